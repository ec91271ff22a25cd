"""`MultiGPUTrainer`: a model on one GPU, on several of one process, or on one of many processes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import find_place
from drivetrain.core.log import notice
from drivetrain.core.world import World
from drivetrain.hardware import DeviceManager, detect
from drivetrain.multi_gpu.config import ChosenMode, MultiGPUConfig, TrainingMode, choose_mode, config_of
from drivetrain.multi_gpu.environment import backend_here
from drivetrain.multi_gpu.gpu_monitor import GPUMonitor
from drivetrain.multi_gpu.managers import DataParallelManager, DistributedManager
from drivetrain.multi_gpu.training_run import TrainingOutcome, TrainingSpec, run_beside


class MultiGPUTrainer:
    """Places a model, makes loaders for it, watches the GPUs, and trains.

    Args:
        config: how to use the GPUs; None is the default `MultiGPUConfig`.

    Example:
        >>> trainer = MultiGPUTrainer(MultiGPUConfig(training_mode="auto"))
        >>> wrapped = trainer.initialize_training(torch.nn.Linear(2, 1))
        >>> trainer.get_training_info()["is_initialized"]
        True
    """

    def __init__(self, config: MultiGPUConfig | None = None) -> None:
        self.config = config or MultiGPUConfig()
        self.hardware = detect()
        self.gpu_monitor = GPUMonitor(self.hardware)
        self.data_parallel_manager = DataParallelManager(self.config, self.hardware)
        self.distributed_manager = DistributedManager(self.config, self.hardware)
        self.model: nn.Module | None = None  # as it was given, without a wrapper
        self.train_loader: DataLoader[Any] | None = None
        self._chosen: ChosenMode | None = None
        self._outcome: TrainingOutcome | None = None
        if self.config.enable_gpu_monitoring:
            self.gpu_monitor.start_monitoring()

    @property
    def training_mode(self) -> TrainingMode:
        """The mode that is used; never `auto`."""
        return self._choice.mode

    @property
    def _choice(self) -> ChosenMode:
        if self._chosen is None:
            num_processes = max(find_place().size, self._num_processes())
            self._chosen = choose_mode(self.config, self._num_gpus(), num_processes)
            if self._chosen.note:
                notice(self._chosen.note)
        return self._chosen

    def _num_gpus(self) -> int:
        if self.hardware.accelerator not in ("cuda", "rocm"):
            return 0
        return len(self.hardware.gpus if self.config.device_ids is None else self.config.device_ids)

    def _num_processes(self) -> int:
        """Return the size of an existing process group, or the configured one if this process is numbered; else one."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size()
        return self.config.world_size if self.config.rank >= 0 else 1

    def auto_detect_training_mode(self) -> TrainingMode:
        """Return the mode that `auto` stands for on this machine, whatever mode is configured."""
        asked = MultiGPUConfig(**{**vars(self.config), "training_mode": "auto"})
        return choose_mode(asked, self._num_gpus(), max(find_place().size, self._num_processes())).mode

    @property
    def device(self) -> torch.device:
        if self.training_mode == "distributed":
            return self.world.device
        ids = self.config.device_ids if self._num_gpus() else None
        return DeviceManager(self.hardware, ids=ids).device

    @property
    def world(self) -> World:
        """The processes that train together, which this joins."""
        return self.distributed_manager.setup_distributed() if self.training_mode == "distributed" else World()

    def initialize_training(self, model: nn.Module) -> nn.Module:
        """Move the model to its device, wrap it as the mode asks for, and return it, ready for a user's own loop.

        Args:
            model: the module to train; `train()` trains it without the wrapper.
        """
        self.model = model
        if self.training_mode == "data_parallel":
            return self.data_parallel_manager.setup_data_parallel(model)
        if self.training_mode == "distributed":
            return self.distributed_manager.setup_distributed_model(model)
        return model.to(self.device)

    def setup_dataloader(self, dataset: Dataset[Any], batch_size: int, **kwargs: Any) -> DataLoader[Any]:
        """Make a DataLoader for the mode; of those that shuffle, the last one made is what `train()` takes.

        Args:
            dataset: map-style samples.
            batch_size: samples at once, for each process.
            kwargs: as for `torch.utils.data.DataLoader`. `shuffle` is on unless it is given; pinned memory is left out
                where there is no GPU.
        """
        options = {"shuffle": True, **kwargs}
        if not self._num_gpus():
            options.pop("pin_memory", None)
        if self.training_mode == "distributed":
            loader = self.distributed_manager.setup_distributed_dataloader(dataset, batch_size, **options)
        else:
            loader = DataLoader(dataset, batch_size=batch_size, **options)
        if options["shuffle"]:
            self.train_loader = loader
        return loader

    def record_gpu_metrics(self) -> None:
        """Record what the devices do now; nothing where `enable_gpu_monitoring` is off."""
        if self.config.enable_gpu_monitoring:
            self.gpu_monitor.record_gpu_metrics(self.config.device_ids)

    def get_training_info(self) -> dict[str, Any]:
        """Return the mode with its reason, the device, this process's place, and what is known of the GPUs."""
        return {
            "training_mode": self.training_mode,
            "reason": self._choice.reason,
            "is_initialized": self.model is not None,
            "device": str(self.device),
            "gpu_info": self.gpu_monitor.get_gpu_info(),
            "distributed_info": self.distributed_manager.get_distributed_info(),
            "data_parallel_info": self.data_parallel_manager.get_data_parallel_info(),
        }

    def get_performance_summary(self) -> dict[str, Any]:
        """Return samples per second and memory efficiency of the last training, and what the GPUs did meanwhile.

        `memory_efficiency` is the part of the memory held by torch that tensors needed at the peak. Both are None
        before a training, and the second without a GPU.
        """
        figures: Mapping[str, Any] = {} if self._outcome is None else self._outcome.figures["performance_summary"]
        return {
            "throughput": None,
            "memory_efficiency": None,
            "training_time": None,
            "num_steps": 0,
            "step_time": None,
            "phases": {},
            **figures,
            "gpu_summary": self.gpu_monitor.get_gpu_summary(),
            "training_info": self.get_training_info(),
        }

    async def train(
        self, train_loader: Any = None, val_loader: Any = None, *, max_epochs: int = 100, **options: Any
    ) -> dict[str, Any]:
        """Train the model of `initialize_training`, without holding up the event loop, and return the results.

        Args:
            train_loader: a DataLoader or data set; None is the loader that `setup_dataloader` made.
            val_loader: held-out samples.
            max_epochs: passes over the data.
            options: as for `create_optimized_training_optimizer`: `learning_rate`, or any setting by name.
        """
        if self.model is None:
            raise DrivetrainError("there is no model to train", remedy="call initialize_training(model) first")
        loader = self.train_loader if train_loader is None else train_loader
        known = {field.name for field in fields(TrainingSpec)}
        given = {name: value for name, value in options.items() if name in known}
        given["settings"] = {name: value for name, value in options.items() if name not in known}
        spec = TrainingSpec(self.model, loader, val_loader, max_epochs=max_epochs, **given)
        return await self.train_spec(spec)

    async def train_spec(self, spec: TrainingSpec) -> dict[str, Any]:
        """Train what a specification says, and return the results.

        Args:
            spec: the model, its data, and how long.
        """
        job, config, notes = self.prepared(spec)
        self._outcome = await run_beside(job, config, self.world, notes, quiet=spec.quiet)
        if self.config.enable_gpu_monitoring:
            self.gpu_monitor.add_rows(self._outcome.rows)
        return {**self._outcome.figures, "multi_gpu_summary": self.get_performance_summary()}

    def prepared(self, spec: TrainingSpec) -> tuple[Any, Config, list[str]]:
        """Return the job and the configuration that a specification comes to here, and lines to print.

        Args:
            spec: the model, its data, and how long.
        """
        world, notes = self.world, spec.notes()
        job = spec.job(world.size)
        if world.size > 1 and spec.source.global_batch:
            each = spec.batch_size or spec.source.global_batch
            notes.append(f"{each} samples per process × {world.size} processes: {job.largest_batch} samples per step")
        values, more = self._settings(world.size)
        return job, spec.config(**values), [*notes, *more]

    def _settings(self, world_size: int) -> tuple[dict[str, Any], list[str]]:
        """Return the mode as settings of the configuration, and what of it cannot be done here."""
        config, notes, has_gpus = self.config, list[str](), self._num_gpus() > 0
        values: dict[str, Any] = {"monitor_gpu": config.enable_gpu_monitoring}
        ids = config.device_ids if has_gpus else None
        if self.training_mode == "data_parallel":
            values |= {"parallel_strategy": "data_parallel", "gpu_mode": "multi_gpu"}
        elif world_size > 1:
            values |= {
                "parallel_strategy": "ddp",
                "backend": backend_here(config.backend, has_gpus),
                "init_method": config.init_method,
                "find_unused_parameters": config.finds_unused_parameters,
                "broadcast_buffers": config.broadcast_buffers,
                "bucket_cap_mb": config.bucket_cap_mb,
                "static_graph": config.static_graph,
                "gradient_as_bucket_view": config.enable_gradient_as_bucket_view,
                "sync_batchnorm": config.sync_bn and has_gpus,
            }
            if config.sync_bn and not has_gpus:
                notes.append("sync_bn needs GPUs, and there are none: each process uses its own batch statistics")
        else:
            if self.training_mode == "distributed":
                notes.append("distributed training of one process: start more with torchrun or `drivetrain launch`")
            values |= {"parallel_strategy": "single", "gpu_mode": "single_gpu" if has_gpus else "cpu"}
            ids = ids[:1] if ids else None
        return values | ({} if ids is None else {"device_ids": ids}), notes

    def cleanup(self) -> None:
        """Leave the other processes, shut NVML down, and release the GPU's cached memory. May be called twice."""
        self.distributed_manager.cleanup()
        self.gpu_monitor.close()
        self.train_loader = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def create_multi_gpu_trainer(config: MultiGPUConfig | None = None, **fields: Any) -> MultiGPUTrainer:
    """Make a trainer from a configuration, or from its fields.

    Args:
        config: a configuration.
        fields: those of `MultiGPUConfig`, where there is no configuration.

    Example:
        >>> create_multi_gpu_trainer(training_mode="single_gpu").training_mode
        'single_gpu'
    """
    return MultiGPUTrainer(config_of(config, fields))


def optimize_model_for_multi_gpu(
    model: nn.Module, config: MultiGPUConfig | None = None, **fields: Any
) -> tuple[nn.Module, MultiGPUTrainer]:
    """Place and wrap a model for the GPUs that are here; return it and the trainer that knows how.

    Args:
        model: the module.
        config: a configuration.
        fields: those of `MultiGPUConfig`, where there is no configuration.
    """
    trainer = create_multi_gpu_trainer(config, **fields)
    return trainer.initialize_training(model), trainer

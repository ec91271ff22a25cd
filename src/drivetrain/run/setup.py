"""What `train` and `drive` set up alike: the world, the settled job, the claimed folder, the parts of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from drivetrain.checkpoint import Checkpoint
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.run_folder import RunFolder, is_finished, read_job
from drivetrain.core.world import World
from drivetrain.data.division import Division
from drivetrain.data.loader import Loader
from drivetrain.hardware import DeviceManager, Hardware, detect
from drivetrain.job import EarlyStopping, Job
from drivetrain.plan import Pins, choose_settings
from drivetrain.strategies import DdpOptions, DdpStrategy, SingleStrategy, Strategy
from drivetrain.strategies.activations import recompute

CHECKPOINTS = "checkpoints"
_command_line: ContextVar[Config | None] = ContextVar("command_line", default=None)
_runs = [0]


@contextmanager
def configured(config: Config) -> Iterator[None]:
    """Everything trained inside uses this configuration, unless it is given one of its own."""
    token = _command_line.set(config)
    try:
        yield
    finally:
        _command_line.reset(token)


def num_trained() -> int:
    """How often `train` or `drive` was called in this process."""
    return _runs[0]


class Setup:
    """One run on one rank. `join` makes it; the parts are built when asked for."""

    path: Path  # of the run's folder, once it is claimed
    strategy: str  # its name, once it is chosen

    @classmethod
    def join(cls, job: Job, config: Config | None, *, quiet: bool) -> Self:
        """Find the devices and join the world, which the caller closes."""
        _runs[0] += 1
        config = config or _command_line.get() or Config()
        hardware = detect(config.run.output_dir)
        devices = DeviceManager(hardware, config.device.mode, config.device.device, config.device.ids).devices
        world = World.join(
            devices,
            backend=None if config.distributed.backend == "auto" else config.distributed.backend,
            init_method=config.distributed.init_method,
            timeout_seconds=config.distributed.timeout_seconds,
        )
        try:
            return cls(job, config, hardware, world, quiet=quiet or not world.is_main)
        except BaseException:
            world.close()
            raise

    def __init__(self, job: Job, config: Config, hardware: Hardware, world: World, *, quiet: bool) -> None:
        self.config, self.hardware, self.world, self.quiet = config, hardware, world, quiet
        self.settings = choose_settings(hardware, Pins(**config.pins()))
        self.name = config.run.name or job.name
        self.job = self._settled(job)

    def _settled(self, job: Job) -> Job:
        """The job with its global batch and what the configuration says of saving."""
        job = replace(
            job,
            global_batch=job.global_batch or self.world.agree(self._global_batch(job) if self.world.is_main else None),
            checkpoint_every=self.config.checkpoint.every or job.checkpoint_every,
            keep_last=self.config.checkpoint.keep_last or job.keep_last,
            ema=self.config.optimizer.ema or job.ema,
            valid_every=self.config.validation.every or job.valid_every,
            early_stopping=self._early_stopping(job),
        )
        size, accumulation = self.config.batch.size, self.config.batch.accumulation
        if size and accumulation and size * accumulation * self.world.size < (job.global_batch or 0):
            raise ConfigError([
                Problem(
                    "--batch-size",
                    f"{size} × {accumulation} × {self.world.size} devices do not hold the {job.global_batch} samples "
                    "that a step of this job has",
                    size,
                    remedy="leave --accumulation-steps out: it follows from the others",
                )
            ])  # fmt: skip
        return job

    def _early_stopping(self, job: Job) -> EarlyStopping | None:
        patience = self.config.validation.patience
        if patience is None:
            return job.early_stopping
        return replace(
            job.early_stopping or EarlyStopping(metric=job.best.metric, mode=job.best.mode), patience=patience
        )

    def _global_batch(self, job: Job) -> int:
        """Micro-batch × accumulation × devices at the first start; afterwards what was recorded then."""
        recorded = read_job(self.config.run.output_dir / self.name).get("global_batch")
        if recorded and not is_finished(self.config.run.output_dir / self.name):
            return int(recorded)
        size, accumulation = self.config.batch.size, self.config.batch.accumulation
        micro = size or self.settings.micro_batch.value
        product = micro * (accumulation or (1 if size else self.settings.accumulation.value)) * self.world.size
        return min(product, job.num_samples) if size is None and accumulation is None else product

    def claim(self) -> RunFolder | None:
        """Rank 0 claims the folder; what it finds wrong is raised on all ranks."""
        folder, answer = None, None
        if self.world.is_main:
            try:
                folder = RunFolder.claim(self.config.run.output_dir, self.name, self.job.identity())
                answer = {"path": str(folder.path.absolute())}
            except DrivetrainError as error:
                answer = {"message": error.message, "remedy": error.remedy}
        answer = self.world.agree(answer)
        if "message" in answer:
            raise DrivetrainError(answer["message"], remedy=answer["remedy"])
        self.path = Path(answer["path"])
        return folder

    def compilation(self) -> str:
        """Asked of the compiler itself: `torch.compile` can do nothing, and say nothing."""
        if not self.config.compile.enabled:
            return "not asked for"
        graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return (
            f"{graphs} graphs in mode {self.config.compile.mode}" if graphs else "asked for, but nothing was compiled"
        )

    def micro_batch(self, checkpoint: Checkpoint | None) -> int:
        """The user's; else the checkpoint's, in a world of the same size; else a rank's whole share at once."""
        share = -(-(self.job.global_batch or 0) // self.world.size)
        if self.config.batch.size:
            return min(self.config.batch.size, share)
        if self.config.batch.accumulation:
            return -(-share // self.config.batch.accumulation)
        if checkpoint is not None and checkpoint.meta["plan"]["world_size"] == self.world.size:
            return int(checkpoint.meta["plan"]["micro_batch"])
        return share

    def loader(self, division: Division, data: Dataset[Any], *, shuffle: bool) -> Loader:
        in_memory = type(data) is TensorDataset
        pinned = self.config.data.num_workers
        loader = Loader(
            data,
            division,
            self.world.rank,
            self.job.seed,
            self.job.collate,
            shuffle=shuffle,
            num_workers=pinned if pinned >= 0 else 0 if in_memory else self.settings.num_workers.value,
            pin_memory=self.settings.pin_memory.value and self.world.device.type == "cuda",
            prefetch_factor=self.settings.prefetch_factor.value or 2,
        )
        if self.world.is_main:
            loader.warn_if_inexact()
        return loader

    def model(self) -> tuple[nn.Module, Optimizer, Any]:
        torch.manual_seed(self.job.seed)  # the same weights on every rank, and in every run of this seed
        made = self.job.model if isinstance(self.job.model, nn.Module) else self.job.model()
        if not isinstance(made, nn.Module):
            raise DrivetrainError(
                f"the model factory returned {type(made).__name__}", remedy="return a torch.nn.Module"
            )
        model = made.to(self.world.device).train()
        if self.config.distributed.sync_batchnorm and self.world.size > 1:
            if self.world.device.type != "cuda":
                raise DrivetrainError("synchronised batch norm needs GPUs", remedy="drop --sync-batchnorm")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        if self.settings.activations.value == "recompute":
            self.recomputed = recompute(model)
        optimizer = self.job.make_optimizer(model)
        called = torch.compile(model, mode=self.config.compile.mode) if self.config.compile.enabled else None
        return model, optimizer, called

    def meta(self, division: Division) -> dict[str, Any]:
        return {
            "plan": {"world_size": self.world.size, "micro_batch": division.micro_batch},
            "job": self.job.identity(),
            "hooks": [dict(hook.state_dict()) for hook in self.job.hooks],
        }

    def make_strategy(self) -> Strategy:
        strategy: Strategy = SingleStrategy(self.world)
        if self.world.size > 1:
            config = self.config
            options = DdpOptions(
                find_unused_parameters=config.distributed.find_unused_parameters,
                broadcast_buffers=config.distributed.broadcast_buffers,
                bucket_cap_mb=config.distributed.bucket_cap_mb,
                static_graph=config.distributed.static_graph,
                gradient_as_bucket_view=config.distributed.gradient_as_bucket_view,
            )
            strategy = DdpStrategy(self.world, options)
        self.strategy = strategy.name
        return strategy

    def load_hooks(self, checkpoint: Checkpoint) -> None:
        hooks, states = self.job.hooks, checkpoint.meta["hooks"]
        if len(states) != len(hooks):
            raise DrivetrainError(
                f"the job has {len(hooks)} hooks now, and had {len(states)} when step {checkpoint.step} was saved",
                remedy="give the same hooks in the same order to go on with that run, or another --name for this one",
            )
        for hook, state in zip(hooks, states, strict=True):
            hook.load_state_dict(state)

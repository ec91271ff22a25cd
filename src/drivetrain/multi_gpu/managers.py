"""The two ways of using several GPUs in a user's own loop: torch's DataParallel and DistributedDataParallel."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import find_place
from drivetrain.core.log import notice
from drivetrain.core.world import World
from drivetrain.hardware import DeviceManager, Hardware
from drivetrain.multi_gpu.config import MultiGPUConfig
from drivetrain.multi_gpu.environment import PREFERRED_PORT, backend_here


class DataParallelManager:
    """Wraps a model in `torch.nn.DataParallel` where there are several GPUs.

    Args:
        config: its `device_ids` are used.
        hardware: what is here.
    """

    def __init__(self, config: MultiGPUConfig, hardware: Hardware) -> None:
        self.config = config
        self._manager = DeviceManager(hardware, ids=config.device_ids if hardware.gpus else None)
        self.model: nn.Module | None = None

    def setup_data_parallel(self, model: nn.Module) -> nn.Module:
        """Move the model to the first device, and wrap it if there are several."""
        model = model.to(self._manager.device)
        devices = [device.index for device in self._manager.devices]
        is_shared = self._manager.mode == "multi_gpu"
        self.model = DataParallel(model, device_ids=devices, output_device=devices[0]) if is_shared else model
        return self.model

    def get_data_parallel_info(self) -> dict[str, Any]:
        """Return how the model is shared between GPUs; keys exist where it is not, too."""
        model = self.model if isinstance(self.model, DataParallel) else None
        return {
            "is_data_parallel": model is not None,
            "device_ids": list(model.device_ids) if model else [],
            "output_device": model.output_device if model else None,
            "broadcast_buffers": True if model else None,  # DataParallel copies buffers with every forward
            "dim": model.dim if model else None,
        }


class DistributedManager:
    """Joins the other processes and wraps a model in `DistributedDataParallel`.

    Args:
        config: backend, meeting point and DDP's options.
        hardware: what is here.
    """

    def __init__(self, config: MultiGPUConfig, hardware: Hardware) -> None:
        self.config, self._hardware = config, hardware
        self.world = World()
        self.model: nn.Module | None = None
        self._is_joined = False
        self._exported: list[str] = []

    def setup_distributed(self, rank: int = -1, world_size: int = -1, local_rank: int = -1) -> World:
        """Join the other processes, unless that was done. -1 is what the configuration says, else the launcher.

        Args:
            rank: number of this process.
            world_size: number of processes.
            local_rank: number of this process on its machine.
        """
        if self._is_joined:
            return self.world
        config = self.config
        self._export(
            {
                "RANK": rank if rank >= 0 else config.rank,
                "WORLD_SIZE": world_size if world_size > 0 else config.world_size,
                "LOCAL_RANK": local_rank if local_rank >= 0 else config.local_rank,
            }
        )
        devices = DeviceManager(self._hardware, ids=config.device_ids if self._hardware.gpus else None).devices
        has_gpus = devices[0].type == "cuda"
        backend = backend_here(config.backend, has_gpus)
        if backend != config.backend and find_place().size > 1 and find_place().rank == 0:
            notice(f"backend {config.backend} needs GPUs, and there are none: {backend} is used")
        self.world = World.join(devices, backend=backend, init_method=config.init_method)
        self._is_joined = True
        return self.world

    def _export(self, numbers: dict[str, int]) -> None:
        """Set missing environment variables from an existing process group, or from the numbers that were given."""
        if dist.is_initialized() and "RANK" not in os.environ:
            numbers = {
                "RANK": dist.get_rank(),
                "WORLD_SIZE": dist.get_world_size(),
                "LOCAL_RANK": numbers["LOCAL_RANK"],
            }
        if numbers["RANK"] >= 0 and numbers["LOCAL_RANK"] < 0:
            numbers["LOCAL_RANK"] = int(os.environ.get("LOCAL_RANK", numbers["RANK"]))
        for name, number in numbers.items():
            told = os.environ.get(name)
            if number >= 0 and told is not None and told != str(number) and "RANK" in os.environ:
                raise DrivetrainError(
                    f"{name} is {told} in the environment of this process, and {number} is asked for",
                    remedy=f"leave {name.lower()} at -1: the launcher knows it",
                )
        if numbers["RANK"] < 0:
            return
        wanted = {name: str(number) for name, number in numbers.items() if number >= 0}
        for name, value in {**wanted, "MASTER_ADDR": "localhost", "MASTER_PORT": str(PREFERRED_PORT)}.items():
            if name not in os.environ:
                os.environ[name] = value
                self._exported.append(name)

    def setup_distributed_model(self, model: nn.Module) -> nn.Module:
        """Move the model to this rank's device and wrap it; in a world of one it is only moved."""
        world, config = self.setup_distributed(), self.config
        model = model.to(world.device)
        on_gpu = world.device.type == "cuda"
        if config.sync_bn and world.size > 1 and on_gpu:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        if world.size == 1:
            self.model = model
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if on_gpu else None,
            find_unused_parameters=config.finds_unused_parameters,
            bucket_cap_mb=config.bucket_cap_mb,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.enable_gradient_as_bucket_view,
        )
        wrapped.broadcast_buffers = config.broadcast_buffers  # torch 2.13 deprecates the argument, not the behavior
        self.model = wrapped
        return wrapped

    def setup_distributed_dataloader(self, dataset: Dataset[Any], batch_size: int, **kwargs: Any) -> DataLoader[Any]:
        """Make a DataLoader whose sampler gives each rank its own samples. `batch_size` is per process."""
        world = self.setup_distributed()
        shuffle = bool(kwargs.pop("shuffle", True))
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=world.size, rank=world.rank, shuffle=shuffle
        )
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **kwargs)

    def get_distributed_info(self) -> dict[str, Any]:
        """Return this process's place among the others; keys exist in a world of one, too."""
        is_initialized = dist.is_available() and dist.is_initialized()
        return {
            "is_initialized": is_initialized,
            "world_size": self.world.size,
            "rank": self.world.rank,
            "local_rank": self.world.local_rank,
            "backend": dist.get_backend() if is_initialized else None,
        }

    def cleanup(self) -> None:
        """Leave the other processes, if it was this manager that joined them, and take back what was exported."""
        self.world.close()
        self.world = World(device=torch.device("cpu"))
        self._is_joined = False
        for name in self._exported:
            os.environ.pop(name, None)
        self._exported = []

"""Configures how a model is spread over GPUs, as one flat value; and chooses the mode for this machine."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from drivetrain.config import nearest
from drivetrain.core.errors import ConfigError, Problem

TrainingMode = Literal["auto", "single_gpu", "data_parallel", "distributed"]
Backend = Literal["nccl", "gloo"]


@dataclass
class MultiGPUConfig:
    """Configures a `MultiGPUTrainer`.

    Args:
        training_mode: `auto` decides by `choose_mode`; the others are taken as they are where the machine allows it.
        enable_data_parallel: lets `auto` take DataParallel: one process for several GPUs.
        device_ids: the GPUs to use, counted after CUDA_VISIBLE_DEVICES; None is all of them.
        enable_distributed: lets `auto` take DistributedDataParallel: one process per GPU.
        backend: `nccl` for GPUs, `gloo` for CPUs; on a machine without a GPU, gloo is used for both, and reported.
        init_method: where processes meet.
        world_size: processes of the job; -1 is what the launcher says.
        rank: number of this process; -1 is what the launcher says.
        local_rank: number of this process on its machine; -1 is what the launcher says.
        find_unused_parameters: for models that do not use every parameter in every step.
        broadcast_buffers: gives all ranks the buffers of rank 0 before each forward.
        bucket_cap_mb: size of the gradient buckets.
        static_graph: promises that every step uses the same parameters.
        enable_gradient_as_bucket_view: keeps gradients in the buckets, which saves a copy.
        enable_find_unused_parameters: the same as `find_unused_parameters`; one of them is enough.
        enable_gpu_monitoring: records what the devices do.
        sync_bn: computes batch statistics over all ranks; needs GPUs.

    Example:
        >>> MultiGPUConfig(training_mode="auto", enable_distributed=True).backend
        'nccl'
    """

    training_mode: TrainingMode = "auto"
    enable_data_parallel: bool = True
    device_ids: list[int] | None = None
    enable_distributed: bool = False
    backend: Backend = "nccl"
    init_method: str = "env://"
    world_size: int = -1
    rank: int = -1
    local_rank: int = -1
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    static_graph: bool = False
    enable_gradient_as_bucket_view: bool = False
    enable_find_unused_parameters: bool = False
    enable_gpu_monitoring: bool = True
    sync_bn: bool = False

    def __post_init__(self) -> None:
        problems = [
            Problem(
                f"MultiGPUConfig.{name}", f"got {value!r}", value, "Python", ", ".join(allowed), f"{name}={first!r}"
            )
            for name, value, allowed, first in (
                ("training_mode", self.training_mode, get_args(TrainingMode), "auto"),
                ("backend", self.backend, get_args(Backend), "nccl"),
            )
            if value not in allowed
        ]
        for name in ("world_size", "rank", "local_rank"):
            least = 1 if name == "world_size" else 0
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or (value != -1 and value < least):
                allowed = f"a whole number from {least}, or -1 for what the launcher says"
                problems.append(Problem(f"MultiGPUConfig.{name}", f"got {value!r}", value, "Python", allowed))
        if 0 < self.world_size <= self.rank:
            message = f"rank {self.rank} is not among {self.world_size} processes"
            problems.append(Problem("MultiGPUConfig.rank", message, self.rank, "Python", "0 to world_size - 1"))
        if self.device_ids is not None and not self.device_ids:
            remedy = "None uses all"
            problems.append(Problem("MultiGPUConfig.device_ids", "no GPU is named", [], "Python", remedy=remedy))
        if problems:
            raise ConfigError(problems)

    @property
    def finds_unused_parameters(self) -> bool:
        return self.find_unused_parameters or self.enable_find_unused_parameters


def config_of(config: MultiGPUConfig | None, given: dict[str, Any]) -> MultiGPUConfig:
    """Return the configuration, or one made from its fields; an unknown field is an error that names the nearest.

    Args:
        config: one that is ready; `given` must be empty then.
        given: fields by name.
    """
    known = [field.name for field in fields(MultiGPUConfig)]
    problems = []
    for name, value in given.items():
        if config is not None:
            message, remedy = "there is a config already", "set it in MultiGPUConfig(...), or leave config out"
        elif name not in known:
            meant = nearest(name, known)
            message = "MultiGPUConfig has no such field"
            remedy = f"did you mean `{meant}`?" if meant else f"its fields: {', '.join(known)}"
        else:
            continue
        problems.append(Problem(name, message, value, "Python", remedy=remedy))
    if problems:
        raise ConfigError(problems)
    return config or MultiGPUConfig(**given)


@dataclass(frozen=True)
class ChosenMode:
    """A training mode that this machine can do, and why it is that one."""

    mode: TrainingMode
    reason: str
    note: str = ""  # what differs from what was asked for, in one line; empty if nothing does


def choose_mode(config: MultiGPUConfig, num_gpus: int, num_processes: int) -> ChosenMode:
    """Decide how to train, in this order; the first that holds is taken.

    Several processes were started: distributed, as anything else would train the same job several times. No GPU:
    single, on the CPU. One GPU: single. Several, and distributed is enabled: distributed. Several, and DataParallel is
    enabled: DataParallel. Otherwise: single.

    Args:
        config: what is asked for.
        num_gpus: GPUs that may be used.
        num_processes: processes that a launcher started.

    Example:
        >>> choose_mode(MultiGPUConfig(enable_distributed=True), num_gpus=4, num_processes=1).mode
        'distributed'
    """
    asked = config.training_mode
    if num_processes > 1:
        reason = f"{num_processes} processes were started"
        note = "" if asked in ("auto", "distributed") else f"{asked} is one process, and {reason}: distributed"
        return ChosenMode("distributed", reason, note)
    if asked == "data_parallel" and num_gpus < 2:
        there = "there is one GPU" if num_gpus else "there is no GPU"
        return ChosenMode("single_gpu", there, f"data_parallel shares batches between GPUs, and {there}: one device")
    if asked != "auto":
        return ChosenMode(asked, "asked for")
    if num_gpus == 0:
        return ChosenMode("single_gpu", "there is no GPU: the CPU")
    if num_gpus == 1:
        return ChosenMode("single_gpu", "there is one GPU")
    if config.enable_distributed:
        return ChosenMode("distributed", f"there are {num_gpus} GPUs, and distributed is enabled")
    if config.enable_data_parallel:
        return ChosenMode("data_parallel", f"there are {num_gpus} GPUs, and DataParallel is enabled")
    return ChosenMode("single_gpu", f"there are {num_gpus} GPUs, and neither DataParallel nor distributed is enabled")

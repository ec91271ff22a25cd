"""Whether the strategy that was asked for fits the processes and the devices that there are."""

from collections.abc import Sequence

import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.world import World

_FLAG = "--parallel-strategy"


def refuse_strategy(asked: str, world: World, devices: Sequence[torch.device]) -> None:
    """Raises what contradicts the launcher or the machine. `auto` never does."""
    if world.size > 1 and asked in ("single", "data_parallel"):
        message = f"{asked} is one process, and a launcher started {world.size}"
        raise _problem(asked, message, "auto, ddp here", "use ddp, or start the script with plain python")
    if world.size == 1 and asked == "ddp":
        message = "ddp is several processes, and this is the only one"
        remedy = "start it with `drivetrain launch`, torchrun or srun; or leave --parallel-strategy out"
        raise _problem(asked, message, "auto, single, data_parallel here", remedy)
    if asked == "data_parallel" and len(devices) < 2:
        message = f"data_parallel shares batches between GPUs, and there is only {devices[0]} to use"
        raise _problem(asked, message, "auto, single here", "leave --parallel-strategy out")


def _problem(asked: str, message: str, allowed: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(_FLAG, message, asked, allowed=allowed, remedy=remedy)])

"""Periodic work at step boundaries, on all ranks alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from drivetrain.core.world import World


@dataclass(frozen=True)
class StepContext:
    """What a hook sees after a step. It must not change weights; it is called on every rank."""

    step: int  # optimizer steps done
    epoch: int  # epochs done
    model: nn.Module
    world: World
    folder: Path


@runtime_checkable
class Hook(Protocol):
    """`every` is a number of steps, or `epoch`. What `state_dict` returns is saved with every checkpoint: JSON only."""

    @property
    def every(self) -> int | Literal["epoch"]: ...

    def __call__(self, context: StepContext) -> None: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

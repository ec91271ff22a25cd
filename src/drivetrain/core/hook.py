"""Periodic work at step boundaries, on all ranks alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from drivetrain.core.world import World


@dataclass(frozen=True)
class StepContext:
    """What a hook sees after a step; it is called on every rank.

    It must not change weights. What does, as experts that come and go, does it in place, on all ranks alike, and to
    what goes with them: `companions` gives the optimizer's state of a parameter, and its moving average as `average`,
    as far as they have its shape. `tell(kind, **facts)` writes an event into the run's books. `batch()` is this rank's
    last micro-batch of the step that counted, as the loss function got it; None if there was none.
    """

    step: int  # optimizer steps done
    epoch: int  # epochs done
    model: nn.Module
    world: World
    folder: Path
    companions: Callable[[Tensor], Mapping[str, Tensor]] = lambda parameter: {}
    tell: Callable[..., None] = lambda kind, **facts: None
    batch: Callable[[], Any] = lambda: None


class Verdict(NamedTuple):
    """What a hook may ask for. It must be the same on every rank: decide from facts that all ranks share."""

    save: bool = False  # a checkpoint of this step, whether or not one is due
    stop: bool = False  # the job is done, before its last step


@runtime_checkable
class Hook(Protocol):
    """`every` is a number of steps, or `epoch`. What `state_dict` returns is saved with every checkpoint: JSON only."""

    @property
    def every(self) -> int | Literal["epoch"]: ...

    def __call__(self, context: StepContext) -> Verdict | None: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

"""Periodic work at step boundaries, called on all ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.loss import LossSum
from drivetrain.core.world import World


class Samples(Protocol):
    """The job's samples by number, for hooks that look at some of them again. All ranks get the same ones."""

    def of_step(self, step: int) -> Sequence[int]:
        """Return the numbers of a step's samples over all ranks; steps count from 0."""

    def items(self, numbers: Sequence[int]) -> list[Any]:
        """Return the samples as the dataset yields them.

        Their random draws are keyed, and no generator is left changed.
        """

    def batch(self, numbers: Sequence[int]) -> Any:
        """Return the samples collated, on this rank's device."""


@dataclass(frozen=True)
class Rehearsal:
    """Everything needed to train on earlier samples again, outside of steps.

    Its user must leave the optimizer's state, its learning rates and all gradients as they were.
    """

    samples: Samples
    optimizer: Optimizer
    clip_norm: float | None
    loss: Callable[[nn.Module, Any], Tensor | LossSum]  # in the run's precision; in full where that scales losses


@dataclass(frozen=True)
class StepContext:
    """The state that a hook sees after a step; hooks are called on every rank.

    A hook must not change weights. One that does, such as the expert lifecycle, changes them in place, on all ranks in
    the same way, together with what belongs to them: `companions` gives the optimizer's state of a parameter, and its
    moving average as `average`, as far as they have its shape. `tell(kind, **facts)` writes an event into the run's
    event log, `say(text)` a line to the terminal. `batch()` is this rank's last micro-batch of the step that counted,
    as the loss function got it; None if there was none. `measure()` validates the model as it is now, on all ranks
    together, without recording the result; it returns nothing where the job has no validation set. `rehearsal` is None
    where samples have no numbers (iterable datasets), and in custom loops, which alone know their loss. `loss` is that
    of the step just done, over all ranks, as it is recorded; nan where nothing was counted.
    """

    step: int  # optimizer steps done
    epoch: int  # epochs done
    model: nn.Module
    world: World
    folder: Path
    companions: Callable[[Tensor], Mapping[str, Tensor]] = lambda parameter: {}
    tell: Callable[..., None] = lambda kind, **facts: None
    batch: Callable[[], Any] = lambda: None
    say: Callable[[str], None] = lambda text: None
    measure: Callable[[], Mapping[str, float]] = dict
    rehearsal: Rehearsal | None = None
    loss: float = math.nan


class Verdict(NamedTuple):
    """A hook's request. It must be the same on every rank: decide from facts that all ranks share."""

    save: bool = False  # a checkpoint of this step, whether or not one is due
    stop: bool = False  # the job is done, before its last step


@runtime_checkable
class ChecksFirst(Protocol):
    """A hook that can detect before the first step that it will not work, so that no work is lost."""

    def check(self, context: StepContext) -> None:
        """Raise if the hook cannot work; called on every rank with the model as it is trained."""


PERIODS = "a whole number of steps from 1, or 'epoch'"


def is_period(every: object) -> bool:
    """Return whether `every` is a valid period of a hook: one of `PERIODS`."""
    return every == "epoch" or (isinstance(every, int) and not isinstance(every, bool) and every >= 1)


@runtime_checkable
class Hook(Protocol):
    """`every` is a number of steps, or `epoch`. What `state_dict` returns is saved with every checkpoint: JSON only."""

    @property
    def every(self) -> int | Literal["epoch"]: ...

    def __call__(self, context: StepContext) -> Verdict | None: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

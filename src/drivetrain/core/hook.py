"""Work at step boundaries: hooks, called on all ranks; and what layers of a model do at the end of each step.

A mixture of experts sums the loads of its experts over all ranks, moves their biases, and has losses of its own. A
strategy calls its `StepSettlement` and knows no such layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.metrics import LossSum
from drivetrain.core.world import World

PERIODS = "a whole number of steps from 1, or 'epoch'"


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
class ExpertAccess:
    """What only hooks that change or replay the model need, such as the lifecycle of experts.

    Args:
        companions: returns what belongs to a parameter and has its shape, by name: the optimizer's state, and its
            moving average as `average`.
        rehearsal: how to train on samples again; None where samples have no numbers (iterable datasets), and in custom
            loops, which alone know their loss.
    """

    companions: Callable[[Tensor], Mapping[str, Tensor]] = lambda parameter: {}
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True)
class StepContext:
    """The state that a hook sees after a step; hooks are called on every rank.

    A hook may change buffers and weights that are not trained, in place and on all ranks in the same way. It must not
    change weights that are trained. One that does, such as the expert lifecycle, changes them in place, on all ranks in
    the same way, together with what belongs to them, which `experts` gives access to.

    Args:
        step: Optimizer steps done.
        epoch: Epochs done.
        model: The model as it is now.
        world: This rank, and the others.
        folder: The run folder.
        tell: `tell(kind, **facts)` writes an event into the run's event log.
        batch: `batch()` returns this rank's last micro-batch of the step that counted, as the loss function got it;
            None if there was none.
        say: `say(text)` prints a line to the terminal, once for all ranks.
        measure: `measure()` validates the model as it is now, on all ranks together, without recording the result; it
            returns nothing where the job has no validation set.
        loss: The loss of the step just done, over all ranks, as it is recorded; nan where nothing was counted.
        freeze: `freeze("body.*")` stops weights from being trained, from the next step on; `*` stands for any text.
            They get no gradient, so that neither they nor their optimizer's state change. Checkpoints hold it.
        unfreeze: `unfreeze("body.*")` lets them train again.
        experts: What only hooks that change or replay the model need.

    Example:
        >>> def report(context):
        ...     context.say(f"step {context.step}: {context.loss:.3f}")
        >>> hook = dt.every(100, report)
    """

    step: int  # optimizer steps done
    epoch: int  # epochs done
    model: nn.Module
    world: World
    folder: Path
    tell: Callable[..., None] = lambda kind, **facts: None
    batch: Callable[[], Any] = lambda: None
    say: Callable[[str], None] = lambda text: None
    measure: Callable[[], Mapping[str, float]] = dict
    loss: float = math.nan
    freeze: Callable[..., None] = lambda *patterns: None
    unfreeze: Callable[..., None] = lambda *patterns: None
    experts: ExpertAccess = ExpertAccess()

    @property
    def companions(self) -> Callable[[Tensor], Mapping[str, Tensor]]:
        """An older name of `experts.companions`."""
        return self.experts.companions

    @property
    def rehearsal(self) -> Rehearsal | None:
        """An older name of `experts.rehearsal`."""
        return self.experts.rehearsal


class Verdict(NamedTuple):
    """A hook's request. It must be the same on every rank: decide from facts that all ranks share.

    Args:
        save: Whether to save a checkpoint of this step, due or not.
        stop: Whether the job is done, before its last step.
        keep: Whether the state of this step is to be kept with the next checkpoint, if it is not saved now.

    Example:
        >>> hook = dt.every(10, lambda context: dt.Verdict(stop=context.loss < 0.01))
    """

    save: bool = False  # a checkpoint of this step, whether or not one is due
    stop: bool = False  # the job is done, before its last step
    keep: bool = False  # the state of this step goes to the disk with the next checkpoint at the latest


@runtime_checkable
class ChecksFirst(Protocol):
    """A hook that can detect before the first step that it will not work, so that no work is lost."""

    def check(self, context: StepContext) -> None:
        """Raise if the hook cannot work; called on every rank with the model as it is trained."""


def is_period(every: object) -> bool:
    """Return whether `every` is a valid period of a hook: one of `PERIODS`."""
    return every == "epoch" or (isinstance(every, int) and not isinstance(every, bool) and every >= 1)


@runtime_checkable
class Hook(Protocol):
    """Work that is done again and again between steps, on all ranks. `every` makes one of a function.

    A class that inherits from it needs `__call__` only: it is then called at the end of each epoch and saves nothing.
    Classes that do not inherit have all four members. A hook that only reads the data set may say so by an attribute,
    `changes_data = False`; others are watched for changes of it, which no checkpoint would hold.

    Example:
        >>> import drivetrain as dt
        >>> class PrintLoss(dt.Hook):
        ...     every = 100
        ...     def __call__(self, context):
        ...         context.say(f"step {context.step}: {context.loss:.3f}")
        >>> PrintLoss().every
        100
    """

    if TYPE_CHECKING:

        @property  # so that a class may declare it a number, or "epoch"
        def every(self) -> int | Literal["epoch"]:
            """The period: a number of steps, or `epoch`."""
    else:
        every = "epoch"

    def __call__(self, context: StepContext) -> Verdict | None:
        """Do the work. Called after a step that was judged; the verdict may ask for a checkpoint or the end."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what is saved with every checkpoint: JSON only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what was saved."""
        return


class _FunctionHook(Hook):
    every: int | Literal["epoch"]

    def __init__(self, period: int | Literal["epoch"], function: Callable[[StepContext], Any]) -> None:
        self.every, self._function = period, function

    def __str__(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def __call__(self, context: StepContext) -> Verdict | None:
        found = self._function(context)
        return found if isinstance(found, Verdict) else None


def every(period: int | Literal["epoch"], function: Callable[[StepContext], Any]) -> Hook:
    """Make a hook of a function, for `Job(hooks=…)` and `dt.drive(hooks=…)`.

    Args:
        period: after how many steps it is called each time, or `"epoch"` for the end of every epoch.
        function: gets the `StepContext`, on every rank. If it returns a `Verdict`, that is obeyed; anything else is
            ignored. `context.say` prints once, whatever the number of ranks.

    Example:
        >>> import drivetrain as dt
        >>> hook = dt.every(100, lambda context: context.say(f"step {context.step}: {context.loss:.3f}"))
        >>> hook.every
        100
    """
    if not is_period(period):
        raise ConfigError([Problem("every", f"got {period!r}", period, allowed=PERIODS, remedy="dt.every(100, …)")])
    given: object = function
    if not callable(given):
        message = f"{type(given).__name__} cannot be called"
        raise ConfigError([Problem("every", message, given, remedy="dt.every(100, lambda context: …)")])
    return _FunctionHook(period, function)


class StepSettlement(Protocol):
    """Settles a step for all layers of a kind in one model."""

    group: dist.ProcessGroup | None  # of the ranks that share a step; set by the strategy

    def take_auxiliary(self) -> Tensor | None:
        """Hand over the losses that the last forward left, to be added to a mean loss; None if there are none."""

    def settle(self) -> None:
        """End a step, on all ranks together. The host does not wait."""

    def forget(self) -> None:
        """Drop what was counted since the last step: it is not part of one."""


class NoSettlement:
    """Does nothing, in a model without such layers."""

    group: dist.ProcessGroup | None = None

    def take_auxiliary(self) -> Tensor | None:
        return None

    def settle(self) -> None:
        pass

    def forget(self) -> None:
        pass


def settlement_of(model: nn.Module) -> StepSettlement:
    """Return the settlement of a model: what the class of a layer makes, if it has `make_settlement(model)`."""
    for module in model.modules():
        make = getattr(type(module), "make_settlement", None)
        if make is not None:
            made: StepSettlement = make(model)
            return made
    return NoSettlement()

"""Steps with several losses: each loss is a turn, taken by a strategy of its own over the whole global batch.

In a turn only the parameters of its optimizers have gradients. So DDP is made once per turn, of these parameters: one
that was made of all would wait for gradients that do not come, or leave those that come unreduced.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import NoSettlement
from drivetrain.core.metrics import LoggedValues, PartLoss, PartReader, PartTotals, StepOutcome
from drivetrain.core.optimizers import JointOptimizer, Turn, chosen_parameters, only_training
from drivetrain.core.precision import widened
from drivetrain.core.state import Shard, TensorSource
from drivetrain.data.batch import leaves
from drivetrain.job import Job
from drivetrain.strategies.base import Clip, LossFunction, ObjectiveCall, Strategy, StrategyParts, Trial
from drivetrain.strategies.loss_parts import LossParts, StepLog


@dataclass(frozen=True)
class TurnParts:
    """A turn, what its strategy is given, and the model's parameters that train in it."""

    turn: Turn
    parts: StrategyParts
    trained: Sequence[Tensor]


class OwnLoss(NamedTuple):
    """The loss of a turn as it is called, it compiled, and its named parts."""

    loss: LossFunction
    called_loss: LossFunction | None
    loss_parts: LossParts


def parts_by_turn(job: Job, whole: StrategyParts, own: Callable[[Turn], OwnLoss]) -> list[TurnParts]:
    """Return the turns of a step, each with what its strategy is given; empty for a job with one loss.

    Args:
        job: The job.
        whole: The parts of all turns together.
        own: Returns what a turn has of its own, besides its optimizers.
    """
    if not job.turns:
        return []
    optimizer = whole.optimizer
    assert isinstance(optimizer, JointOptimizer)
    chosen, turns = chosen_parameters(whole.model, job.optims), []
    for turn in job.turns:
        members = {name: optimizer.members[name] for name in turn.optimizers}
        loss, called_loss, loss_parts = own(turn)
        parts = replace(
            whole,
            loss=loss,
            called_loss=called_loss,
            loss_parts=loss_parts,
            optimizer=JointOptimizer(members) if len(members) > 1 else next(iter(members.values())),
            clips=clips_of(job, optimizer, turn.optimizers),
            average=None,
            step_log=TurnLog(whole.step_log),
            of_all_turns=whole,
        )
        turns.append(TurnParts(turn, parts, [parameter for name in turn.optimizers for parameter in chosen[name]]))
    return turns


def clips_of(job: Job, optimizer: Optimizer, names: Iterable[str] | None = None) -> tuple[Clip, ...]:
    """Return how the gradients of several optimizers are clipped, each by itself; nothing where none is clipped."""
    if not isinstance(optimizer, JointOptimizer) or not job.clips:
        return ()
    return tuple(
        Clip(
            [parameter for group in optimizer.members[name].param_groups for parameter in group["params"]],
            job.settled_optim(name).clip_norm,
        )
        for name in (job.optims if names is None else names)
    )


def turns_in(strategy: Strategy) -> list[AbstractContextManager[None]]:
    """Return a context for each turn of a step: one that does nothing for a strategy of one loss."""
    if isinstance(strategy, TurnsStrategy):
        return [strategy.taking(number) for number in range(len(strategy.turns))]
    return [nullcontext()]


class TurnLog(StepLog):
    """Hands what a turn logs to the log of the step, which is taken after the last turn."""

    def __init__(self, of_step: StepLog) -> None:
        super().__init__()
        self._of_step = of_step

    def add(self, values: LoggedValues, num_samples: int) -> None:
        self._of_step.add(values, num_samples)

    def settle(self) -> None:
        """Do nothing: the names are those of the whole step."""

    def take(self) -> None:
        """Return nothing: the whole step has it."""

    def forget(self) -> None:
        self._of_step.forget()


class TurnsStrategy:
    """Takes the turns of a step one after the other. What is saved and loaded is the state of all of them."""

    def __init__(self, make: Callable[[], Strategy], turns: Sequence[TurnParts]) -> None:
        self._given = turns
        self._strategies = [make() for _ in turns]
        self.name = self._strategies[0].name
        self.turns = tuple(given.turn for given in turns)
        self._all = [parameter for given in turns for parameter in given.trained]
        self._objectives: list[ObjectiveCall] = []
        self._now = 0
        self._outcomes: dict[int, StepOutcome] = {}

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        """Prepare the strategy of each turn on the trial."""
        self.parts = parts
        if not isinstance(parts.mixtures, NoSettlement):
            raise DrivetrainError(
                "a mixture of experts cannot be trained by several losses in turn: the load of its experts is settled "
                "once in a step",
                remedy="add the losses up in one function",
            )
        for number, (given, strategy) in enumerate(zip(self._given, self._strategies, strict=True)):
            with self.training(number), _unchanged(trial.batch, given.turn.name):
                self._objectives.append(strategy.prepare(given.parts, trial))
        return self._call

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs at most: of each turn a sum or its parts, and a count."""
        of_turns = sum(max(1, given.parts.loss_parts.num_values) + 1 for given in self._given)
        return of_turns + self.parts.step_log.num_values

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        return self._objectives[self._now](batch, num_samples, step_samples, weight)

    @contextmanager
    def training(self, number: int) -> Iterator[None]:
        """Let a turn train inside the context: forwards and backwards are its own. It ends with `end_turn`."""
        self._now = number
        with only_training(self._all, self._given[number].trained):
            yield

    def due(self, step: int) -> list[int]:
        """Return the numbers of the turns that the step after `step` steps has."""
        return [number for number, turn in enumerate(self.turns) if turn.is_due(step)]

    @contextmanager
    def taking(self, number: int, stop: float = 0.0) -> Iterator[None]:
        """Take a turn: run its forwards and backwards inside the context. Its optimizers step at the end of it."""
        with self.training(number):
            yield
            self.end_turn(stop)

    def end_turn(self, stop: float) -> None:
        """Step the optimizers of the turn that trains now."""
        self._outcomes[self._now] = self._strategies[self._now].step(stop)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._strategies[self._now].accumulate()

    def backward(self, objective: Tensor) -> None:
        self._strategies[self._now].backward(objective)

    def step(self, stop: float) -> StepOutcome:
        """End the step, after its turns were taken."""
        outcome = self.move()
        self.follow()
        return outcome

    def move(self) -> StepOutcome:
        """Return what the turns of the step came to."""
        outcomes, self._outcomes = self._outcomes, {}
        found = list(outcomes.values())
        values, entries = list[Tensor](), list[_Entry]()
        for number, turn in enumerate(self.turns):
            entries.append(_entry(turn.name, outcomes.get(number), values))
        norms = [outcome.grad_norm for outcome in found if outcome.grad_norm is not None]
        return StepOutcome(
            [],
            entries[next(iter(outcomes))].known_count or found[0].num_items,
            _highest([outcome.stop for outcome in found]),
            torch.stack([widened(norm) for norm in norms]).square().sum().sqrt() if norms else None,
            _mean([outcome.skipped for outcome in found]),
            named=PartTotals(torch.cat(values), _TurnReader(entries)),
            logged=self.parts.step_log.take(),
        )

    def follow(self) -> None:
        """Update the moving average, once in a step."""
        self.parts.follow()

    def abandon(self) -> None:
        """Discard a step that was begun and will not be ended."""
        self._outcomes.clear()
        for strategy in self._strategies:
            strategy.abandon()  # type: ignore[attr-defined]  # only steps of strategies that have it are captured

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        return self._strategies[0].save()  # its parts name those of all turns as what is saved

    def load(self, source: TensorSource) -> None:
        self._strategies[0].load(source)

    def close(self) -> None:
        for strategy in self._strategies:
            strategy.close()


@contextmanager
def _unchanged(batch: Any, name: str) -> Iterator[None]:
    """Raise if the loss changes its batch in place: the turns that follow get the same one."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    before = [tensor._version for tensor in tensors]
    yield
    if before != [tensor._version for tensor in tensors]:
        raise DrivetrainError(
            f"the loss {name!r} changes its batch in place, and the losses of the other turns get the same batch",
            remedy="compute a new tensor from it: x = x / 255, not x /= 255",
        )


def _highest(values: Sequence[Tensor | float]) -> Tensor | float:
    tensors = [widened(value) for value in values if isinstance(value, Tensor)]
    if not tensors:
        return max(float(value) for value in values)
    numbers = max((float(value) for value in values if not isinstance(value, Tensor)), default=0.0)
    return torch.stack(tensors).max().clamp(min=numbers)


def _mean(values: Sequence[Tensor | float]) -> Tensor | float:
    tensors = [widened(value) for value in values if isinstance(value, Tensor)]
    numbers = sum(float(value) for value in values if not isinstance(value, Tensor))
    return (torch.stack(tensors).sum() + numbers) / len(values) if tensors else numbers / len(values)


class _Entry(NamedTuple):
    """How the numbers of one turn are read: those of named parts, or its loss sum and count."""

    name: str
    length: int = 0  # of its numbers; 0: it was not taken in this step
    reader: PartReader | None = None
    known_count: float | None = None  # where the host knows it


def _entry(name: str, outcome: StepOutcome | None, values: list[Tensor]) -> _Entry:
    if outcome is None:
        return _Entry(name)
    count = outcome.num_items
    if isinstance(count, Tensor) and count.device.type == "cpu":
        count = count.item()  # the host has it: a copy to the device would wait
    if outcome.named is not None:
        own = [widened(outcome.named.values)]
    else:
        total = sum(widened(value) * factor for value, factor in outcome.losses)
        assert isinstance(total, Tensor)
        own = [total.reshape(1)]
    if isinstance(count, Tensor):
        own.append(widened(count).reshape(1))
    values += own
    reader = None if outcome.named is None else outcome.named.reader
    return _Entry(name, sum(map(len, own)), reader, None if isinstance(count, Tensor) else count)


class _TurnReader:
    """Reads the losses of the turns of a step: each is a named part, and their sum is the step's loss."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = entries

    def read(self, values: Sequence[float], step: int, num_samples: float) -> tuple[float, dict[str, PartLoss]]:
        whole, parts, first = 0.0, dict[str, PartLoss](), 0
        for name, length, reader, known in self._entries:
            if not length:
                parts[name] = PartLoss(math.nan, 0)
                continue
            own, first = values[first : first + length], first + length
            count = own[-1] if known is None else known
            if reader is None:
                loss = own[0] / count if count else own[0] * math.inf if own[0] else 0.0
            else:
                loss, named = reader.read(own if known is not None else own[:-1], step, count)
                parts |= {f"{name}_{part}": value for part, value in named.items()}
            parts[name] = PartLoss(loss, count)
            whole += loss
        return whole, parts

"""The trace of a run under test, step by step and rank by rank: values only, read from its recorder's files."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TracedBatch:
    """One backward through the loss on one rank."""

    numbers: tuple[int, ...]  # of its samples
    loss: float
    weight: float  # the gradient that reached the loss: what the trainer multiplied it by
    content: tuple[int, ...] = ()  # digests of its items, where the case records them


@dataclass(frozen=True)
class StepTrace:
    """One optimizer step on one rank, as the optimizer saw it."""

    micro_batches: tuple[TracedBatch, ...]
    learning_rates: tuple[float, ...]  # by parameter group
    grad_norm: float  # of the gradients that the optimizer got: reduced and clipped
    gradients: Mapping[str, Tensor] | None = None  # by parameter name; only of the first steps
    weights: Mapping[str, Tensor] | None = None  # parameters before the step; only of the first steps
    digests: Mapping[str, int] | None = None  # of weights, buffers and optimizer state before the step, by name

    @property
    def samples(self) -> tuple[int, ...]:
        """The numbers of the samples that counted, in the order in which they were used."""
        return tuple(number for micro in self.micro_batches if micro.weight for number in micro.numbers)


@dataclass(frozen=True)
class Reported:
    """The figures that the trainer itself reports of a step."""

    step: int  # from 0
    loss: float | None = None
    grad_norm: float | None = None  # before clipping


@dataclass
class RankTrace:
    """One process of a run, from its start to its end or its kill."""

    steps: list[StepTrace] = field(default_factory=list)
    first_weights: Mapping[str, Tensor] = field(default_factory=dict)  # before its first step
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # when it ended: parameters and buffers
    reported: list[Reported] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """All ranks of one run. `error` is empty where it ended well; `killed` tells that it was killed on purpose."""

    ranks: Sequence[RankTrace]
    error: str = ""
    killed: bool = False
    seconds: float = 0.0

    @property
    def main(self) -> RankTrace:
        return self.ranks[0]

    @property
    def num_steps(self) -> int:
        return min((len(rank.steps) for rank in self.ranks), default=0)

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the samples of a step over all ranks, ordered by rank."""
        return tuple(number for rank in self.ranks for number in rank.steps[step].samples)

    def division(self, step: int) -> list[list[tuple[int, ...]]]:
        """Return how a step was divided: for each rank, its micro-batches that counted."""
        return [
            [micro.numbers for micro in rank.steps[step].micro_batches if micro.weight and micro.numbers]
            for rank in self.ranks
        ]

    def reported(self, step: int) -> Reported | None:
        return next((entry for rank in self.ranks for entry in rank.reported if entry.step == step), None)


def read_rank(path: Path) -> RankTrace:
    """Read what a recorder wrote, up to the last complete entry: a kill may have cut the file."""
    trace = RankTrace()
    if not path.exists():
        return trace
    with path.open("rb") as file:
        while True:
            try:
                kind, value = pickle.load(file)
            except (EOFError, pickle.UnpicklingError, AttributeError, ValueError):
                return trace
            _add(trace, kind, value)


def _add(trace: RankTrace, kind: str, value: Any) -> None:
    if kind == "step":
        trace.steps.append(value)
    elif kind == "first_weights":
        trace.first_weights = value
    elif kind == "weights":
        trace.weights = value
    elif kind == "reported":
        trace.reported.append(value)
    elif kind == "note":
        trace.notes.append(value)
    elif kind == "restart":  # what was recorded so far was not training
        trace.steps.clear()
        trace.reported.clear()

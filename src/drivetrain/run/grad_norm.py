"""Decides how often the gradient norm is recorded where nothing is clipped by it.

It is recorded in every step where it costs at most 1 % of a step; else in every n-th, so that it costs that much. It is
measured on the run itself: what a norm takes when it starts, and what a step takes over its first steps, which all have
their norm. A captured step cannot leave its norm out now and then: it has its norm if the plan measured how long a step
takes and the norm is short against that; else every n-th step is run without capture, for its norm.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from drivetrain.core.world import World, synchronize
from drivetrain.strategies import StrategyParts

MOST_SHARE = 0.01  # of a step's time
FIRST, LAST = 3, 12  # steps of a run, from 0, between whose beginnings a step is timed
EVERY_CAPTURED = 1000  # a step without capture takes some ten times as long
ROUNDS, AT_ONCE = 3, 3  # of norms that are timed


class NormCadence:
    """Decides in which steps the norm is computed."""

    def __init__(
        self,
        parts: StrategyParts,
        world: World,
        first_step: int,
        tell: Callable[[str, dict[str, Any]], None],
        *,
        shares: bool,
    ) -> None:
        """Time the norm. `shares`: whether gradients are sharded over ranks, so that the norm takes a collective."""
        self._due, self._world, self._first_step, self._tell = parts.norms, world, first_step, tell
        self._norm_seconds = norm_seconds(parts, world, shares=shares)
        self._begins: list[float] = []
        self._is_settled = self._is_captured = False
        self.every = 1

    def settle_captured(self, step_seconds: float | None) -> None:
        """Decide before the first step, which may be captured, with its norm or without. None: no replay was timed."""
        is_short = step_seconds is not None and self._norm_seconds <= MOST_SHARE * step_seconds
        self._is_captured = True
        self._settle(1 if is_short else EVERY_CAPTURED, step_seconds)

    def begin(self, step: int) -> bool:
        """Prepare the step that begins, after so many. Returns whether there is nothing left to decide or to do."""
        number = step - self._first_step
        if not self._is_settled and number >= FIRST:
            self._begins.append(time.perf_counter())
            if number >= LAST:
                self._settle_by_clock()
        self._due.is_due = self.every == 1 or (step + 1) % self.every == 0
        self._due.is_apart = self._is_captured and self.every > 1 and self._due.is_due
        return self._is_settled and self.every == 1

    def _settle_by_clock(self) -> None:
        """Decide by the measured times, at the same step on all ranks.

        The host waits here once: the ranks agree on the slowest rank's norm.
        """
        seconds = statistics.median(after - before for before, after in pairwise(self._begins))
        told = self._world.gather([self._norm_seconds, seconds])
        self._norm_seconds = max(norm for norm, _ in told)
        seconds = max(1e-9, statistics.median(step for _, step in told) - self._norm_seconds)
        self._settle(round_up(self._norm_seconds / (MOST_SHARE * seconds)), seconds)

    def _settle(self, every: int, step_seconds: float | None) -> None:
        self.every, self._is_settled = every, True
        of_step = "" if step_seconds is None else f", {self._norm_seconds / step_seconds:.1%} of a step"
        words = f"every {every} steps: it takes {1e3 * self._norm_seconds:.3g} ms{of_step}" if every > 1 else ""
        facts = {"every": every, "norm_seconds": self._norm_seconds, "step_seconds": step_seconds}
        self._tell(words, facts)


def round_up(number: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50 and so on."""
    factor = 1
    while True:
        for step in (1, 2, 5):
            if step * factor >= number:
                return step * factor
        factor *= 10


def norm_seconds(parts: StrategyParts, world: World, *, shares: bool) -> float:
    """Time the norm of tensors like the gradients: the weights. All ranks call it together."""
    tensors = [parameter.detach() for parameter in parts.trained if parameter.numel()]

    def once() -> None:
        nn.utils.get_total_norm(tensors)
        if shares:
            world.all_reduce(torch.zeros((), dtype=torch.float64, device=world.device))

    times = []
    for _ in range(1 + ROUNDS):
        synchronize(world.device)
        began = time.perf_counter()
        for _ in range(AT_ONCE):
            once()
        synchronize(world.device)  # the host waits, before the first step
        times.append((time.perf_counter() - began) / AT_ONCE)
    return min(times[1:])

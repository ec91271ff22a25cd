"""Stochastic weight averaging (SWA), as a job asks for it: from which step, and how often."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drivetrain.core.hook import PERIODS, is_period


@dataclass(frozen=True)
class SWA:
    """Stochastic weight averaging: the plain mean of the weights that the last part of a run goes through.

    Training goes on with the weights themselves. Once averaging has begun, the mean is what is validated, tested and
    exported, and what `Result.model` has. The learning rate is the schedule's: a constant or cyclic one is usual.

    Args:
        start: When averaging begins: a fraction of the job's steps, or a number of steps.
        every: How often the weights are added to the mean: a number of steps, or `epoch`.
        batch_norm_samples: How many training samples the statistics of batch-norm layers are computed anew from,
            since those of the weights are not those of their mean. That is done before a validation and at the end.
            Default: all samples.

    Example:
        >>> swa = dt.SWA(start=0.75, every="epoch")
        >>> swa.first_step(num_steps=100)
        75
    """

    start: float | int = 0.75
    every: int | Literal["epoch"] = "epoch"
    batch_norm_samples: int | None = None

    def first_step(self, num_steps: int | None) -> int:
        """Return how many steps are done when the weights may first be taken.

        Raises:
            ValueError: If a fraction was given, and the number of steps is not known.
        """
        if isinstance(self.start, int):
            return max(1, self.start)
        if num_steps is None:
            raise ValueError("the number of steps is not known beforehand")
        return max(1, math.ceil(self.start * num_steps))

    def problems(self) -> Iterator[tuple[str, object, str]]:
        """Yield what is wrong: the name of the argument, its value, and what is allowed."""
        start: object = self.start
        is_steps = isinstance(start, int) and not isinstance(start, bool) and start >= 0
        if not is_steps and not (isinstance(start, float) and 0 <= start < 1):
            yield "start", start, "a fraction from 0 to below 1, such as 0.75, or a whole number of steps"
        if not is_period(self.every):
            yield "every", self.every, PERIODS
        samples: object = self.batch_norm_samples
        if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < 2):
            yield "batch_norm_samples", samples, "a whole number from 2, or None for all"

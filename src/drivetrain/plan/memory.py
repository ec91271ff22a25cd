"""Forecasts the memory of a micro-batch from a few small ones: a line beyond a floor, and never a blind doubling.

Weights, gradients and optimizer take the same for any micro-batch; activations grow with it. The peak is reached either
in backward (a line in the micro-batch) or in the optimizer's step with its temporaries (a floor): peaks of small
micro-batches may all lie on the floor and say nothing of the line. So the line goes through the two largest sizes, and
it is trusted where it can be shown that no floor hides behind it:

What is held at any time (weights, optimizer, and gradients where steps accumulate) is counted, not fitted. The line
starts at that or above. So a step of m samples takes at most `held + m × (peak - held) / n` if one of n ≤ m samples
took `peak`, wherever that peak was. Nothing is measured that this bound does not allow, and a forecast is settled where
line and bound are near each other; one that stays open is not used, but the bound. The exception is a floor beyond half
of the limit: the bound then allows next to nothing however little a sample takes. There sizes are doubled until they
leave the floor, and one of them may not fit.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

from drivetrain.core.value import Value

FRAGMENTATION = 0.03  # of what is reserved, seen between the peak of what is allocated and of what is reserved
CLOSE = 0.03  # a forecast is settled when two ways to it are this near
MOST_SIZES = 4  # that are measured for the line's sake; those on the floor but the last do not count


class Peak(NamedTuple):
    """The peak memory of a step with this many samples."""

    micro_batch: int
    num_bytes: int


class MemoryModel(Value):
    """Peak = fixed + per sample × micro-batch, but no less than the floor."""

    fixed_bytes: float
    sample_bytes: float
    floor_bytes: float = 0.0

    @classmethod
    def fitted(cls, peaks: Sequence[Peak], held_bytes: float = 0.0) -> Self:
        """Fit the line through the two largest sizes, with the floor so high that no measured peak is above both.

        With one size alone and what is held: the line from there to the peak, which is the most it can be.
        """
        largest = _largest_per_size(peaks)
        if not largest or (len(largest) < 2 and not held_bytes):
            raise ValueError("a line needs peaks of two different micro-batches, or one and what is held without any")
        size, peak = largest[-1]
        before = largest[-2] if len(largest) > 1 else Peak(0, round(held_bytes))
        slope = max(0.0, (peak - before.num_bytes) / (size - before.micro_batch))
        fixed = peak - slope * size
        above = (p.num_bytes for p in largest if p.num_bytes > fixed + slope * p.micro_batch)
        return cls(fixed_bytes=fixed, sample_bytes=slope, floor_bytes=max(above, default=0.0))

    def peak_bytes(self, micro_batch: int) -> int:
        return round(max(self.floor_bytes, self.fixed_bytes + self.sample_bytes * micro_batch))

    def largest(self, limit_bytes: float, at_most: int) -> int:
        """Return the largest micro-batch that fits; 0 if none does."""
        room = _usable(limit_bytes)
        if max(self.floor_bytes, self.fixed_bytes + self.sample_bytes) > room:
            return 0
        return _count(room - self.fixed_bytes, self.sample_bytes, at_most)


def next_size_to_measure(
    peaks: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float = 0.0
) -> int | None:
    """Return a micro-batch that fits and is worth measuring; None where memory up to `at_most` can be forecast.

    Only where a floor hides the line, or even one sample more than the smallest step is not shown to fit, a larger one
    is proposed all the same: it may fit.
    """
    largest = _largest_per_size(peaks)
    if not largest:
        return 1
    size = largest[-1].micro_batch
    if size >= at_most:
        return None
    certain = bound_to_fit(largest, limit_bytes, at_most, held_bytes)
    if len(largest) == 1:
        return max(size + 1, min(certain, -(-at_most // 2)))
    aim = _unsettled(largest, limit_bytes, at_most, held_bytes)
    if aim is None:
        return None
    if _is_flat(largest):
        return max(min(certain, aim), min(2 * size, at_most))
    if _num_off_floor(largest) >= MOST_SIZES:
        return None
    further = min(certain, -(-(size + aim) // 2))
    return further if further > size else None


def largest_that_fits(peaks: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float = 0.0) -> int:
    """Return the largest micro-batch that fits: by the line if it is settled, else by the bound or as seen to fit."""
    largest = _largest_per_size(peaks)
    if largest[-1].micro_batch < at_most and _unsettled(largest, limit_bytes, at_most, held_bytes) is not None:
        return max(largest[-1].micro_batch, bound_to_fit(largest, limit_bytes, at_most, held_bytes))
    return MemoryModel.fitted(largest, held_bytes).largest(limit_bytes, at_most)


def bound_to_fit(peaks: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float = 0.0) -> int:
    """Return the most samples that the bound allows, by the largest step that was run."""
    size, peak = max(peaks)
    return _count(_usable(limit_bytes) - held_bytes, max(0.0, peak - held_bytes) / size, at_most)


def _unsettled(largest: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float) -> int | None:
    """Return the target size, where its forecast is still open."""
    model = MemoryModel.fitted(largest, held_bytes)
    size, peak = largest[-1]
    aim = model.largest(limit_bytes, at_most)
    if aim <= size:
        return None
    forecast = model.peak_bytes(aim)
    bound = held_bytes + aim * (peak - held_bytes) / size
    if held_bytes and bound - forecast <= CLOSE * forecast:
        return None
    if len(largest) > 2 and not _is_flat(largest) and not _is_flat(largest[:-1]):
        before = MemoryModel.fitted(largest[:-1], held_bytes)
        if abs(before.sample_bytes - model.sample_bytes) * (aim - size) <= CLOSE * forecast:
            return None
    return aim


def _is_flat(largest: Sequence[Peak]) -> bool:
    """Return whether peaks lie on the floor: they hardly differ, though the sizes do, and do not determine the line."""
    before, last = largest[-2:]
    return last.micro_batch >= 1.5 * before.micro_batch and last.num_bytes - before.num_bytes <= CLOSE * last.num_bytes


def _num_off_floor(largest: Sequence[Peak]) -> int:
    """Return the number of peaks off the floor, plus the last one on it."""
    return next((n for n in range(1, len(largest)) if _is_flat(largest[: len(largest) - n + 1])), len(largest))


def _largest_per_size(peaks: Sequence[Peak]) -> list[Peak]:
    """Return the largest peak of each size, sorted by size."""
    found: dict[int, int] = {}
    for size, num_bytes in peaks:
        found[size] = max(num_bytes, found.get(size, 0))
    return [Peak(size, found[size]) for size in sorted(found)]


def _usable(limit_bytes: float) -> float:
    return limit_bytes * (1 - FRAGMENTATION)


def _count(room: float, each: float, at_most: int) -> int:
    if room < each:
        return 0
    return at_most if each * at_most <= room else min(at_most, math.floor(room / each))

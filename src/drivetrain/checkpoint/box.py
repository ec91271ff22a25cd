"""Boxes of a tensor's index space: where two meet, and whether many of them tile a whole."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Boxes that no straight cut divides are compared in pairs; real shards are never that many.
MOST_ENTANGLED_BOXES = 20_000


@dataclass(frozen=True)
class Box:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """Return the intersection of both boxes; None if it is empty."""
        starts = tuple(max(pair) for pair in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(min(pair) for pair in zip(self._stops, other._stops, strict=True))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds the outer one."""
        return tuple(
            slice(offset - base, offset - base + size)
            for offset, base, size in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )

    def fits_in(self, shape: Sequence[int]) -> bool:
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= total
            for offset, size, total in zip(self.offsets, self.shape, shape, strict=True)
        )

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return a problem, or empty if the boxes, which must fit in the shape, hold each of its elements exactly once."""
    solid = [box for box in boxes if box.volume]
    if overlap := _overlap(solid):
        return overlap
    missing = math.prod(shape) - sum(box.volume for box in solid)
    return f"{missing} of its {math.prod(shape)} elements are in no part" if missing else ""


def _overlap(boxes: list[Box]) -> str:
    """Find an overlap by cutting the boxes apart along any dimension, so that shards of any grid cost n log n."""
    groups = [boxes]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        dimensions = range(len(group[0].shape))
        parts = next((parts for d in dimensions if len(parts := list(_groups_along(group, d))) > 1), None)
        if parts is not None:
            groups.extend(parts)
        elif problem := _overlap_in_pairs(group):
            return problem
    return ""


def _groups_along(boxes: list[Box], dimension: int) -> Iterator[list[Box]]:
    """Yield groups of boxes that overlap along one dimension, directly or through others."""
    group: list[Box] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dimension]):
        if group and box.offsets[dimension] >= end:
            yield group
            group = []
        group.append(box)
        end = max(end, box.offsets[dimension] + box.shape[dimension])
    yield group


def _overlap_in_pairs(boxes: list[Box]) -> str:
    if len(boxes) > MOST_ENTANGLED_BOXES:
        return f"{len(boxes)} parts lie in a way that no sharding makes"
    starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    stops = starts + np.array([box.shape for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    for index in range(len(boxes) - 1):
        meets = (starts[index] < stops[index + 1 :]) & (starts[index + 1 :] < stops[index])
        for other in np.flatnonzero(meets.all(axis=1)):
            first, second = boxes[index], boxes[index + 1 + int(other)]
            return (
                f"the part at {list(first.offsets)} of shape {list(first.shape)} overlaps"
                f" the one at {list(second.offsets)} of shape {list(second.shape)}"
            )
    return ""

"""Represents ranges of a tensor's elements, in row-major order, as boxes: a checkpoint holds boxes.

Some backends flatten many weights into one, and cut that anywhere. A range of one weight is then the end of a row, some
whole rows, and the start of another; in more dimensions the same again inside a row.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from drivetrain.core.state import Shard, TensorSource

Shape = tuple[int, ...]


def boxes_of(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the fewest boxes, as (offsets, shape), that hold the elements from `start` to before `stop`, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row_size = prod(shape[1:])
    row, column = divmod(start, row_size)
    last_row, last_column = divmod(stop, row_size)
    if column or row == last_row:
        end = row_size if row < last_row else last_column
        yield from (((row, *offsets), (1, *size)) for offsets, size in boxes_of(shape[1:], column, end))
        if row == last_row:
            return
        row += 1
    if row < last_row:
        yield (row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:])
    yield from (((last_row, *offsets), (1, *size)) for offsets, size in boxes_of(shape[1:], 0, last_column))


def shards_of(key: str, flat: Tensor, shape: Shape, start: int) -> list[Shard]:
    """Return a flat tensor, which holds the elements of a whole from `start` on, as shards that share its memory."""
    shards, taken = [], 0
    for offsets, size in boxes_of(shape, start, start + flat.numel()):
        part = flat[taken : taken + prod(size)].view(size)
        shards.append(Shard(key, part, shape, offsets, is_part=True))
        taken += part.numel()
    return shards


def read_flat(source: TensorSource, key: str, shape: Shape, start: int, stop: int) -> Tensor:
    """Read the elements from `start` to before `stop` of a stored tensor."""
    parts = [source.read(key, offsets, size).reshape(-1) for offsets, size in boxes_of(shape, start, stop)]
    return torch.cat(parts) if parts else torch.zeros(0)

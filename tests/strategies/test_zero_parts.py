"""Ranges of a tensor's elements as boxes: every element once, in order, in few boxes."""

from math import prod
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.strategies.zero_parts import boxes_of, read_flat, shards_of

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


class Stored:
    """A stored tensor, read box by box."""

    meta: dict[str, Any] = {}  # noqa: RUF012
    keys: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def read(self, key: str, offsets: Any = None, shape: Any = None) -> torch.Tensor:
        assert offsets is not None
        return self.tensor[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))].clone()


@given(SHAPES, st.integers(0, 700), st.integers(0, 700))
def test_any_range_of_any_shape(shape: tuple[int, ...], first: int, second: int) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    start, stop = sorted((first % (prod(shape) + 1), second % (prod(shape) + 1)))
    expected = whole.reshape(-1)[start:stop]
    boxes = list(boxes_of(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert torch.equal(read_flat(Stored(whole), "key", shape, start, stop).long(), expected)
    rebuilt = torch.full(shape, -1)
    for shard in shards_of("key", expected.clone(), shape, start):
        assert shard.global_shape == shape
        assert shard.is_part
        rebuilt[tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.tensor.shape, strict=True))] = shard.tensor
    inside = (whole >= start) & (whole < stop)
    assert torch.equal(rebuilt, torch.where(inside, whole, -1))


def test_whole_rows_are_one_box() -> None:
    assert list(boxes_of((4, 3), 3, 9)) == [((1, 0), (2, 3))]
    assert list(boxes_of((4, 3), 2, 10)) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert list(boxes_of((), 0, 1)) == [((), ())]
    assert list(boxes_of((7,), 2, 2)) == []


def test_shards_share_memory() -> None:
    flat = torch.zeros(5)
    for shard in shards_of("key", flat, (3, 3), 2):
        shard.tensor.fill_(1.0)
    assert flat.sum() == 5

"""Which batches one recorded step fits."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from drivetrain.loop.static_inputs import NotStaticError, signature, with_tensors


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Sample:
    inputs: Tensor
    name: str


def of(batch: Any) -> Any:
    return signature(batch, [])


def floats(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: floats(3, 4),
        lambda: [floats(3, 4), torch.arange(3)],
        lambda: Pair(floats(2), floats(3)),
        lambda: {"a": floats(2), "b": (floats(1), {"c": None})},
        lambda: Sample(floats(2), "name"),
        lambda: UserDict(a=floats(2), b=3),
        lambda: [1, 2.5, True, "text", b"bytes", None],
    ],
)
def test_equal_for_what_differs_in_values_only(make: Any) -> None:
    assert of(make()) == of(make())
    assert hash(of(make())) == hash(of(make()))


IMAGE = torch.zeros(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (floats(3, 4), floats(4, 3)),
        (floats(3), floats(3).double()),
        (IMAGE, IMAGE.contiguous(memory_format=torch.channels_last)),
        ([floats(2)], (floats(2),)),
        ([floats(2), 1], [floats(2), True]),
        ([floats(2), 1], [floats(2), 2]),
        ({"a": floats(2)}, {"b": floats(2)}),
        (Pair(floats(2), floats(2)), (floats(2), floats(2))),
        (Sample(floats(2), "one"), Sample(floats(2), "other")),
    ],
)
def test_different_for_anything_else(one: Any, other: Any) -> None:
    assert of(one) != of(other)


@pytest.mark.parametrize("thing", [torch.eye(3).to_sparse(), object(), {1, 2}])
def test_what_cannot_be_given_anew_is_named(thing: Any) -> None:
    with pytest.raises(NotStaticError, match="a batch holds a"):
        of([floats(2), thing])


@pytest.mark.parametrize(
    "batch",
    [
        [torch.arange(3), torch.arange(4)],
        Pair(torch.arange(3), torch.arange(4)),
        {"b": torch.arange(3), "a": [torch.arange(4), "kept"]},
        UserDict(b=torch.arange(3), a=(torch.arange(4),)),
        Sample(torch.arange(3), "kept"),
    ],
)
def test_the_same_structure_around_other_tensors(batch: Any) -> None:
    tensors: list[Tensor] = []
    before = signature(batch, tensors)
    others = [tensor + 1 for tensor in tensors]
    changed = with_tensors(batch, iter(others))
    found: list[Tensor] = []
    assert signature(changed, found) == before
    assert all(one is other for one, other in zip(found, others, strict=True))
    again: list[Tensor] = []
    signature(batch, again)
    assert all(one is other for one, other in zip(again, tensors, strict=True)), "the batch itself was changed"

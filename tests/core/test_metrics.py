"""Sums and counts over ranks, against fractions and float64 sums that share nothing with them."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import DrivetrainError, LossSum
from drivetrain.core.metrics import Counted, Tally, flattened, over_all_ranks
from drivetrain.core.world import World


class Ranks(World):
    """A world of this process alone that is told what the others gathered."""

    def __init__(self, *others: object) -> None:
        super().__init__()
        self.others = list(others)

    def gather(self, value: object) -> list[object]:
        return [super().gather(value)[0], *self.others]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
def test_true_and_false_are_counted_exactly(batches: list[list[bool]]) -> None:
    tally = Tally("accuracy")
    for batch in batches:
        tally.add(torch.tensor(batch), len(batch))
    flat = [entry for batch in batches for entry in batch]
    counted = tally.read()
    assert counted == (sum(flat), len(flat))
    assert counted is not None
    assert isinstance(counted.total, int)
    assert over_all_ranks({"accuracy": counted}, World())["accuracy"] == sum(flat) / len(flat)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(1, 50)), min_size=1, max_size=8))
def test_means_are_weighted_by_their_samples(batches: list[tuple[float, int]]) -> None:
    tally = Tally("error")
    for mean, size in batches:
        tally.add(torch.tensor(mean), size)
    exact = sum(Fraction(mean) * size for mean, size in batches) / sum(size for _, size in batches)
    found = over_all_ranks({"error": tally.read()}, World())["error"]
    assert found == pytest.approx(float(exact), rel=1e-9, abs=1e-6)


def test_whole_numbers_beyond_what_floats_hold() -> None:
    large = 2**53 + 1
    assert over_all_ranks({"n": Counted(large, 1)}, Ranks({"n": [large, 1]}))["n"] == (2 * large) / 2
    tally = Tally("n")
    tally.add(torch.tensor([large, large]), 2)
    assert tally.read() == (2 * large, 2)


def test_ranks_that_saw_nothing_take_no_part() -> None:
    assert over_all_ranks({"a": Counted(3, 4)}, Ranks({"a": None}, {"a": [1, 4]}))["a"] == 0.5
    assert math.isnan(over_all_ranks({"a": None}, Ranks({"a": None}))["a"])


def test_sums_over_ranks_are_as_if_added_without_rounding() -> None:
    found = over_all_ranks({"a": Counted(1e16, 1)}, Ranks({"a": [1.0, 1]}, {"a": [-1e16, 1]}, {"a": [1.0, 1]}))
    assert found["a"] == 0.5


def test_ranks_that_disagree_are_named() -> None:
    with pytest.raises(DrivetrainError, match="rank 0 has the metrics a and rank 1 has b"):
        over_all_ranks({"a": Counted(1, 1)}, Ranks({"b": [1, 1]}))
    with pytest.raises(DrivetrainError, match="whole numbers on rank 0 and real ones on rank 1"):
        over_all_ranks({"a": Counted(1, 1)}, Ranks({"a": [1.5, 1]}))


def test_what_a_metric_may_return() -> None:
    tally = Tally("m")
    with pytest.raises(DrivetrainError, match="returned float"):
        tally.add(0.5, 3)  # type: ignore[arg-type]
    with pytest.raises(DrivetrainError, match=r"total is \[2\]"):
        tally.add(LossSum(torch.ones(2), 2), 2)
    tally.add(LossSum(torch.tensor(3), torch.tensor(4)), 2)
    with pytest.raises(DrivetrainError, match="on one batch and in real ones on another"):
        tally.add(torch.tensor(0.5), 2)
    assert tally.read() == (3, 4)
    entries = Tally("squares")
    entries.add(torch.tensor([0.25, 0.5]), 1)
    entries.add(torch.tensor([[1.0], [2.0]]), 1)
    assert entries.read() == (3.75, 4)


def test_numbers_of_a_metric_object() -> None:
    assert flattened("f1", torch.tensor(0.5)) == {"f1": 0.5}
    assert flattened("f1", torch.tensor([0.5, 1.0])) == {"f1_0": 0.5, "f1_1": 1.0}
    assert flattened("all", {"a": torch.tensor(1.0), "b": 2}) == {"all_a": 1.0, "all_b": 2.0}

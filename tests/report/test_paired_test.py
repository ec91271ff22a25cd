"""The paired test: exactly fair if nothing differs, and quick to find what does."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.report.paired_test import _e_values, evidence, fewest_pairs, paired_test, pairs_needed

SIZES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9)
HERE = np.zeros(1)


def e_value(differences: object) -> float:
    return float(_e_values(np.asarray(differences, dtype=float), HERE)[0])


@given(SIZES)
def test_bets_on_fair_coins_are_worth_their_stake(sizes: list[float]) -> None:
    """Over all signs, the mean e-value is 1, whatever the sizes: there is no distribution to be wrong about."""
    flips = itertools.product((1, -1), repeat=len(sizes))
    assert np.mean([e_value(np.multiply(signs, sizes)) for signs in flips]) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("power", [0, 1, 4], ids=["equal", "growing", "one outweighs the others"])
def test_looking_after_every_pair_finds_nothing_too_often(power: int) -> None:
    sizes = np.arange(1, 12, dtype=float) ** power
    flips = itertools.product((1, -1), repeat=len(sizes))
    wins = [evidence(np.multiply(signs, sizes)).max() >= 20 for signs in flips]
    assert 0 < np.mean(wins) <= 0.05


def test_the_evidence_after_each_pair_is_that_of_the_pairs_so_far() -> None:
    differences = np.random.default_rng(3).normal(0.3, 1, size=20)
    looks = [paired_test(list(differences[:seen])).e_value for seen in range(1, 21)]
    assert evidence(differences) == pytest.approx(looks)


def test_six_pairs_that_agree_are_enough_and_five_are_not() -> None:
    assert fewest_pairs(0.95) == 6
    assert paired_test([-0.01] * 6).is_found
    assert not paired_test([-0.01] * 5).is_found
    assert not paired_test([1e9]).is_found


def test_the_interval_is_what_the_test_does_not_rule_out() -> None:
    rng = np.random.default_rng(0)
    differences = list(rng.normal(0.5, 1, size=30))
    found = paired_test(differences)
    assert found.low < np.median(differences) < found.high
    width = found.high - found.low
    for place, is_inside in ((found.low - 0.02 * width, False), (found.low + 0.02 * width, True),
                             (found.high - 0.02 * width, True), (found.high + 0.02 * width, False)):  # fmt: skip
        assert (e_value(np.subtract(differences, place)) < 20) == is_inside
    moved = paired_test([3 * value + 7 for value in differences])
    assert (moved.low, moved.high) == pytest.approx((3 * found.low + 7, 3 * found.high + 7), rel=1e-6)


def test_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(1)
    held = [(found := paired_test(rng.standard_t(3, size=15) + 2)).low <= 2 <= found.high for _ in range(200)]
    assert np.mean(held) >= 0.95


def test_few_pairs_rule_nothing_out() -> None:
    found = paired_test([1.0, 1.1, 0.9])
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_most_pairs_against_the_mean_are_no_verdict() -> None:
    found = paired_test([1.0] * 60 + [-80.0])
    assert found.e_value > 20
    assert not found.is_found


def test_how_many_pairs_a_small_difference_takes() -> None:
    rng = np.random.default_rng(2)
    noise = rng.normal(size=40)
    noise -= noise.mean()
    clear, faint = pairs_needed(list(noise / noise.std() + 1)), pairs_needed(list(noise / noise.std() + 0.3))
    assert clear is not None
    assert faint is not None
    assert 6 <= clear < 30 < faint < 400
    assert pairs_needed([0.0] * 8) is None


@pytest.mark.parametrize("differences", [[], [1.0, math.nan], [math.inf]])
def test_what_is_no_number_is_refused(differences: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        paired_test(differences)

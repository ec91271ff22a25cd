"""What is remembered: a fair sample of each group, whatever came in which order."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.moe import Reservoir


def group_of(number: int) -> str:
    return "rare" if number % 17 == 0 else str(number % 3)


def filled(numbers: list[int], capacity: int = 24, seed: int = 0) -> Reservoir:
    reservoir = Reservoir(capacity, seed)
    for number in numbers:
        reservoir.add(number, group_of(number))
    return reservoir


@given(st.lists(st.integers(0, 300), min_size=1, max_size=150), st.integers(0, 5), st.randoms(use_true_random=False))
def test_neither_order_nor_repetition_matters(numbers: list[int], seed: int, chance: random.Random) -> None:
    shuffled = numbers * 2
    chance.shuffle(shuffled)
    one, other = filled(numbers, seed=seed), filled(shuffled, seed=seed)
    assert one.groups == other.groups
    assert len(one) <= 24 + 4, "a group has one sample at least"
    shares = {name: len(kept) for name, kept in one.groups.items()}
    there = Counter(group_of(number) for number in set(numbers))
    quota = 24 // len(there)
    assert shares == {name: min(count, quota) for name, count in there.items()}, "as many of each as there is room for"
    assert all(group_of(number) == one.group_of(number) for kept in one.groups.values() for number in kept)


def test_every_sample_is_kept_equally_often() -> None:
    """Over many seeds: a sample that was seen first has no advantage over the last."""
    counts = Counter(
        number for seed in range(300) for kept in filled(list(range(100)), 40, seed).groups.values() for number in kept
    )
    of_one_group = [counts[number] for number in range(100) if group_of(number) == "1"]
    expected = 300 * 10 / len(of_one_group)
    assert max(abs(count - expected) for count in of_one_group) < 5 * expected**0.5


def test_a_draw_has_equally_many_of_each_group_and_none_that_is_checked() -> None:
    reservoir = filled(list(range(300)), 120)
    drawn = reservoir.draw(20, 1, 2)
    assert Counter(map(group_of, drawn)) == {"0": 5, "1": 5, "2": 5, "rare": 5}
    assert len(set(drawn)) == 20
    assert not set(drawn) & set(reservoir.checked)
    assert drawn == reservoir.draw(20, 1, 2)
    assert set(drawn) != set(reservoir.draw(20, 1, 3)), "another draw"
    assert 10 < len(reservoir.checked) < 50


def test_what_is_unknown_is_what_may_be_kept() -> None:
    reservoir, everything = Reservoir(8, 0), list(range(100))
    chosen = reservoir.unknown(everything, 10)
    for number in chosen:
        reservoir.add(number, "one")
    whole = Reservoir(8, 0)
    for number in everything:
        whole.add(number, "one")
    assert reservoir.groups == whole.groups
    assert not set(reservoir.unknown(everything, 100)) & set(reservoir.groups["one"])


def test_it_is_saved_and_goes_on_the_same() -> None:
    whole, first = filled(list(range(200))), filled(list(range(100)))
    second = Reservoir(24, 0)
    second.load_state_dict(first.state_dict())
    for number in range(100, 200):
        second.add(number, group_of(number))
    assert second.groups == whole.groups
    assert second.draw(7, 3) == whole.draw(7, 3)

"""How a global batch is divided: nothing lost, nothing twice, the same for every world."""

import statistics
import time
from functools import partial
from itertools import groupby, takewhile
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.division import Division, Permutation, Place, SampleStream, key_of

divisions = st.builds(
    Division,
    num_samples=st.integers(1, 400),
    global_batch=st.integers(1, 100),
    micro_batch=st.integers(1, 40),
    world_size=st.integers(1, 9),
    least=st.integers(1, 3),
)


@given(divisions)
def test_an_epoch_takes_each_position_once(division: Division) -> None:
    seen = []
    for step in range(division.steps_per_epoch):
        place = division.place(step)
        assert place.epoch == 0
        for rank in range(division.world_size):
            for part in division.micro_steps(place, rank):
                if part.weight:
                    seen += range(part.start, part.stop)
    assert seen == list(range(division.num_samples))


@st.composite
def growing(draw: st.DrawFn) -> Division:
    num_samples = draw(st.integers(1, 60))
    changes = sorted(draw(st.sets(st.integers(1, 40), max_size=4)))
    every_size = [(first, draw(st.integers(1, num_samples))) for first in (0, *changes)]
    sizes = tuple(next(same) for _, same in groupby(every_size, key=itemgetter(1)))
    return Division(num_samples, max(size for _, size in sizes), 7, 1, 1, False, sizes, draw(st.booleans()))


def walked(division: Division, num_steps: int) -> list[Place]:
    """Cut the epochs into steps one after the other, each of the size that holds then."""
    sizes, found, epoch, start = dict(division.batch_sizes), [], 0, 0
    size = sizes[0]
    for step in range(num_steps):
        size = sizes.get(step, size)
        left = division.num_samples - start
        if left < (size if division.drops_last else 1):
            epoch, start = epoch + 1, 0
            found[-1] = found[-1]._replace(ends_epoch=True)
        stop = min(start + size, division.num_samples)
        found.append(Place(step, epoch, start, stop))
        start = stop
    return found


def has_size(size: int, place: Place) -> bool:
    return place.num_samples == size and not place.ends_epoch


@given(growing())
def test_a_batch_that_grows_cuts_the_same_stream(division: Division) -> None:
    expected = walked(division, 90)
    places = [division.place(step) for step in range(89)]
    assert places == expected[:-1]
    for epoch in range(expected[-1].epoch + 1):
        assert division.first_step_of(epoch) == next(place.step for place in expected if place.epoch == epoch)
    for place, others in ((place, expected[place.step : -1]) for place in places):
        alike = list(takewhile(partial(has_size, place.num_samples), others))
        assert len(alike) == len(others) or division.num_alike(place) == len(alike)


@given(divisions, st.integers(0, 50))
def test_all_ranks_run_equally_many_micro_steps(division: Division, step: int) -> None:
    place = division.place(step)
    lengths = {len(division.micro_steps(place, rank)) for rank in range(division.world_size)}
    assert lengths == {division.num_micro_steps(place)}


@given(divisions, st.integers(0, 50))
def test_no_micro_step_is_empty_or_too_large(division: Division, step: int) -> None:
    place = division.place(step)
    for rank in range(division.world_size):
        for part in division.micro_steps(place, rank):
            assert 1 <= part.num_samples <= division.micro_batch + (division.least - 1) * part.weight or not part.weight
            assert place.start <= part.start < part.stop <= place.stop
            assert part.weight == 1 or part.num_samples == min(division.least, place.num_samples)
            if division.micro_batch >= division.least <= place.num_samples:
                assert part.num_samples >= division.least


@given(divisions, st.integers(0, 50))
def test_ranks_share_as_equally_as_can_be(division: Division, step: int) -> None:
    place = division.place(step)
    sizes = [stop - start for start, stop in (division.rank_slice(place, r) for r in range(division.world_size))]
    if place.num_samples < division.least * division.world_size:
        sizes = [size for size in sizes if size] or [0]
        assert min(sizes) >= min(division.least, place.num_samples)
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == place.num_samples


@given(divisions, st.integers(0, 200), st.integers(1, 9), st.integers(1, 40))
def test_a_steps_place_knows_nothing_of_the_world(division: Division, step: int, world: int, micro: int) -> None:
    other = Division(division.num_samples, division.global_batch, micro, world)
    assert other.place(step) == division.place(step)
    assert division.place(step).num_samples == division.global_batch or step % division.steps_per_epoch == (
        division.steps_per_epoch - 1
    )


@given(
    num_samples=st.integers(1, 200),
    global_batch=st.integers(1, 70),
    micro_batch=st.integers(1, 70),
    world_size=st.integers(1, 6),
    least=st.sampled_from([1, 2]),
)
def test_a_fixed_division_is_the_same_on_any_number_of_ranks(
    num_samples: int, global_batch: int, micro_batch: int, world_size: int, least: int
) -> None:
    alone = Division(num_samples, global_batch, micro_batch, 1, least, True)
    shared = Division(num_samples, global_batch, micro_batch, world_size, least, True)
    for step in range(alone.steps_per_epoch):
        place = alone.place(step)
        by_rank = [shared.micro_steps(place, rank) for rank in range(world_size)]
        assert len({len(parts) for parts in by_rank}) == 1, "all ranks run equally many"
        assert [part for parts in by_rank for part in parts if part.weight] == alone.micro_steps(place, 0)


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_each_sample_exactly_once(size: int, key: int) -> None:
    order = Permutation(size, key)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


@given(st.integers(1, 30000), st.integers(0, 2**63), st.integers(0, 5), st.data())
def test_any_slice_equals_the_whole(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    whole = SampleStream(size, seed).samples(epoch, 0, size)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    stream = SampleStream(size, seed)
    assert stream.samples(epoch, start, stop).tolist() == whole[start:stop].tolist()
    assert stream.samples(epoch, start, stop).tolist() == whole[start:stop].tolist()  # from the cached block too


def test_epochs_and_seeds_differ() -> None:
    stream = SampleStream(1000, 7)
    first, second = stream.samples(0, 0, 1000).tolist(), stream.samples(1, 0, 1000).tolist()
    other = SampleStream(1000, 8).samples(0, 0, 1000).tolist()
    assert first != second
    assert first != other
    assert stream.samples(0, 0, 1000).tolist() == first


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    assert SampleStream(10, 3, shuffle=False).samples(4, 2, 6).tolist() == [2, 3, 4, 5]


def test_the_order_is_frozen() -> None:
    """A change here would change every job's data order: resumed runs would repeat and miss samples."""
    assert key_of(1, 2, 3) == 13041116711478803063
    assert SampleStream(10, 0).samples(0, 0, 10).tolist() == [1, 0, 6, 5, 2, 4, 8, 3, 7, 9]


def test_positions_outside_an_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="not within an epoch of 10"):
        SampleStream(10, 0).samples(0, 5, 11)


@pytest.mark.parametrize("size", [24, 100, pytest.param(257, marks=pytest.mark.soak)])
def test_every_sample_lands_everywhere_equally_often(size: int) -> None:
    """Chi-squared over (position, sample) cells: within five standard deviations of a fair shuffle's."""
    rounds = 1000
    counts = np.zeros((size, size))
    for epoch in range(rounds):
        counts[np.arange(size), SampleStream(size, 11).samples(epoch, 0, size)] += 1
    expected = rounds / size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_not_kept_together() -> None:
    """Among fair shuffles, the number of adjacent pairs i, i+1 is Poisson with mean about 1."""
    kept = []
    for epoch in range(300):
        order = SampleStream(5000, 1).samples(epoch, 0, 5000)
        kept.append(int((np.diff(order) == 1).sum()))
    assert 0.7 < statistics.mean(kept) < 1.3


def test_starting_in_the_middle_of_a_hundred_million_costs_nothing() -> None:
    begin = time.thread_time()  # other processes do not count
    found = SampleStream(10**8, 5).samples(3, 10**7, 10**7 + 64)
    assert time.thread_time() - begin < 0.1
    assert len(set(found.tolist())) == 64
    assert found.max() < 10**8

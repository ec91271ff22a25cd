"""How a global batch is divided: nothing lost, nothing twice, the same for every world."""

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.division import Division

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

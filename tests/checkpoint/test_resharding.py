"""Whatever world wrote the parts, any range of the whole reads as the same numbers."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import Checkpointer, Shard
from drivetrain.checkpoint.tensor_file import Box, tiling_problem
from drivetrain.core.world import World
from tests.checkpoint.thread_world import on_ranks
from tests.gloo_pool import GlooPool


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A global shape and the boxes of a random grid over it, some of them empty."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    cuts = [sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=3))]) for size in shape]
    boxes = [
        Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
        for spans in itertools.product(*(itertools.pairwise(c) for c in cuts))
    ]
    return shape, draw(st.permutations(boxes))


@given(grids(), st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_any_range_equals_the_slice(grid: tuple[tuple[int, ...], list[Box]], size: int, data: st.DataObject) -> None:
    shape, boxes = grid
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int64).reshape(shape)
    owners = [data.draw(st.integers(0, size - 1)) for _ in boxes]

    def save_and_find(world: World) -> None:
        checkpointer = Checkpointer(Path(folder), world)
        own = [
            Shard("w", torch.from_numpy(whole)[box.slices_in(Box((0,) * len(shape), shape))], shape, box.offsets)
            for box, owner in zip(boxes, owners, strict=True)
            if owner == world.rank
        ]
        checkpointer.save(3, own, {"size": size})

    with tempfile.TemporaryDirectory() as folder:
        on_ranks(size, save_and_find)
        checkpoint = Checkpointer(Path(folder), World()).latest()
        assert checkpoint is not None
        assert (checkpoint.world_size, checkpoint.meta) == (size, {"size": size})
        for _ in range(5):
            bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
            offsets, lengths = [start for start, _ in bounds], [stop - start for start, stop in bounds]
            expected = whole[tuple(slice(start, stop) for start, stop in bounds)]
            result = checkpoint.read("w", offsets, lengths).numpy()
            assert result.shape == expected.shape
            assert np.array_equal(result, expected)
        assert np.array_equal(checkpoint.read("w").numpy(), whole)


boxes_in_a_small_world = st.lists(
    st.tuples(st.tuples(*[st.integers(0, 4)] * 2), st.tuples(*[st.integers(0, 5)] * 2)), max_size=7
)


@given(boxes_in_a_small_world, st.booleans())
@settings(max_examples=500)
def test_a_tiling_is_told_from_gaps_and_overlaps(
    pairs: list[tuple[tuple[int, int], tuple[int, int]]], fill: bool
) -> None:
    """Against counting every element. Where asked, single elements fill the gaps, so that true tilings come up, too."""
    boxes = [box for box in (Box(offsets, shape) for offsets, shape in pairs) if box.fits_in((5, 5))]
    count = np.zeros((5, 5), dtype=int)
    for box in boxes:
        count[box.slices_in(Box((0, 0), (5, 5)))] += 1
    if fill:
        for row, column in np.argwhere(count == 0):
            boxes.append(Box((int(row), int(column)), (1, 1)))
            count[row, column] = 1
    problem = tiling_problem((5, 5), boxes)
    assert (problem == "") == bool((count == 1).all()), (problem, count)
    assert ("overlaps" in problem) == bool((count > 1).any())


def test_a_pinwheel_that_no_straight_cut_divides_is_a_tiling() -> None:
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert tiling_problem((3, 3), pinwheel) == ""
    assert "overlaps" in tiling_problem((3, 3), [*pinwheel, Box((1, 1), (1, 1))])


def save_rows(folder: str, world_size: int) -> tuple[int, list[float], list[int]]:
    import torch.distributed as dist

    world = World(dist.get_rank(), world_size, group=dist.group.WORLD)
    checkpointer = Checkpointer(Path(folder), world)
    rows = torch.arange(12.0).reshape(6, 2).chunk(world_size)
    start = sum(len(part) for part in rows[: world.rank])
    step = (checkpointer.steps() or [0])[-1] + 1
    world.barrier()
    shards = [Shard("w", rows[world.rank], (6, 2), (start, 0))]
    if world.is_main:
        shards.append(Shard.whole("replicated", torch.tensor(5)))
    checkpointer.save(step, shards, {"rank": world.rank})
    checkpoint = checkpointer.latest()
    assert checkpoint is not None
    return checkpoint.step, checkpoint.read("w", (4, 0)).flatten().tolist(), [checkpoint.meta["rank"]]


def test_processes_save_together_and_other_worlds_read_it(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for step, world in enumerate((2, 3, 2), start=1):
        assert (
            gloo_pool.run(save_rows, str(tmp_path / "c"), world, world=world)
            == [(step, [8.0, 9.0, 10.0, 11.0], [0])] * world
        )
    alone = Checkpointer(tmp_path / "c", World()).latest()
    assert alone is not None
    assert torch.equal(alone.read("w"), torch.arange(12.0).reshape(6, 2))
    assert alone.read("replicated") == 5


@pytest.mark.parametrize("dimension", [0, 1])
def test_many_parts_cost_little(dimension: int) -> None:
    """Shards of thousands of ranks, along either dimension: pairs would take minutes."""
    shape = [8, 8]
    shape[dimension] = 50_000
    boxes = [
        Box((index, 0) if dimension == 0 else (0, index), (1, 8) if dimension == 0 else (8, 1))
        for index in range(50_000)
    ]
    assert tiling_problem(shape, boxes) == ""
    assert "overlaps" in tiling_problem(shape, [*boxes, boxes[777]])

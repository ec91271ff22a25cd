"""Tensors that ranks divide by a rule are not listed part by part, and read the same in any world."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.checkpoint_scale import Checkpoint, parameters, simulate_resume, simulate_save
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import Checkpointer, CheckpointError, Shard
from drivetrain.checkpoint.manifest import even_rows
from drivetrain.core.world import World
from tests.checkpoint.thread_world import on_ranks


def manifest_of(folder: Path, step: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"step-{step:08d}" / "manifest.json").read_text())["manifest"]
    return found


@given(st.integers(0, 40), st.integers(1, 12))
def test_rows_are_divided_as_by_torch(num_rows: int, count: int) -> None:
    rows = torch.arange(num_rows)
    chunks = [chunk.tolist() for chunk in rows.chunk(count)] if num_rows else []
    chunks += [[]] * (count - len(chunks))
    for index in range(count):
        start, stop = even_rows(num_rows, index, count)
        assert rows[start:stop].tolist() == chunks[index]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=4), st.integers(1, 5), st.data())
@settings(max_examples=40)
def test_even_tensors_read_the_same_in_any_world(shapes: list[tuple[int, int]], size: int, data: st.DataObject) -> None:
    """Uneven last parts, empty ones, tensors of one row and of none, beside whole ones."""
    wholes = [torch.arange(rows * columns).reshape(rows, columns) + 100 * n for n, (rows, columns) in enumerate(shapes)]

    def save(world: World) -> None:
        shards = []
        for number, whole in enumerate(wholes):
            start, stop = even_rows(len(whole), world.rank, world.size)
            shards.append(Shard(f"w{number}", whole[start:stop], tuple(whole.shape), (start, 0), is_part=True))
        if world.rank == min(1, world.size - 1):
            shards.append(Shard.whole("count", torch.tensor(7)))
        Checkpointer(Path(folder), world).save(1, shards, {})

    with tempfile.TemporaryDirectory() as folder:
        on_ranks(size, save)
        tensors = manifest_of(Path(folder))["tensors"]
        assert not any("parts" in tensor for tensor in tensors.values())
        assert tensors["count"]["over"] == [min(1, size - 1), 1]
        found = Checkpoint.open(Path(folder) / "step-00000001")
        assert found.read("count") == 7
        for number, whole in enumerate(wholes):
            assert tensors[f"w{number}"].get("over") == ([0, size] if len(whole) else None)
            assert torch.equal(found.read(f"w{number}"), whole)
            first = data.draw(st.integers(0, len(whole)))
            last = data.draw(st.integers(first, len(whole)))
            assert np.array_equal(
                found.read(f"w{number}", (first, 0), (last - first, whole.shape[1])), whole[first:last]
            )


def test_ranks_that_divide_differently_list_their_parts(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    cuts = {0: (0, 2), 1: (2, 3), 2: (3, 6)}  # the first is what an even division would give it

    def save(world: World) -> None:
        start, stop = cuts[world.rank]
        even = Shard("even", whole[2 * world.rank : 2 * world.rank + 2], (6, 2), (2 * world.rank, 0), is_part=True)
        odd = Shard("odd", whole[start:stop], (6, 2), (start, 0), is_part=True)
        checkpointer = Checkpointer(tmp_path, world)
        for step in (1, 2):
            checkpointer.save(step, [even, odd], {})

    on_ranks(3, save)
    for step in (1, 2):
        found = Checkpoint.open(tmp_path / f"step-{step:08d}")
        assert torch.equal(found.read("odd"), whole)
        assert torch.equal(found.read("even"), whole)
        assert len(manifest_of(tmp_path, step)["tensors"]["odd"]["parts"]) == 3


@pytest.mark.parametrize("fault", ["missing on one", "another shape on one", "twice"])
def test_parts_that_do_not_make_a_whole_are_refused(tmp_path: Path, fault: str) -> None:
    whole = torch.arange(12.0).reshape(6, 2)

    def save(world: World) -> None:
        shards = [Shard("w", whole[3 * world.rank : 3 * world.rank + 3], (6, 2), (3 * world.rank, 0), is_part=True)]
        if world.rank == 1 and fault == "missing on one":
            shards = []
        if world.rank == 1 and fault == "another shape on one":
            shards = [Shard("w", whole[4:6], (8, 2), (4, 0), is_part=True)]
        if world.rank == 1 and fault == "twice":
            shards.append(Shard("w", whole[:3], (6, 2), (0, 0), is_part=True))
        Checkpointer(tmp_path, world).save(1, shards, {})

    with pytest.raises(CheckpointError, match=r"do not make whole tensors|but F32"):
        on_ranks(2, save)
    assert list(tmp_path.iterdir()) == []


def test_many_ranks_simulated_one_at_a_time(tmp_path: Path) -> None:
    """A small version of `python -m benchmarks checkpoint-scale`: what grows with ranks is not in the manifest."""
    names = parameters(layers=1)
    for size in (8, 24):
        folder = tmp_path / str(size) / "checkpoints"
        folder.parent.mkdir()
        found = simulate_save(folder, names, size)
        assert found["files"] == size
        tensors = manifest_of(folder, 100)["tensors"]
        assert len(tensors) == 4 * len(names)
        assert not any("parts" in tensor for tensor in tensors.values())
        for rank, world in ((0, size), (size - 1, size), (3, 5), (0, 1)):
            simulate_resume(folder, names, rank, world)
    small, large = (manifest_of(tmp_path / size / "checkpoints", 100)["tensors"] for size in ("8", "24"))
    assert len(json.dumps(large)) - len(json.dumps(small)) <= 4 * len(names)  # digits of the number of ranks

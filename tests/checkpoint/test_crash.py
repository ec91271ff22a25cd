"""Killed at any point of a save: the old checkpoint or the new one, never a mix, never none."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import Checkpoint, Checkpointer, Shard
from drivetrain.core.world import World
from tests import warm_python
from tests.checkpoint.crashing import ROWS, points_of

REPOSITORY = Path(__file__).parents[2]
Case = tuple[str, int, int]  # way, size of the world, rank that is killed
SHORT: list[Case] = [
    ("waiting", 1, 0),
    ("waiting", 3, 2),
    ("beside", 1, 0),
    ("beside", 2, 1),
    ("abandoned", 1, 0),
    ("discarding", 1, 0),
    ("frozen", 1, 0),
    ("frozen", 2, 1),
    ("moved", 1, 0),
]
FROZEN = {"frozen": {1: 7.0, 2: 7.0}, "moved": {1: 7.0, 2: 8.0}}  # the frozen weight of a way at each step
LONG: list[Case] = [
    (way, size, rank)
    for way in ("waiting", "beside", "abandoned", "frozen", "moved")
    for size, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 3))
]


def crash(folder: Path, cases: list[Case]) -> list[dict[str, Any]]:
    words = [f"{way}/{size}/{rank}" for way, size, rank in cases]
    done = warm_python.run(["-m", "tests.checkpoint.crashing", str(folder), *words], cwd=REPOSITORY, timeout=3000)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def short_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return crash(tmp_path_factory.mktemp("crashes"), SHORT)


def found_after(folder: Path, size: int, way: str) -> int:
    """The step that a new start finds, after a look at all of it."""
    checkpointer = Checkpointer(folder, World())
    names = [path.name for path in folder.iterdir()]
    assert all(name.startswith(("step-", "frozen-")) for name in names), "leftovers are removed at the start"
    checkpoint = checkpointer.latest()
    assert checkpointer.problems == []
    assert checkpoint is not None
    step = checkpoint.step
    assert checkpoint.meta == {"step": step}
    assert torch.equal(checkpoint.read("w"), torch.full((ROWS, 3), float(step)))
    for rank in range(size):
        assert torch.equal(checkpoint.read(f"only on {rank}"), torch.full((5,), step))
    if way in FROZEN:
        weights = torch.full((ROWS, 2), FROZEN[way][step])
        assert ("frozen" in checkpoint.keys) == ((way, step) != ("frozen", 1))
        assert "frozen" not in checkpoint.keys or torch.equal(checkpoint.read("frozen"), weights)
        go_on(checkpointer, checkpoint, weights)
    return step


def go_on(checkpointer: Checkpointer, checkpoint: Checkpoint, weights: torch.Tensor) -> None:
    """The next save goes on with what is shared, and removes what a crash has left of it."""
    folder = checkpointer.folder
    checkpointer.pin(checkpoint.step)
    checkpointer.save(3, [Shard("frozen", weights, (ROWS, 2), (0, 0), is_untrained=True)], {})
    newest = Checkpoint.open(folder / "step-00000003")
    assert torch.equal(newest.read("frozen"), weights)
    needed = {*newest.manifest.shared, *checkpoint.manifest.shared}
    if (folder / "step-00000001").exists():
        needed |= Checkpoint.open(folder / "step-00000001").manifest.shared.keys()
    assert {path.name for path in folder.glob("frozen-*")} == needed
    assert checkpointer.problems == []


def check(results: list[dict[str, Any]], way: str, size: int, fatal_rank: int) -> None:
    calm, *killed = [r for r in results if (r["way"], r["size"], r["fatal_rank"]) == (way, size, fatal_rank)]
    assert calm["codes"] == [0] * size
    assert found_after(Path(calm["folder"]), size, way) == (1 if way in ("abandoned", "discarding") else 2)
    operations = calm["operations"]
    points = points_of(operations)
    assert [result["point"] for result in killed] == points
    assert all(result["codes"][fatal_rank] == -signal.SIGKILL for result in killed)
    found = {result["point"]: found_after(Path(result["folder"]), size, way) for result in killed}
    if way == "discarding":
        assert operations[:3] == ["rename to .trash", "rename to .trash", "fsync_folder"]
        # The newest goes first: 3 until it is renamed, 2 until that is, then 1.
        assert list(found.values()) == [3] + [2] * 2 + [1] * (len(points) - 3)
        return
    if way == "abandoned":
        assert "write_file manifest.json" not in operations
        assert set(found.values()) == {1}
        return
    if fatal_rank != 0:
        assert operations == [f"write_file rank-{fatal_rank:05d}.safetensors"] * (2 if way == "frozen" else 1)
        # Killed after its file was whole but before it could say so: nobody commits.
        assert set(found.values()) == {1}
        return
    removals = ["remove_file"] * (size + 1)
    shares, was_shared = way == "frozen", way == "moved"
    assert operations == [
        *["make_folder"] * (2 if shares else 1),
        *["write_file rank-00000.safetensors"] * (2 if shares else 1),
        *(["fsync_folder", "rename to frozen", "fsync_folder"] if shares else []),
        "write_file manifest.json",
        "fsync_folder",
        "rename to step-0",
        "fsync_folder",
        "rename to .trash",
        *removals,
        "remove_folder",
        *(["rename to .trash", *["remove_file"] * size, "remove_folder"] if was_shared else []),
    ]
    committed = points.index(f"{operations.index('rename to step-0') + 1}-after")
    assert list(found.values()) == [1] * committed + [2] * (len(points) - committed)


@pytest.mark.parametrize(("way", "size", "fatal_rank"), SHORT)
def test_a_rank_killed_at_every_point(
    short_results: list[dict[str, Any]], way: str, size: int, fatal_rank: int
) -> None:
    check(short_results, way, size, fatal_rank)


@pytest.mark.soak
def test_every_rank_of_larger_worlds_killed_at_every_point(tmp_path: Path) -> None:
    results = crash(tmp_path, LONG)
    for way, size, fatal_rank in LONG:
        check(results, way, size, fatal_rank)


def test_the_first_save_of_all_killed_leaves_nothing(tmp_path: Path) -> None:
    """Before anything was committed, none is right; and it is not mistaken for damage."""
    draft = tmp_path / "c" / ".step-00000001.tmp-0123456789abcdef"
    draft.mkdir(parents=True)
    (draft / "rank-00000.safetensors").write_bytes(b"half")
    checkpointer = Checkpointer(tmp_path / "c", World())
    assert checkpointer.latest() is None
    assert list((tmp_path / "c").iterdir()) == []

"""Saves that fail, steps that are there already, what is kept, and what is cleaned."""

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import Checkpointer, CheckpointError, Files, Shard
from drivetrain.checkpoint.files import Written
from drivetrain.core.world import World
from tests.checkpoint.thread_world import on_ranks
from tests.gloo_pool import GlooPool


def one(value: int, elements: int = 4) -> list[Shard]:
    return [Shard.whole("w", torch.full((elements,), float(value)))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def value_of_latest(folder: Path) -> float:
    checkpoint = Checkpointer(folder, World()).latest()
    assert checkpoint is not None
    return checkpoint.read("w")[0].item()


# Failures


class BrokenFiles(Files):
    """Fails at one kind of operation."""

    def __init__(self, operation: str, error: Exception, target: str = "") -> None:
        self._operation, self._error, self._target = operation, error, target

    def _fail(self, operation: str, path: Path) -> None:
        if operation == self._operation and self._target in path.name:
            raise self._error

    def make_folder(self, path: Path) -> None:
        self._fail("make_folder", path)
        super().make_folder(path)

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        written = super().write_file(path, chunks)  # the partial file is there, as after a full disk
        self._fail("write_file", path)
        return written

    def fsync_folder(self, path: Path) -> None:
        self._fail("fsync_folder", path)
        super().fsync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._fail("rename", target)
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        self._fail("remove_file", path)
        super().remove_file(path)


@pytest.mark.parametrize(
    ("operation", "target"),
    [
        ("make_folder", ""),
        ("write_file", "rank-00000"),
        ("write_file", "manifest"),
        ("fsync_folder", "tmp"),
        ("fsync_folder", "checkpoints"),
        ("rename", "step-00000002"),
    ],
)
def test_a_failed_save_leaves_everything_as_it_was(tmp_path: Path, operation: str, target: str) -> None:
    folder = tmp_path / "checkpoints"
    Checkpointer(folder, World()).save(1, one(1), {})
    broken = BrokenFiles(operation, OSError(errno.EIO, "planted"), target)
    checkpointer = Checkpointer(folder, World(), keep_last=1, files=broken)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be saved in .*checkpoints: planted"):
        checkpointer.save(2, one(2), {})
    assert names(folder) == ["step-00000001"]
    assert value_of_latest(folder) == 1


def test_a_checkpoint_that_cannot_be_pruned_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    Checkpointer(folder, World()).save(1, one(1), {})
    broken = BrokenFiles("rename", OSError(errno.EACCES, "planted"), ".trash")
    checkpointer = Checkpointer(folder, World(), keep_last=1, files=broken)
    checkpointer.save(2, one(2), {})
    assert checkpointer.problems == [f"{folder / 'step-00000001'} could not be removed: planted"]
    assert checkpointer.steps() == [1, 2]


def save_with_one_rank_failing(folder: str, size: int, failing: int, kind: str) -> tuple[str, float]:
    world = World(dist.get_rank(), size, group=dist.group.WORLD)
    mine = Shard("w", torch.full((2,), 1.0), (2 * size,), (2 * world.rank,))
    Checkpointer(Path(folder), world).save(1, [mine], {})
    files, shards = None, [mine]
    if world.rank == failing:
        if kind == "disk":
            files = BrokenFiles("write_file", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        elif kind == "bug":
            files = BrokenFiles("write_file", ZeroDivisionError("planted"))
        else:
            shards = [Shard("odd", torch.ones(1, dtype=torch.float8_e4m3fnuz), (1,), (0,))]
    checkpointer = Checkpointer(Path(folder), world, files=files)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(2, shards, {})
    checkpoint = checkpointer.latest()  # the ranks are still in step with each other
    assert checkpoint is not None
    return caught.value.message, checkpoint.read("w").sum().item() + checkpoint.step


@pytest.mark.parametrize(
    ("world", "failing", "kind", "words"),
    [
        (2, 1, "disk", ["rank 1: ", "No space left on device", "it needs 16 bytes", "were free"]),
        (3, 0, "disk", ["rank 0: ", "No space left on device", "it needs 24 bytes"]),
        (3, 2, "bug", ["rank 2: ", "ZeroDivisionError: planted"]),
        (3, 1, "tensor", ["rank 1: ", "'odd'", "float8_e4m3fnuz"]),
    ],
)
def test_one_rank_fails_and_all_raise_the_same(
    gloo_pool: GlooPool, tmp_path: Path, world: int, failing: int, kind: str, words: list[str]
) -> None:
    folder = tmp_path / "c"
    answers = gloo_pool.run(save_with_one_rank_failing, str(folder), world, failing, kind, world=world)
    assert len(set(answers)) == 1
    message, total = answers[0]
    assert all(word in message for word in words), message
    assert total == 2 * world + 1
    assert names(folder) == ["step-00000001"]


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    def attempt(world: World) -> None:
        checkpointer = Checkpointer(tmp_path / "c", world)
        with pytest.raises(CheckpointError, match="different steps: 4, 5"):
            checkpointer.save(4 + world.rank, [], {})

    on_ranks(2, attempt)
    assert names(tmp_path / "c") == []


# No space


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    checkpointer = Checkpointer(folder, World(), keep_last=1)
    checkpointer.save(1, one(1, elements=20_000), {})
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(2, one(2, elements=60_000), {})
        error = caught.value
        assert (error.path, error.needed_bytes) == (folder, 240_000)
        assert error.free_bytes == pytest.approx(free, abs=16_384)
        assert str(folder) in error.message
        assert "No space left on device" in error.message
        assert "it needs 240000 bytes" in error.message
        assert f"{error.free_bytes} were free" in error.message
        assert "free space there" in error.remedy
        assert names(folder) == ["step-00000001"]
    assert value_of_latest(folder) == 1
    checkpointer.save(3, one(3, elements=20_000), {})  # and goes on once there is room
    assert value_of_latest(folder) == 3


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", World())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; it needs 40000 bytes"):
            checkpointer.save(1, one(1, elements=10_000), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path / "c") == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def attempt(world: World) -> None:
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be kept in .*file/c: Not a directory"):
            Checkpointer(tmp_path / "file" / "c", world)

    on_ranks(2, attempt)


# Steps, retention, leftovers


def test_a_step_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", World())
    checkpointer.save(1, one(1), {})
    with pytest.raises(CheckpointError, match="step-00000001 is there already, and is left as it is"):
        checkpointer.save(1, one(2), {})
    assert names(tmp_path / "c") == ["step-00000001"]
    assert value_of_latest(tmp_path / "c") == 1


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_that_is_no_step(tmp_path: Path, step: int) -> None:
    with pytest.raises(CheckpointError, match=f"expected a step from 0 on, got {step}"):
        Checkpointer(tmp_path / "c", World()).save(step, [], {})


def test_the_last_ones_are_kept_and_those_that_are_pinned(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", World(), keep_last=2)
    for step in (5, 10, 15, 20, 25):
        if step == 20:
            checkpointer.pin(10)
        checkpointer.save(step, one(step), {})
    assert checkpointer.steps() == [10, 20, 25]
    checkpointer.unpin(10)
    checkpointer.save(123_456_789, one(6), {})
    assert checkpointer.steps() == [25, 123_456_789]
    assert names(tmp_path / "c") == ["step-00000025", "step-123456789"]


def test_a_pin_made_again_after_a_restart_loses_nothing(tmp_path: Path) -> None:
    """Neither a start nor a search prunes; the first save does, and what was pinned before it stays."""
    first = Checkpointer(tmp_path / "c", World(), keep_last=2)
    first.pin(1)
    for step in (1, 2, 3):
        first.save(step, one(step), {})
    first.close()
    restarted = Checkpointer(tmp_path / "c", World(), keep_last=1)
    assert restarted.latest() is not None
    assert restarted.steps() == [1, 2, 3]
    restarted.pin(1)
    restarted.save(4, one(4), {})
    assert restarted.steps() == [1, 4]
    restarted.unpin(1)
    assert restarted.steps() == [1, 4]
    restarted.save(5, one(5), {})
    assert restarted.steps() == [5]


def test_later_checkpoints_are_discarded_pinned_ones_too(tmp_path: Path) -> None:
    def attempt(world: World) -> tuple[list[int], list[int]]:
        checkpointer = Checkpointer(tmp_path / "c", world, keep_last=9)
        checkpointer.pin(3)
        for step in (1, 2, 3, 4):
            checkpointer.save(step, one(step) if world.is_main else [], {})
        assert checkpointer.discard_after(9) == []
        removed = checkpointer.discard_after(2)
        left = checkpointer.steps()
        world.barrier()
        checkpointer.save(3, one(30) if world.is_main else [], {})  # its name is free again
        return removed, left

    assert on_ranks(2, attempt) == [([3, 4], [1, 2])] * 2
    assert names(tmp_path / "c") == ["step-00000001", "step-00000002", "step-00000003"]
    assert value_of_latest(tmp_path / "c") == 30
    short = Checkpointer(tmp_path / "c", World(), keep_last=1)
    short.save(5, one(5), {})
    assert short.steps() == [5]


def test_what_cannot_be_discarded_is_told_on_all_ranks(tmp_path: Path) -> None:
    def attempt(world: World) -> None:
        broken = BrokenFiles("rename", OSError(errno.EACCES, "planted"), ".trash")
        checkpointer = Checkpointer(tmp_path / "c", world, files=broken)
        checkpointer.save(1, one(1) if world.is_main else [], {})
        with pytest.raises(CheckpointError, match=r"checkpoints after step 0 cannot be removed in .*: planted"):
            checkpointer.discard_after(0)

    on_ranks(2, attempt)
    assert names(tmp_path / "c") == ["step-00000001"]


def test_what_was_just_saved_is_kept_even_if_a_later_step_is_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", World(), keep_last=1)
    checkpointer.save(9, one(9), {})
    checkpointer.save(4, one(4), {})
    assert checkpointer.steps() == [4, 9]


def test_leftovers_are_removed_and_nothing_else_is(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    Checkpointer(folder, World()).save(1, one(1), {})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    for leftover in (".step-00000002.tmp-0123456789abcdef", ".trash-step-00000003-0123456789abcdef"):
        (folder / leftover / "deeper").mkdir(parents=True)
        (folder / leftover / "deeper" / "file").write_text("")
        (folder / leftover / "link").symlink_to(outside)
    others = [".hidden", "notes.txt", "step-00000007.corrupt", "step-7", ".step-00000002.tmp-mine", "tmp-x"]
    for other in others:
        (folder / other).mkdir()
    checkpointer = Checkpointer(folder, World())
    assert names(folder) == sorted([*others, "step-00000001"])
    assert names(outside) == ["precious"]
    assert checkpointer.steps() == [1]


def test_two_starts_at_the_same_time_clean_together(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    Checkpointer(folder, World()).save(1, one(1), {})
    for number in range(30):
        leftover = folder / f".trash-step-00000003-{number:016x}"
        leftover.mkdir()
        for file in range(20):
            (leftover / f"{file}").write_text("")
    problems: list[str] = []
    errors: list[BaseException] = []
    together = threading.Barrier(4)

    def start() -> None:
        try:
            together.wait()
            problems.extend(Checkpointer(folder, World()).problems)
        except BaseException as error:  # noqa: BLE001  (the test asks what it was)
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, problems) == ([], [])
    assert names(folder) == ["step-00000001"]


def test_a_leftover_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    leftover = tmp_path / "c" / ".trash-step-00000003-0123456789abcdef"
    leftover.mkdir(parents=True)
    (leftover / "file").write_text("")
    broken = BrokenFiles("remove_file", OSError(errno.EPERM, "planted"))
    checkpointer = Checkpointer(tmp_path / "c", World(), files=broken)
    assert checkpointer.problems == [f"{leftover}, left by a crash, could not be removed: planted"]
    assert checkpointer.latest() is None

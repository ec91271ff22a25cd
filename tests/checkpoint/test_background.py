"""Saves beside training: what reaches the file, when it counts, and what happens when something goes wrong."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import (
    BackgroundSaver,
    Checkpoint,
    Checkpointer,
    CheckpointError,
    Files,
    Shard,
    background,
    manifest,
)
from drivetrain.checkpoint.files import PIECE_BYTES, Written
from drivetrain.checkpoint.staging import Staging
from drivetrain.core.launchers import Supervision
from drivetrain.core.world import World
from drivetrain.monitor.recorder import NoRunRecorder
from drivetrain.run import CheckpointSaver
from drivetrain.run import saver as saver_module
from tests.gloo_pool import GlooPool


def one(value: float, elements: int = 4) -> list[Shard]:
    return [Shard.whole("w", torch.full((elements,), value))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.001)


class GatedFiles(Files):
    """Writes ranks' files when the gate is open; counts how many are being written."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = self.active = self.most_active = 0

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        if path.name.startswith("rank-"):
            self.begun += 1
            self.active += 1
            self.most_active = max(self.most_active, self.active)
            assert self.gate.wait(120)
            self.active -= 1
        return super().write_file(path, chunks)


class FailingFiles(Files):
    """Fails at the n-th write of a rank's file, counted from 1."""

    def __init__(self, *fatal: int) -> None:
        self.fatal, self.count = fatal, 0

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        written = super().write_file(path, chunks)
        self.count += path.name.startswith("rank-")
        if path.name.startswith("rank-") and self.count in self.fatal:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written


def made(folder: Path, files: Files | None = None, keep_last: int = 3) -> tuple[BackgroundSaver, Checkpointer]:
    world = World()
    checkpointer = Checkpointer(folder, world, keep_last, files=files)
    return BackgroundSaver(checkpointer, world), checkpointer


# What is saved


def test_what_is_changed_after_the_call_does_not_reach_the_file(tmp_path: Path) -> None:
    files = GatedFiles()
    saver, _ = made(tmp_path / "c", files)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(300, 70, generator=generator)
    moments = torch.randn(70, 300, generator=generator).t()
    steps = torch.tensor(7.0)
    before = [weights.clone(), moments.clone(), steps.clone()]
    meta = {"hooks": [{"seen": [1, 2]}]}
    saver.begin(1, [Shard.whole("w", weights), Shard.whole("m", moments), Shard.whole("s", steps)], meta)
    for tensor in (weights, moments, steps):
        tensor.fill_(-1)  # before anything was read for the file: the writer is at the gate, or before it
    meta["hooks"][0]["seen"].append(3)
    files.gate.set()
    saver.judged()
    saver.finish()
    found = Checkpoint.latest_in(tmp_path / "c")
    assert found is not None
    assert all(torch.equal(found.read(key), value) for key, value in zip("wms", before, strict=True))
    assert found.meta == {"hooks": [{"seen": [1, 2]}]}


def test_the_same_as_a_save_that_waits(tmp_path: Path) -> None:
    shards = [
        Shard.whole("a", torch.randn(5, 3)),
        Shard.whole("b", torch.arange(4)),
        Shard.whole("none", torch.empty(0)),
    ]
    Checkpointer(tmp_path / "sync", World()).save(3, shards, {"x": 1})
    saver, _ = made(tmp_path / "async")
    saver.begin(3, shards, {"x": 1})
    saver.judged()
    saver.finish()
    for file in ("rank-00000.safetensors", "manifest.json"):
        one_way, other = ((tmp_path / kind / "step-00000003" / file).read_bytes() for kind in ("sync", "async"))
        assert one_way == other


def test_nothing_counts_before_it_is_judged(tmp_path: Path) -> None:
    saver, checkpointer = made(tmp_path / "c")
    saver.begin(1, one(1), {})
    until(lambda: list((tmp_path / "c").glob(".step-00000001.tmp-*/rank-00000.safetensors")))
    time.sleep(0.05)
    assert checkpointer.steps() == []
    assert not saver.has_news
    saver.judged()
    saver.wait()
    assert checkpointer.steps() == [1]
    (outcome,) = saver.take_news()
    assert (outcome.step, outcome.error) == (1, None)
    assert outcome.seconds >= outcome.stalled_seconds + 0.05
    assert saver.take_news() == []


def test_a_bad_step_leaves_nothing_and_the_next_save_works(tmp_path: Path) -> None:
    saver, checkpointer = made(tmp_path / "c", keep_last=1)
    for step, is_good in ((1, True), (2, False), (3, True), (4, False)):
        saver.begin(step, one(step), {})
        (saver.judged if is_good else saver.abandon)()
        saver.finish()
        assert names(tmp_path / "c") == ["step-00000001" if step < 3 else "step-00000003"]
    assert [outcome.step for outcome in saver.take_news()] == [1, 3]
    assert checkpointer.problems == []


# One at a time


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = GatedFiles()
    saver, checkpointer = made(tmp_path / "c", files)
    saver.begin(1, one(1), {})
    saver.judged()
    until(lambda: files.begun)
    join = saver._join

    def join_later() -> None:
        threading.Timer(0.2, files.gate.set).start()
        join()

    with monkeypatch.context() as patch:
        patch.setattr(saver, "_join", join_later)
        saver.begin(2, one(2), {})
    assert checkpointer.steps() == [1]
    saver.judged()
    saver.finish()
    first, second = saver.take_news()
    assert first.waited_seconds < second.waited_seconds
    assert second.waited_seconds >= 0.2
    assert files.most_active == 1
    assert checkpointer.steps() == [1, 2]


def test_a_wait_without_an_end_is_refused(tmp_path: Path) -> None:
    saver, checkpointer = made(tmp_path / "c")
    saver.begin(1, one(1), {})
    for wait in (saver.wait, saver.finish, lambda: saver.begin(2, one(2), {})):
        with pytest.raises(ValueError, match="step 1 is being saved and was not judged"):
            wait()
    saver.judged()
    saver.finish()
    assert checkpointer.steps() == [1]


# Failures


def test_a_failed_save_is_told_and_the_next_one_tried(tmp_path: Path) -> None:
    saver, checkpointer = made(tmp_path / "c", FailingFiles(2), keep_last=1)
    for step in (1, 2, 3):
        saver.begin(step, one(step), {})
        saver.judged()
        saver.wait()
        assert names(tmp_path / "c") == [f"step-0000000{1 if step < 3 else 3}"]
    good, bad, also_good = saver.take_news()
    assert good.error is also_good.error is None
    assert isinstance(bad.error, CheckpointError)
    assert "step 2 cannot be saved" in bad.error.message
    assert "No space left on device; it needs 32 bytes" in bad.error.message
    assert bad.error.remedy
    saver.finish()  # the last one is there
    assert checkpointer.steps() == [3]


def test_a_failure_of_the_last_save_raises_at_the_end(tmp_path: Path) -> None:
    saver, checkpointer = made(tmp_path / "c", FailingFiles(2))
    for step in (1, 2):
        saver.begin(step, one(step), {})
        saver.judged()
    with pytest.raises(CheckpointError, match="step 2 cannot be saved"):
        saver.finish()
    saver.close()
    assert checkpointer.steps() == [1]


def test_a_copy_that_cannot_be_made_fails_that_save(tmp_path: Path) -> None:
    class Full(Staging):
        def take(self, shards: Any) -> Any:
            raise MemoryError("planted")

    checkpointer = Checkpointer(tmp_path / "c", World())
    saver = BackgroundSaver(checkpointer, World(), Full())
    saver.begin(1, one(1), {})
    saver.judged()
    with pytest.raises(CheckpointError, match=r"step 1 cannot be saved .* MemoryError: planted"):
        saver.finish()
    assert names(tmp_path / "c") == []


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path: Path) -> None:
    saver, _ = made(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"meta.x is a object"):
        saver.begin(1, one(1), {"x": object()})
    with pytest.raises(CheckpointError, match=r"meta.x has the key 3"):
        saver.prepare(one(1), {"x": {3: 4}})
    with pytest.raises(CheckpointError, match=r"'odd' cannot be saved: its type is torch.float8_e4m3fnuz"):
        saver.prepare([Shard.whole("odd", torch.ones(1, dtype=torch.float8_e4m3fnuz))], {})
    saver.begin(1, [Shard.whole("odd", torch.ones(1, dtype=torch.float8_e4m3fnuz))], {})  # found by the writer
    saver.judged()
    with pytest.raises(CheckpointError, match="'odd' cannot be saved"):
        saver.finish()


# The end


def test_close_finishes_what_was_judged_and_abandons_the_rest(tmp_path: Path) -> None:
    files = GatedFiles()
    saver, checkpointer = made(tmp_path / "c", files)
    saver.begin(1, one(1), {})
    saver.judged()
    threading.Timer(0.1, files.gate.set).start()
    saver.close()
    assert checkpointer.steps() == [1]
    saver.begin(2, one(2), {})
    saver.close()
    assert names(tmp_path / "c") == ["step-00000001"]
    saver.close()
    made(tmp_path / "c")[0].close()


def test_memory_that_was_got_ahead_is_used(tmp_path: Path) -> None:
    saver, checkpointer = made(tmp_path / "c")
    state = one(5, elements=1000)
    saver.prepare(state, {"x": 1})
    saver.begin(1, state, {"x": 1})
    saver.judged()
    saver.finish()
    assert [outcome.waited_seconds for outcome in saver.take_news()] == [0.0]  # there was no save to wait for
    assert checkpointer.steps() == [1]


# Several ranks


def joined() -> World:
    return World(dist.get_rank(), dist.get_world_size(), group=dist.group.WORLD)


def part(value: float, world: World) -> list[Shard]:
    return [Shard("w", torch.full((2,), value), (2 * world.size,), (2 * world.rank,))]


def train_beside_saves(folder: str, num_saves: int) -> tuple[list[int], float]:
    """All-reduces in the main thread, without a pause, while the threads agree on their saves."""
    world = joined()
    try:
        checkpointer = Checkpointer(Path(folder), world, keep_last=num_saves)
        saver = BackgroundSaver(checkpointer, world)
        total = 0.0
        for step in range(1, num_saves + 1):
            saver.begin(step, part(step, world), {"step": step})
            for _ in range(30):
                total += world.all_reduce(torch.ones(3)).sum().item()
            saver.judged()
        saver.finish()
        saver.close()
        return [outcome.step for outcome in saver.take_news() if outcome.error is None], total
    finally:
        world.close()


@pytest.mark.parametrize("world", [2, 4])
def test_training_and_saving_do_not_mix(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    answers = gloo_pool.run(train_beside_saves, str(tmp_path / "c"), 8, world=world)
    assert answers == [(list(range(1, 9)), 8 * 30 * 3.0 * world)] * world
    for step in range(1, 9):
        found = Checkpoint.open(tmp_path / "c" / f"step-{step:08d}")
        assert found.read("w").tolist() == [float(step)] * 2 * world
        assert found.meta == {"step": step}


def save_with_trouble_on_one_rank(folder: str, troubled: int, trouble: str) -> list[tuple[int, str]]:
    world = joined()
    try:
        files = FailingFiles(2) if trouble == "disk" and world.rank == troubled else None
        saver = BackgroundSaver(Checkpointer(Path(folder), world, files=files), world)
        for step in (1, 2, 3):
            saver.begin(step, part(step, world), {})
            if trouble == "verdict" and world.rank == troubled and step == 2:
                saver.abandon()
            else:
                saver.judged()
        saver.finish()
        return [(outcome.step, outcome.error.message if outcome.error else "") for outcome in saver.take_news()]
    finally:
        world.close()


@pytest.mark.parametrize("troubled", [0, 2])
def test_a_failure_on_one_rank_is_told_on_all(gloo_pool: GlooPool, tmp_path: Path, troubled: int) -> None:
    answers = gloo_pool.run(save_with_trouble_on_one_rank, str(tmp_path / "c"), troubled, "disk", world=3)
    assert answers[0] == answers[1] == answers[2]
    (_, good), (step, bad), (_, also_good) = answers[0]
    assert (good, step, also_good) == ("", 2, "")
    assert bad.startswith(f"rank {troubled}: step 2 cannot be saved")
    assert names(tmp_path / "c") == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("troubled", [0, 1])
def test_a_step_that_is_bad_on_one_rank_is_saved_on_none(gloo_pool: GlooPool, tmp_path: Path, troubled: int) -> None:
    answers = gloo_pool.run(save_with_trouble_on_one_rank, str(tmp_path / "c"), troubled, "verdict", world=2)
    assert answers == [[(1, ""), (3, "")]] * 2
    assert names(tmp_path / "c") == ["step-00000001", "step-00000003"]


def leave_early(folder: str) -> float:
    """Rank 1 leaves on an error while rank 0 does not get to judge its step: nobody may hang."""
    world = joined()
    saver = BackgroundSaver(Checkpointer(Path(folder), world), world)
    saver.begin(1, part(1, world), {})
    began = time.monotonic()
    if world.rank == 1:
        saver.judged()
        with mock.patch.object(background, "GRACE_SECONDS", 0.5):
            saver.close()
    left = time.monotonic() - began
    world.barrier()
    saver.close()  # rank 0 abandons; the thread of rank 1 is still there, and agrees
    world.close()
    return left


def test_a_rank_that_leaves_does_not_wait_for_ever(gloo_pool: GlooPool, tmp_path: Path) -> None:
    left = gloo_pool.run(leave_early, str(tmp_path / "c"), world=2)[1]
    assert 0.4 < left < 50
    assert names(tmp_path / "c") == []


class FreezingFiles(Files):
    """Stops its own process inside the write of a rank's file, as a debugger or the cgroup freezer would."""

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        if path.name.startswith("rank-"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().write_file(path, chunks)


def train_with_a_frozen_rank(folder: str) -> dict[str, Any]:
    """Rank 1 is frozen while a save that was judged is in flight; rank 0 finds out in its next collective."""
    world = joined()
    pids = world.gather(os.getpid())
    training = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    reports, reports_there = os.pipe()
    files = FreezingFiles() if world.rank == 1 else None
    said: list[str] = []
    recorder = mock.create_autospec(NoRunRecorder, instance=True)
    recorder.say = said.append
    saver = CheckpointSaver(
        Checkpointer(Path(folder), world, files=files),
        world,
        recorder,
        lambda: (part(1, world), {}),
        lambda: None,
        beside=True,
    )
    assert saver.snapshot is not None
    saver.snapshot(1)(True)
    found: dict[str, Any] = {}
    if world.rank == 1:
        saver.finish()
        world.close()
        return found
    try:
        with (
            mock.patch.object(saver_module, "supervision", Supervision(reports_there)),
            mock.patch.object(background, "GRACE_SECONDS", 1.0),
        ):
            try:
                dist.all_reduce(torch.ones(1), group=training)
            except RuntimeError as error:
                saver.failed(error)
                found["report"] = json.loads(os.read(reports, 2**16))
                began = time.monotonic()
                saver.close()
                found["seconds"] = time.monotonic() - began
                found["checkpoints"] = names(Path(folder))
    finally:
        os.kill(pids[1], signal.SIGCONT)
    saver.finish()
    found["said"] = said
    world.close()
    return found


def test_a_rank_that_is_frozen_during_a_save_is_reported_before_it_is_waited_for(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    found, _ = gloo_pool.run(train_with_a_frozen_rank, str(tmp_path / "c"), world=2)
    assert found["report"]["kind"] == "error"
    assert found["report"]["saving"] is True
    assert "imed out" in found["report"]["message"]
    assert 0.9 < found["seconds"] < 50
    assert "step-00000001" not in found["checkpoints"]
    assert found["said"] == [
        "the save of step 1 has not ended, and has written nothing for 1 s: other ranks do not answer, or the disk does"
        " not; it is given up, and the checkpoints before it are as they were"
    ]


def test_a_wait_lasts_as_long_as_something_is_written(tmp_path: Path) -> None:
    """The limit is for a save that stands still, not for one that is long."""

    class SlowFiles(Files):
        def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
            return super().write_file(path, slowly(chunks) if path.name.startswith("rank-") else chunks)

    def slowly(chunks: Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
        yield from chunks
        for _ in range(8):
            time.sleep(0.3)
            yield bytes(PIECE_BYTES)

    checkpointer = Checkpointer(tmp_path / "c", World(), files=SlowFiles())
    saver = BackgroundSaver(checkpointer, World(), limit_seconds=1.5)
    saver.begin(1, one(1), {})
    saver.judged()
    saver.finish()
    assert checkpointer.steps() == [1]


def test_a_save_that_stands_still_is_an_error_for_the_one_that_waits(tmp_path: Path) -> None:
    files = GatedFiles()
    checkpointer = Checkpointer(tmp_path / "c", World(), files=files)
    saver = BackgroundSaver(checkpointer, World(), limit_seconds=0.2)
    saver.begin(1, one(1), {})
    saver.judged()
    with pytest.raises(CheckpointError, match="the save of step 1 has not ended, and has written nothing"):
        saver.begin(2, one(2), {})
    assert saver.close().endswith("it is given up, and the checkpoints before it are as they were")
    files.gate.set()


def groups_of_a_world() -> tuple[bool, bool, int, int]:
    world = joined()
    aside = world.aside()
    answer = aside is world.aside(), aside.group is world.group
    total = aside.all_reduce(torch.ones(1)).item()
    before = len(dist.distributed_c10d._world.pg_map)
    world.close()
    return *answer, int(total), before - len(dist.distributed_c10d._world.pg_map)


def test_the_side_group_is_made_once_and_closed_with_the_world(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(groups_of_a_world, world=2) == [(True, False, 2, 1)] * 2
    alone = World()
    assert alone.aside() is alone


def test_the_first_save_works_out_nothing_that_was_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a save does beside training takes the interpreter from it."""
    calls: list[str] = []
    for name in ("merged_tensors", "parts_problem", "arranged"):
        original = getattr(manifest, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(manifest, name, counted)
    shards = [
        Shard.whole("a", torch.arange(6.0)),
        Shard.whole("empty", torch.zeros(0)),
        Shard.whole("b", torch.ones(2)),
    ]
    saver = BackgroundSaver(Checkpointer(tmp_path / "checkpoints", World()), World())
    saver.prepare(shards, {})
    assert saver._thread is not None
    saver._thread.join()
    assert calls == ["arranged", "merged_tensors", "parts_problem"]
    saver.begin(1, shards, {})
    saver.judged()
    saver.finish()
    assert len(calls) == 3
    found = Checkpoint.latest_in(tmp_path / "checkpoints")
    assert found is not None
    assert found.read("a").tolist() == list(range(6))
    assert found.read("b").tolist() == [1, 1]
    assert found.read("empty").shape == (0,)

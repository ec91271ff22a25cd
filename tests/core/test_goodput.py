"""Where the time of a run went: delays of known length land in their buckets, over restarts, kills and clock jumps."""

import json
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.commands.monitor import in_words, state_of
from drivetrain.core.goodput import BUCKETS, Account, read_account
from drivetrain.core.run_folder import read_rows
from drivetrain.loop.schedule import SaveSchedule
from drivetrain.report.run_data import RunData, summary
from tests.api.jobs import Variant, make_job, run, vector_loss
from tests.commands.test_train_integration import SCRIPT, diary, wait_for_step
from tests.launch.jobs import launching
from tests.simulated_clock import SimulatedClock, simulated_clock  # noqa: F401

WALL = 1_700_000_000.0
SMALL = Variant(dtype=torch.float32, steps=20, num_samples=80, global_batch=8, save_every=5)


class Written:
    """A run folder with rows of known times; `jump` moves the wall clock and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.jump, self.boot = folder, 0.0, 0.0, "one"

    def row(self, event: str, file: str = "events", **facts: Any) -> None:
        at = datetime.fromtimestamp(WALL + self.now + self.jump, UTC).isoformat()
        with (self.folder / f"{file}.jsonl").open("a") as log:
            row = {"event": event, **facts, "time": at, "mono": 50.0 + self.now, "boot": self.boot}
            log.write(json.dumps(row) + "\n")

    def steps(self, count: int, seconds: float, *, first: int, **more: float) -> None:
        self.now += count * seconds + sum(more.values())
        self.row("time", step=first + count, spent={"step": count * seconds, **more})


def close(account: Account | None, **seconds: float) -> None:
    assert account is not None
    wanted = dict.fromkeys(BUCKETS, 0.0) | seconds
    assert account.seconds == pytest.approx(wanted, abs=1e-3)


def test_a_kill_moves_steps_from_kept_to_lost(tmp_path: Path) -> None:
    run = Written(tmp_path)
    run.row("launch", "attempts", submitted=WALL - 30)
    run.now = 1
    run.row("attempt", "attempts", number=0)
    run.now = 11  # 4 s until the ranks had met, 6 s to build
    run.row("start", step=0, since={"seconds": 10, "launch": 4, "restore": 0})
    run.steps(10, 2.0, first=0, data_wait=1.0, ckpt_block=0.5, eval=3.0)  # the checkpoint that counts
    run.steps(0, 0, first=10)
    (run.folder / "events.jsonl").write_text("".join((run.folder / "events.jsonl").read_text().splitlines(True)[:2]))
    saved = run.now
    run.now += 8.0
    run.row("time", step=14, spent={"step": 28.0, "data_wait": 1.0, "ckpt_block": 0.5, "eval": 3.0})
    run.now += 1.5  # into a step that nobody wrote down
    failed_at = 50.0 + run.now
    run.now += 5.0
    run.jump = -3600  # an hour back: nothing changes
    run.row(
        "failure", "attempts", cause="signal", step=14, failed_at=failed_at, progress_at=failed_at - 1,
        noticed_after=0.5,
    )  # fmt: skip
    run.now += 2.0
    run.row("attempt", "attempts", number=1)
    run.now += 9.0
    run.row("resume", step=10, since={"seconds": 9, "launch": 3, "restore": 2})
    run.steps(10, 2.0, first=10)
    run.row("finish", step=20)
    run.now += 0.25
    run.row("end", "attempts", code=0)
    account = read_account(tmp_path)
    close(
        account, queue=30, launch=1 + 4 + 3, init=6 + 4, restore=2, step=40, step_lost=8 + 1.5, data_wait=1,
        ckpt_block=0.5, eval=3, recovery=7, shutdown=0.25,
    )  # fmt: skip
    assert account is not None
    assert saved == pytest.approx(11 + 24.5)
    assert account.wall_seconds == pytest.approx(30 + run.now)  # every second, once
    assert account.interruptions == {"signal": 1}
    assert account.lost_steps == (4,)
    assert account.repair_seconds == pytest.approx((16.0,))
    assert account.goodput == pytest.approx(40 / account.wall_seconds)
    assert account.detection_seconds == (0.5,)
    assert "signal (1); 500 ms to notice, 16 s to go on and 4 steps lost" in account.failures_in_words()


@pytest.mark.parametrize("saved", [8, 11])
def test_what_a_rank_records_after_another_has_died_counts_once(tmp_path: Path, saved: int) -> None:
    """The time since the death is recovery's: the main process waited for the dead rank in its last step."""
    run = Written(tmp_path)
    run.row("start", step=0, since={"seconds": 0, "launch": 0})
    run.steps(10, 1.0, first=0)
    failed_at = 50 + run.now
    run.now += 3.0
    run.row("time", step=11, spent={"step": 13.0})
    run.row("failure", "attempts", cause="signal", step=10, failed_at=failed_at)
    run.row("resume", step=saved, since={"seconds": 0, "launch": 0})
    run.steps(6, 1.0, first=saved)
    run.row("finish", step=saved + 6)
    account = read_account(tmp_path)
    close(account, step=min(saved, 10) + 6, step_lost=max(0, 10 - saved), recovery=3)
    assert account is not None
    assert account.wall_seconds == pytest.approx(run.now)


def test_a_hang_and_a_stop_with_another_machine_behind_it(tmp_path: Path) -> None:
    run = Written(tmp_path)
    run.row("launch", "attempts")
    run.row("attempt", "attempts", number=0)
    run.now = 5
    run.row("start", step=0, since={"seconds": 5, "launch": 5, "restore": 0})
    run.steps(4, 1.0, first=0)
    progress_at = 50 + run.now
    run.now += 60  # nothing goes on, until somebody sees it
    run.row("failure", "attempts", cause="timeout", step=4, failed_at=50 + run.now, progress_at=progress_at)
    run.now += 2
    run.row("attempt", "attempts", number=1)
    run.now += 3
    run.row("resume", step=4, since={"seconds": 3, "launch": 1, "restore": 2})
    run.steps(6, 1.0, first=4)
    run.row("stop", step=10)
    run.row("end", "attempts", code=138)
    run.boot, run.now = "two", run.now + 100  # requeued: it waits for a machine
    run.row("launch", "attempts")
    run.row("attempt", "attempts", number=0)
    run.now += 5
    run.row("resume", step=10, since={"seconds": 5, "launch": 5, "restore": 0})
    run.steps(5, 1.0, first=10)
    run.row("finish", step=15)
    close(read_account(tmp_path), launch=11, restore=2, step=15, hang=60, recovery=2, queue=100)


def test_a_fallback_to_an_older_checkpoint_loses_steps_of_earlier_starts(tmp_path: Path) -> None:
    run = Written(tmp_path)
    for resumed_from in (0, 10, 4):  # the checkpoint of step 10 was damaged
        run.row("resume" if resumed_from else "start", step=resumed_from, since={"seconds": 0, "launch": 0})
        run.steps(10, 1.0, first=resumed_from)
        if resumed_from != 4:
            run.row("stopped by an error", error="KeyError: planted")
    run.row("finish", step=14)
    account = read_account(tmp_path)
    close(account, step=4 + 10, step_lost=6 + 10)
    assert account is not None
    assert account.interruptions == {"KeyError": 2}
    assert account.lost_steps == (0, 16)


def test_delays_of_a_real_run_land_in_their_buckets(
    tmp_path: Path,
    simulated_clock: SimulatedClock,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every part of a run takes a time of its own: no two sums agree by accident."""
    spend, calls = simulated_clock.spend, {"loss": 0, "valid": 0}
    # Behind the first step, the saver looks at what it will have to save.
    monkeypatch.setattr(SaveSchedule, "expect", lambda schedule, num_bytes: spend(7.0))

    class Slow(torch.utils.data.Dataset[Any]):
        data: Any = make_job(SMALL).data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            spend(0.05)
            return self.data[index]

    def loss(model: Any, batch: Any) -> Tensor:
        calls["loss" if model.training else "valid"] += 1
        spend(1.0 if model.training else 3.0)
        return vector_loss(model, batch)

    found = run(
        str(tmp_path), SMALL, settings={"async_save": False}, loss=loss, data=Slow(), valid=make_job(SMALL).data,
        valid_every=10, metrics={},
    )  # fmt: skip
    assert found is not None
    account = read_account(tmp_path / "suite")
    assert account is not None
    seconds = account.seconds
    assert seconds["step"] == pytest.approx(20 * 1.0, rel=0.02)
    assert seconds["data_wait"] == pytest.approx(20 * 8 * 0.05, rel=0.02)
    assert seconds["eval"] == pytest.approx(3.0 * (calls["valid"] - 1), rel=0.02)
    assert seconds["ckpt_block"] == pytest.approx(7.0, rel=0.02)
    assert seconds["init"] >= 3.0  # a batch of the validation set is tried beforehand
    assert seconds["other"] <= 0.01 * account.wall_seconds
    assert seconds["step_lost"] == 0.0


@pytest.mark.alone  # of a run of seconds, three hundredths are little: other processes take that long
def test_a_real_run_that_is_killed_accounts_for_all_of_its_time(tmp_path: Path) -> None:
    began = time.time()
    with launching(tmp_path, str(SCRIPT), str(tmp_path), "40", forks=True, PAUSE="0.05") as process:
        at, pid = wait_for_step(tmp_path, 9, rank=1)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_for_step(tmp_path, 12, after=at + 0.5)
        running = state_of(tmp_path / "runs" / "launched")
        _, err = process.communicate(240)
    took = time.time() - began
    assert process.returncode == 0, err
    folder = tmp_path / "runs" / "launched"
    account = read_account(folder)
    assert account is not None
    assert account.interruptions == {"signal": 1}
    assert account.lost_steps[0] in (0, 1, 2)  # checkpoints are every 2 steps
    (failure,) = [row for row in read_rows(folder / "attempts.jsonl")[0] if row["event"] == "failure"]
    # One clock for all processes of a machine; the kernel takes a moment to take a process apart.
    assert 0 < failure["noticed_after"] < failure["failed_at"] - killed + 1.0
    assert killed < failure["failed_at"]
    assert account.detection_seconds == (failure["noticed_after"],)
    assert 0 < account.wall_seconds <= took
    assert account.wall_seconds > diary(tmp_path)[-1][1] - diary(tmp_path)[0][1]
    assert account.seconds["step"] >= 40 * 0.05
    assert account.seconds["other"] <= 0.03 * account.wall_seconds  # launching alone takes 7 %
    assert 0 < account.seconds["recovery"] < took
    assert running.state == "running"
    assert running.goodput is not None
    assert "interruptions 1: signal (1)" in in_words(running)
    assert f"goodput {account.goodput:.1%}" in in_words(state_of(folder))
    assert "steps kept" in summary(RunData.read(folder))

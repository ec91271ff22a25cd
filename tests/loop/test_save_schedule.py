"""When checkpoints are due: by cost and risk, on all ranks at the same step; and that the best one is kept."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.checkpoint import Checkpoint, Files
from drivetrain.checkpoint.files import Written
from drivetrain.loop.schedule import SAVE_FLAG, SaveSchedule, observed_mtbf
from drivetrain.run.result import checkpoint_of
from tests.api.jobs import Trained, run, vector_loss
from tests.api.test_resume import BASE, MICRO_BATCH, assert_identical
from tests.gloo_pool import GlooPool
from tests.run.test_saver import events, steps_saved
from tests.simulated_clock import SimulatedClock


@pytest.mark.parametrize(
    ("blocked", "written", "expected", "words"),
    [
        (0.5, 1.0, 120.0, "saves and failures cost least"),
        (0.002, 30.0, 300.0, "10 times as long as a write takes"),
        (100.0, 1.0, 5000.0, "saves take 2% of the time"),
    ],
)
def test_the_interval_and_its_reason(blocked: float, written: float, expected: float, words: str) -> None:
    schedule = SaveSchedule(mtbf_seconds=14400)
    schedule.learn(blocked, written)
    assert schedule.interval_seconds == pytest.approx(expected)
    assert words in schedule.in_words()
    assert "mean time between failures 4 h 0 min (stated)" in schedule.in_words()


def test_the_median_of_the_last_saves_counts() -> None:
    schedule = SaveSchedule(mtbf_seconds=14400)
    for blocked in (9.0, 0.5, 0.5, 30.0, 0.5, 0.5):
        schedule.learn(blocked, 0.1)
    assert schedule.interval_seconds == pytest.approx(120.0)


def test_failures_that_were_seen_count() -> None:
    assert observed_mtbf(14400, 0, 0) == 14400
    assert observed_mtbf(14400, 7200, 8) == 2400  # more than it was, less than was stated
    assert "(observed)" in SaveSchedule(mtbf_seconds=2400, mtbf_is_observed=True).in_words()


def test_rank_0_asks_by_its_clock_until_a_save_has_begun(simulated_clock: SimulatedClock) -> None:
    main, other = SaveSchedule(seconds=60.0), SaveSchedule(seconds=60.0, is_main=False)
    assert main.request() == 0
    simulated_clock.spend(61)
    assert main.request() == main.request() == SAVE_FLAG  # a step may be repeated: it asks until it is heard
    assert other.request() == 0
    for schedule in (main, other):
        assert not schedule.hear(SAVE_FLAG, step=7)
        assert schedule.take()
        assert not schedule.take()
        schedule.begun(8)
        assert not schedule.hear(SAVE_FLAG, step=9)  # sent before the save began
        assert not schedule.take()
        assert not schedule.hear(SAVE_FLAG, step=10)
        assert schedule.take()
    assert main.request() == 0
    simulated_clock.spend(59)
    assert main.request() == 0
    simulated_clock.spend(2)
    assert main.request() == SAVE_FLAG


@pytest.mark.parametrize("num_ranks", [1, 3, 1024])
@pytest.mark.parametrize("num_micro", [1, 7, 4096])
def test_flags_are_told_apart_in_any_sum(num_ranks: int, num_micro: int) -> None:
    """DDP adds up micro-batches, and averages over ranks before it multiplies by their number."""
    for stopping in (0, 1, num_ranks):
        for saving in (False, True):
            flags = [float(rank < stopping) + SAVE_FLAG * (saving and rank == 0) for rank in range(num_ranks)]
            total = sum(flag * num_micro for flag in flags)
            schedule = SaveSchedule(is_main=False)
            assert schedule.hear(total / num_ranks * num_ranks, step=5) == (stopping > 0)
            if not stopping:
                assert schedule.take() == saving


def test_a_pinned_schedule_does_not_look_at_the_clock(simulated_clock: SimulatedClock) -> None:
    simulated_clock.spend(1e6)
    for every in (3, "epoch"):
        schedule = SaveSchedule(every)  # type: ignore[arg-type]
        assert schedule.request() == 0
        assert "(pinned)" in schedule.in_words()


# In runs


class SlowFiles(Files):
    """Writes ranks' files in simulated seconds."""

    def __init__(self, clock: SimulatedClock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        if path.name.startswith("rank-"):
            self.clock.spend(self.seconds)
        return super().write_file(path, chunks)


def test_short_epochs_do_not_save_all_the_time(tmp_path: Path, simulated_clock: SimulatedClock) -> None:
    """Epochs of 5 steps of two seconds, and saves of half a second: by epochs they would take 5 % of the time."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        simulated_clock.spend(2.0)
        return vector_loss(model, batch)

    files = SlowFiles(simulated_clock, 0.5)
    with mock.patch("drivetrain.checkpoint.checkpointer.Files", return_value=files):
        run(str(tmp_path), replace(BASE, steps=200), loss=loss, checkpoint_every=None, settings={"async_save": False})
    saved = [event["step"] for event in events(tmp_path, "checkpoint")]
    first, *rest = saved
    assert 15 <= first <= 22  # before one was measured
    assert all(59 <= later - earlier <= 65 for earlier, later in zip(saved, rest[:-1], strict=False)), saved
    assert saved[-1] == 200
    assert sum(event["seconds"] for event in events(tmp_path, "checkpoint")) < 0.02 * 400
    words = [event["words"] for event in events(tmp_path, "checkpoint interval")]
    assert "about every 2 min 0 s, at which saves and failures cost least" in words[-1]


def run_by_time(folder: str, strategy: str, seconds: float | None) -> Trained | None:
    settings: dict[str, Any] = {"parallel_strategy": strategy}
    if seconds is not None:
        settings["checkpoint_seconds"] = seconds
    return run(folder, replace(BASE, steps=20), MICRO_BATCH, settings=settings, checkpoint_every=None)


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_saves_by_the_clock_change_nothing(gloo_pool: GlooPool, tmp_path: Path, world: int, strategy: str) -> None:
    often = gloo_pool.run(run_by_time, str(tmp_path / "often"), strategy, 1e-3, world=world)[0]
    never = gloo_pool.run(run_by_time, str(tmp_path / "never"), strategy, 1e6, world=world)[0]
    assert_identical(often, never)
    assert [event["step"] for event in events(tmp_path / "never", "checkpoint")] == [20]
    saved = [event["step"] for event in events(tmp_path / "often", "checkpoint")]
    assert len(saved) > 3
    for step in steps_saved(tmp_path / "often"):
        assert Checkpoint.open(tmp_path / "often" / "suite" / "checkpoints" / f"step-{step:08d}").step == step


def turning_job(**changes: Any) -> dt.Job:
    """Gets better for two epochs of four steps, then worse."""
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    data = TensorDataset(inputs, 3 * inputs)
    values: dict[str, Any] = {
        "name": "turning",
        "model": lambda: nn.Linear(1, 1),
        "data": data,
        "valid": data,
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.5),
        "schedule": lambda step: 1.0 if step < 8 else 0.0 if step < 12 else 40.0,
        "global_batch": 16,
        "epochs": 5,
        "ema": None,
    }
    return dt.Job(**{**values, **changes})


@pytest.mark.parametrize("settings", [{}, {"async_save": False}], ids=["beside", "waiting"])
def test_the_best_is_not_lost_between_checkpoints(tmp_path: Path, settings: dict[str, Any]) -> None:
    folders = []
    for name, every in (("by time", None), ("by epoch", "epoch")):
        config = dt.configure(output_dir=tmp_path / name, gpu_mode="cpu", report=False, **settings)
        result = dt.train(turning_job(checkpoint_every=every, keep_last=1), config, quiet=True)
        folders.append(result.folder)
        assert result.best is not None
    by_time, by_epoch = (checkpoint_of(folder, "best") for folder in folders)
    assert by_time.step == by_epoch.step < 20
    for key in by_epoch.keys:
        assert torch.equal(by_time.read(key), by_epoch.read(key)), key
    assert by_time.meta["validation"] == by_epoch.meta["validation"]
    rows = [json.loads(line) for line in (folders[0] / "events.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "checkpoint"] == [by_time.step, 20]


def test_a_run_that_is_stopped_has_its_best(tmp_path: Path) -> None:
    def stopping(context: Any) -> dt.Verdict:
        return dt.Verdict(stop=context.step == 18)

    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    result = dt.train(turning_job(hooks=(dt.every(18, stopping),)), config, quiet=True)
    assert checkpoint_of(result.folder, "last").step == 18
    assert checkpoint_of(result.folder, "best").step in (8, 12)

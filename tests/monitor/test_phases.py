"""The phase clock: laps leave no gap, communication is told from backward, a clock that is off measures nothing."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.loop.trainer import Trainer
from drivetrain.monitor.phases import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    PHASES,
    STEP,
    EventClock,
    HostClock,
    Laps,
    NoClock,
)
from tests.api.jobs import Variant, make_job, run, vector_loss
from tests.gloo_pool import GlooPool
from tests.simulated_clock import SimulatedClock

SMALL = Variant(dtype=torch.float32, steps=24, num_samples=64, global_batch=8, save_every=100)


def phases_of(folder: Path) -> tuple[dict[str, float], int]:
    """Seconds by phase over the whole run, and the steps they are of."""
    totals: dict[str, float] = {}
    steps = 0
    for line in (folder / "suite" / "speed.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps += row["phase_steps"]
        for name, seconds in row["phases"].items():
            totals[name] = totals.get(name, 0.0) + seconds * row["phase_steps"]
    return totals, steps


def test_laps_leave_no_gap(simulated_clock: SimulatedClock) -> None:
    clock = HostClock()
    clock.start()
    began = time.perf_counter()
    for phase, seconds in ((DATA, 0.02), (FORWARD, 0.01), (BACKWARD, 0.03), (DATA, 0.02)):
        simulated_clock.spend(seconds)
        clock.lap(phase)
    clock.next_step()
    whole = time.perf_counter() - began
    laps = clock.take()
    assert laps.steps == 1
    assert sum(laps.seconds) == pytest.approx(whole, abs=1e-5)
    found = laps.per_step()
    assert set(found) == {"data", "forward", "backward"}
    assert found["data"] == pytest.approx(0.04, abs=1e-5)
    assert found["backward"] == pytest.approx(0.03, abs=1e-5)
    assert clock.take() == Laps(0, [0.0] * len(PHASES))  # taken is taken


def test_no_clock_measures_nothing() -> None:
    clock = NoClock()
    clock.start()
    clock.lap(DATA)
    clock.next_step()
    assert clock.take().per_step() == {}


def test_the_phases_of_a_run_add_up_to_its_loop(tmp_path: Path, simulated_clock: SimulatedClock) -> None:
    """Against a clock around the loop that knows nothing of phases; and slow parts are found where they are."""
    times: list[float] = []

    def slow_loss(model: Any, batch: Any) -> Tensor:
        simulated_clock.spend(0.004)
        return vector_loss(model, batch)

    original = Trainer.run

    def timed_run(self: Trainer) -> Any:
        times.append(time.perf_counter())
        yield from original(self)
        times.append(time.perf_counter())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", timed_run)
        run(str(tmp_path), SMALL, 4, loss=slow_loss, checkpoint_every=6)
    totals, steps = phases_of(tmp_path)
    assert steps == SMALL.steps
    assert sum(totals.values()) == pytest.approx(times[1] - times[0], rel=0.02)
    assert set(totals) == {"data", "forward", "backward", "optimizer", "logging", "checkpoint"}
    assert totals["forward"] == pytest.approx(2 * SMALL.steps * 0.004, rel=0.01)  # two micro-steps each


def slow_on_rank_1(model: Any, batch: Any) -> Tensor:
    if dist.get_rank() == 1:
        time.sleep(0.02)
    return vector_loss(model, batch)


def run_beside_a_slow_rank(folder: str) -> Any:
    return run(folder, SMALL, 4, loss=slow_on_rank_1)


def run_plainly(folder: str) -> Any:
    return run(folder, SMALL, 4)


@pytest.mark.alone
def test_waiting_for_another_rank_is_communication(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(run_beside_a_slow_rank, str(tmp_path), world=2)
    totals, steps = phases_of(tmp_path)
    assert steps == SMALL.steps
    # Rank 0 has its gradients 20 ms before rank 1 has, in every step; that is not backward.
    assert totals["communication"] > 0.8 * SMALL.steps * 0.02
    assert totals["backward"] < 0.5 * totals["communication"]


def test_telling_communication_changes_no_bit(gloo_pool: GlooPool, tmp_path: Path) -> None:
    watched = gloo_pool.run(run_plainly, str(tmp_path / "a"), world=2)[0]
    unwatched = gloo_pool.run(run_unwatched, str(tmp_path / "b"), world=2)[0]
    assert watched.rows == unwatched.rows
    assert all((watched.weights[key] == unwatched.weights[key]).all() for key in watched.weights)


def run_unwatched(folder: str) -> Any:
    return run(folder, SMALL, 4, settings={"log_every": 0, "monitor_gpu": False, "report": False})


def test_off_is_off(tmp_path: Path) -> None:
    run_unwatched(str(tmp_path))
    folder = tmp_path / "suite"
    assert (folder / "speed.jsonl").read_text() == ""
    assert not (folder / "gpu.jsonl").exists()
    assert not (folder / "performance_summary.txt").exists()
    assert "flops" not in (folder / "events.jsonl").read_text()


def test_a_job_can_be_watched_twice(tmp_path: Path) -> None:
    """A compiled or hooked objective must not keep hooks of steps before."""
    job = make_job(SMALL)
    assert job.items == "items"
    clock = HostClock()
    weight = torch.ones(3, requires_grad=True)
    for _ in range(3):
        clock.start()
        objective = (weight * 2).sum()
        clock.watch_backward(objective)
        torch.autograd.backward(objective)
        clock.end_backward()
        clock.next_step()
    laps = clock.take()
    assert laps.steps == 3
    assert set(laps.per_step()) == {"backward", "communication"}


def test_steps_in_a_row_are_counted() -> None:
    clock = HostClock()
    clock.lap(STEP)
    clock.next_steps(7)
    clock.lap(STEP)
    clock.next_step()
    assert clock.take().steps == 8


class FakeDevice:
    """Time passes on it as it is told to; its events are past once it has come to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given = 0.0  # when all that it was given will be done
        self.now = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = float("inf")

            def record(self, stream: Any) -> None:
                self.at = device.given

            def query(self) -> bool:
                return self.at <= device.now

            def synchronize(self) -> None:
                device.now = max(device.now, self.at)

            def elapsed_time(self, other: Any) -> float:
                assert other.query()
                return 1e3 * float(other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


@pytest.mark.parametrize("behind", [0.0, 0.005])
@pytest.mark.parametrize(("step_seconds", "is_sampled"), [(1e-2, False), (1e-4, True)])
def test_events_of_a_device(
    monkeypatch: pytest.MonkeyPatch, behind: float, step_seconds: float, is_sampled: bool
) -> None:
    """Long steps are measured each, short ones now and then; what is rare is measured whenever it happens."""
    device = FakeDevice(monkeypatch)
    clock = EventClock(torch.device("cuda"))
    num_steps, num_events = 500, 0
    lap = clock.lap

    def counted(phase: int) -> None:
        nonlocal num_events
        num_events += clock._current is not None
        lap(phase)

    monkeypatch.setattr(clock, "lap", counted)
    clock.start()
    for step in range(1, num_steps + 1):
        for phase, share in ((FORWARD, 0.25), (BACKWARD, 0.75)):
            device.given += share * step_seconds
            clock.lap(phase)
        if step % 50 == 0:
            clock.look()
            device.given += 0.01
            clock.lap(CHECKPOINT)
        device.now = device.given - behind
        clock.next_step()
    clock.finish()
    laps = clock.take()
    assert laps.steps == pytest.approx(num_steps, abs=64 if is_sampled else 0)
    found = dict(zip(PHASES, laps.seconds, strict=True))
    assert found["forward"] == pytest.approx(0.25 * step_seconds * laps.steps)
    assert found["backward"] == pytest.approx(0.75 * step_seconds * laps.steps)
    assert found["checkpoint"] == pytest.approx(10 * 0.01)
    assert clock.lost == 0
    assert (num_events < num_steps / 2) == is_sampled


def test_steps_in_a_row_are_stood_for_by_one_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is only begun where the next step is not to be measured, and so no lap of it takes an event.

    What the device waits for between a row and what comes next it waits for once, and not as often as a row has steps.
    """
    device = FakeDevice(monkeypatch)
    clock = EventClock(torch.device("cuda"))
    clock.start()
    num_steps = num_rows = num_seams = 0

    def give(count: int) -> None:
        nonlocal num_steps, num_seams
        device.given += 2e-4
        clock.lap(DATA)
        device.given += count * 1e-4
        clock.lap(STEP)
        clock.next_steps(count)
        num_steps, num_seams = num_steps + count, num_seams + 1
        device.now = device.given - 5e-3

    while num_steps < 3000:
        give(1)
        if not clock.measures_next:
            give(40)
            num_rows += 1
    clock.finish()
    laps = clock.take()
    assert num_rows > 50
    assert laps.steps == pytest.approx(num_steps, abs=50)
    found = dict(zip(PHASES, laps.seconds, strict=True))
    assert found["step"] == pytest.approx(1e-4 * laps.steps)
    assert found["data"] == pytest.approx(2e-4 * num_seams, rel=0.03)

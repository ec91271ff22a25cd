"""Watching on a real GPU: phases by events, no wait in the loop with everything on, the card's own figures."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.loop.trainer import Trainer
from drivetrain.monitor.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, EventClock
from drivetrain.monitor.recorder import RunRecorder
from tests.waits import IN_A_STEP, refuse_waits

pytestmark = pytest.mark.gpu

WIDTH = 2048


class Wide(nn.Module):
    """Some milliseconds of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def job(steps: int = 60, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": "watched",
        "model": Wide,
        "data": TensorDataset(torch.randn(4096, WIDTH)),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-4),
        "global_batch": 1024,
        "max_steps": steps,
        "checkpoint_every": steps,
    }
    return Job(**{**values, **changes})


def config(folder: Path, **settings: Any) -> Any:
    return configure(output_dir=folder, gpu_mode="single_gpu", precision="fp32", **settings)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "watched" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.alone  # other processes of the device would be in its times
def test_events_tell_what_the_device_did() -> None:
    """Against a clock on the host around work that is waited for."""
    device = torch.device("cuda", 0)
    matrix = torch.randn(4096, 4096, device=device)

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    work(20)
    torch.cuda.synchronize()
    began = time.perf_counter()
    work(50)
    torch.cuda.synchronize()
    alone = (time.perf_counter() - began) / 50
    clock = EventClock(device)
    clock.start()
    for _ in range(12):
        clock.lap(DATA)
        work(5)
        clock.lap(FORWARD)
        work(10)
        clock.lap(BACKWARD)
        clock.lap(OPTIMIZER)
        torch.cuda.synchronize()  # as the loop does when it reads an outcome
        clock.next_step()
    clock.finish()
    laps = clock.take()
    assert laps.steps + clock.lost == 12
    assert clock.lost == 0
    found = laps.per_step()
    assert found["forward"] == pytest.approx(5 * alone, rel=0.25)
    assert found["backward"] == pytest.approx(10 * alone, rel=0.25)
    assert found["optimizer"] < 0.5 * alone


def test_a_starving_device_shows_as_data() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.randn(1024, 1024, device=device)
    clock = EventClock(device)
    clock.start()
    for _ in range(10):
        time.sleep(0.01)
        clock.lap(DATA)
        torch.mm(matrix, matrix)
        clock.lap(FORWARD)
        torch.cuda.synchronize()
        clock.next_step()
    clock.finish()
    found = clock.take().per_step()
    assert found["data"] == pytest.approx(0.01, rel=0.3)
    assert found["forward"] < 0.003


@pytest.mark.alone
def test_the_phases_of_a_run_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    original = Trainer.run

    def timed(self: Trainer) -> Any:
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        yield from original(self)
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    monkeypatch.setattr(Trainer, "run", timed)
    train(job(), config(tmp_path, log_every=10), quiet=True)
    found = rows(tmp_path, "speed")
    assert sum(row["phase_steps"] for row in found) == 60
    total = sum(seconds * row["phase_steps"] for row in found for seconds in row["phases"].values())
    assert total == pytest.approx(times[1] - times[0], rel=0.05)
    late = found[3]["phases"]  # past the warm-up
    assert late["backward"] > 1.3 * late["forward"] > 0
    assert {"data", "copy"} <= set(late)
    assert late["copy"] < 0.5 * late["forward"]  # most of it is hidden behind the step before
    assert late["forward"] > 10 * late.get("logging", 0.0)
    assert 0.01 < found[3]["mfu"] < 1.0


def test_the_host_never_waits_with_everything_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step, every record and every lap, trackers, sampler and phases on: whatever waits raises."""
    calls = refuse_waits(monkeypatch, *IN_A_STEP, (RunRecorder, "write"), (EventClock, "next_step"), num_spared=12)
    settings = {"trackers": ["tensorboard"], "log_every": 1, "gpu_log_interval": 1}
    train(job(checkpoint_every=1000), config(tmp_path, **settings), quiet=True)
    assert len(calls) > 200
    assert len(rows(tmp_path, "steps")) == 60


def test_the_sampler_reads_the_card(tmp_path: Path) -> None:
    train(job(steps=400), config(tmp_path, gpu_log_interval=20), quiet=True)
    found = [row for row in rows(tmp_path, "gpu") if row["device"] != "cpu"]
    assert len(found) >= 3
    assert len({row["device"] for row in found}) == 1
    last = found[-1]
    total = torch.cuda.get_device_properties(0).total_memory / 1024**3
    assert last["memory_total_gib"] == pytest.approx(total, rel=0.05)
    assert 0 < last["memory_allocated_gib"] <= last["memory_reserved_gib"] <= last["memory_used_gib"]
    assert last["memory_allocated_gib"] <= last["memory_peak_gib"] <= last["memory_peak_reserved_gib"]
    assert 10 < last["temperature_c"] < 110
    assert 20 < last["power_watts"] < 1500
    assert last["clock_sm_mhz"] > 100
    assert isinstance(last["throttled"], list)
    assert max(row["utilisation_percent"] for row in found) > 20
    summary = (tmp_path / "watched" / "performance_summary.txt").read_text()
    assert "temperature (°C)" in summary
    assert "MFU" in summary
    assert "peak allocated" in summary


def test_a_profile_has_kernels(tmp_path: Path) -> None:
    train(job(steps=12), config(tmp_path, profile="5:6", report=False), quiet=True)
    trace = json.loads((tmp_path / "watched" / "profile" / "trace.json").read_text())
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) > 20
    assert "steps 5 to 6" in (tmp_path / "watched" / "profile" / "table.txt").read_text()

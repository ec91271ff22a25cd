"""The doctor: which finding leads, what it advises, and by how much; then jobs that were made to have each problem."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.hardware import Rate
from drivetrain.loop.trainer import Trainer
from drivetrain.monitor.doctor import WAITS_LITTLE, Checkups, Diagnosis, Observed, Symptom, diagnose
from drivetrain.monitor.phases import PHASES, Laps
from drivetrain.plan.tune import LAUNCH_BOUND
from tests.gloo_pool import GlooPool
from tests.simulated_clock import SimulatedClock

HEALTHY = {"data": 0.0002, "forward": 0.003, "backward": 0.006, "optimizer": 0.0008}


def seen(phases: dict[str, float], **changes: Any) -> Observed:
    return replace(Observed(steps=100, phases=phases, num_cores=16), **changes)


def leading(phases: dict[str, float], **changes: Any) -> Symptom:
    return diagnose(seen(phases, **changes)).leading


# ---- which finding leads


@pytest.mark.parametrize(
    ("phases", "changes", "kind"),
    [
        (HEALTHY, {}, "compute-bound"),
        ({"step": 0.010}, {"device": "cuda"}, "compute-bound"),
        ({**HEALTHY, "data": 0.008}, {"num_workers": 4}, "input-bound"),
        ({**HEALTHY, "copy": 0.008}, {"device": "cuda"}, "copy-bound"),
        ({**HEALTHY, "communication": 0.008}, {"world_size": 8}, "communication-bound"),
        ({**HEALTHY, "checkpoint": 0.008}, {"num_saves": 5, "save_seconds": 0.2}, "checkpoint-bound"),
        ({**HEALTHY, "validation": 0.008}, {"num_validations": 10}, "validation-bound"),
        ({**HEALTHY, "hooks": 0.008}, {}, "hooks-bound"),
        ({**HEALTHY, "prayer": 0.008}, {}, "prayer-bound"),  # a phase that is not known is named as it is
        (HEALTHY, {"device": "cuda", "waited_seconds": 0.0, "busy": 0.4}, "launch-bound"),
        (HEALTHY, {"device": "cuda", "waited_seconds": 0.0}, "launch-bound"),
        (HEALTHY, {"device": "cuda", "waited_seconds": 0.0, "mfu": 0.5, "peak_flops": 9e14}, "compute-bound"),
        (HEALTHY, {"device": "cuda", "waited_seconds": 0.006, "busy": 0.4}, "compute-bound"),
        (HEALTHY, {"device": "cuda", "waited_seconds": 0.0, "busy": 0.97}, "compute-bound"),
        (HEALTHY, {"device": "cuda", "allocation_retries": 60}, "memory-bound"),
        (HEALTHY, {"device": "cuda", "mfu": 0.05, "peak_flops": 9e14, "memory_busy": 0.9}, "bandwidth-bound"),
        (HEALTHY, {"device": "cuda", "mfu": 0.05, "peak_flops": 9e14, "memory_busy": 0.2}, "compute-bound"),
        (dict.fromkeys(("data", "copy", "hooks", "checkpoint", "validation", "logging", "forward"), 0.001), {},
         "balanced"),
        (HEALTHY, {"steps": 7}, "too short"),
        ({name: value / 1e3 for name, value in HEALTHY.items()}, {"steps": 50}, "too short"),  # half a millisecond
        ({"data": 3.0, "forward": 2.0}, {"steps": 6}, "input-bound"),  # few steps, and long ones
        ({}, {"steps": 0}, "too short"),
    ],
)  # fmt: skip
def test_what_leads(phases: dict[str, float], changes: dict[str, Any], kind: str) -> None:
    found = diagnose(seen(phases, **changes))
    if kind == "balanced":
        assert all(finding.share < 0.2 for finding in found.findings)
    assert found.leading.kind == kind, found


def test_a_lesser_problem_follows() -> None:
    found = diagnose(seen({**HEALTHY, "validation": 0.0015}, num_validations=10))
    assert [finding.kind for finding in found.findings] == ["compute-bound", "validation-bound"]
    assert found.warning == ""


def test_problems_are_ranked_by_their_time() -> None:
    found = diagnose(seen({**HEALTHY, "validation": 0.01, "data": 0.02}, num_validations=10, num_workers=1))
    assert [finding.kind for finding in found.findings][:2] == ["input-bound", "validation-bound"]
    assert found.warning == "input-bound 50%"


def test_a_card_that_is_nearly_full_is_said_and_does_not_lead() -> None:
    found = diagnose(seen(HEALTHY, device="cuda", memory_held=0.97))
    assert [finding.kind for finding in found.findings] == ["compute-bound", "memory-bound"]
    assert "close to the limit" in found.findings[1].words


def test_the_rate_says_what_it_is_compared_with() -> None:
    found = leading(HEALTHY, device="cuda", mfu=0.462, peak_flops=989.4e12, peak_origin="tabled", compiled=True)
    assert found.words == "computes 98% of the time, at 46% of the tabled peak of 989.4 TFLOP/s"
    assert "--precision bf16" in found.next_step
    assert leading(HEALTHY, device="cuda", precision="bf16", compiled=True).next_step == ""


def test_what_the_plan_measured_or_ruled_out_is_not_advised() -> None:
    assert "--compile" in leading(HEALTHY).next_step
    compiling = {"compile.enabled": "it would be 1 % slower"}
    assert leading(HEALTHY, settled=compiling).next_step == ""
    found = leading(HEALTHY, device="cuda", settled=compiling).next_step
    assert "--precision bf16 may" in found
    assert leading(HEALTHY, device="cuda", settled={**compiling, "precision.dtype": "as set"}).next_step == ""
    idle = {"device": "cuda", "waited_seconds": 0.0, "busy": 0.3, "accumulation": 4, "micro_batch": 8}
    settled = {**compiling, "kernels.capture": "captured would be +1%", "batch.size": "up to 8 fit"}
    free, closed = (leading(HEALTHY, **idle, settled=names) for names in ({}, settled))
    assert free.kind == closed.kind == "launch-bound"
    assert "--batch-size 16" in free.next_step
    assert "--capture on; --compile" in free.next_step
    assert "settled by the plan" not in free.next_step
    assert "--" not in closed.next_step
    assert closed.next_step.startswith("a larger global batch, if the job may have it: ")
    assert "a larger micro-batch (up to 8 fit), capturing (captured would be +1%), compiling (it would" in (
        closed.next_step
    )


def test_a_recurrent_network_is_not_told_to_do_what_the_plan_did_not_try() -> None:
    """Its steps take 25 ms and the device idles: either the plan tried to capture them, or its reason is told."""
    phases = {"forward": 0.009, "backward": 0.015, "optimizer": 0.001}
    idle = {"device": "cuda", "waited_seconds": 0.0005, "busy": 0.62, "precision": "bf16"}
    why = "not tried: the time for measuring was over"
    found = leading(phases, **idle, settled={"kernels.capture": why, "compile.enabled": "as set"})
    assert found.expected_gain == pytest.approx(1.6, abs=0.1)
    assert f"capturing ({why})" in found.next_step
    # What the doctor calls launch-bound is what the plan captures: the host launches for all but so much of the time.
    assert 1 - WAITS_LITTLE >= LAUNCH_BOUND


def test_workers_that_the_plan_chose_are_not_advised_against() -> None:
    why = "a step's data takes 80 ms to read and 10 ms to compute: 8 workers would keep up, and there can be 4"
    settled = {"data.num_workers": why}
    found = leading({"data": 0.010, "forward": 0.010}, num_workers=4, settled=settled)
    assert "--num-workers" not in found.next_step
    assert found.next_step.startswith("make items cheaper")
    assert why in found.next_step
    copied = leading({"copy": 0.010, "forward": 0.010}, device="cuda", settled=settled)
    assert "--num-workers" not in copied.next_step


# ---- advice, against the model worked out by hand


def test_workers_until_the_step_is_the_longer() -> None:
    """4 workers take 20 ms for a step, so loading takes 80 ms: 8 workers take 10, as long as the rest."""
    found = leading({"data": 0.010, "forward": 0.010}, num_workers=4)
    assert found.share == pytest.approx(0.5)
    assert "--num-workers 8 (now 4)" in found.next_step
    assert found.expected_gain == pytest.approx(2.0, rel=0.03)


def test_workers_until_the_cores_are_used_up() -> None:
    """30 ms of loading and 10 of computing on 2 cores: 20 ms at best, of 40."""
    found = leading({"data": 0.030, "forward": 0.010}, num_workers=0, num_cores=2)
    assert "--num-workers 2 (now 0)" in found.next_step
    assert "still waits 50%" in found.next_step
    assert found.expected_gain == pytest.approx(2.0)


def test_no_workers_where_they_would_not_help() -> None:
    for changes in ({"num_workers": 16}, {"num_workers": 2, "num_cores": 2}, {"num_workers": 0, "num_cores": 1}):
        found = leading({"data": 0.030, "forward": 0.010}, **changes)
        assert "more workers would not help" in found.next_step
        assert found.expected_gain is None
    for changes in ({"may_add_workers": False}, {"is_resident": True}):
        found = leading({"data": 0.030, "forward": 0.010}, **changes)
        assert found.kind == "input-bound"
        assert "--num-workers" not in found.next_step
        assert found.expected_gain is None


def test_saves() -> None:
    phases = {**HEALTHY, "checkpoint": 0.010}
    waiting = leading(phases, num_saves=10, save_seconds=0.1, saves_beside=False)
    assert "--no-async-save" in waiting.next_step
    assert waiting.expected_gain == pytest.approx(2.0)  # 10 of 20 ms; a save of 100 ms fits into 10 steps of 10 ms
    late = leading(phases, num_saves=50, save_seconds=0.1, save_waits=0.8)
    assert "--checkpoint-every 10 (now about 2)" in late.next_step  # 10 steps of 10 ms are as long as a save
    copying = leading(phases, num_saves=50, save_seconds=0.001)
    assert copying.expected_gain == pytest.approx(20 / (10 + 10 / 20))  # to 5 % of the rest: 20 times as rare


def test_validation() -> None:
    found = leading({**HEALTHY, "validation": 0.010}, num_validations=25)
    assert "--valid-every 80 (now about 4)" in found.next_step
    assert found.expected_gain == pytest.approx(20 / (10 + 10 / 20))


def test_copies() -> None:
    phases = {"copy": 0.010, "forward": 0.010}
    assert leading(phases, device="cuda", pins_memory=True).expected_gain == pytest.approx(20 / 15)
    unpinned = leading(phases, device="cuda", num_workers=4)
    assert unpinned.next_step.startswith("--pin-memory gains about 2.0 ×")
    assert leading({"copy": 0.1, "forward": 0.001}, device="cuda").next_step.startswith("send fewer bytes")


def test_launches() -> None:
    found = leading(HEALTHY, device="cuda", waited_seconds=0.0001, busy=0.48, accumulation=4, micro_batch=8)
    assert found.share == pytest.approx(0.5)
    assert found.expected_gain == pytest.approx(2.0)
    assert "--batch-size 16" in found.next_step
    assert "--capture" not in leading(HEALTHY, device="cuda", waited_seconds=0.0, captured=True).next_step


# ---- whatever is observed


counts = some.integers(0, 10_000)
shares = some.none() | some.floats(0, 1)
durations = some.floats(0, 1e4)


@given(
    steps=counts,
    phases=some.dictionaries(some.sampled_from([*PHASES, "step", "another"]), durations),
    device=some.sampled_from(["cpu", "cuda"]),
    num_workers=some.integers(0, 64),
    num_cores=some.integers(1, 256),
    others=some.fixed_dictionaries(
        {
            "mfu": some.none() | some.floats(0, 2),
            "peak_flops": some.none() | some.floats(1, 1e18),
            "waited_seconds": some.none() | durations,
            "busy": shares,
            "memory_busy": shares,
            "memory_held": shares,
            "allocation_retries": counts,
            "num_saves": counts,
            "save_seconds": durations,
            "save_waits": durations,
            "num_validations": counts,
            "pins_memory": some.booleans(),
            "saves_beside": some.booleans(),
            "compiled": some.booleans(),
            "may_add_workers": some.booleans(),
            "is_resident": some.booleans(),
        }
    ),
)
def test_it_always_finds_something_that_makes_sense(
    steps: int, phases: dict[str, float], device: str, num_workers: int, num_cores: int, others: dict[str, Any]
) -> None:
    found = diagnose(
        Observed(steps=steps, phases=phases, device=device, num_workers=num_workers, num_cores=num_cores, **others)
    )
    assert found.findings
    for finding in found.findings:
        assert 0 <= finding.share <= 1 + 1e-9
        assert finding.words
        assert finding.expected_gain is None or finding.expected_gain >= 1 - 1e-9
        assert "nan" not in str(finding)
    json.dumps([finding.as_dict() for finding in found.findings], allow_nan=False)


# ---- when it looks


def laps(steps: int, **seconds: float) -> Laps:
    return Laps(steps, [steps * seconds.get(name, 0.0) for name in PHASES])


def test_the_warm_up_is_not_judged() -> None:
    checkups = Checkups(seen({}))
    checkups.saw_steps(laps(10, data=0.5, forward=0.001), None)
    first = checkups.final()
    assert first is not None
    assert first.leading.kind == "too short"
    for _ in range(5):
        checkups.saw_steps(laps(10, data=0.0001, forward=0.010), None)
    found = checkups.final()
    assert found is not None
    assert (found.leading.kind, found.steps) == ("compute-bound", 50)


def test_news_is_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    checkups = Checkups(seen({}))

    def second(**seconds: float) -> tuple[Diagnosis | None, bool]:
        now[0] += 1.1
        checkups.saw_steps(laps(100, **seconds), None)
        return checkups.look()

    fast, slow = {"forward": 0.010}, {"forward": 0.010, "data": 0.1}
    assert [second(**fast)[1] for _ in range(4)] == [False, True, False, False]
    for _ in range(40):  # beyond half a minute the first seconds are forgotten
        found, is_news = second(**slow)
        if is_news:
            break
    assert found is not None
    assert found.leading.kind == "input-bound"
    checkups.saw_steps(laps(100, **fast), None)
    assert checkups.look() == (None, False)  # not due yet


def test_the_cards_figures_are_of_the_time_between() -> None:
    checkups = Checkups(seen({}, device="cuda"))
    rows = [
        {"utilisation_percent": busy, "allocation_retries": retries} for busy, retries in ((0, 3), (40, 3), (60, 5))
    ]
    for row in rows:
        checkups.saw_card(row)
        checkups.saw_card(row)  # seen before: counted once
    checkups.saw_steps(laps(100, forward=0.01)._replace(waited=0.0), None)
    found = checkups.final()
    assert found is not None
    (launch,) = [finding for finding in found.findings if finding.kind == "launch-bound"]
    assert launch.share == pytest.approx(0.5)
    assert "memory-bound" not in [finding.kind for finding in found.findings]  # 2 in 100 steps: below what is told


# ---- jobs made to have each problem


class Slow(Dataset[Any]):
    """Items that take their time, and know how much."""

    SECONDS = 0.002

    def __init__(self, spend: Callable[[float], None] = time.sleep) -> None:
        self.spend, self.spent = spend, 0.0

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        self.spend(self.SECONDS)
        item = torch.full((6,), index / 800), torch.tensor(index % 4)
        self.spent += time.perf_counter() - began
        return item


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def job(**changes: Any) -> Job:
    generator = torch.Generator().manual_seed(0)  # the same data on each rank, whatever its process has drawn before
    inputs = torch.randn(800, 6, generator=generator)
    values: dict[str, Any] = {
        "name": "ill",
        "model": lambda: nn.Linear(6, 4),
        "data": TensorDataset(inputs, torch.randint(0, 4, (800,), generator=generator)),
        "loss": loss,
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.01),
        "global_batch": 8,
        "max_steps": 60,
        "checkpoint_every": 1000,
    }
    return Job(**{**values, **changes})


def treat(folder: Path, sick: Job, **settings: Any) -> list[Symptom]:
    """Trains it, and returns the findings of the final verdict."""
    config = configure(output_dir=folder, gpu_mode="cpu", **{"num_workers": 0, "report": False, **settings})
    train(sick, config, quiet=True)
    return findings_in(folder)


def findings_in(folder: Path) -> list[Symptom]:
    rows = [json.loads(line) for line in (folder / "ill" / "events.jsonl").read_text().splitlines()]
    (final,) = [row for row in rows if row["event"] == "verdict" and row["final"]]
    return [Symptom(**finding) for finding in final["findings"]]


def test_slow_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated_clock: SimulatedClock) -> None:
    """The share against the data set's own clock and one around the loop."""
    data, times = Slow(simulated_clock.spend), [0.0, 0.0]
    original = Trainer.run

    def timed(self: Trainer) -> Any:
        times[0], before = time.perf_counter(), data.spent
        yield from original(self)
        times[1], data.spent = time.perf_counter(), data.spent - before

    monkeypatch.setattr(Trainer, "run", timed)
    found = treat(tmp_path, job(data=data), report=True)[0]
    assert found.kind == "input-bound"
    assert found.share == pytest.approx(data.spent / (times[1] - times[0]), abs=0.02)
    assert "--num-workers" in found.next_step or "more workers would not help" in found.next_step
    summary = (tmp_path / "ill" / "performance_summary.txt").read_text()
    assert f"  input-bound: {found.words}\n    next: {found.next_step}\n" in summary


@pytest.mark.alone
def test_frequent_saves(tmp_path: Path) -> None:
    sick = job(model=lambda: nn.Sequential(nn.Linear(6, 400_000), nn.Linear(400_000, 4, bias=False)))
    sick = replace(sick, loss=lambda model, batch: model[0].bias.sum() * 0.0 + model[0].weight[0].sum(), max_steps=24)
    found = treat(tmp_path, replace(sick, checkpoint_every=1, keep_last=1), async_save=False)[0]
    assert found.kind == "checkpoint-bound"
    assert found.share > 0.3
    assert "24 saves" in found.words or "14 saves" in found.words  # without the first ten steps where that is enough
    assert found.expected_gain is not None


def test_long_validation(tmp_path: Path, simulated_clock: SimulatedClock) -> None:
    def slow_when_validated(model: nn.Module, batch: Any) -> Tensor:
        simulated_clock.spend(0.005 if model.training else 0.03)
        return loss(model, batch)

    sick = job(loss=slow_when_validated, valid=job().data, valid_every=2, global_batch=400)
    found = treat(tmp_path, sick)[0]
    assert found.kind == "validation-bound"
    assert found.share > 0.5
    assert "--valid-every" in found.next_step


def test_much_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated_clock: SimulatedClock) -> None:
    """At a rate that a machine with this peak would call its own."""
    rate = Rate(value=2.0, unit="TFLOP/s", origin="measured", source="this test")
    monkeypatch.setattr("drivetrain.monitor.recorder.peak_rate", lambda *_: rate)

    def long_loss(model: nn.Module, batch: Any) -> Tensor:
        simulated_clock.spend(0.02)
        return loss(model, batch)

    model = lambda: nn.Sequential(nn.Linear(6, 512), *[nn.Linear(512, 512) for _ in range(4)], nn.Linear(512, 4))  # noqa: E731
    sick = job(model=model, loss=long_loss, global_batch=256, max_steps=40)
    found = treat(tmp_path, sick)[0]
    assert found.kind == "compute-bound"
    assert found.share > 0.8
    assert "% of the measured peak of 2.0 TFLOP/s" in found.words


class Heavy(nn.Module):
    """Much to reduce, little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4_000_000))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight[:24].view(6, 4)


def train_heavily(folder: str) -> None:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False)
    train(job(model=Heavy, max_steps=30), config, quiet=True)


@pytest.mark.alone
def test_large_gradients(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(train_heavily, str(tmp_path), world=2)
    found = findings_in(tmp_path)[0]
    assert found.kind == "communication-bound"
    assert "2 processes" in found.words


def test_a_short_run_is_not_judged(tmp_path: Path, capsys: Any) -> None:
    train(job(max_steps=5), configure(output_dir=tmp_path, gpu_mode="cpu", report=False, num_workers=0))
    assert "too short to judge" in capsys.readouterr().out
    assert findings_in(tmp_path)[0].kind == "too short"


def test_the_terminal_says_it(tmp_path: Path, capsys: Any, simulated_clock: SimulatedClock) -> None:
    sick = job(data=Slow(simulated_clock.spend), max_steps=120)
    train(sick, configure(output_dir=tmp_path, gpu_mode="cpu", report=False, num_workers=0, log_every=10))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  verdict    input-bound: waits") for line in lines)
    assert any(line.startswith("  next       ") for line in lines)
    assert any(line.startswith("epoch") and "input-bound" in line for line in lines)  # while it runs
    events = [json.loads(line) for line in (tmp_path / "ill" / "events.jsonl").read_text().splitlines()]
    verdicts = [row for row in events if row["event"] == "verdict"]
    assert verdicts[-1]["final"]
    assert len(verdicts) <= 3  # one when it showed, one at the end: not one with every row


@pytest.mark.alone
def test_the_advice_helps_as_much_as_was_said(tmp_path: Path) -> None:
    """Waiting is no work: two processes wait for twice as many items, on a machine of any size."""
    before = treat(tmp_path / "before", job(data=Slow(), max_steps=100), log_every=10)[0]
    assert before.expected_gain is not None, before
    workers = int(before.next_step.split("--num-workers ")[1].split()[0])
    treat(tmp_path / "after", job(data=Slow(), max_steps=200), num_workers=workers, log_every=10)
    gain = speed(tmp_path / "after") / speed(tmp_path / "before")
    assert gain > 1.2
    assert 0.5 * before.expected_gain < gain < 2 * before.expected_gain, before


def speed(folder: Path) -> float:
    """Samples per second, the warm-up aside."""
    rows = [json.loads(line) for line in (folder / "ill" / "speed.jsonl").read_text().splitlines()][3:]
    return float(sum(8 * row["steps"] for row in rows) / sum(row["seconds"] for row in rows))

"""What planning may do to a run, and what it may not: the guard of the job's meaning, the cache, resuming."""

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.errors import ConfigError
from drivetrain.monitor.doctor import Checkups
from drivetrain.plan.knobs import REMEDIES, StepWay
from drivetrain.plan.tune import Measurement, Tried, Tuned
from drivetrain.planning import planner
from drivetrain.planning.description import _alternatives
from drivetrain.planning.planner import PlanningProgress
from drivetrain.planning.probe import StepProbe, _has_compiled
from drivetrain.report import write_report
from drivetrain.run import Session
from tests.api.jobs import Variant, Vectors, make_job
from tests.api.test_resume import CrashingLoss, PlantedError
from tests.gloo_pool import GlooPool
from tests.simulated_clock import SimulatedClock

VARIANT = Variant(steps=9, num_samples=70, global_batch=20, save_every=3)


@pytest.fixture(autouse=True)
def short_jobs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LEAST_STEPS", 1)
    monkeypatch.setattr(planner, "LEAST_JOB_SECONDS", 0.0)
    monkeypatch.setattr(planner, "BUDGET_SHARE", math.inf)


def run(folder: Path, job: Job, **settings: Any) -> Path:
    settings = {"gpu_mode": "cpu", "num_workers": 0, "report": False, "loss_weighting": "samples", **settings}
    return train(job, configure(output_dir=folder, **settings), quiet=True).folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def plan_of(folder: Path) -> dict[str, Any]:
    found = yaml.safe_load((folder / "plan.yaml").read_text())
    assert isinstance(found, dict)
    return found


def decide(monkeypatch: pytest.MonkeyPatch, *ways: StepWay, seconds: float = 0.0) -> None:
    """The planner measures all of these, for real, and takes the last."""

    def tune(start: StepWay, scope: Any, measure: Any, clock: Any) -> Tuned:
        tried = tuple(Tried(way=way, measurement=measure(way, seconds)) for way in ways)
        return Tuned(way=ways[-1], tried=tried, reasons={})

    monkeypatch.setattr(planner, "tune", tune)


class Noted:
    """A loss that writes down which samples it was given, in which order."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += batch[0][:, 0].tolist()
        return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "way",
    [
        StepWay(micro_batch=20, num_threads=1),
        StepWay(micro_batch=7),
        StepWay(micro_batch=1, recompute=True),
        StepWay(micro_batch=20, channels_last=True),
    ],
    ids=str,
)
def test_no_way_changes_what_the_job_means(way: StepWay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Global batch, order of samples, weighting, learning rate: all as by rule; the losses to rounding, in float64."""
    plain, planned = Noted(), Noted()
    before = run(tmp_path / "rule", make_job(VARIANT, loss=plain), auto_optimize=False)
    decide(monkeypatch, way)
    after = run(tmp_path / "way", make_job(VARIANT, loss=planned))
    assert plan_of(after)["way"] == str(way), "it was followed"
    for one, other in zip(rows(before), rows(after), strict=True):
        assert {key: one[key] for key in ("step", "epoch", "samples", "lr", "num_items")} == {
            key: other[key] for key in ("step", "epoch", "samples", "lr", "num_items")
        }
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
    num_trained = sum(row["samples"] for row in rows(before))
    assert planned.seen[-num_trained:] == plain.seen[-num_trained:], "the same samples in the same order"


def test_what_was_tried_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with dropout, items that draw, and a probe that fails in the middle."""
    variant = replace(VARIANT, dropout=0.3, noisy_items=True)
    before = run(tmp_path / "rule", make_job(variant), auto_optimize=False)
    calls = [0]
    loss_function = make_job(variant).loss

    def failing(model: nn.Module, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 8:  # the second way's
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_function(model, batch)

    decide(monkeypatch, StepWay(micro_batch=5), StepWay(micro_batch=10), StepWay(micro_batch=20))
    after = run(tmp_path / "measured", make_job(variant, loss=failing))
    assert calls[0] > 8
    assert any(tried.get("problem") == "out of memory" for tried in plan_of(after)["tried"])
    assert [row["loss"] for row in rows(before)] == [row["loss"] for row in rows(after)]


def test_a_resumed_run_keeps_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, StepWay(micro_batch=7, num_threads=1))
    whole = run(tmp_path / "whole", make_job(VARIANT))
    decide(monkeypatch, StepWay(micro_batch=7, num_threads=1))
    with pytest.raises(PlantedError):
        run(tmp_path / "cut", make_job(VARIANT, loss=CrashingLoss(make_job(VARIANT).loss, 25)))
    begun = plan_of(next((tmp_path / "cut").iterdir()))

    def never(*_: Any) -> Tuned:
        raise AssertionError("a resumed run does not plan anew")

    monkeypatch.setattr(planner, "tune", never)
    cut = run(tmp_path / "cut", make_job(VARIANT))
    assert plan_of(cut)["way"] == "fp32, micro-batch 7, eager, 1 thread"
    assert plan_of(cut)["notes"][0].startswith("as in the checkpoint of step ")
    now = plan_of(cut)
    for name in ("forecast", "tried", "planned", "planning_seconds"):
        assert now[name] == begun[name], "what it was planned by is still there"
    # How samples arrive is measured, and on a busy machine not as on an idle one; why is told by each start.
    reasons, reasons_before = (
        {name: choice for name, choice in each["choices"].items() if not name.startswith("data.")}
        for each in (now, begun)
    )
    assert reasons == reasons_before, "and why, where nothing was found anew"
    assert begun["forecast"]["step_seconds"] > 0
    assert write_report(cut) == []
    plan = (cut / "report.html").read_text().partition("<h2>Plan</h2>")[2].partition("</section>")[0]
    assert "seconds per step" in plan
    assert "as in the checkpoint" not in plan
    assert [row["loss"] for row in rows(whole)] == [row["loss"] for row in rows(cut)]
    pinned = run(tmp_path / "pinned", make_job(VARIANT), batch_size=4, auto_optimize=False)
    assert plan_of(pinned)["choices"]["batch.size"] == {"value": 4, "why": "asked for"}


def test_a_resumed_run_says_what_was_pinned_and_what_was_kept(tmp_path: Path) -> None:
    def note(name: str, **settings: Any) -> str:
        dying = make_job(VARIANT, loss=CrashingLoss(make_job(VARIANT).loss, 13))
        with pytest.raises(PlantedError):
            run(tmp_path / name, dying, batch_size=10, num_threads=2, auto_optimize=False)
        return str(plan_of(run(tmp_path / name, make_job(VARIANT), **settings))["notes"][0])

    file = tmp_path / "b.yaml"
    file.write_text("choices:\n  batch.size: {value: 5}\n  kernels.num_threads: {value: 2}\n")
    assert note("kept", batch_size=10).startswith("as in the checkpoint of step ")
    assert note("asked", batch_size=5, num_threads=1).startswith(
        "micro-batch, threads as asked for; else as in the checkpoint of step "
    )
    both = note("both", plan=file, num_threads=1)
    assert both.startswith("micro-batch pinned by b.yaml; threads as asked for; else as in the checkpoint of step ")


def counted_probes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    original = StepProbe.__call__

    def probe(self: StepProbe, way: StepWay, time: float, **how: bool) -> Measurement:
        seconds.append(time)
        return original(self, way, time, **how)

    monkeypatch.setattr(StepProbe, "__call__", probe)
    return seconds


def other_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1]) * 1.0


def test_the_second_start_measures_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MUCH_SLOWER", math.inf)  # however busy the machine is meanwhile
    seconds = counted_probes(monkeypatch)
    run(tmp_path / "a", make_job(VARIANT))
    assert max(seconds) > 0
    seconds.clear()
    again = run(tmp_path / "b", make_job(VARIANT))
    assert seconds == [0.0], "one step, to see that it still holds"
    assert "measured at an earlier start" in plan_of(again)["notes"][0]
    seconds.clear()
    run(tmp_path / "c", make_job(VARIANT), plan_cache=False)
    assert len(seconds) > 1
    assert max(seconds) > 0
    seconds.clear()
    other = run(tmp_path / "d", make_job(VARIANT, loss=other_loss))
    assert "measured at an earlier start" not in str(plan_of(other)["notes"]), "another loss is another job"


def test_what_does_not_hold_any_more_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "a", make_job(VARIANT))
    calls = [0]
    original = StepProbe.__call__

    def probe(self: StepProbe, way: StepWay, time: float, **how: bool) -> Measurement:
        calls[0] += 1
        return (
            Measurement(problem="out of memory", out_of_memory=True)
            if calls[0] == 1
            else original(self, way, time, **how)
        )

    monkeypatch.setattr(StepProbe, "__call__", probe)
    again = run(tmp_path / "b", make_job(VARIANT))
    assert "does not hold any more (out of memory)" in plan_of(again)["notes"][0]
    assert calls[0] > 1
    assert len(rows(again)) == 9


def rates(own_cache: Path) -> list[float]:
    (file,) = (own_cache / "plans").glob("*.json")
    tried = json.loads(file.read_text())["tried"]
    return [found["measurement"]["sample_seconds"] for found in tried if not found["measurement"].get("is_brief")]


def change_rates(own_cache: Path, factor: float) -> None:
    (file,) = (own_cache / "plans").glob("*.json")
    known = json.loads(file.read_text())
    for tried in known["tried"]:
        tried["measurement"]["sample_seconds"] *= factor
    file.write_text(json.dumps(known))


def test_a_machine_that_became_slower_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a driver's update, with a slower clock, or beside another user: remembered is a hundredth."""
    run(tmp_path / "a", make_job(VARIANT))
    change_rates(own_cache, 0.01)
    before = rates(own_cache)
    seconds = counted_probes(monkeypatch)
    given = {"num_workers": 0, "report": False, "loss_weighting": "samples"}
    settings = configure(gpu_mode="cpu", output_dir=tmp_path / "b", **given)
    again = train(make_job(VARIANT), settings).folder
    assert seconds[:2] == [0.0, planner.SURE_SECONDS]
    assert len(seconds) > 2
    (note,) = (note for note in plan_of(again)["notes"] if "does not hold any more (a step takes" in note)
    assert f"drivetrain: {note}: measuring anew" in capsys.readouterr().err
    assert min(rates(own_cache)) > 2 * max(before), "what is remembered is the new figure"
    assert len(rows(again)) == 9


@pytest.mark.parametrize("is_brief", [True, False])
def test_what_was_looked_at_briefly_is_tried_again_with_no_more_samples(is_brief: bool) -> None:
    """A whole micro-batch would make a second start slower than the first; a rate of whole ones is for whole ones."""
    asked = list[tuple[float, bool]]()

    def probe(way: StepWay, seconds: float, *, of_part: bool = False) -> Measurement:
        asked.append((seconds, of_part))
        return Measurement(sample_seconds=1.0)

    remembered = Measurement(sample_seconds=1.0, is_brief=is_brief)
    tuned: Any = SimpleNamespace(way=None, chosen=remembered)
    scope: Any = SimpleNamespace(memory_limit_bytes=math.inf)
    assert planner._why_outdated(cast(StepProbe, probe), tuned, scope) == ""
    assert asked == [(0.0, is_brief)]


def test_one_slow_step_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    run(tmp_path / "a", make_job(VARIANT))
    change_rates(own_cache, 1000.0)  # whatever else runs here, no second look is slower than that
    before = rates(own_cache)
    seconds = counted_probes(monkeypatch)
    original = StepProbe.__call__

    def hiccup(self: StepProbe, way: StepWay, time: float, **how: bool) -> Measurement:
        found = original(self, way, time, **how)
        return found if time else found.model_copy(update={"sample_seconds": 100 * max(before)})

    monkeypatch.setattr(StepProbe, "__call__", hiccup)
    again = run(tmp_path / "b", make_job(VARIANT))
    assert seconds == [0.0, planner.SURE_SECONDS]
    assert "measured at an earlier start" in plan_of(again)["notes"][0]
    assert rates(own_cache) == before


def limits_of(folder: str) -> list[float]:
    """What this rank may use, in the planner's eyes, where ranks have different amounts of memory free."""
    found: list[float] = []
    tune = planner.tune

    def noting(start: StepWay, scope: Any, measure: Any, clock: Any) -> Tuned:
        found.append(scope.memory_limit_bytes)
        return tune(start, scope, measure, clock)

    with (
        mock.patch.object(planner, "tune", noting),
        mock.patch.object(Session, "free_bytes", lambda run: 1000 - run.world.rank),
        mock.patch.object(planner, "LEAST_STEPS", 1),
    ):
        run(Path(folder), make_job(VARIANT), parallel_strategy="ddp", gpu_memory_fraction=0.5)
    return found


def test_ranks_plan_with_what_the_poorest_has(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Else they would try different sizes, and each wait for the other."""
    assert gloo_pool.run(limits_of, str(tmp_path), world=2) == [[499.5], [499.5]]


def test_a_cache_that_cannot_be_used_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    own_cache.write_text("this is a file, not a folder")
    assert len(rows(run(tmp_path / "a", make_job(VARIANT)))) == 9
    own_cache.unlink()
    run(tmp_path / "b", make_job(VARIANT))
    for file in (own_cache / "plans").glob("*.json"):
        file.write_text("{ torn")
    assert len(rows(run(tmp_path / "c", make_job(VARIANT)))) == 9


def test_when_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = counted_probes(monkeypatch)
    off = run(tmp_path / "off", make_job(VARIANT), auto_optimize=False)
    assert plan_of(off)["notes"] == ["by rule: measuring is switched off"]
    monkeypatch.setattr(planner, "LEAST_STEPS", 40)
    short = run(tmp_path / "short", make_job(VARIANT))
    assert "fewer than 40 steps" in plan_of(short)["notes"][0]
    iterated = run(tmp_path / "iterated", make_job(VARIANT, data=iter(list(Vectors(VARIANT)) * 4)))
    assert "only be iterated" in plan_of(iterated)["notes"][0]
    assert not seconds


def test_a_plan_in_a_file_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, StepWay(micro_batch=7))
    first = run(tmp_path / "a", make_job(VARIANT))
    seconds = counted_probes(monkeypatch)
    second = run(tmp_path / "b", make_job(VARIANT), plan=first / "plan.yaml")
    assert not seconds
    assert plan_of(second)["micro_batch"] == 7
    assert [row["loss"] for row in rows(first)] == [row["loss"] for row in rows(second)]
    with pytest.raises(ConfigError, match="it holds no plan"):
        configure(plan=first / "steps.jsonl")
    with pytest.raises(ConfigError, match="No such file"):
        configure(plan=tmp_path / "none.yaml")
    text = (first / "plan.yaml").read_text()
    (tmp_path / "cut.yaml").write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match="cut off"):
        configure(plan=tmp_path / "cut.yaml")


@pytest.mark.parametrize(
    ("least", "settings", "open_ones"),
    [
        (2, {}, set()),  # measured, or ruled out
        (2, {"compile": False, "batch_size": 5}, {"compile.enabled", "batch.size"}),  # fixed by the user, unseen
        (2, {"num_workers": 0, "resident": "off"}, {"data.num_workers"}),
        (40, {}, set()),  # too short
        # Nobody looked; but that a CPU captures nothing is known.
        (2, {"auto_optimize": False}, {remedy.setting for remedy in REMEDIES} - {"kernels.capture"}),
    ],
)
def test_the_doctor_is_told_what_the_plan_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, settings: dict[str, Any], open_ones: set[str]
) -> None:
    monkeypatch.setattr(planner, "LEAST_STEPS", least)
    told: list[Any] = []
    look = Checkups.__init__
    monkeypatch.setattr(Checkups, "__init__", lambda self, known: (told.append(known.settled), look(self, known))[1])
    run(tmp_path, make_job(VARIANT), **{"num_workers": -1, **settings})
    assert {remedy.setting for remedy in REMEDIES} - set(told[0]) == open_ones
    assert all(told[0].values())


class SlowRows(Vectors):
    """Takes far longer to read than to compute."""

    def __init__(self, variant: Variant, clock: SimulatedClock) -> None:
        super().__init__(variant)
        self.clock = clock

    def __getitem__(self, index: int) -> Any:
        self.clock.spend(0.02)
        return super().__getitem__(index)


def test_reading_is_measured_where_it_takes_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated_clock: SimulatedClock
) -> None:
    """Steps that compute for seconds in all, and read for minutes: what they read is not left to the rule."""
    looked: list[float] = []

    def data_path(run: Any, micro_batch: int, step_seconds: float, steps_left: int, step_bytes: int) -> None:
        looked.append(step_seconds * steps_left)

    monkeypatch.setattr(planner, "measured_data_path", data_path)
    monkeypatch.setattr(planner, "BUDGET_SHARE", 0.5)
    run(tmp_path / "slow", make_job(VARIANT, data=SlowRows(VARIANT, simulated_clock)))
    assert len(looked) == 1
    assert looked[0] < 1.0
    run(tmp_path / "quick", make_job(VARIANT))
    assert len(looked) == 1


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def test_where_samples_influence_each_other_their_number_is_left_alone(tmp_path: Path) -> None:
    variant = replace(VARIANT, dtype=torch.float32)
    folder = run(tmp_path, make_job(variant, model=Normed))
    choice = plan_of(folder)["choices"]["batch.size"]
    assert choice["value"] == 20
    assert "batch normalization" in choice["why"]


def test_the_longest_samples_are_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    data = [(torch.ones(3 + (index == 37) * 50), torch.tensor(0)) for index in range(60)]

    def collate(items: list[Any]) -> Any:
        longest = max(len(values) for values, _ in items)
        return torch.stack([functional.pad(values, (0, longest - len(values))) for values, _ in items])

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        lengths.append(batch.shape[1])
        return model(batch.sum(1, keepdim=True)).square().mean()

    job = Job(
        name="long",
        model=lambda: nn.Linear(1, 1),
        data=data,
        loss=loss,
        collate=collate,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-6),
        global_batch=4,
        max_steps=3,
    )
    decide(monkeypatch, StepWay(micro_batch=2))
    run(tmp_path, job)
    assert lengths[0] == 53


class Stubborn(nn.Module):
    """Cannot be copied, so nothing can be tried on a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot copy an open connection")

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs)
        return result


def test_what_cannot_be_copied_is_trained_by_rule(tmp_path: Path) -> None:
    folder = run(tmp_path, make_job(replace(VARIANT, dtype=torch.float32), model=Stubborn))
    assert "cannot copy an open connection" in plan_of(folder)["notes"][0]
    assert len(rows(folder)) == 9


def test_a_broken_loss_shows_its_own_traceback(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        run(tmp_path, make_job(VARIANT, loss=loss))


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"cudnn_benchmark": False}, {}], ids=str)
def test_probes_run_with_the_kernels_of_the_run(
    settings: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe of other kernels would forecast the time of a step that is never run.

    A brief one is for memory: with many convolutions, cuDNN would spend seconds on looking for the fastest.
    """
    seen: list[tuple[bool, bool]] = []
    loss_function = make_job(VARIANT).loss

    def watched(model: nn.Module, batch: Any) -> Any:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))
        return loss_function(model, batch)

    is_strict = settings.get("deterministic", False)
    way, expected = StepWay(micro_batch=20, repeat="strict" if is_strict else "off"), settings.get("cudnn_benchmark")
    decide(monkeypatch, way, seconds=1e-3)
    run(tmp_path, make_job(VARIANT, loss=watched), loss_weighting="samples", **settings)
    assert set(seen) == {(is_strict, not is_strict if expected is None else expected)}
    seen.clear()
    decide(monkeypatch, way)
    run(tmp_path / "brief", make_job(VARIANT, loss=watched), loss_weighting="samples", **settings)
    assert seen[0] == (is_strict, False)


class Convolutions(nn.Module):
    """A block whose shapes change with its width, as in most convolutional networks."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.parts(images)
        return result


@pytest.mark.parametrize(
    ("blocks", "scopes"),
    [
        ([(4, 4, 1)] * 6, ["blocks", "both", "loss"]),
        ([(4, 4, 1)] * 3 + [(8, 8, 1)] * 3, ["blocks", "both", "loss"]),
        ([(4, 8, 2), (8, 16, 2), (16, 16, 1), (16, 16, 2), (16, 32, 2), (32, 32, 1)], ["loss"]),
    ],
    ids=["alike", "two kinds", "nearly all differ"],
)
def test_blocks_are_compiled_one_by_one_only_where_they_are_alike(
    blocks: list[tuple[int, int, int]], scopes: list[str]
) -> None:
    model = nn.Sequential(*(Convolutions(*sizes) for sizes in blocks), nn.Conv2d(4, 4, 1))
    for asked, expected in (("auto", scopes), ("blocks", ["blocks"]), ("both", ["both"]), ("loss", ["loss"])):
        run: Any = SimpleNamespace(config=SimpleNamespace(compile=SimpleNamespace(scope=asked)), shards=False)
        assert list(planner._compile_costs(run, model)) == expected


@pytest.mark.parametrize(
    "block",
    [lambda: Convolutions(4, 4, 1), lambda: nn.TransformerEncoderLayer(8, 1, 8, batch_first=True)],
    ids=["own", "of torch"],
)
def test_code_that_an_earlier_trial_compiled_is_found(block: Callable[[], nn.Module]) -> None:
    """Otherwise a later trial of the same code, captured for example, is taken for one that compiled nothing."""
    torch._dynamo.reset()
    module = block()
    assert not _has_compiled(type(module).forward)
    called = torch.compile(MethodType(type(module).forward, module), backend="eager")
    called(torch.randn(2, 4, 8, 8) if isinstance(module, Convolutions) else torch.randn(2, 3, 8))
    assert _has_compiled(type(module).forward)
    torch._dynamo.reset()


def test_planning_shows_a_bar_with_the_time_left() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, highlight=False)
    with PlanningProgress(quiet=False, after_seconds=0, console=console) as progress:
        progress.begins("trying eager", None)
        progress.begins("trying compiled", 30.0)
        progress(StepWay(micro_batch=4), Measurement(sample_seconds=0.5))
        progress._bar.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert re.search(r"planning .* at most (29|30) s left +trying compiled", text)
    assert "micro-batch 4, eager: 2 samples/s" in text
    assert shown.getvalue().rstrip("\n").endswith("\x1b[2K"), "nothing of the bar stays"


def test_planning_shows_no_bar_in_a_log() -> None:
    shown = io.StringIO()
    with PlanningProgress(quiet=False, after_seconds=0, console=Console(file=shown, width=80)) as progress:
        progress.begins("trying eager", 3.0)
        progress(StepWay(micro_batch=4), Measurement(sample_seconds=0.5))
    assert [line.strip() for line in shown.getvalue().splitlines()][1:] == ["fp32, micro-batch 4, eager: 2 samples/s"]


@pytest.mark.parametrize("lines", ["{\n", '"never closed\n', "# -*- coding: nothing -*-\n"])
def test_code_of_files_that_are_no_python_has_a_key(tmp_path: Path, lines: str) -> None:
    """As cells of a notebook have. Compiled functions have neither a file nor, some of them, a module."""
    file = tmp_path / "notebook.ipynb"
    file.write_text(lines * 4)

    def made(result: int) -> Any:
        found: dict[str, Any] = {"__name__": "__main__"}
        text = f"def loss(model, batch):\n    return sum(model(item) + {result} for item in batch)\n"
        exec(compile(text, str(file), "exec"), found)
        return found["loss"]

    assert planner._sources([made(1)]) == planner._sources([made(1)])
    assert planner._sources([made(1)]) != planner._sources([made(2)])
    assert len(planner._sources([len, [].append, functional.relu])) == 2, "torch's own go with its version"


def test_what_else_was_measured_is_told_as_settings_have_it() -> None:
    chosen = StepWay(micro_batch=4)
    ways = [chosen, *(chosen.but(**change) for change in ({"capture": True}, {"compile_mode": "default"}))]
    tried = tuple(Tried(way=way, measurement=Measurement(sample_seconds=0.5)) for way in ways)
    told = {field: _alternatives(Tuned(way=ways[0], tried=tried, reasons={}), field) for field in StepWay.model_fields}
    assert {field: words for field, words in told.items() if words} == {
        "capture": ("on: 2 samples/s",),
        "compile_mode": ("default: 2 samples/s",),
    }
    assert _alternatives(Tuned(way=ways[1], tried=tried, reasons={}), "capture") == ("off: 2 samples/s",)

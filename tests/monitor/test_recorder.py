"""The books of a run: the banner, rows on resume, ranks that write nothing, a profile, FLOPs."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain import Job, LossSum
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.errors import ConfigError
from drivetrain.hardware import Rate
from drivetrain.monitor import sampler
from drivetrain.monitor.doctor import Checkups
from drivetrain.monitor.phases import FlopCount, count_apart, peak_rate
from drivetrain.monitor.recorder import RunPlan, RunRecorder
from tests.api.jobs import Variant, make_job, run, vector_loss
from tests.gloo_pool import GlooPool
from tests.hardware_fixtures import load

SMALL = Variant(dtype=torch.float32, steps=20, num_samples=80, global_batch=8, save_every=5)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "suite" / f"{name}.jsonl").read_text().splitlines()]


def accuracy(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(1) == batch[1]).double()


def validated(**changes: Any) -> dict[str, Any]:
    data = make_job(SMALL).data
    return {"valid": data, "valid_every": 4, "metrics": {"accuracy": accuracy}, **changes}


def test_validation_is_written_and_dropped_with_its_step_on_resume(tmp_path: Path) -> None:
    calls = [0]

    def crashing(model: Any, batch: Any) -> Tensor:
        if model.training:
            calls[0] += 1
        if calls[0] == 15:  # after the trial and thirteen steps
            raise KeyError("planted")
        return vector_loss(model, batch)

    settings = {"log_every": 3}
    whole = run(str(tmp_path / "whole"), SMALL, settings=settings, **validated())
    with pytest.raises(KeyError):
        run(str(tmp_path), SMALL, settings=settings, **validated(loss=crashing))
    assert [row["step"] for row in rows(tmp_path, "metrics")] == [4, 8, 12]
    # As if it had gone on a little, and then lost its power: rows that no checkpoint holds, and half a row.
    for name in ("metrics", "speed", "gpu"):
        with (tmp_path / "suite" / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 16, "epoch": 1, "valid_loss": 99.0, "device": "cpu"}\n{"step": 17, "ep')
    resumed = run(str(tmp_path), SMALL, settings=settings, **validated())
    assert resumed is not None
    assert whole is not None
    assert resumed.resumed_from in (10, 12)
    assert resumed.rows == whole.rows
    keys = ("step", "epoch", "valid_loss", "valid_accuracy")
    found, wanted = (
        [{key: row[key] for key in keys} for row in rows(folder, "metrics")]
        for folder in (tmp_path, tmp_path / "whole")
    )
    assert found == wanted
    assert [row["step"] for row in rows(tmp_path, "metrics")] == [4, 8, 12, 16, 20]
    assert [row["step"] for row in rows(tmp_path, "speed")] == [3, 6, 9, 12, 15, 18, 20]
    assert all("phases" in row for row in rows(tmp_path, "speed"))
    steps = [row["step"] for row in rows(tmp_path, "gpu")]
    assert steps == sorted(steps)


def run_on_ranks(folder: str) -> list[str]:
    """What this rank's process had open for writing below the folder while it trained."""
    opened: set[str] = set()

    def looking(model: Any, batch: Any) -> Tensor:
        for entry in Path("/proc/self/fd").iterdir():
            try:
                target = str(entry.readlink())
            except OSError:
                continue
            if target.startswith(folder):
                opened.add(Path(target).name)
        return vector_loss(model, batch)

    settings = {"trackers": ["tensorboard"], "report": True, "profile": "3:4", "gpu_log_interval": 2}
    run(folder, SMALL, 4, settings=settings, loss=looking)
    return sorted(opened)


def test_only_the_main_process_writes(gloo_pool: GlooPool, tmp_path: Path) -> None:
    main, other = gloo_pool.run(run_on_ranks, str(tmp_path), world=2)
    assert other == []
    assert {"steps.jsonl", "events.jsonl", "speed.jsonl", "gpu.jsonl"} <= set(main)
    assert [row["step"] for row in rows(tmp_path, "steps")] == list(range(1, 21))
    assert sum(row["steps"] for row in rows(tmp_path, "speed")) == 20
    assert sum(row["phase_steps"] for row in rows(tmp_path, "speed")) == 20
    files = {path.name for path in (tmp_path / "suite").iterdir()}
    assert {"training_metrics.png", "performance_summary.txt", "tensorboard", "profile", "gpu.jsonl"} <= files
    assert len(list((tmp_path / "suite" / "tensorboard").iterdir())) == 1
    summary = (tmp_path / "suite" / "performance_summary.txt").read_text()
    assert "2 (ddp)" in summary
    assert "communication" in summary


def shown(capsys: Any, folder: Path, changes: Mapping[str, Any] | None = None, **settings: Any) -> str:
    config = configure(output_dir=folder, gpu_mode="cpu", batch_size=4, report=False, **settings)
    train(make_job(SMALL, **(changes or {})), config)
    return str(capsys.readouterr().out)


def test_the_banner_and_the_lines(tmp_path: Path, capsys: Any) -> None:
    text = shown(capsys, tmp_path, num_workers=0)
    assert "training 20 steps of 8 samples" in text
    for label, words in (
        ("processes", "1 (single)"),
        ("device", "cpu"),
        ("precision", "fp32: "),
        ("batch", "4 × 2 accumulated × 1 device = 8"),
        ("loader", "in the training process"),
    ):
        assert f"  {label:<10} {words}" in text
    assert "\x1b" not in text  # no bar and no colors where nobody looks
    assert [line.split()[3] for line in text.splitlines() if line.startswith("epoch")] == ["10", "20"]


def test_what_a_card_does_in_the_last_save_is_not_held_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are looked at with each point of speed, but not with the one that is written once all is saved."""
    card = load("4x-l4").gpus[0]
    seen: list[str] = []
    enter = RunRecorder.__enter__

    class Cards:
        """As many readings as there are questions."""

        @property
        def latest(self) -> dict[str, dict[str, float]]:
            return {sampler.label(card): {"utilisation_percent": 50.0}}

        def at_step(self, step: int) -> None:
            pass

        def close(self) -> None:
            pass

    def with_a_card(books: RunRecorder) -> Any:
        found = enter(books)
        books._sampler, books._facts = Cards(), replace(books._facts, gpu=card)  # type: ignore[assignment]
        return found

    monkeypatch.setattr(RunRecorder, "__enter__", with_a_card)
    monkeypatch.setattr(Checkups, "saw_card", lambda self, row: seen.append("card"))
    monkeypatch.setattr(Checkups, "saw_steps", lambda self, *rest: seen.append("steps"))
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, log_every=8, monitor_gpu=False)
    train(make_job(SMALL), config, quiet=True)
    assert seen == ["card", "steps", "card", "steps", "steps"]  # of steps 8, 16 and 20


def test_the_first_set_is_shown_once_and_equal_metrics_are_all_shown(tmp_path: Path, capsys: Any) -> None:
    """Of several sets the first has its values twice. Metrics that happen to be equal are different metrics."""
    data, metrics = make_job(SMALL).data, {"accuracy": accuracy, "clean_accuracy": accuracy}
    text = shown(capsys, tmp_path / "one", changes=validated(metrics=metrics))
    assert "valid accuracy" in text
    assert "valid clean accuracy" in text
    text = shown(capsys, tmp_path / "two", changes=validated(valid={"clean": data, "other": data}))
    assert "valid clean accuracy" in text
    assert "valid other accuracy" in text
    assert "valid accuracy" not in text
    assert "valid loss" not in text


def test_records_without_a_checkpoint_are_told(tmp_path: Path, capsys: Any) -> None:
    def crashing(context: dt.StepContext) -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError):
        run(str(tmp_path), SMALL, hooks=[dt.every(12, crashing)])
    shutil.rmtree(tmp_path / "suite" / "checkpoints")  # as by hand
    capsys.readouterr()
    train(make_job(SMALL), configure(output_dir=tmp_path, gpu_mode="cpu", report=False, auto_optimize=False))
    assert "12 steps were recorded here, and there is no checkpoint: training begins anew with step 1" in (
        capsys.readouterr().out
    )
    assert [row["step"] for row in rows(tmp_path, "steps")] == list(range(1, 21))


def test_log_every_asks_for_lines(tmp_path: Path, capsys: Any) -> None:
    text = shown(capsys, tmp_path, log_every=4)
    steps = [line.split()[3] for line in text.splitlines() if line.startswith("epoch")]
    assert steps == ["4", "8", "10", "12", "16", "20"]


def test_quiet_is_quiet(tmp_path: Path, capsys: Any) -> None:
    assert shown(capsys, tmp_path, quiet=True) == ""


def test_a_batch_that_does_not_divide() -> None:
    plan = RunPlan(3, 3, 8, 2, 37, "ddp", "bf16", "", "cuda:0", 4)
    assert plan.batch_in_words == "8 × 2 accumulated × 3 devices holds 37"


# ---- profile


def test_a_profile_of_some_steps(tmp_path: Path) -> None:
    run(str(tmp_path), SMALL, settings={"profile": "6:8"})
    folder = tmp_path / "suite" / "profile"
    trace = json.loads((folder / "trace.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(steps) == 3
    assert "steps 6 to 8" in (folder / "table.txt").read_text()
    assert "aten::" in (folder / "table.txt").read_text()


@pytest.mark.parametrize(
    ("window", "words", "num_steps"),
    [
        ("30:40", "so nothing is profiled", 0),
        ("19:40", "so only steps 19 to 20 are profiled", 2),
        ("20:20", "", 1),
    ],
)
def test_a_window_outside_the_run_is_said(tmp_path: Path, window: str, words: str, num_steps: int) -> None:
    run(str(tmp_path), SMALL, settings={"profile": window})
    notes = [row["text"] for row in rows(tmp_path, "events") if row["event"] == "note"]
    assert any(words in text for text in notes) or not words
    assert (tmp_path / "suite" / "profile" / "trace.json").exists() == bool(num_steps)


@pytest.mark.parametrize("window", ["10", "15:10", "0:5", "a:b", "5:"])
def test_a_window_that_is_none(window: str) -> None:
    with pytest.raises(ConfigError, match="profile"):
        configure(profile=window)


# ---- FLOPs


def by_hand(batch: int) -> int:
    """Of the suite's mlp: two products of each layer in backward, but one where nothing lies below."""
    forward = 2 * batch * (6 * 24 + 24 * 24 + 24 * 4)
    return 3 * forward - 2 * batch * 6 * 24


def test_flops_of_a_run(tmp_path: Path) -> None:
    run(str(tmp_path), SMALL, 4)
    (event,) = [row for row in rows(tmp_path, "events") if row["event"] == "flops"]
    assert event["flops_per_sample"] == by_hand(1)


def test_counting_apart_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Linear(24, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = [torch.randn(8, 6), torch.randint(0, 4, (8,))]
    flops = count_apart(vector_loss, model, batch, None)
    assert flops == 3 * 2 * 8 * (6 * 24 + 24 * 4) - 2 * 8 * 6 * 24
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_counting_apart_survives_what_fails() -> None:
    assert count_apart(lambda model, batch: 1 / 0, nn.Linear(2, 2), None, None) == 0


def test_a_formula_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.plan import fitting as simulate

    monkeypatch.setattr(simulate, "flop_registry", {torch.ops.aten.mm: lambda *_, **__: 1 / 0})
    with FlopCount() as count:
        assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
    assert count.total == 0


def test_a_compiled_model_is_counted_and_compiled(tmp_path: Path) -> None:
    """A mode around the trial would keep it from being compiled, without a word."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = configure(output_dir=tmp_path, gpu_mode="cpu", compile=True, report=False)
    result = train(make_job(SMALL), config, quiet=True)
    assert "graphs" in result.compilation
    (event,) = [row for row in rows(tmp_path, "events") if row["event"] == "flops"]
    assert event["flops_per_sample"] == by_hand(1)


def test_the_peak_says_where_it_is_from() -> None:
    machine = load("4x-l4")
    tabled = peak_rate(machine, torch.device("cuda", 2), "bf16")
    assert tabled is not None
    assert (tabled.value, tabled.origin) == (121, "tabled")
    assert peak_rate(machine, torch.device("cpu"), "fp32") == machine.cpu.peaks.get("fp32")
    measured = Rate(value=1.5, unit="TFLOP/s", origin="measured", source="drivetrain verify")
    known = machine.model_copy(update={"cpu": machine.cpu.model_copy(update={"peaks": {"fp32": measured}})})
    assert peak_rate(known, torch.device("cpu"), "fp32") == measured


def test_items_have_a_name(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> LossSum:
        return LossSum(model(batch[0]).square().sum(), batch[0].numel())

    job = Job(
        name="suite",
        model=lambda: nn.Linear(5, 1),
        data=TensorDataset(torch.randn(40, 5)),
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01),
        global_batch=8,
        epochs=4,
        items="tokens",
    )
    train(job, configure(output_dir=tmp_path, gpu_mode="cpu"), quiet=True)
    row = rows(tmp_path, "speed")[0]
    assert row["items_per_second"] == pytest.approx(5 * row["samples_per_second"])
    assert "tokens per second" in (tmp_path / "suite" / "performance_summary.txt").read_text()

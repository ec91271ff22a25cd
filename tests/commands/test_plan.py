"""`drivetrain plan`: what it says, that it changes nothing, and that what it writes pins what it says."""

import inspect
import json
import math
import multiprocessing
import random
import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import DrivetrainError
from drivetrain.api.measuring import plan
from drivetrain.api.training import train
from drivetrain.cli import main
from drivetrain.commands import in_process as showing
from drivetrain.commands import training as launching
from drivetrain.config import configure
from drivetrain.config.settings import SETTINGS
from drivetrain.core.launchers import ProcessPlace
from drivetrain.core.plugins import RECIPES
from drivetrain.core.world import World
from drivetrain.data.division import Division
from drivetrain.data.loader import Loader
from drivetrain.hardware.catalogue import machine_named
from drivetrain.job import Job
from drivetrain.launch.layout import make_layout
from drivetrain.plan.knobs import KNOBS, StepWay
from drivetrain.plan.tune import Measurement, Tried, Tuned
from drivetrain.planning import description, other_machine
from drivetrain.planning.probe import Journal, StepProbe
from tests.api.jobs import Variant, make_job
from tests.gloo_pool import GlooPool
from tests.hardware_fixtures import load

VARIANT = Variant(dtype=torch.float32, steps=6, num_samples=60, global_batch=20, dropout=0.1)


def planned(folder: Path, job: Job | None = None, **settings: Any) -> Any:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False)
    return plan(job or make_job(VARIANT), config, **settings)


def test_by_rule_and_measured(tmp_path: Path) -> None:
    by_rule = planned(tmp_path)
    assert not by_rule.measured
    assert by_rule.choices["batch.size"].value == 20
    assert by_rule.forecast.memory.parameters == sum(p.numel() * 4 for p in make_job(VARIANT).model().parameters())
    measured = planned(tmp_path, measure=True)
    assert measured.measured
    assert measured.forecast.job_seconds == pytest.approx(measured.forecast.step_seconds * 6)
    assert measured.tried[0].measurement.sample_seconds > 0
    assert measured.choices["compile.enabled"].reason.startswith("not tried: the job takes 0 s more")
    assert [entry.name for entry in tmp_path.iterdir()] == ["drivetrain-cache"], "no run folder is made"


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Items that are made when they are asked for."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        value = torch.tensor([number / 60])
        return value, value.square()


def stacked(items: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*items, strict=True)]


PAIRS = TensorDataset(torch.arange(60.0).unsqueeze(1) / 60, (torch.arange(60.0) / 60).square().unsqueeze(1))
DATA: dict[str, Any] = {
    "tensors": PAIRS,
    "a sampler": DataLoader(PAIRS, sampler=[*range(59, -1, -1)]),
    "items": Squares(),
    "own collate": DataLoader(
        PAIRS, collate_fn=lambda items: [torch.stack(column) for column in zip(*items, strict=True)]
    ),
    "workers": DataLoader(PAIRS, num_workers=1),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("resident", ["auto", "on", "off"])
def test_the_run_does_what_the_plan_says(tmp_path: Path, name: str, resident: str) -> None:
    job = Job(
        name="predicted",
        model=lambda: nn.Linear(1, 1),
        data=DATA[name],
        loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        global_batch=12,
        epochs=1,
    )
    settings = {"gpu_mode": "cpu", "resident": resident, "output_dir": tmp_path, "quiet": True, "report": False}
    said = plan(job, configure(**settings))
    result = train(job, configure(**settings))
    did = yaml.safe_load((result.folder / "plan.yaml").read_text())
    assert {name: "auto" if choice.value is None else choice.value for name, choice in said.choices.items()} == {
        name: choice["value"] for name, choice in did["choices"].items()
    }
    is_resident = did["data_path"].startswith("resident")
    assert ("data.resident" in said.choices) == is_resident
    if "data.num_workers" in said.choices:
        assert did["num_workers"] == said.choices["data.num_workers"].value
    if is_resident:
        assert ("asked for" in said.choices["data.resident"].reason) == (resident == "on")


class Idle:
    every = 1

    def __call__(self, context: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(("every", "num_validations"), [(None, 2), (1, 6), (4, 2), (100, 1)])
def test_validation_counts_in_the_time_of_the_job(tmp_path: Path, every: int | None, num_validations: int) -> None:
    """In 6 steps of 20 of 60 samples: after each epoch or so many steps, and at the end."""
    valid = make_job(replace(VARIANT, num_samples=500)).data
    forecast = planned(tmp_path, make_job(VARIANT, valid=valid, valid_every=every), measure=True).forecast
    steps = forecast.step_seconds * 6
    assert forecast.validation_seconds == pytest.approx(forecast.step_seconds / 20 / 3 * 500 * num_validations)
    assert forecast.job_seconds == pytest.approx(steps + forecast.validation_seconds)


def test_what_is_not_compiled_is_not_forecast_as_if_it_were() -> None:
    eager, compiled = StepWay(micro_batch=20), StepWay(micro_batch=20, compile_mode="default")
    tried = tuple(
        Tried(way=way, measurement=Measurement(sample_seconds=seconds))
        for way, seconds in ((eager, 0.03), (compiled, 0.01))
    )
    job = make_job(VARIANT, valid=make_job(VARIANT).data)
    run: Any = SimpleNamespace(job=job, world=World())
    seconds = description._validation_seconds(run, Tuned(way=compiled, tried=tried, reasons={}))
    assert seconds == pytest.approx(0.01 * 60 * 2)


def test_the_plan_says_that_hooks_are_not_counted(tmp_path: Path) -> None:
    assert not any("hooks" in note for note in planned(tmp_path, measure=True).notes)
    notes = planned(tmp_path, make_job(VARIANT, hooks=[Idle()]), measure=True).notes
    assert notes[-1] == "the forecast of the job's time does not count its hooks (1)"


def probe_of(job: Job, model: nn.Module, journal: Journal) -> StepProbe:
    def loader(division: Division) -> Loader:
        return Loader(job.source, division, 0, job.seed, job.collate)

    return StepProbe(job, model, World(), loader, journal)


def generators() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


class Counting(nn.Module):
    """Has a buffer that every forward changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.drop(self.norm(self.layer(inputs)))
        return result


@pytest.mark.parametrize("failure", [None, torch.OutOfMemoryError("CUDA out of memory"), ValueError("no such column")])
def test_a_probe_leaves_everything_as_it_was(failure: Exception | None) -> None:
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        value = functional.cross_entropy(model(batch[0]), batch[1])
        if failure is not None and calls[0] == 3:
            raise failure
        return value

    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = generators()
    found = probe_of(make_job(VARIANT, loss=loss), model, Journal(None))(StepWay(micro_batch=5), 0.05)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert generators() == states
    if failure is None:
        assert 0 < found.sample_seconds < 1
    else:
        assert found.problem == (
            "out of memory" if isinstance(failure, torch.OutOfMemoryError) else "ValueError: no such column"
        )
        assert found.out_of_memory is isinstance(failure, torch.OutOfMemoryError)


def test_a_way_that_crashed_is_left_out_the_next_time(tmp_path: Path) -> None:
    file, way, job = tmp_path / "probes.jsonl", StepWay(micro_batch=5), make_job(VARIANT)
    process = multiprocessing.get_context("fork").Process(target=Journal(file).begin, args=(way,))
    process.start()
    process.join()
    assert process.exitcode == 0, "the line is written, and the process gone"
    probe = probe_of(job, job.model(), Journal(file))
    assert probe(way, 0.05).problem == "the last start crashed while it was tried"
    assert not probe(StepWay(micro_batch=6), 0.0).problem
    assert not probe_of(job, job.model(), Journal(file))(StepWay(micro_batch=6), 0.0).problem


def test_a_way_that_another_job_is_trying_has_not_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, way = tmp_path / "probes.jsonl", StepWay(micro_batch=5)
    Journal(file).begin(way)
    assert not Journal(file).crashed_in(way)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")  # whose processes cannot be asked
    assert not Journal(file).crashed_in(way)
    Journal(file).begin(StepWay(micro_batch=6))
    Journal(file).end(StepWay(micro_batch=6))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert Journal(file).crashed_in(way)
    assert not Journal(file).crashed_in(StepWay(micro_batch=6))


@pytest.mark.parametrize("factor", [100.0, math.nan])
def test_a_precision_that_strays_is_rejected_and_named(factor: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        lost = factor if output.dtype == torch.bfloat16 else 1.0
        return functional.cross_entropy(output.float(), batch[1]) * lost

    job = make_job(VARIANT, loss=loss)
    probe = probe_of(job, job.model(), Journal(None))
    assert not probe(StepWay(micro_batch=5), 0.0).problem
    assert "more than bf16 explains" in probe(StepWay(micro_batch=5, precision="bf16"), 0.0).problem


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("label")

    with pytest.raises(DrivetrainError, match="a step of this job cannot be run: KeyError"):
        planned(tmp_path, make_job(VARIANT, loss=loss), measure=True)
    with pytest.raises(DrivetrainError, match="can only be iterated"):
        planned(tmp_path, make_job(VARIANT, data=iter([(torch.zeros(6), torch.tensor(0))] * 40)), measure=True)


def plan_in_world(folder: str) -> str:
    found = planned(Path(folder), measure=True)
    return str(found.to_json())


def test_ranks_plan_alike(tmp_path: Path, gloo_pool: GlooPool) -> None:
    first, second = (json.loads(text) for text in gloo_pool.run(plan_in_world, str(tmp_path), world=2))
    assert first == second
    assert first["choices"]["distributed.strategy"]["value"] == "ddp"
    assert first["choices"]["batch.size"]["value"] == 10
    assert first["choices"]["distributed.strategy"]["reason"] == "2 processes, each with a whole copy of the model"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_of_all_shows_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, rank: int
) -> None:
    monkeypatch.setattr(showing, "find_place", lambda: ProcessPlace("torchrun", rank, 2))
    file = tmp_path / "p.yaml"
    assert main(["plan", "digits", "--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--out", str(file)]) == 0
    assert bool(capsys.readouterr().out) == file.exists() == (rank == 0)


def test_processes_to_plan_for_are_started_as_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launching, "start", lambda *given, **options: started.append(given) or 0)
    flags = ["--out", str(tmp_path / "p.yaml"), "--output-dir", str(tmp_path)]
    assert main(["plan", "digits", "--cpu", "--num-processes", "3", "--epochs", "2", "--measure", *flags]) == 0
    ((words, script, options, _, _),) = started
    assert words[:3] == ("command", "plan", "digits")
    assert {"--budget.epochs=2", "--measure=True", f"--out={tmp_path / 'p.yaml'}"} <= set(words)
    assert (script, options.num_processes, options.cpu, options.max_restarts) == (None, 3, True, 0)
    assert not options.log_dir.exists(), "nothing is left of a plan that was made"
    assert main(["plan", "digits", "--num-processes", "2", "--for", "4xL4"]) == 2
    assert "--for plans for a machine that is not here" in capsys.readouterr().err
    started_by_others = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in started_by_others.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", "digits", "--num-processes", "2"]) == 2
    assert "started 2 processes already" in capsys.readouterr().err
    assert len(started) == 1


@pytest.mark.parametrize(
    ("flags", "numbers"), [([], [4]), (["--num-processes", "2"], [2]), (["--gpu-mode", "cpu"], [])]
)
def test_a_plan_is_for_the_devices_that_train_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], numbers: list[int]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launching, "start", lambda *given, **options: started.append(given) or 0)
    monkeypatch.setattr(launching, "detect", lambda *_: load("4x-l4"))
    assert main(["plan", "digits", "--output-dir", str(tmp_path), *flags]) == 0
    assert [make_layout(options, hardware).num_processes for _, _, options, hardware, _ in started] == numbers


def test_what_is_written_pins_what_was_said(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "plan.yaml"
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path)]
    assert main(["plan", "digits", "--max-steps", "4", "--out", str(file), *flags]) == 0
    shown = capsys.readouterr().out
    assert "By rule: nothing was measured" in shown
    assert main(["train", "digits", "--max-steps", "4", "--plan", str(file), *flags]) == 0
    assert main(["train", "digits", "--max-steps", "4", "--name", "plain", *flags]) == 0
    rows = [(tmp_path / name / "steps.jsonl").read_text().splitlines() for name in ("digits", "plain")]
    losses = [[json.loads(line)["loss"] for line in run] for run in rows]
    assert losses[0] == losses[1], "a plan divides the same work, and changes nothing of it"


def test_a_script_is_planned_and_not_trained(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch, drivetrain as dt\n"
        "from torch.utils.data import TensorDataset\n"
        "job = dt.Job(name='mine', model=lambda: torch.nn.Linear(3, 2), data=TensorDataset(torch.randn(32, 3)),\n"
        "             loss=lambda m, b: m(b[0]).square().mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "             global_batch=8, epochs=1)\n"
        "dt.train(job)\n"
        "print('after training')\n"
    )
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path / "runs")]
    assert main(["plan", str(script), "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job"] == "mine"
    assert found["num_steps"] == 4
    assert not (tmp_path / "runs").exists()


def steps_of(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / name / "steps.jsonl").read_text().splitlines()]
    return [(row["samples"], row["loss"]) for row in rows]


def recorded(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / name / "plan.yaml").read_text())
    return found


@pytest.mark.parametrize(
    "recipe",
    [name if name in ("digits", "gpt") else pytest.param(name, marks=pytest.mark.soak) for name in RECIPES.names()],
)
def test_a_plan_leaves_the_global_batch_of_a_recipe_alone(tmp_path: Path, recipe: str) -> None:
    text = tmp_path / "book.txt"
    text.write_text("What is said three times is true. " * 400)
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--no-report", "--quiet", "--max-steps", "1"]
    flags += ["--data", str(text)] if recipe == "gpt" else []
    assert main(["train", recipe, "--name", "plain", *flags]) == 0
    plain = steps_of(tmp_path, "plain")
    for name, choice in (("size", "batch.size: {value: 8}"), ("accumulation", "batch.accumulation: {value: 3}")):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"choices:\n  {choice}\n")
        assert main(["train", recipe, "--name", name, "--plan", str(file), *flags]) == 0
        planned = steps_of(tmp_path, name)
        assert [samples for samples, _ in planned] == [samples for samples, _ in plain]
        if recipe != "email-sequence":  # its dropout draws other numbers for another division
            assert planned[0][1] == pytest.approx(plain[0][1], rel=1e-3)
        assert recorded(tmp_path, name)["micro_batch"] < recorded(tmp_path, "plain")["micro_batch"]


SCRIPT = (
    "import torch, drivetrain as dt\n"
    "from torch.utils.data import TensorDataset\n"
    "job = dt.Job(name='mine', model=lambda: torch.nn.Linear(3, 2), data=TensorDataset(torch.randn(32, 3)),\n"
    "             loss=lambda m, b: m(b[0]).square().mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
    "             global_batch={}, epochs=1)\n"
    "dt.train(job)\n"
)


def test_a_plan_for_steps_of_another_size_is_refused(tmp_path: Path, capsys: Any) -> None:
    file, script = tmp_path / "a.yaml", tmp_path / "mine.py"
    script.write_text(SCRIPT.format(8))
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--max-steps", "2"]
    assert main(["plan", "digits", "--batch-size", "16", "--out", str(file), *flags]) == 0
    for target, own in (("digits", 64), (str(script), 8)):
        assert main(["train", target, "--plan", str(file), *flags]) == 2
        said = capsys.readouterr().err
        assert f"{file}: it is a plan for steps of 16 samples, and a step of this job has {own}" in said
        assert f"drivetrain plan TARGET --out {file}" in said
    assert main(["plan", "digits", "--plan", str(file), "--for", "4xL4", *flags]) == 2
    assert main(["train", "digits", "--plan", str(file), "--batch-size", "16", *flags]) == 0
    assert [samples for samples, _ in steps_of(tmp_path, "digits")] == [16, 16]


def test_a_job_without_a_global_batch_takes_the_plans(tmp_path: Path) -> None:
    file, script = tmp_path / "a.yaml", tmp_path / "mine.py"
    script.write_text(SCRIPT.format(None))
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--no-report"]
    file.write_text("global_batch: 10\nchoices:\n  batch.size: {value: 4}\n")
    assert main(["train", str(script), "--plan", str(file), *flags]) == 0
    assert [samples for samples, _ in steps_of(tmp_path, "mine")] == [10, 10, 10, 2]


def test_every_choice_that_is_written_can_be_read(tmp_path: Path) -> None:
    readable = {setting.name for setting in SETTINGS if setting.is_planned}
    assert set(planned(tmp_path, measure=True).choices) <= readable
    source = inspect.getsource(description) + inspect.getsource(other_machine)
    written = {told.setting for knob in KNOBS for told in knob.lines}
    written |= set(re.findall(r'"((?:\w+)\.(?:\w+))": (?:Choice|_strategy|settings|workers|sharded_rest)', source))
    written |= set(re.findall(r'choices\["([\w.]+)"\] = ', source))
    assert written == readable


def test_a_strategy_of_a_plan_that_does_not_fit_is_told_by_file_and_line(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "l4.yaml"
    file.write_text("choices:\n  batch.size: {value: 16}\n  distributed.strategy: {value: ddp}\n")
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path)]
    assert main(["train", "digits", "--plan", str(file), *flags]) == 2
    said = capsys.readouterr().err
    assert "distributed.strategy (l4.yaml line 3): ddp needs several processes, and this is the only one" in said
    assert "--parallel-strategy" not in said
    assert f"drivetrain plan TARGET --out {file}" in said


def test_a_plan_that_does_not_hold_the_step_is_told_by_file_and_line(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("choices:\n  batch.size: {value: 16}\n  batch.accumulation: {value: 2}\n")
    assert main(["train", "digits", "--plan", str(file), "--gpu-mode", "cpu", "--output-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "batch.size (a.yaml line 2): 16 × 2 × 1 devices do not hold the 64 samples" in said
    assert "--accumulation-steps" not in said


def test_steps_that_cannot_be_captured_are_not_called_captured(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "a.yaml"
    file.write_text('choices:\n  kernels.capture: {value: "on"}\n')
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--no-report", "--max-steps", "2"]
    assert main(["train", "digits", "--plan", str(file), *flags]) == 0
    said = capsys.readouterr().out
    assert "eager, captured" not in said
    assert "not captured: only CUDA devices" in " ".join(said.split())
    found = recorded(tmp_path, "digits")
    assert "captured" not in found["way"]
    choice = found["choices"]["kernels.capture"]
    assert (choice["value"], choice["why"]) == (
        "off",
        "asked for, but only CUDA devices replay a step, and this run is on cpu",
    )


def test_a_plan_says_what_cannot_be_captured(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "a.yaml"
    assert main(["plan", "digits", "--gpu-mode", "cpu", "--capture", "on", "--out", str(file)]) == 0
    choice = yaml.safe_load(file.read_text())["choices"]["kernels.capture"]
    assert choice["value"] == "off"
    assert choice["why"].startswith("asked for, but only CUDA devices")


def test_a_budget_without_measuring_is_refused(tmp_path: Path, capsys: Any) -> None:
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path)]
    assert main(["plan", "digits", "--budget", "5", *flags]) == 2
    assert "nothing is measured without --measure" in capsys.readouterr().err
    file = tmp_path / "train.yaml"
    file.write_text("plan: {budget_seconds: 5}\n")
    assert main(["plan", "digits", "--config", str(file), *flags]) == 0, "of a file that is for training, too"


def test_lazy_modules_are_refused_with_a_remedy(tmp_path: Path) -> None:
    job = make_job(VARIANT, model=lambda: nn.Sequential(nn.LazyLinear(4)))
    for action in (
        lambda: planned(tmp_path, job),
        lambda: other_machine.plan_elsewhere(job, configure(), machine_named("4xL4"), load("4x-l4")),
    ):
        with pytest.raises(DrivetrainError, match=r"0\.weight of the model has no shape yet") as caught:
            action()
        assert "run one batch through the model" in caught.value.remedy


def test_lazy_modules_that_saw_a_batch_are_planned(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.LazyLinear(4))
        made(torch.zeros(1, 6))
        return made

    assert planned(tmp_path, make_job(VARIANT, model=model)).forecast.memory.parameters == 4 * 7 * 4

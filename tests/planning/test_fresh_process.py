"""Trying whether a job's steps repeat: in fresh processes that run its script again, and in this one."""

import importlib.util
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpointer
from drivetrain.commands.in_process import _answer
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.tune import Measurement, Repeatability, RepeatTrial
from drivetrain.planning import fresh_process, planner
from drivetrain.planning.fresh_process import FirstSteps, RepeatProbe, _digest
from drivetrain.run import CHECKPOINTS, Session, session
from drivetrain.run.model_factory import build_model
from tests import warm_python

# A script whose loss is off by what differs between two processes, or not at all.
SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
import drivetrain as dt
from drivetrain.config import configure
from drivetrain.planning import planner

planner.LEAST_STEPS, planner.LEAST_JOB_SECONDS, planner.REPEAT_SHARE = 1, 0.0, float("inf")
kind, folder = sys.argv[1:]
noise = {"process": lambda: os.getpid() % 997, "none": lambda: 0}[kind]

def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1]) * (1 + 1e-4 * noise())

print("what a script prints is not an answer")
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator))
job = dt.Job(name="job", model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)), data=data,
             loss=loss, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2), global_batch=8, max_steps=8)
dt.train(job, configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, deterministic=True))
"""


@pytest.mark.parametrize(
    ("kind", "value"), [("process", "no"), pytest.param("none", "yes", marks=pytest.mark.soak)], ids=["no", "yes"]
)
def test_a_script_is_run_again_in_a_fresh_process(kind: str, value: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = warm_python.run([str(script), kind, str(tmp_path)])  # the fresh one is started by it
    assert done.returncode == 0, done.stderr
    row = yaml.safe_load((tmp_path / "job" / "plan.yaml").read_text())["repeatable"]
    assert row["value"] == value
    if kind == "process":
        assert "the loss of step 1 differs between two runs of the same job" in row["why"]
        assert "repeats    no: the loss of step 1" in done.stdout
    else:
        assert "in a fresh process" in row["why"]
    events = [json.loads(line) for line in (tmp_path / "job" / "events.jsonl").read_text().splitlines()]
    assert [event["value"] for event in events if event["event"] == "repeatable"] == [value]


def test_a_module_of_python_m_is_run_again_as_a_module(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "constants.py").write_text("FACTOR = 1e-4\n")
    code = SCRIPT.replace("import drivetrain as dt", "import drivetrain as dt\nfrom .constants import FACTOR")
    (package / "training.py").write_text(code.replace("1e-4 *", "FACTOR *"))
    done = warm_python.run(["-m", "mine.training", "process", str(tmp_path)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    row = yaml.safe_load((tmp_path / "job" / "plan.yaml").read_text())["repeatable"]
    assert row["value"] == "no"
    assert "the loss of step 1 differs between two runs of the same job" in row["why"]


def test_a_librarys_runner_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m pytest` may train, too: to run that again would run all tests up to the one that does."""
    for name, found in {"pytest.__main__": "", "unittest.__main__": "", "tests.waits": "tests.waits"}.items():
        main, spec = types.ModuleType("__main__"), importlib.util.find_spec(name)
        assert spec is not None
        main.__spec__, main.__file__ = spec, spec.origin
        monkeypatch.setitem(sys.modules, "__main__", main)
        assert session.module_of_run() == found


def job_of(loss: Callable[..., Tensor] | None = None, model: Any = None, **changes: Any) -> Job:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator))
    return Job(
        **{
            "name": "job",
            "model": model or (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))),
            "data": data,
            "loss": loss or (lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])),
            "optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
            "global_batch": 8,
            "max_steps": 8,
            **changes,
        }
    )


def noisy(model: nn.Module, batch: Any) -> Tensor:
    noise = int.from_bytes(os.urandom(4), "big") * 1e-12
    return functional.cross_entropy(model(batch[0]), batch[1]) * (1 + noise)


@pytest.fixture
def short_jobs_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LEAST_STEPS", 1)
    monkeypatch.setattr(planner, "LEAST_JOB_SECONDS", 0.0)
    monkeypatch.setattr(planner, "REPEAT_SHARE", math.inf)


@pytest.fixture
def setups(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    made: list[Session] = []

    def make(job: Job, **settings: Any) -> Session:
        settings = {"gpu_mode": "cpu", "num_workers": 0, **settings}
        made.append(Session.join(job, configure(output_dir=tmp_path, **settings), quiet=True))
        return made[-1]

    yield make
    for run in made:
        run.close_loaders()
        run.close()


def plan_of(folder: Path) -> dict[str, Any]:
    found = yaml.safe_load((folder / "plan.yaml").read_text())
    assert isinstance(found, dict)
    return found


def trained(folder: Path, job: Job, **settings: Any) -> dict[str, Any]:
    settings = {"gpu_mode": "cpu", "num_workers": 0, "report": False, **settings}
    return plan_of(train(job, configure(output_dir=folder, **settings), quiet=True).folder)


@pytest.mark.usefixtures("short_jobs_are_tried")
def test_where_no_other_process_can_make_the_job_it_is_run_twice_here(tmp_path: Path) -> None:
    found = trained(tmp_path / "a", job_of(), deterministic=True)
    assert found["repeatable"]["value"] == "yes"
    assert "a restart was not tried" in found["repeatable"]["why"]
    assert found["choices"]["kernels.repeatable"]["value"] == "strict"
    found = trained(tmp_path / "b", job_of(noisy), deterministic=True)
    assert found["repeatable"]["value"] == "no"


def test_trying_leaves_no_trace(tmp_path: Path, short_jobs_are_tried: None) -> None:
    """Bit for bit: the run is the same whether its first steps were tried before or not."""
    trained(tmp_path / "tried", job_of(), deterministic=True)
    trained(tmp_path / "plain", job_of(), auto_optimize=False)

    def losses(name: str) -> list[float]:
        rows = (tmp_path / name / "job" / "steps.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]

    assert losses("tried") == losses("plain")


def test_the_first_steps_are_those_of_the_run(setups: Callable[..., Session], tmp_path: Path) -> None:
    """Their losses are those that `train` writes down: the same batches, the same dropout, the same updates."""
    run = setups(job_of())
    bits = FirstSteps(run, build_model(run)).bits(run.way)
    assert bits.problem == ""
    assert bits.repeats_here
    folder = train(job_of(), configure(output_dir=tmp_path / "run", gpu_mode="cpu", report=False), quiet=True).folder
    rows = [json.loads(row) for row in (folder / "steps.jsonl").read_text().splitlines()]
    sums = [float.fromhex(row.split()[0]) for row in bits.losses]
    assert sums == [row["loss"] for row in rows[: len(sums)]] or sums == [8 * row["loss"] for row in rows[: len(sums)]]


@pytest.mark.usefixtures("short_jobs_are_tried")
def test_what_was_found_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[StepWay] = []

    def elsewhere(self: object, way: StepWay) -> RepeatTrial:
        calls.append(way)
        return RepeatTrial(way=way, repeats=True)

    monkeypatch.setattr(fresh_process.RepeatProbe, "elsewhere", elsewhere)
    monkeypatch.setattr(planner, "MUCH_SLOWER", math.inf)  # else a busy machine has everything measured again
    first = trained(tmp_path / "a", job_of(), deterministic=True)
    second = trained(tmp_path / "b", job_of(), deterministic=True)
    assert len(calls) == 1
    assert first["repeatable"] == second["repeatable"]
    trained(tmp_path / "c", job_of(), deterministic=True, plan_cache=False)
    assert len(calls) == 2


def test_a_short_job_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LEAST_STEPS", 1)
    found = trained(tmp_path / "a", job_of(), deterministic=True)
    assert found["repeatable"]["value"] == "not measured"
    assert "s of work are left, too little to spend some" in found["repeatable"]["why"]
    found = trained(tmp_path / "b", job_of())
    assert found["repeatable"]["why"].startswith("not measured: on a CPU")
    found = trained(tmp_path / "c", job_of(), repeatable="off")
    assert "--repeatable off" in found["repeatable"]["why"]


@pytest.mark.usefixtures("short_jobs_are_tried")
def test_a_resumed_run_keeps_what_was_found_and_the_kernels(setups: Callable[..., Session], tmp_path: Path) -> None:
    trained(tmp_path, job_of(max_steps=8), repeatable="fixed")
    folder = tmp_path / "job"
    checkpoint = Checkpointer(folder / CHECKPOINTS, World()).latest()
    assert checkpoint is not None
    meta = checkpoint.meta["plan"]
    assert meta["way"]["repeat"] == "fixed"
    assert Repeatability.model_validate(meta["repeatable"]).value is True
    run = setups(job_of(), repeatable="auto")
    before = run.planned
    planned = planner.make_plan(run, build_model(run), checkpoint)
    assert planned.way.repeat == "fixed", "nobody asked for something else"
    assert planned.plan is not None
    assert planned.plan.repeatable.value is True
    assert run.planned is before, "planning changes nothing of the run"
    run = setups(job_of(), repeatable="off")
    planned = planner.make_plan(run, build_model(run), checkpoint)
    assert planned.plan is not None
    assert (planned.way.repeat, planned.plan.repeatable.value) == ("off", None)


def test_a_way_of_an_older_checkpoint_loads() -> None:
    assert StepWay.model_validate({"micro_batch": 3, "precision": "bf16"}).repeat == "off"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_digest_tells_one_bit(dtype: torch.dtype) -> None:
    tensor = torch.zeros(50, dtype=torch.float64).to(dtype)
    digests = {int(_digest(tensor)), int(_digest(tensor[:49]))}
    for index in range(50):
        other = tensor.clone()
        other[index] = 1
        digests.add(int(_digest(other)))
    assert len(digests) == 52
    assert int(_digest(torch.tensor([0.0]))) != int(_digest(torch.tensor([-0.0]))), "bits, not values"


def test_a_cpu_repeats_with_the_fastest_kernels(setups: Callable[..., Session]) -> None:
    """So that nothing has to be tried there: convolutions, attention, embeddings and recurrent dropout, all threads."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 8)
            self.convolution = nn.Conv1d(8, 8, 3, padding=1)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
            self.recurrent = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.embedding((inputs.abs() * 3).long() % 5)
            hidden = self.layer(self.convolution(hidden.transpose(1, 2)).transpose(1, 2))
            result: Tensor = self.out(self.recurrent(hidden)[0][:, -1])
            return result

    run = setups(job_of(model=Model))
    built = build_model(run)
    first, second = (FirstSteps(run, built).bits(run.way) for _ in range(2))
    assert first.problem == ""
    assert first.repeats_here
    assert first.difference(second) == ""
    assert FirstSteps(run, built).bits(run.way.but(repeat="strict")).difference(first) == "", "the same numbers, too"


def test_memory_that_another_way_holds_is_given_back(
    setups: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step holds its activations: of large models, two ways do not fit side by side."""
    run = setups(job_of())
    steps, one = FirstSteps(run, build_model(run)), FirstSteps._once

    def fits_alone(steps: FirstSteps, run: Session) -> Any:
        if set(steps._ready) - {run.way}:
            raise torch.OutOfMemoryError
        return one(steps, run)

    ways = [run.way, run.way.but(repeat="strict")]
    expected = [steps.bits(way) for way in ways]
    assert not any(bits.problem for bits in expected)
    steps.release()
    monkeypatch.setattr(FirstSteps, "_once", fits_alone)
    assert [steps.bits(way) for way in ways] == expected
    with pytest.raises(KeyError):  # which the caller takes for a cost that is not known
        steps.seconds(ways)
    monkeypatch.setattr(FirstSteps, "_once", _never_fits)
    assert steps.bits(run.way).problem == "out of memory"


def _never_fits(steps: FirstSteps, run: Session) -> Any:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("free_gib", "captured", "expected"),
    [
        (100, False, (16, True)),
        (100, True, (16, False)),
        (130, True, (16, True)),
        (60, False, (16, False)),
        (30, False, (4, False)),
        (15, False, (0, False)),
    ],
)
def test_both_run_at_once_where_the_memory_holds_what_each_needs(
    free_gib: int, captured: bool, expected: tuple[int, bool]
) -> None:
    """A step takes 40 GiB, 9 of them for what stays; a graph keeps all of it."""
    run: Any = types.SimpleNamespace(
        world=World(device=torch.device("cuda")),
        free_bytes=lambda: free_gib << 30,
        config=types.SimpleNamespace(memory=types.SimpleNamespace(gpu_fraction=1.0)),
    )
    chosen = Measurement(
        sample_seconds=1.0, peak_bytes=40 << 30,
        parameter_bytes=2 << 30, gradient_bytes=2 << 30, optimizer_bytes=5 << 30,
    )  # fmt: skip
    way = StepWay(precision="bf16", micro_batch=16, capture=captured)
    assert planner._micro_batch_of_copies(run, way, chosen) == expected


def test_the_first_step_of_a_long_job_waits_a_minute_at_most() -> None:
    """A job of ten minutes, one of two hours, and one of two days."""
    assert [planner.repeat_seconds(left) for left in (600.0, 7200.0, 172_800.0)] == [30.0, 60.0, 864.0]


class Answering:
    """Answers as the fresh process does, from this one: computes when it is asked for its answer."""

    def __init__(self, steps: FirstSteps, told: list[str]) -> None:
        self._steps, self._told = steps, told
        self._answers: list[Callable[[], dict[str, Any]]] = [lambda: {"ready": True}]

    def tell(self, question: dict[str, Any]) -> None:
        self._told.append("asked")
        self._answers.append(lambda: _answer(self._steps, question))

    def answer(self) -> dict[str, Any]:
        found = self._answers.pop(0)()
        self._told += ["answered"] if "bits" in found else []
        return found

    def close(self) -> None:
        assert not self._answers, "an answer was not awaited"


@pytest.mark.parametrize("holds_both", [True, False])
def test_a_variant_is_compiled_here_and_in_the_fresh_process_at_once(
    setups: Callable[..., Session], no_kernels: None, monkeypatch: pytest.MonkeyPatch, holds_both: bool
) -> None:
    run = setups(job_of())
    told: list[str] = []
    steps_of = FirstSteps.bits

    def bits(steps: FirstSteps, way: StepWay, *, twice: bool = True) -> Any:
        told.extend(["here"] if twice else [])
        return steps_of(steps, way, twice=twice)

    monkeypatch.setattr(FirstSteps, "bits", bits)
    monkeypatch.setattr(FirstSteps, "seconds", lambda steps, ways: [told.append("timed") or 1.0 for _ in ways])
    model = build_model(run)
    probe = RepeatProbe(run, model, run.way.micro_batch, holds_both=holds_both)
    monkeypatch.setattr(probe, "_child", Answering(FirstSteps(run, model), told))
    monkeypatch.setattr(probe, "_why_not_elsewhere", "")
    way = run.way.but(compile_mode="default")
    variant = way.but(repeat="strict")
    try:
        probe.here(way)
        assert probe.here(variant).repeats
        assert probe.cost_of(variant) == 0.0
        assert probe.elsewhere(variant).repeats
        assert probe.elsewhere(way).repeats, "what was not asked before is asked now"
    finally:
        probe.close()
    first = ["here", "asked", "here", "answered", "timed", "timed"]
    later = ["here", "here", "timed", "timed", "asked", "answered"]
    assert told == (first if holds_both else later) + ["asked", "answered"]

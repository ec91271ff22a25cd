"""`dt.sweep` and `drivetrain sweep`: variants, rungs, forks, and going on after whatever happened."""

import dataclasses
import importlib
import json
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.api import sweeping
from drivetrain.cli import main
from drivetrain.core.run_folder import read_rows
from drivetrain.run.claiming import fork_run
from tests import warm_python

QUIET = dt.configure(report=False, auto_optimize=False, monitor_gpu=False)
STEPS = 24
signals: list[int] = []  # seeds whose run gets a Ctrl-C


def make(lr: float, seed: int, epochs: int = 3) -> tuple[dt.Job, dt.Config]:
    """A line with dropout, so that randomness inside the model counts, too; 8 steps and a validation an epoch."""
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)

    def press(context: dt.StepContext) -> None:
        if seed in signals:
            signals.remove(seed)
            os.kill(os.getpid(), signal.SIGINT)

    job = dt.Job(
        name="line",
        model=lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)),
        data=TensorDataset(inputs, inputs.sin()),
        valid=TensorDataset(inputs, inputs.sin()),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9),
        schedule=dt.WarmupCosine(),
        global_batch=8,
        epochs=epochs,
        seed=seed,
        hooks=[dt.every(3, press)],
    )
    return job, QUIET


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["lr"]) for row in read_rows(folder / "steps.jsonl")[0]]


def trained(tmp_path: Path, lr: float, seed: int) -> Path:
    """The same run without a sweep."""
    job, config = make(lr, seed)
    run = config.run.model_copy(update={"name": f"plain-{lr}-{seed}", "output_dir": tmp_path})
    return dt.train(job, config.model_copy(update={"run": run}), quiet=True).folder


def folder_of(result: sweeping.SweepResult, lr: float, seed: int) -> Path:
    row = next(row for row in result.rows if row["settings"] == {"lr": lr})
    return Path(row["runs"][str(seed)]["folder"])


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    """A job without validation, and a metric that it does not have: each with what to do instead."""

    def unvalidated(lr: float, seed: int) -> tuple[dt.Job, Any]:
        job, config = make(lr, seed)
        return dataclasses.replace(job, valid=None, hooks=()), config

    with pytest.raises(dt.DrivetrainError, match="no validation set, so it has no valid_loss") as caught:
        dt.sweep(unvalidated, {"lr": [0.1, 0.2]}, name="blind", output_dir=tmp_path)
    assert "Job(valid=…)" in caught.value.remedy
    assert not [*(tmp_path / "blind").glob("*/steps.jsonl")], "nothing is trained in vain"
    assert dt.sweep(make, {"lr": [0.1, 0.2]}, name="blind", output_dir=tmp_path).is_done, "once it has one, it goes on"
    with pytest.raises(dt.DrivetrainError, match="no valid_f1 was measured: there is valid_loss"):
        dt.sweep(make, {"lr": [0.1]}, name="other", metric="valid_f1", mode="max", output_dir=tmp_path)


def test_a_grid_with_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = dt.sweep(make, {"lr": [0.1, 1e-5]}, seeds=[0, 1], output_dir=tmp_path)
    assert result.best == {"lr": 0.1}
    assert result.is_done
    assert [row["state"] for row in result.rows] == ["done", "done"]
    assert losses(folder_of(result, 0.1, 1)) == losses(trained(tmp_path, 0.1, 1))
    assert result.comparison is not None
    assert result.comparison.verdicts[0].kind == "cannot tell"
    assert len(result.comparison.verdicts[0].pairs) == 2
    assert "<h1>Sweep: 2 variants of 2 seeds each</h1>" in (tmp_path / "sweep" / "sweep.html").read_text()
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["variants"] == list(result.rows)
    assert "4/4" in capsys.readouterr().out


def test_halving_drops_the_worse_and_the_others_go_on_to_the_bit(tmp_path: Path) -> None:
    rates = [1e-6, 0.1, 1e-5, 0.05]
    result = dt.sweep(make, {"lr": rates}, halving=2, first_steps=8, output_dir=tmp_path, quiet=True)
    states = {row["settings"]["lr"]: (row["state"], row["rung"]) for row in result.rows}
    assert states[1e-6] == states[1e-5] == ("dropped", 8)
    assert sorted(states[rate] for rate in (0.1, 0.05)) == [("done", None), ("dropped", 16)]
    assert result.best is not None
    assert losses(folder_of(result, result.best["lr"], 0)) == losses(trained(tmp_path, result.best["lr"], 0))
    assert losses(folder_of(result, 1e-6, 0))[-1][0] < 16, "it stopped soon after its rung"


def test_rungs_are_those_of_the_length_that_is_asked_for(tmp_path: Path) -> None:
    """The configuration has the last word on it: --epochs 4 of a script that says 30."""

    def shorter(lr: float, seed: int) -> tuple[dt.Job, dt.Config]:
        config = dt.configure(report=False, auto_optimize=False, monitor_gpu=False, max_steps=12, valid_every=2)
        return make(lr, seed)[0], config

    result = dt.sweep(shorter, {"lr": [1e-6, 0.1]}, halving=2, output_dir=tmp_path, quiet=True)
    assert [(row["state"], row["rung"]) for row in result.rows] == [("dropped", 6), ("done", None)]
    dropped, done = (losses(folder_of(result, lr, 0))[-1][0] for lr in (1e-6, 0.1))
    assert dropped < done == 12


def test_it_goes_on_after_its_budget_without_doing_anything_twice(tmp_path: Path) -> None:
    first = dt.sweep(make, {"lr": [0.1, 0.05, 0.02]}, budget_steps=STEPS, output_dir=tmp_path, quiet=True)
    assert not first.is_done
    assert "budget of 24 steps" in first.why_stopped
    assert [row["state"] for row in first.rows] == ["done", "waiting", "waiting"]
    done = folder_of(first, 0.1, 0) / "steps.jsonl"
    before = done.stat().st_mtime_ns
    ledger = tmp_path / "sweep" / "sweep.json"
    text = ledger.read_text()
    second = dt.sweep(make, {"lr": [0.1, 0.05, 0.02]}, budget_steps=2 * STEPS, output_dir=tmp_path, quiet=True)
    assert [row["state"] for row in second.rows] == ["done", "done", "waiting"]
    ledger.write_text(text)  # as if it had been killed between the end of the run and the ledger
    third = dt.sweep(make, {"lr": [0.1, 0.05, 0.02]}, output_dir=tmp_path, quiet=True)
    assert third.is_done
    assert done.stat().st_mtime_ns == before
    assert len(list((tmp_path / "sweep").glob("*/job.yaml"))) == 3
    with pytest.raises(dt.DrivetrainError, match="another sweep: variants changed"):
        dt.sweep(make, {"lr": [0.1, 0.3]}, output_dir=tmp_path, quiet=True)


def test_no_run_begins_once_the_time_is_up_and_one_that_runs_pauses(tmp_path: Path) -> None:
    result = dt.sweep(make, {"lr": [0.1]}, budget_seconds=1e-9, output_dir=tmp_path, quiet=True)
    assert "is used up" in result.why_stopped
    task = sweeping.SweepTask(sweeping.FunctionMaker(make), {"lr": 0.1}, 0, tmp_path / "late", "valid_loss", None, 1.0)
    assert (outcome := sweeping.run_task(task))["state"] == "paused"
    assert outcome["step"] == 8
    assert sweeping.run_task(sweeping.SweepTask(**{**vars(task), "deadline": None}))["state"] == "done"
    assert losses(tmp_path / "late") == losses(trained(tmp_path, 0.1, 0))


def test_ctrl_c_keeps_what_is_done_and_the_next_start_goes_on(tmp_path: Path) -> None:
    signals.append(1)
    first = dt.sweep(make, {"lr": [0.1, 0.05]}, seeds=[0, 1, 2], output_dir=tmp_path, quiet=True)
    assert first.why_stopped == sweeping.INTERRUPTED
    assert [len(row["runs"]) for row in first.rows] == [2, 1]
    second = dt.sweep(make, {"lr": [0.1, 0.05]}, seeds=[0, 1, 2], output_dir=tmp_path, quiet=True)
    assert second.is_done
    assert losses(folder_of(second, 0.1, 1)) == losses(trained(tmp_path, 0.1, 1))


def test_a_variant_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    result = dt.sweep(make, {"lr": [-1.0, 0.1]}, output_dir=tmp_path, quiet=True)
    assert [row["state"] for row in result.rows] == ["failed", "done"]
    assert "learning rate: -1.0" in result.rows[0]["runs"]["0"]["error"]
    assert result.best == {"lr": 0.1}


def without_end(lr: float, seed: int) -> tuple[dt.Job, dt.Config]:
    job, config = make(lr, seed)
    return dataclasses.replace(job, epochs=0 if lr == 1 else 3), config


def test_a_variant_that_cannot_be_configured_says_why(tmp_path: Path) -> None:
    result = dt.sweep(without_end, {"lr": [1, 0.1]}, output_dir=tmp_path, quiet=True)
    error = result.rows[0]["runs"]["0"]["error"]
    assert "1 problem with the configuration: Job.epochs" in error
    assert "remedy" in error
    assert "\n" not in error


def test_a_fork_without_a_change_is_the_same_run_to_the_bit(tmp_path: Path) -> None:
    base = trunk(tmp_path, *make(0.1, 0))
    result = dt.sweep(make, {"lr": [0.1, 0.02]}, fork=f"{base}@8", output_dir=tmp_path, quiet=True)
    assert result.is_done
    same, other = losses(folder_of(result, 0.1, 0)), losses(folder_of(result, 0.02, 0))
    assert same == losses(base)
    assert other[:8] == same[:8]
    assert other[8][1] == same[8][1], "the loss of the first step after the fork is before its update"
    assert other[9][1] != same[9][1]
    assert [rate for _, _, rate in other[8:]] == pytest.approx([rate / 5 for _, _, rate in same[8:]])
    with pytest.raises(dt.DrivetrainError, match="no checkpoint of step 5"):
        fork_run(base, tmp_path / "x", 5)
    for _ in range(2):
        with pytest.raises(dt.DrivetrainError, match=r"trunk is at the end of the job: nothing is left") as refused:
            dt.sweep(make, {"lr": [0.1, 0.02]}, name="none", fork=base, output_dir=tmp_path, quiet=True)
        assert "trunk@STEP" in refused.value.remedy
        assert not list(tmp_path.glob("none/*-seed-*")), "it would count as trained when the sweep goes on"


def test_a_fork_of_nothing_ends_the_sweep_and_keeps_no_failure(tmp_path: Path) -> None:
    """Once the checkpoint is there, the same command goes on; a folder may have an @ in its name."""
    folder = tmp_path / "a@home" / "trunk"

    def swept(fork: str) -> sweeping.SweepResult:
        return dt.sweep(make, {"lr": [0.1, 0.02]}, fork=fork, output_dir=tmp_path, quiet=True)

    with pytest.raises(dt.DrivetrainError, match="trunk has no checkpoint of step 8 to fork from") as refused:
        swept(f"{folder}@8")
    assert "train it first" in refused.value.remedy
    assert trunk(tmp_path / "a@home", *make(0.1, 0)) == folder
    assert swept(f"{folder}@8").is_done
    with pytest.raises(dt.DrivetrainError, match="trunk@late has no checkpoint to fork from"):
        dt.sweep(make, {"lr": [0.1]}, name="late", fork=f"{folder}@late", output_dir=tmp_path, quiet=True)


class Slowing(torch.optim.SGD):
    """Keeps a number of its own in its groups, as Prodigy does: each step is shorter than the one before."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["length"] = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["length"] *= 0.9
            group["lr"] = group["lr"] * group["length"]
        return super().step(closure)


def make_decayed(
    weight_decay: float | None, seed: int, kind: Any = torch.optim.SGD, is_frozen: bool = False
) -> tuple[dt.Job, dt.Config]:
    job, config = make(0.1, seed)

    def model() -> nn.Module:
        made: Any = job.model()
        made[0].bias.requires_grad_(not is_frozen)
        return made

    optimizer = partial(kind, lr=0.1, momentum=0.9)
    return dataclasses.replace(job, model=model, optimizer=optimizer, weight_decay=weight_decay), config


def trunk(tmp_path: Path, job: dt.Job, config: dt.Config) -> Path:
    """A run with a checkpoint after each epoch."""
    run = config.run.model_copy(update={"name": "trunk", "output_dir": tmp_path})
    saves = config.checkpoint.model_copy(update={"every": 8, "keep_last": 9})
    return dt.train(job, config.model_copy(update={"run": run, "checkpoint": saves}), quiet=True).folder


@pytest.mark.parametrize("kind", [torch.optim.SGD, Slowing])
def test_a_fork_has_another_weight_decay(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    """It makes other groups of the optimizer; each weight has its moments all the same."""
    make_it = partial(make_decayed, kind=kind)
    base = trunk(tmp_path, *make_it(None, 0))
    result = dt.sweep(make_it, {"weight_decay": [None, 0.0, 0.3]}, fork=f"{base}@8", output_dir=tmp_path, quiet=True)
    assert [row["state"] for row in result.rows] == ["done", "done", "done"]
    none, zero, some = (losses(Path(row["runs"]["0"]["folder"])) for row in result.rows)
    assert none == zero == losses(base)
    assert some[:9] == none[:9]
    assert some[9][1] != none[9][1]
    grouped = trunk(tmp_path / "grouped", *make_it(0.0, 0))
    back = dt.sweep(
        make_it, {"weight_decay": [None]}, fork=f"{grouped}@8", output_dir=tmp_path, name="back", quiet=True
    )
    assert losses(Path(back.rows[0]["runs"]["0"]["folder"])) == none, "two groups become one"


def test_a_fork_of_other_weights_is_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = trunk(tmp_path, *make_decayed(None, 0))
    frozen = partial(make_decayed, is_frozen=True)
    result = dt.sweep(frozen, {"weight_decay": [None]}, fork=f"{base}@8", output_dir=tmp_path)
    told = capsys.readouterr().out
    assert "seed 0: failed: " in told
    assert "valid_loss" not in told, "that of the run it was forked from is none of its own"
    error = result.rows[0]["runs"]["0"]["error"]
    assert "only in the checkpoint: 0.bias" in error
    assert "--init-from" in error
    assert "--name" not in error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": []}, "no variants"),
        ({"variants": [{"lr": 1}, {"lr": 1}]}, "twice"),
        ({"seeds": [1, 1]}, "twice"),
        ({"seeds": [-1]}, "at least 0"),
        ({"metric": "valid_thing"}, "less or more of valid_thing"),
        ({"halving": 1}, "halving"),
        ({"parallel": 0}, "processes"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.sweep(make, **{"variants": {"lr": [0.1]}, "output_dir": tmp_path, "quiet": True, **changes})


def with_worker(lr: float, seed: int) -> tuple[dt.Job, dt.Config]:
    """The same job; workers of its loader would be started as those of a run without a sweep."""
    job, config = make(lr, seed)
    assert multiprocessing.get_start_method() == os.environ["START_METHOD"]
    return job, config


def _wait_for_a_run(output_dir: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not [*output_dir.glob("sweep/*/job.yaml")]:
        time.sleep(0.02)


def test_several_processes_do_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is a fresh interpreter, which takes seconds of CPU time to import torch; the other waits for it."""
    monkeypatch.setenv("START_METHOD", multiprocessing.get_start_method())
    ways = [warm_python.spawn, partial(warm_python.spawn_by_fork, first=partial(_wait_for_a_run, tmp_path))]

    def start(path: bytes, words: list[Any], descriptors: list[int]) -> int:
        is_worker = "--multiprocessing-fork" in words
        return int((ways.pop(0) if is_worker else warm_python.spawn)(path, words, descriptors))

    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", start)
    result = dt.sweep(with_worker, {"lr": [0.1, 0.05]}, seeds=[0, 1], parallel=2, output_dir=tmp_path, quiet=True)
    assert result.is_done
    assert not ways, "two processes were started"
    assert [row["state"] for row in result.rows] == ["done", "done"], "a loader's workers are started as elsewhere"
    for lr in (0.1, 0.05):
        assert losses(folder_of(result, lr, 1)) == losses(trained(tmp_path, lr, 1))


def _sweep_until_killed(output_dir: Path) -> None:
    os.setsid()  # a signal to its group reaches its processes, and not those of the tests
    start = partial(warm_python.spawn_by_fork, first=partial(time.sleep, 0.5))  # a signal may come in that time
    multiprocessing.util.spawnv_passfds = start  # type: ignore[attr-defined]
    result = dt.sweep(slow, {"lr": [0.1, 0.05]}, seeds=[0, 1], parallel=2, output_dir=output_dir, quiet=True)
    (output_dir / "why").write_text(result.why_stopped)


def slow(lr: float, seed: int) -> tuple[dt.Job, dt.Config]:
    """The same job, which takes its time in the sweep that is killed."""
    job, config = make(lr, seed)
    delay = dt.every(1, lambda context: time.sleep(0.2 if "SLOW_SWEEP" in os.environ else 0.0))
    return dataclasses.replace(job, hooks=[*job.hooks, delay]), config


def ledger(folder: Path) -> Any:
    """The ledger, which has to be JSON in the strict sense at every moment; without seconds and places."""
    found = json.loads((folder / "sweep.json").read_text(), parse_constant=pytest.fail)
    for outcome in (each for row in found["variants"] for each in row["runs"].values()):
        outcome |= {"seconds": 0.0, "folder": Path(outcome["folder"]).name}
    return {**found, "seconds": 0.0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_a_sweep_that_is_ended_with_its_processes_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """All of it gets the signal: in the middle of runs if killed, else while its processes are being started."""
    monkeypatch.setenv("SLOW_SWEEP", "1")
    process = warm_python.warm_context.Process(target=_sweep_until_killed, args=(tmp_path,))
    process.start()
    needed = 2 if number == signal.SIGKILL else 0
    while len([path for path in tmp_path.glob("sweep/*/steps.jsonl") if path.stat().st_size > 300]) < needed or not (
        (tmp_path / "sweep" / "sweep.json").exists() and psutil.Process(process.pid).children()
    ):
        time.sleep(0.02)
        assert process.is_alive()
        assert not (tmp_path / "sweep" / "sweep.json").exists() or ledger(tmp_path / "sweep")
    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    process.join()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
    if number == signal.SIGINT:
        assert (tmp_path / "why").read_text() == sweeping.INTERRUPTED
    monkeypatch.delenv("SLOW_SWEEP")
    result = dt.sweep(slow, {"lr": [0.1, 0.05]}, seeds=[0, 1], output_dir=tmp_path, quiet=True)
    assert result.is_done
    dt.sweep(slow, {"lr": [0.1, 0.05]}, seeds=[0, 1], output_dir=tmp_path / "undisturbed", quiet=True)
    assert ledger(tmp_path / "sweep") == ledger(tmp_path / "undisturbed" / "sweep")
    for folder in (tmp_path / "sweep").glob("0*"):
        assert losses(folder) == losses(tmp_path / "undisturbed" / "sweep" / folder.name)


def test_sigterm_ends_a_sweep_as_ctrl_c_does() -> None:
    """It comes to one process, and those that train hear of it, but no process that was there before."""
    context = multiprocessing.get_context("fork")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in the children, too, which wait for it
    try:
        other, child = (context.Process(target=signal.sigwait, args=({signal.SIGINT},)) for _ in range(2))
        other.start()
        with pytest.raises(KeyboardInterrupt):
            _start_and_be_ended(child)
        child.join()
        other.join(0.2)  # it would end as the other did
        assert other.is_alive()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.kill()
        other.join()
    assert child.exitcode == 0


def _start_and_be_ended(child: multiprocessing.process.BaseProcess) -> None:
    with sweeping._ended_as_by_ctrl_c():
        child.start()
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_variant_without_a_finite_value_has_failed(tmp_path: Path) -> None:
    """Its ledger is JSON that everybody reads, and it is not the best."""
    result = dt.sweep(diverging, {"is_endless": [False, True]}, output_dir=tmp_path, quiet=True)
    assert [row["state"] for row in ledger(tmp_path / "sweep")["variants"]] == ["done", "failed"]
    assert "valid_loss is inf at step 24" in result.rows[1]["runs"]["0"]["error"]
    assert result.best == {"is_endless": False}


def diverging(is_endless: bool, seed: int) -> tuple[dt.Job, dt.Config]:
    job, config = make(0.1, seed)
    inputs = torch.ones(4, 1)
    return dataclasses.replace(job, valid=TensorDataset(inputs, inputs * (math.inf if is_endless else 1.0))), config


def test_optuna_searches_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="no Optuna here: its search is not tried (pip install 'drivetrain[sweep]')")
    spec = sweeping.SweepSpec("found", search={"lr": [1e-4, 0.2, "log"]}, trials=4)
    for steps, number in ((2 * STEPS, 2), (None, 4)):
        limits = sweeping.SweepLimits(steps=steps)
        result = sweeping.run_sweep(sweeping.FunctionMaker(make), spec, limits, tmp_path, lambda text: None)
        assert len([row for row in result.rows if row["state"] == "done"]) == number
    assert result.is_done
    assert result.best == min(result.rows, key=lambda row: row["value"])["settings"]
    plain = sweeping.run_sweep(
        sweeping.FunctionMaker(make), spec, sweeping.SweepLimits(), tmp_path / "undisturbed", lambda text: None
    )
    assert ledger(tmp_path / "found") == ledger(plain.folder), "it goes on as if it had not been interrupted"


SCRIPT = """
import argparse
import torch
import drivetrain as dt
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1)
width = parser.parse_args().width
x = torch.linspace(0, 1, 32).unsqueeze(1)
data = torch.utils.data.TensorDataset(x, x)
dt.train(dt.Job(name="script", model=lambda: torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1)),
    data=data, valid=data, loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), global_batch=8, epochs=1))
"""


def test_the_command_on_a_script_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("line.py").write_text(SCRIPT)
    Path("sweep.yaml").write_text("target: line.py\nseeds: [0, 1]\ngrid:\n  width: [1, 3]\n  lr: [0.1]\nname: widths\n")
    assert main(["sweep", "sweep.yaml", "--seeds", "3", "--no-auto-optimize"]) == 0
    told = capsys.readouterr().out
    assert "sweep widths: 2 variants × 1 seed of line.py" in told
    assert "a verdict on 2 variants takes at least 6 seeds" in told
    assert "cannot tell" in told
    assert main(["sweep", "sweep.yaml", "--seeds", "3", "--no-auto-optimize", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["settings"] for row in found["rows"]] == [{"width": 1, "lr": 0.1}, {"width": 3, "lr": 0.1}]
    assert found["comparison"]["differences"]


def test_the_command_on_a_recipe_with_a_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "digits", "--max-steps", "2", "--no-auto-optimize"]
    assert main([*words, "--grid", "lr=1e-3,3e-3"]) == 0
    assert "cannot tell: lr=0.003 against lr=0.001" in capsys.readouterr().out
    assert main([*words, "--grid", "lr=", "--name", "other"]) == 1
    assert main([*words, "--name", "nothing"]) == 1
    assert main([*words, "--grid", "width=3,4", "--name", "unknown"]) == 1
    told = capsys.readouterr()
    assert "no setting width" in told.out + told.err


FUNCTIONS = """
import torch
import drivetrain as dt

x = torch.linspace(-1, 1, 32).unsqueeze(1)
data = torch.utils.data.TensorDataset(x, x.sin())


def make(lr, seed, weight_decay=0.0):
    return dt.Job(name="line", model=lambda: torch.nn.Linear(1, 1), data=data, valid=data,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay),
        global_batch=8, epochs=1, seed=seed)


def any_settings(**settings):
    return make(**settings)


def with_config(lr, seed):
    return make(lr, seed), dt.configure(auto_optimize=False, max_steps=2, keep_last=7)


def plain(lr=0.1):
    return make(lr, 5)


def wrong(lr, depth):
    raise TypeError("never called")


job = make(0.1, 0)
"""


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in read_rows(folder / "steps.jsonl")[0]]


@pytest.mark.parametrize("name", ["make", "any_settings", "with_config"])
def test_the_command_calls_a_function_as_dt_sweep_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """With its seed, and with arguments that are settings, too; the runs have the same losses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "functions", raising=False)
    Path("functions.py").write_text(FUNCTIONS)
    words = ["--grid", "lr=0.1,0.2", "--seeds", "3", "--no-auto-optimize", "--json"]
    assert main(["sweep", f"functions:{name}", *words]) == 0
    there = json.loads(capsys.readouterr().out)["rows"]
    function = getattr(importlib.import_module("functions"), name)
    here = dt.sweep(function, {"lr": [0.1, 0.2]}, seeds=[3], output_dir=tmp_path / "here", quiet=True).rows
    for one, other in zip(there, here, strict=True):
        assert (one["settings"], one["state"]) == (other["settings"], "done")
        assert losses(Path(one["runs"]["3"]["folder"])) == losses(Path(other["runs"]["3"]["folder"]))
    assert set(rates(Path(there[1]["runs"]["3"]["folder"]))) == {0.2}
    if name == "with_config":
        assert len(losses(Path(there[0]["runs"]["3"]["folder"]))) == 2
        assert main(["sweep", f"functions:{name}", *words, "--max-steps", "3", "--name", "longer"]) == 0
        there = json.loads(capsys.readouterr().out)["rows"]
        assert len(losses(Path(there[0]["runs"]["3"]["folder"]))) == 3, "the command line wins"


def test_the_command_and_arguments_that_a_function_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "functions", raising=False)
    Path("functions.py").write_text(FUNCTIONS)
    words = ["--seeds", "3", "--no-auto-optimize", "--json"]
    assert main(["sweep", "functions:make", "--grid", "lr=0.1 weight-decay=0.5", *words]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    config = (Path(row["runs"]["3"]["folder"]) / "config.yaml").read_text()
    assert "weight_decay: 0.5" not in config, "the function has set it"
    assert main(["sweep", "functions:plain", "--grid", "lr=0.1 precision=fp32", *words]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["state"] == "done", "its seed and precision are the run's"
    for target, message in (
        ("wrong", "cannot be called with lr: missing a required argument: 'depth'"),
        ("make", "got an unexpected keyword argument 'width'"),
        ("job", "the job functions:job has no setting width"),
    ):
        grid = "lr=0.1" if target == "wrong" else "lr=0.1 width=3"
        assert main(["sweep", f"functions:{target}", "--grid", grid, *words, "--name", target]) == 1
        assert message in json.loads(capsys.readouterr().out)["rows"][0]["runs"]["3"]["error"]

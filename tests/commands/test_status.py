"""How runs stand, from their records alone; and SLURM's jobs, from a squeue that is made up."""

import fcntl
import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main
from drivetrain.commands.monitor import LAST_BYTES, runs_in, state_of
from drivetrain.core.run_folder import RunFolder
from drivetrain.launch.clusters import jobs_of, write_down
from drivetrain.launch.root_cause import Failure, as_json
from drivetrain.report import RunData
from drivetrain.report.page import live_figures
from tests import warm_python

JOB = {"name": "mine", "num_steps": 100, "global_batch": 8}


def made(folder: Path, steps: int = 10, job: dict[str, Any] | None = None, **files: Any) -> RunFolder:
    """A run that did some steps, as training writes them."""
    run = RunFolder.claim(folder.parent, folder.name, JOB | (job or {}))
    rows = [
        {"step": n, "epoch": n // 50, "samples": 8, "loss": 1 / n, "num_items": 8, "seconds": 0.5, "skipped": False}
        for n in range(1, steps + 1)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "lo')
    for number in (4, 8):
        (folder / "checkpoints" / f"step-{number:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{number:08d}" / "manifest.json").write_text("{}")
    (folder / "checkpoints" / "step-00000009").mkdir()
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return run


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = made(tmp_path / "mine")
    grows = made(tmp_path / "grows", job={"global_batch": {"0": 8, "50": 24}})  # 16 samples per second so far
    child = (  # in a process of its own: a process does not see its own locks
        "import json,sys;from pathlib import Path;from dataclasses import asdict;"
        "from drivetrain.commands.monitor import state_of;"
        "print(json.dumps([asdict(state_of(Path(folder))) for folder in sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", child, str(run.path), str(grows.path)]
    found, growing = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert growing["seconds_left"] == (40 * 8 + 50 * 24) / 16
    assert found["state"] == "running"
    assert (found["step"], found["num_steps"], found["epoch"], found["loss"]) == (10, 100, 0, 0.1)
    assert (found["samples_per_second"], found["seconds_left"], found["checkpoint"]) == (16.0, 45.0, 8)
    run.close()


def test_how_runs_end(tmp_path: Path) -> None:
    stop = '{"event": "stop", "step": 10}\n{"event": "end"}\n'
    made(tmp_path / "stopped", events_jsonl=stop).close()
    finished = made(tmp_path / "finished", steps=100)
    finished.finish({"steps": 100})
    finished.close()
    failure = Failure("exception", 1, 0, "here", 12, "ValueError: no such label", remedy="mend the data")
    made(tmp_path / "crashed", events_jsonl=stop, crash_json=as_json(failure, 0, (), "now")).close()
    made(tmp_path / "killed", events_jsonl='{"event": "checkpoint", "step": 8}\n').close()
    resumed = stop + '{"event": "resume", "step": 10}\n'
    made(tmp_path / "again", events_jsonl=resumed).close()
    failed = '{"event": "start", "step": 0}\n{"event": "stopped by an error", "error": "ValueError: boom"}\n'
    made(tmp_path / "failed", events_jsonl=failed).close()
    early = '{"event": "stop", "step": 0, "because": "Ctrl-C before it began; the same command begins it"}\n'
    made(tmp_path / "early", events_jsonl=early).close()
    at_once = '{"event": "start", "step": 0}\n{"event": "stopped by an error", "error": "KeyboardInterrupt: "}\n'
    at_once += '{"event": "end"}\n'
    made(tmp_path / "at once", events_jsonl=at_once).close()
    made(tmp_path / "failed before", events_jsonl=failed + '{"event": "resume", "step": 0}\n').close()
    found = {Path(one.folder).name: one for one in runs_in(tmp_path)}
    assert {name: one.state for name, one in found.items()} == {
        "stopped": "stopped",
        "finished": "finished",
        "crashed": "crashed",
        "killed": "crashed",
        "again": "crashed",
        "failed": "crashed",
        "failed before": "crashed",
        "at once": "stopped",
        "early": "stopped",
    }
    assert found["early"].cause == "Ctrl-C before it began; the same command begins it"
    assert found["stopped"].cause == "asked to stop; the same command goes on"
    for one in found.values():
        data = RunData.read(Path(one.folder))
        assert data.standing.state == one.state, "the page has the same word"
        assert live_figures(data)["about"].startswith(one.state)
    assert found["failed"].cause.startswith("ValueError: boom")
    assert "without a word" in found["failed before"].cause
    assert found["crashed"].cause == "exception on rank 1: ValueError: no such label; remedy: mend the data"
    assert "killed, or the machine went down" in found["killed"].cause
    assert all(one.seconds_left is None for one in found.values())


def test_damaged_records_hide_nothing(tmp_path: Path) -> None:
    """A power cut leaves zeros and half bytes behind; a run whose job cannot be read is among the others."""
    made(tmp_path / "well").close()
    made(tmp_path / "damaged").close()
    with (tmp_path / "well" / "steps.jsonl").open("ab") as file:
        file.write(b"\n\xff\xfe\n7\n\0\0")
    (tmp_path / "damaged" / "job.yaml").write_bytes(b"\xff\xfe")
    found = {state.name: state for state in runs_in(tmp_path)}
    assert found["mine"].step == 10
    assert "job.yaml cannot be read" in found["damaged"].cause
    (tmp_path / "slurm-jobs.jsonl").write_bytes(b'\xff}\n{"job": "7"}\n7\n')
    assert jobs_of(tmp_path)[0] == []


def test_only_the_end_of_long_records_is_read(tmp_path: Path) -> None:
    run = made(tmp_path / "long", steps=5000)
    assert (run.path / "steps.jsonl").stat().st_size > 2 * LAST_BYTES
    run.close()
    assert state_of(run.path).step == 5000


def test_nothing_is_taken(tmp_path: Path) -> None:
    """Asking does not keep a run from starting, and a folder without anything is told as it is."""
    made(tmp_path / "mine", steps=0).close()
    assert state_of(tmp_path / "mine").loss is None
    with (tmp_path / "mine" / ".lock").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_real_run_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, time, torch\nimport drivetrain as dt\n"
        "data = {'x': torch.zeros(64, 2), 'y': torch.zeros(64).long()}\n"
        f"saved = pathlib.Path({str(tmp_path / 'runs' / 'mine' / 'checkpoints')!r})\n"
        "def loss(model, batch):\n"
        "    if any(saved.glob('step-*')): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    # Written in the background, and committed once a later step was enqueued: go on, slowly.\n"
        "    if saved.is_dir() and any(saved.iterdir()): time.sleep(0.05)\n"
        "    return torch.nn.functional.cross_entropy(model(batch['x']), batch['y'])\n"
        "dt.train(dt.Job(name='mine', model=lambda: torch.nn.Linear(2, 2), data=data, loss=loss, max_steps=40,\n"
        "  optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), global_batch=4, checkpoint_every=5),\n"
        f"  dt.configure(output_dir={str(tmp_path / 'runs')!r}, gpu_mode='cpu', report=False, auto_optimize=False))\n"
    )
    done = warm_python.run([str(script)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = state_of(tmp_path / "runs" / "mine")
    assert found.state == "crashed"
    assert found.num_steps == 40
    assert found.checkpoint == 5


def test_a_run_may_be_named_in_any_language(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed, continued, reported and shown under a name that is no ASCII and means something to shells and HTML."""
    name = 'Größe Δ <b>試験 & "$q"'
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, time, torch\nimport drivetrain as dt\n"
        "data = {'x': torch.zeros(64, 2), 'y': torch.zeros(64).long()}\n"
        "saved = pathlib.Path(sys.argv[1])\n"
        "def loss(model, batch):\n"
        "    if not pathlib.Path('killed').exists():\n"
        "        if any(saved.glob('step-*')):\n"
        "            pathlib.Path('killed').touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        if saved.is_dir() and any(saved.iterdir()): time.sleep(0.05)\n"
        "    return torch.nn.functional.cross_entropy(model(batch['x']), batch['y'])\n"
        "dt.train(dt.Job(name='mine', model=lambda: torch.nn.Linear(2, 2), data=data, loss=loss, max_steps=40,\n"
        "  optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), global_batch=4, checkpoint_every=5))\n"
    )
    runs = tmp_path / "läufe"
    words = ["-m", "drivetrain", "train", str(script), "--name", name, "--output-dir", str(runs), "--gpu-mode", "cpu"]
    words += ["--auto-optimize", "false", "--", str(runs / name / "checkpoints")]
    assert warm_python.run(words, cwd=tmp_path).returncode == -signal.SIGKILL
    done = warm_python.run(words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from step 5 of" in done.stdout, done.stdout
    told = shlex.split(re.findall(r"`(drivetrain report .*)` draws", done.stdout)[0])[1:]
    assert main(told) == 0, "the command that the run names"
    assert main(["status", name, "--json", "--output-dir", str(runs)]) == 0
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert (Path(found["folder"]).name, found["state"], found["step"]) == (name, "finished", 40)
    page = (runs / name / "report.html").read_text(encoding="utf-8")
    assert f"<title>{html.escape(f'{name} (mine)')}</title>" in page
    assert shlex.quote(f"{name}-again") in html.unescape(page), "the command that does it again"


def test_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    assert main(["status", "--output-dir", str(folder)]) == 0
    assert capsys.readouterr().out == f"no runs below {folder}\n"
    made(folder / "mine", events_jsonl='{"event": "stop", "step": 10}\n').close()
    assert main(["status", "mine", "--output-dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"stopped   {folder}/mine: step 10 of 100, epoch 1, loss 0.1, 16 samples/s, checkpoint 8\n")
    assert main(["status", "--output-dir", str(folder), "--json", "--slurm"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"][0]["state"] == "stopped"
    assert document["slurm"]["jobs"] == []
    assert main(["status", "nothing", "--output-dir", str(folder)]) == 1
    assert f"name one of {folder}/mine" in capsys.readouterr().err


def test_a_line_end_in_a_name_breaks_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "plain").close()
    (tmp_path / "plain").rename(tmp_path / "two\nlines")
    assert main(["status", "--output-dir", str(tmp_path)]) == 0
    line, _cause = capsys.readouterr().out.splitlines()
    assert f"{tmp_path}/two\\x0alines: step 10" in line


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stands before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_slurm_jobs(tmp_path: Path, tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tools / "squeue", 'case "$*" in *"--jobs 7") echo "7|PENDING|0:00|Resources";; *) exit 1;; esac')
    program(tools / "sacct", 'case "$*" in *"--jobs 6") echo "6|CANCELLED by 0|00:01:02|None";; esac')
    for number in ("6", "7", "8"):
        write_down(tmp_path, number, "train", tmp_path / "train.sbatch", f"slurm-{number}.log")
    jobs, why_not = jobs_of(tmp_path)
    assert why_not == ""
    assert [(job.job, job.state, job.elapsed, job.reason) for job in jobs] == [
        ("6", "CANCELLED", "00:01:02", ""),
        ("7", "PENDING", "0:00", "Resources"),
        ("8", "", "", ""),
    ]
    assert main(["status", "--slurm", "--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "PENDING   job 7 (train), submitted " in out
    assert "unknown   job 8 (train)" in out


def test_submitting_writes_the_number_down(tmp_path: Path, tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tools / "sbatch", 'echo "4711;cluster"')
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    runs = tmp_path / "runs"
    assert main(["launch", "--output-dir", str(runs), "--slurm", "--submit", str(script)]) == 0
    assert "`drivetrain status --slurm` shows it" in capsys.readouterr().out
    (job,), _ = jobs_of(runs)
    assert (job.job, job.name, job.output) == ("4711", "train", f"{runs}/slurm-4711.log")

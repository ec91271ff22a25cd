"""Ctrl-C and SIGTERM: the step is finished, a checkpoint is written, and the same command goes on to the same end."""

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain as dt
from drivetrain import report
from drivetrain.api import driving, training
from drivetrain.checkpoint import Checkpoint
from drivetrain.cli import main
from drivetrain.commands.monitor import state_of
from drivetrain.core import processes
from drivetrain.core.processes import IMPATIENT_AFTER_SECONDS
from tests import warm_python
from tests.api.jobs import Variant, make_job

SCRIPT = """
import signal, sys, time
from pathlib import Path
import torch
import drivetrain as dt
from drivetrain.config import configure

RUNS = Path(sys.argv[1])

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            (RUNS / "handles-signals").touch()
        seconds = {delay} if (RUNS / "slow" / "plan.yaml").exists() else 0.001
        # Once the test has seen a step, the rest takes long enough for its signal to come in time.
        steps = RUNS / "slow" / "steps.jsonl"
        is_seen = {delay} and steps.exists() and steps.stat().st_size
        time.sleep(max(seconds, 0.05) if is_seen else seconds)
        return torch.randn(4), torch.tensor(index % 2)

job = dt.Job(
    name="slow",
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)),
    data=Slow(),
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01),
    global_batch=8,
    max_steps={steps},
    checkpoint_every=1000,
)
settings = {{"gpu_mode": "cpu", "report": False, "num_workers": int(sys.argv[2])}}
result = dt.train(job, configure(output_dir=RUNS, **settings))
print("finished" if result.finished else "stopped", result.steps, flush=True)
"""


def write(folder: Path, delay: float) -> Path:
    script = folder / "slow.py"
    script.write_text(SCRIPT.format(delay=delay, steps=70))
    return script


def start(folder: Path, delay: float, workers: int = 0) -> warm_python.WarmProcess:
    """In a group of its own, so that a signal reaches it and its loader workers as a terminal's Ctrl-C would."""
    return warm_python.WarmProcess([str(write(folder, delay)), str(folder / "runs"), str(workers)])


def wait_for_steps(folder: Path) -> None:
    """Until some steps are written; the file is flushed once a second."""
    file = folder / "runs" / "slow" / "steps.jsonl"
    for _ in range(2400):
        if file.exists() and file.stat().st_size:
            return
        time.sleep(0.05)
    raise AssertionError("no step was written in 120 s")


def finish(folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The script to its end, in this process: another start would take seconds. Returns where it went on."""
    script = write(folder, 0.0)
    monkeypatch.setattr(sys, "argv", [str(script), str(folder / "runs"), str(workers)])
    result = runpy.run_path(str(script), run_name="__main__")["result"]
    assert result.finished
    assert result.steps == 70
    return int(result.resumed_from)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_a_signal_stops_cleanly_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, workers: int
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    with start(cut, 0.004, workers) as process:
        wait_for_steps(cut)
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "stopping after this step, with a checkpoint" in output
    assert "Traceback" not in output
    stopped = int(output.split("stopped")[-1].split()[0])
    assert 0 < stopped < 70
    checkpoint = Checkpoint.latest_in(cut / "runs" / "slow" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == stopped

    assert finish(cut, workers, monkeypatch) == stopped
    assert finish(whole, workers, monkeypatch) == 0
    first, second = (Checkpoint.latest_in(folder / "runs" / "slow" / "checkpoints") for folder in (whole, cut))
    assert first is not None
    assert second is not None
    assert all((first.read(key) == second.read(key)).all() for key in first.keys)
    rows = [
        [json.loads(line) for line in (folder / "runs" / "slow" / "steps.jsonl").read_text().splitlines()]
        for folder in (whole, cut)
    ]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


def test_the_command_line_says_that_a_script_was_stopped(tmp_path: Path) -> None:
    script = write(tmp_path, 0.004)
    words = ["-m", "drivetrain", "train", str(script)]
    script.write_text(
        script.read_text().replace("sys.argv[1]", repr(str(tmp_path / "runs"))).replace("int(sys.argv[2])", "0")
    )
    with warm_python.WarmProcess(words) as process:
        wait_for_steps(tmp_path)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with start(tmp_path, 1.5) as process:  # a step takes twelve seconds
        for _ in range(2400):
            if (tmp_path / "runs" / "handles-signals").exists():
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        assert any("stopping after this step" in line for line in process.stdout), "it ended"
        time.sleep(IMPATIENT_AFTER_SECONDS + 0.3)  # sooner it would be taken for a launcher's echo of the first
        assert process.poll() is None, "it would end after its step"
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in output
    assert list((tmp_path / "runs" / "slow" / "checkpoints").glob("step-*")) == [], "it finished its step"


# At the end: the loop is over, and the report is being written


class KilledError(Exception):
    """Where nobody handles it, SIGTERM would end the tests themselves."""


@pytest.fixture
def sigterm_is_seen() -> Iterator[None]:
    def die(*_: Any) -> None:
        raise KilledError

    before = signal.signal(signal.SIGTERM, die)
    yield
    assert signal.getsignal(signal.SIGTERM) is die, "the handler is put back"
    signal.signal(signal.SIGTERM, before)


def train(folder: Path) -> Path:
    config = dt.configure(output_dir=folder, gpu_mode="cpu", num_workers=0)
    return dt.train(make_job(Variant(steps=3)), config).folder


def drive(folder: Path) -> Path:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = dt.configure(output_dir=folder, gpu_mode="cpu", num_workers=0)
    run = dt.drive(model, optimizer, [torch.ones(2)] * 8, global_batch=4, max_steps=2, config=config)
    for batch in run:
        run.backward(run.model(batch).mean())
        run.step()
    return run.folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("how", [train, drive], ids=lambda how: how.__name__)
@pytest.mark.usefixtures("sigterm_is_seen")
def test_a_signal_waits_for_the_report(
    how: Callable[[Path], Path],
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def slow_report(folder: Path, **how: bool) -> list[str]:
        os.kill(os.getpid(), number)
        time.sleep(0.05)
        (folder / "report.html").write_text("all of it")
        return []

    monkeypatch.setattr({train: training, drive: driving}[how], "write_report", slow_report)
    with pytest.raises(KilledError if number == signal.SIGTERM else KeyboardInterrupt):
        how(tmp_path)  # heeded afterwards: a script does not go on with its next job
    (folder,) = (path.parent for path in tmp_path.glob("*/report.html"))
    assert (folder / "report.html").read_text() == "all of it"
    words = capsys.readouterr().out
    assert f"{number.name}: the run is over; its report is written first" in " ".join(words.split())
    assert "stopping after this step" not in words
    assert (state_of(folder).state, state_of(folder).cause) == ("finished", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.usefixtures("sigterm_is_seen")
def test_a_second_signal_waits_for_nothing(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "IMPATIENT_AFTER_SECONDS", 0.01)
    said: list[str] = []
    reached = []

    def write() -> None:
        with processes.written_first(said.append):
            for which in ("the first waits", "the second does not"):
                os.kill(os.getpid(), number)
                time.sleep(0.05)
                reached.append(which)

    with pytest.raises(KilledError if number == signal.SIGTERM else KeyboardInterrupt):
        write()
    assert reached == ["the first waits"]
    assert len(said) == 1


def test_a_report_that_was_cut_off_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a second Ctrl-C; or by SIGKILL, which leaves the same."""
    monkeypatch.setattr(processes, "IMPATIENT_AFTER_SECONDS", 0.01)

    def endless(*_: Any) -> bytes:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        return b""

    monkeypatch.setattr(report, "summary", endless)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tmp_path)
    folder = tmp_path / "suite"
    remedy = f"`drivetrain report {folder}` writes it"
    assert remedy in caught.value.__notes__[0]
    assert not (folder / "report.html").exists()
    assert (state_of(folder).state, state_of(folder).cause) == ("finished", f"its report is missing: {remedy}")
    monkeypatch.undo()
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").exists()
    assert state_of(folder).cause == ""
    assert main(["report", "suite", "--output-dir", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none")]) != 0
    assert "is no folder of a run" in capsys.readouterr().err

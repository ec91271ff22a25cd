"""Ctrl-C and SIGTERM: the step is finished, a checkpoint is written, and the same command goes on to the same end."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.checkpoint import Checkpoint
from drivetrain.core.interrupt import IMPATIENT_AFTER_SECONDS

SCRIPT = """
import sys, time
import torch
import drivetrain as dt
from drivetrain.config import configure

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep({delay})
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
result = dt.train(job, configure(output_dir=sys.argv[1], **settings))
print("finished" if result.finished else "stopped", result.steps, flush=True)
"""


def write(folder: Path, delay: float) -> Path:
    script = folder / "slow.py"
    script.write_text(SCRIPT.format(delay=delay, steps=70))
    return script


def start(folder: Path, delay: float, workers: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, str(write(folder, delay)), str(folder / "runs"), str(workers)]
    # A group of its own, so that a signal reaches it and its loader workers as a terminal's Ctrl-C would.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env={**os.environ}
    )


def wait_for_steps(folder: Path) -> None:
    """Until some steps are written; the file is flushed once a second."""
    file = folder / "runs" / "slow" / "steps.jsonl"
    for _ in range(600):
        if file.exists() and file.stat().st_size:
            return
        time.sleep(0.05)
    raise AssertionError("no step was written in 30 s")


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
        output, _ = process.communicate(timeout=60)
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
    words = [sys.executable, "-m", "drivetrain", "train", str(script)]
    script.write_text(
        script.read_text().replace("sys.argv[1]", repr(str(tmp_path / "runs"))).replace("int(sys.argv[2])", "0")
    )
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for_steps(tmp_path)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with start(tmp_path, 0.25) as process:  # a step takes two seconds
        for _ in range(200):
            if (tmp_path / "runs" / "slow" / "plan.yaml").exists():
                break
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(IMPATIENT_AFTER_SECONDS + 0.3)  # sooner it would be taken for a launcher's echo of the first
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in output

"""Ctrl-C and SIGTERM: the step is finished, a checkpoint is written, and the same command goes on to the same end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.checkpoint import Checkpoint

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
result = dt.train(job, configure(output_dir=sys.argv[1], gpu_mode="cpu", num_workers=int(sys.argv[2])))
print("finished" if result.finished else "stopped", result.steps, flush=True)
"""


def start(folder: Path, delay: float, steps: int, workers: int = 0) -> subprocess.Popen[str]:
    script = folder / "slow.py"
    script.write_text(SCRIPT.format(delay=delay, steps=steps))
    command = [sys.executable, str(script), str(folder / "runs"), str(workers)]
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


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_a_signal_stops_cleanly_and_the_run_goes_on(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    with start(cut, 0.004, 70, workers) as process:
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

    for folder in (cut, whole):
        with start(folder, 0.0, 70, workers) as process:
            output, _ = process.communicate(timeout=60)
        assert "finished 70" in output, output
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
    script = tmp_path / "slow.py"
    script.write_text(SCRIPT.format(delay=0.004, steps=70))
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
    with start(tmp_path, 0.25, 70) as process:  # a step takes two seconds
        for _ in range(200):
            if (tmp_path / "runs" / "slow" / "plan.yaml").exists():
                break
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.3)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in output

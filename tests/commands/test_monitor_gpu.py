"""`drivetrain monitor` beside a run on a real GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch, drivetrain as dt
from torch import nn

dt.train(dt.Job(
    name="busy",
    model=lambda: nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]),
    data=torch.randn(4096, 4096),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-6),
    global_batch=2048,
    max_steps=1_000_000,
))
"""


def look(output_dir: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "drivetrain", "monitor", "--json", "--output-dir", str(output_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_run_and_its_gpu_are_seen(tmp_path: Path) -> None:
    """Its steps go up between two looks, and the card is busy and holds its memory, by another process."""
    script, runs = tmp_path / "busy.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    flags = ["--output-dir", str(runs), "--no-compile", "--precision", "tf32"]
    command = [sys.executable, "-m", "drivetrain", "train", str(script), *flags]
    log = tmp_path / "log.txt"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            steps: list[int] = []
            while len(steps) < 2 or steps[-1] <= steps[0]:
                assert process.poll() is None, log.read_text()
                found = look(runs)
                mine = [row for row in found["runs"] if row["folder"].startswith(str(runs))]
                steps += [row["step"] for row in mine if row["step"]]
                time.sleep(0.5)
            assert [row["state"] for row in mine] == ["running"]
            gpu = next(row for row in found["devices"] if row["device"] != "host")
            assert gpu["memory_total_gib"] > 8
            assert gpu["memory_used_gib"] > 1  # weights alone are half of it
            assert 0 < gpu["utilisation_percent"] <= 100
        finally:
            process.terminate()
            process.wait(60)

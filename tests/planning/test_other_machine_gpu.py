"""`plan --for --measure` on a real GPU: a forecast from the step that was measured here."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch, drivetrain as dt
from torch import nn

width = 2048
layers = [layer for _ in range(12) for layer in (nn.Linear(width, width), nn.GELU())]
dt.train(dt.Job(
    name="wide",
    model=lambda: nn.Sequential(*layers),
    data=torch.randn(65536, width),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
    global_batch=8192,
    max_steps=400,
))
"""
WAY = ["--precision", "bf16", "--no-compile", "--capture", "off"]


@pytest.mark.alone  # other processes of the device would be in its times
def test_the_measured_step_is_the_one_that_is_trained(tmp_path: Path, capsys: Any) -> None:
    """For one GPU like this one the forecast is what a run then takes; eight share the work and exchange gradients."""
    script = tmp_path / "wide.py"
    script.write_text(SCRIPT)
    flags = [*WAY, "--output-dir", str(tmp_path / "runs")]
    assert main(["plan", str(script), "--for", "8xH200", "--measure", "--json", *flags]) == 0
    time = json.loads(capsys.readouterr().out)["forecast"]["time"]
    assert time["basis"] == "measured"
    rows = {row["num_devices"]: row for row in time["rows"]}
    assert list(rows) == [1, 2, 4, 8]
    assert 1.0 < rows[8]["speedup"] < 8.0
    assert rows[8]["exchange_seconds"] > 0.0
    assert not (tmp_path / "runs").exists()

    assert main(["train", str(script), *flags]) == 0
    steps = [json.loads(line) for line in (tmp_path / "runs" / "wide" / "steps.jsonl").read_text().splitlines()]
    seconds = statistics.median(row["seconds"] for row in steps[100:])
    assert rows[1]["step_seconds"] == pytest.approx(seconds, rel=0.15), time["assumes"]

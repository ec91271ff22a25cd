"""The last lines of a run on the terminal."""

import re
from pathlib import Path

import pytest
import torch

import drivetrain as dt
from drivetrain.config import configure
from drivetrain.core.value import format_duration


def job(**changes: object) -> dt.Job:
    data = list(torch.arange(32.0).reshape(8, 4) / 32)
    values = {
        "name": "summed-up",
        "model": lambda: torch.nn.Linear(4, 1),
        "data": data,
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.01),
        "global_batch": 4,
        "epochs": 3,
    }
    return dt.Job(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("report", [True, False])
def test_a_run_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str], report: bool) -> None:
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=report, log_every=0)
    result = dt.train(job(valid=list(torch.ones(4, 4))), config)
    assert result.best is not None
    lines = capsys.readouterr().out.splitlines()
    best, took = [line for line in lines if re.match("  (best|took) ", line)]
    assert best.split() == ["best", "valid_loss", f"{result.best.value:.6g}", "at", "step", "6"]
    assert re.fullmatch(r"  took       [\d.,]+ m?s, 6 steps in all", took)
    assert (lines[-1] == f"  report     {tmp_path / 'summed-up' / 'report.html'}") == report
    assert dt.train(job(max_steps=2), config).finished
    assert re.search(r"\n  last       loss \S+ at step 2\n", capsys.readouterr().out)
    dt.train(job(), config, quiet=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.5, "500 ms"),
        (59.4, "59.4 s"),
        (59.9, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (2e5, "2 days 7 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words

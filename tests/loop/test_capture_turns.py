"""Captured steps with several turns: a graph for each turn, and the same results as without capture."""

from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain as dt
from tests.api.test_several_optimizers import (
    DISC,
    adam,
    drawing_d,
    drawing_g,
    gan_job,
    noisy_job,
    records_of,
    state_of,
)
from tests.loop.test_capture import Captures, captures

__all__ = ["captures"]

SETTINGS: dict[str, Any] = {
    "gpu_mode": "cpu",
    "num_workers": 0,
    "batch_size": 14,
    "report": False,
    "monitor_gpu": False,
    "auto_optimize": False,
}


def trained(folder: Path, job: dt.Job, **settings: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    result = dt.train(job, dt.configure(output_dir=folder, **SETTINGS, **settings), quiet=True)
    return records_of(result.folder), state_of(result.folder)


def logging_job(folder: str, **changes: Any) -> dt.Job:
    return gan_job(folder, loss={"d": drawing_d, "g": drawing_g}, **changes)


@pytest.mark.parametrize("resident", ["off", "on"])
@pytest.mark.parametrize("make", [noisy_job, logging_job])
def test_the_same_as_without(captures: Captures, tmp_path: Path, make: Any, resident: str) -> None:
    changes = {"max_steps": 20}
    rows, plain = trained(tmp_path / "plain", make("", **changes), capture="off", resident=resident)
    assert not captures.steppers
    again, found = trained(tmp_path / "captured", make("", **changes), capture="on", resident=resident)
    recorder = captures.recorders[0]
    assert recorder.num_recorded == 2 * len(captures.last._recorded), "a graph for each turn of each shape"
    assert recorder.num_replayed == 2 * captures.last._num_replays
    assert captures.last._num_replays > 5
    for key, value in plain.items():
        assert torch.equal(found[key], value), key
    for row, other in zip(rows, again, strict=True):
        assert {**row, "seconds": 0, "grad_norm": 0} == {**other, "seconds": 0, "grad_norm": 0}


def test_turns_that_not_every_step_has_are_not_captured(captures: Captures, tmp_path: Path) -> None:
    rare = dt.Optim(adam(2e-2), params="gen.*", loss="g", every=2)
    job = gan_job("", optimizer={"d": DISC, "g": rare}, max_steps=20)
    trained(tmp_path, job, capture="on")
    assert not captures.steppers
    assert "not every step has the same turns" in (tmp_path / "gan" / "events.jsonl").read_text()

"""What is known to be wrong is refused before planning measures anything, and leaves the name of the run free."""

import math
from pathlib import Path
from typing import Any

import pytest

import drivetrain as dt
from drivetrain.api import training
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from tests.run.test_ending import job


def last_is_nan(step: int) -> float:
    return math.nan if step == 5 else 1.0


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"init_from": "nowhere.safetensors"}, {}, "init_from: nowhere.safetensors is not there"),
        ({"schedule": last_is_nan}, {}, "returned nan for step 6"),
        ({}, {"compile": True, "compile_only": "router"}, "the model has no such module"),
    ],
)
def test_it_is_refused_before_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    def plan(*_: Any, **__: Any) -> None:
        raise AssertionError("planned")

    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, **settings)
    with monkeypatch.context() as patched:
        patched.setattr(training, "make_plan", plan)
        with pytest.raises(DrivetrainError, match=words):
            dt.train(job(**changes), config, quiet=True)
    result = dt.train(job(seed=1), configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    assert result.folder.name == "summed-up"

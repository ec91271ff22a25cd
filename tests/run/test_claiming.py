"""A job that SLURM requeues again and again without a checkpoint in between is stopped, with a message."""

from pathlib import Path
from typing import Any

import pytest

import drivetrain as dt
from drivetrain.run.claiming import REQUEUES
from tests.api.jobs import Variant, make_job


class LimitError(Exception):
    """The time is up."""


class Ends:
    """Ends the start at a step."""

    every = 1

    def __init__(self) -> None:
        self.at = 2

    def __call__(self, context: dt.StepContext) -> None:
        if context.step >= self.at:
            raise LimitError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, ends: Ends, job: str = "7", attempt: int = 0
) -> Any:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    config = dt.configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, async_save=False)
    return dt.train(make_job(Variant(steps=20), hooks=[ends], checkpoint_every=5), config, quiet=True)


def test_requeues_in_vain_are_counted_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    for number in (0, 1, 2):
        for attempt in (0, 1):  # a restart by the supervisor is no requeue
            with pytest.raises(LimitError):
                start(tmp_path, monkeypatch, number, ends, attempt=attempt)
    with pytest.raises(
        dt.DrivetrainError, match="requeued job 7 3 times since its beginning, and no checkpoint"
    ) as told:
        start(tmp_path, monkeypatch, 3, ends)
    assert "--signal-seconds" in told.value.remedy
    assert (tmp_path / "suite" / REQUEUES).exists()
    with pytest.raises(LimitError):  # submitted again
        start(tmp_path, monkeypatch, 0, ends, job="8")


def test_a_checkpoint_begins_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    for number, at in ((0, 2), (1, 2), (2, 6), (3, 6), (4, 6), (5, 11), (6, 11)):
        ends.at = at
        with pytest.raises(LimitError):
            start(tmp_path, monkeypatch, number, ends)
    ends.at = 100
    assert start(tmp_path, monkeypatch, 7, ends).finished

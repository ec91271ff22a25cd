"""What a job pays before its first step and after its last one: little enough for a job of 20 s."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.run.loss_weighting import MOST_SAMPLES

BATCH = 64


def short_job(num_steps: int, model: nn.Module | None = None) -> tuple[dt.Job, list[int]]:
    """Return a job, and the numbers of samples that its loss is called with."""
    data = TensorDataset(torch.randn(256, 6), torch.randint(0, 3, (256,)))
    seen: list[int] = []

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        seen.append(len(batch[0]))
        return functional.cross_entropy(model(batch[0]), batch[1])

    made = lambda: model or nn.Linear(6, 3)  # noqa: E731
    job = dt.Job("short", made, data, loss, lambda groups: torch.optim.SGD(groups, lr=0.1), BATCH, max_steps=num_steps)
    return job, seen


def test_before_the_first_step_less_than_one_is_computed(tmp_path: Path) -> None:
    job, seen = short_job(60)
    dt.train(job, dt.configure(output_dir=tmp_path, gpu_mode="cpu"), quiet=True)
    before, steps = seen[:-60], seen[-60:]
    assert set(steps) == {BATCH}
    # The weighting of the loss: a batch and its three parts. The plan and the trial: less than a whole batch.
    assert sum(before) - 2 * MOST_SAMPLES < BATCH
    assert max(before) < BATCH


def test_a_model_that_couples_samples_is_tried_with_all_of_them(tmp_path: Path) -> None:
    job, seen = short_job(45, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    dt.train(job, dt.configure(output_dir=tmp_path, gpu_mode="cpu"), quiet=True)
    assert BATCH in seen[:-45]


def test_a_short_run_has_its_page_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises
    done = dt.train(short_job(4)[0], dt.configure(output_dir=tmp_path, gpu_mode="cpu"))
    assert "short" in (done.folder / "report.html").read_text()
    assert "steps" in (done.folder / "performance_summary.txt").read_text()
    assert not (done.folder / "training_metrics.png").exists()
    shown = capsys.readouterr().out
    assert "was not written" not in shown
    assert f"`drivetrain report {done.folder}` draws them" in shown


def test_a_report_that_is_asked_for_has_its_picture(tmp_path: Path) -> None:
    done = dt.train(short_job(4)[0], dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=True), quiet=True)
    assert (done.folder / "training_metrics.png").read_bytes().startswith(b"\x89PNG")

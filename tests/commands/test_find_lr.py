"""The range test against a plain loop, and on a problem whose divergence is known; it leaves nothing behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.cli import main
from drivetrain.core.errors import DrivetrainError
from tests.api.test_schedules import data_of, job_of, loss_of, model_of, two_groups


class Bowl(nn.Module):
    """A quadratic with curvature 10: gradient descent diverges at rates above 2 / 10."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))


def bowl_loss(model: Any, batch: Tensor) -> Tensor:
    return 5.0 * model.weight.square().sum() + 0.1 + 0.0 * batch.sum()


def config_of(folder: Path, **settings: Any) -> dt.Config:
    return dt.configure(output_dir=str(folder), gpu_mode="cpu", num_workers=0, loss_weighting="samples", **settings)


def bowl(**changes: Any) -> dt.Job:
    values: dict[str, Any] = {"model": Bowl(), "data": torch.zeros(8, 1), "loss": bowl_loss, "hooks": []}
    return job_of(dt.WarmupCosine(), optimizer=lambda it: torch.optim.SGD(it, lr=0.7), **{**values, **changes})


def test_the_divergence_of_a_quadratic(tmp_path: Path) -> None:
    job = bowl()
    found = dt.find_lr(job, config_of(tmp_path, lr=0.123))
    assert found.diverged_at is not None
    assert 0.2 < found.diverged_at < 5.0  # it starts to rise at 0.2, from a loss that is near 0 by then
    assert found.steepest is not None
    assert 0.001 < found.steepest < 0.2
    assert found.suggestion == min(found.steepest, found.diverged_at / 10)
    assert len(found.rates) < 100, "it ends where nothing more is to be learned"
    assert not list(tmp_path.iterdir())
    assert isinstance(job.model, Bowl)
    assert job.model.weight.tolist() == [2.0, 2.0, 2.0]


def test_the_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Two groups: the rate is the highest group's, and the other keeps its ratio."""
    found = dt.find_lr(job_of(dt.StepDecay(2), hooks=[]), config_of(tmp_path), lowest=1e-3, highest=0.1, num_steps=12)
    model, losses = model_of(), []
    optimizer = two_groups([{"params": list(model.parameters())}])
    batch = [torch.stack(column) for column in zip(*data_of(), strict=True)]
    for step in range(12):
        for group, ratio in zip(optimizer.param_groups, (1.0, 0.2), strict=True):
            group["lr"] = ratio * 1e-3 * 100 ** (step / 11)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found.losses == pytest.approx(losses, rel=1e-10)
    assert found.rates[-1] == pytest.approx(0.1)


def test_a_loss_that_is_no_longer_finite(tmp_path: Path) -> None:
    def fragile(model: Any, batch: Tensor) -> Tensor:
        return bowl_loss(model, batch) + (model.weight.abs().max() > 50) * torch.tensor(float("nan"))

    found = dt.find_lr(bowl(loss=fragile), config_of(tmp_path), highest=1e4, num_steps=40)
    assert found.diverged_at is not None
    assert all(loss == loss for loss in found.losses)


def test_a_loss_that_does_not_fall_suggests_nothing(tmp_path: Path) -> None:
    job = bowl(loss=lambda model, batch: 1.0 + 0.0 * model.weight.sum())
    found = dt.find_lr(job, config_of(tmp_path), num_steps=10)
    assert (found.steepest, found.diverged_at, found.suggestion) == (None, None, None)


def test_what_cannot_be_tried() -> None:
    with pytest.raises(DrivetrainError, match="no range test"):
        dt.find_lr(bowl(), lowest=1.0, highest=0.1)
    with pytest.raises(DrivetrainError, match="used up"):
        dt.find_lr(bowl(data=iter([torch.zeros(1)])))


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    assert main(["find-lr", "digits", "--output-dir", str(tmp_path), "--gpu-mode", "cpu", "--steps", "20"]) == 0
    said = capsys.readouterr().out
    assert "steepest descent" in said
    assert {path.name for path in tmp_path.iterdir()} == {"digits.find-lr.png", "digits.find-lr.json"}
    found = json.loads((tmp_path / "digits.find-lr.json").read_text())
    assert len(found["rates"]) == len(found["losses"]) <= 20

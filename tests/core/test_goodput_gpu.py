"""The account of the time on a GPU, where phases are the device's: it still adds up."""

from pathlib import Path

import pytest
import torch
from torch import nn

import drivetrain as dt
from drivetrain.core.goodput import read_account

pytestmark = pytest.mark.gpu


def test_the_time_of_a_run_on_a_gpu_is_accounted_for(tmp_path: Path) -> None:
    inputs = torch.randn(4096, 1024)
    job = dt.Job(
        name="account",
        model=lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)),
        data=torch.utils.data.TensorDataset(inputs, inputs),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=256,
        epochs=20,
    )
    result = dt.train(job, dt.configure(output_dir=tmp_path, report=False), quiet=True)
    account = read_account(result.folder)
    assert account is not None
    assert account.seconds["step"] > 0
    assert account.seconds["step_lost"] == account.seconds["hang"] == 0
    assert account.seconds["other"] <= 0.05 * account.wall_seconds

"""A job of steps that take a while, for tests of hangs: FOLDER STEPS.

`PAUSE` is the time of a step; with `SLOW`, every seventh takes three times as long. `HOOK_SECONDS` and `VALID_SECONDS`
are those of a hook in step 20, and of a validation in step 30.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import drivetrain as dt

PAUSE, SLOW = float(os.environ.get("PAUSE", "0.05")), os.environ.get("SLOW", "")
HOOK_SECONDS, VALID_SECONDS = (float(os.environ.get(name, "0")) for name in ("HOOK_SECONDS", "VALID_SECONDS"))
calls = [0]


def loss(model: Any, batch: Any) -> torch.Tensor:
    if model.training:
        calls[0] += 1
        time.sleep(PAUSE * (3 if SLOW and calls[0] % 7 == 3 else 1))
    elif VALID_SECONDS and calls[0] > 10:
        time.sleep(VALID_SECONDS)
    return functional.cross_entropy(model(batch[0]), batch[1])


def hook(context: dt.StepContext) -> None:
    time.sleep(HOOK_SECONDS)


def make_job(steps: int) -> dt.Job:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 6, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    held_out = torch.utils.data.TensorDataset(inputs[:12], (inputs[:12].sum(1) > 0).long())
    return dt.Job(
        name="stepping",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double(),
        data=data,
        valid=held_out if VALID_SECONDS else None,
        valid_every=30 if VALID_SECONDS else None,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        hooks=[dt.every(20, hook)] if HOOK_SECONDS else [],
        global_batch=12,
        max_steps=steps,
        checkpoint_every=4,
    )


if __name__ == "__main__":
    config = dt.configure(
        output_dir=str(Path(sys.argv[1]) / "runs"), num_workers=0, report=False, gpu_mode="cpu", auto_optimize=False,
        loss_weighting="samples",
    )  # fmt: skip
    dt.train(make_job(int(sys.argv[2])), config)

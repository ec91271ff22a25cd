"""A small job for tests of launching: double precision, data and weights from seeds, every step written down.

Run as a script: FOLDER STEPS. `PAUSE` is the time a step takes at least; `HOLD` the step after which all wait until
there is a file FOLDER/go.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import drivetrain as dt
from drivetrain.config import configure


class Diary:
    """Who made which step when, on the clock that all processes of a machine share."""

    every = 1

    def __init__(self, folder: Path, pause_seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._pause_seconds = folder, pause_seconds

    def __call__(self, context: dt.StepContext) -> None:
        time.sleep(self._pause_seconds)
        with (self._folder / f"diary-{context.world.rank}").open("a") as file:
            file.write(f"{context.step} {time.monotonic()} {os.getpid()}\n")
        while context.step == int(os.environ.get("HOLD", "0")) and not (self._folder / "go").exists():
            time.sleep(0.02)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def make_job(folder: Path, steps: int, pause_seconds: float) -> dt.Job:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 6, generator=generator, dtype=torch.float64)
    labels = (inputs.sum(1) > 0).long()
    return dt.Job(
        name="launched",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double(),
        data=torch.utils.data.TensorDataset(inputs, labels),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        hooks=[Diary(folder, pause_seconds)],
        global_batch=12,
        max_steps=steps,
        checkpoint_every=2,
    )


def train(folder: Path, steps: int, pause_seconds: float = 0.0, mode: str = "cpu", *, quiet: bool = True) -> dt.Result:
    config = configure(output_dir=str(folder / "runs"), num_workers=0, report=False, gpu_mode=mode)
    return dt.train(make_job(folder, steps, pause_seconds), config, quiet=quiet)


if __name__ == "__main__":
    pause, mode = float(os.environ.get("PAUSE", "0.02")), os.environ.get("MODE", "cpu")
    result = train(Path(sys.argv[1]), int(sys.argv[2]), pause, mode, quiet=False)
    print("finished" if result.finished else "stopped", result.steps, flush=True)

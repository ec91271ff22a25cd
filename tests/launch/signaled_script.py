"""A job to be signaled: its items are read by loader processes, and only a stop saves it before its end.

Run as a script: FOLDER STEPS. It notes in FOLDER how far it is; `MOMENT` is where it lingers, for a signal to come:
`startup` (before the run begins), `validation` or `save`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import drivetrain as dt
from tests.launch.training_script import Diary

FOLDER, MOMENT = Path(sys.argv[1]), os.environ.get("MOMENT", "")


def linger(at: str, seconds: float) -> None:
    if at == MOMENT:
        (FOLDER / "moment").write_text(at)
        time.sleep(seconds)


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int, moment: str = "") -> None:
        self._size, self._moment = size, moment

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 3 and (FOLDER / "diary-0").exists():
            linger(self._moment, 1.0)
        return torch.randn(6, dtype=torch.float64), torch.tensor(index % 2)


def model() -> torch.nn.Module:
    linger("startup", 30.0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2)).double()


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        if "/checkpoints/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            linger("save", 0.5)
        fsync(descriptor)

    os.fsync = slow_fsync
    job = dt.Job(
        name="launched",
        model=model,
        data=Items(96),
        **({"valid": Items(8, "validation"), "valid_every": 5} if MOMENT == "validation" else {}),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        hooks=[Diary(FOLDER, float(os.environ.get("PAUSE", "0.05")))],
        global_batch=12,
        max_steps=int(sys.argv[2]),
        checkpoint_every=5 if MOMENT == "save" else 100_000,
    )
    loaders = int(os.environ.get("LOADERS", "1"))
    config = dt.configure(output_dir=FOLDER / "runs", num_workers=loaders, report=False, gpu_mode="cpu")
    result = dt.train(job, config)
    print("finished" if result.finished else "stopped", result.steps, flush=True)


if __name__ == "__main__":
    main()

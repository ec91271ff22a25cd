"""Jobs made to have the problems that only a GPU has: launches, copies; and one that has none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.monitor.doctor import Symptom

pytestmark = pytest.mark.gpu


def verdict(folder: Path, sick: Job, **settings: Any) -> list[Symptom]:
    # Whatever the planner would do about these problems is switched off: they are what is wanted here.
    pins = {"num_workers": 0, "compile": False, "capture": "off", "resident": "off", "auto_optimize": False}
    config = configure(output_dir=folder, gpu_mode="single_gpu", report=False, **{**pins, **settings})
    train(sick, config, quiet=True)
    rows = [json.loads(line) for line in (folder / "ill" / "events.jsonl").read_text().splitlines()]
    (final,) = [row for row in rows if row["event"] == "verdict" and row["final"]]
    return [Symptom(**finding) for finding in final["findings"]]


class Drawn(Dataset[Any]):
    """Items that are drawn anew each time, so that nothing can keep them on the device."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16)


def loss(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(batch).float().square().mean()
    return result


@pytest.mark.alone
def test_tiny_layers_are_launch_bound(tmp_path: Path) -> None:
    """Many kernels of a few microseconds each."""
    sick = Job(
        name="ill",
        model=lambda: nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(16, 16), nn.Tanh())]),
        data=Drawn(),
        loss=loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3, foreach=False, fused=False),
        global_batch=4,
        max_steps=600,
        checkpoint_every=10_000,
    )
    found = verdict(tmp_path, sick, precision="fp32", gpu_log_interval=100)
    assert found[0].kind == "launch-bound", found
    assert found[0].share > 0.2
    assert "never waits" in found[0].words


class Views(Dataset[Any]):
    """Large items that cost nothing to fetch: what is left is to bring them to the device."""

    def __init__(self) -> None:
        self.memory = torch.ones(64 * 2**20)  # 256 MiB, not pinned

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        torch.rand(1)  # as if it were augmented
        return self.memory


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean() * self.factor


def test_large_unpinned_batches_are_copy_bound(tmp_path: Path) -> None:
    sick = Job(
        name="ill",
        model=Mean,
        data=Views(),
        collate=lambda items: items[0],
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-6),
        global_batch=1,
        max_steps=50,
        checkpoint_every=10_000,
    )
    found = verdict(tmp_path, sick, precision="fp32", pin_memory=False, log_every=5)
    assert found[0].kind == "copy-bound", found
    assert found[0].share > 0.6
    assert "not pinned" in found[0].words


@pytest.mark.alone  # beside other processes on the same GPU it computes at a smaller share of the peak
def test_large_products_are_compute_bound(tmp_path: Path) -> None:
    width = 8192
    well = Job(
        name="ill",
        model=lambda: nn.Sequential(nn.Linear(64, width), *[nn.Linear(width, width) for _ in range(4)]),
        data=TensorDataset(torch.randn(4 * width, 64)),
        loss=lambda model, batch: loss(model, batch[0]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-6),
        global_batch=width,
        max_steps=80,
        checkpoint_every=10_000,
    )
    found = verdict(tmp_path, well, precision="bf16", gpu_log_interval=10)
    (best,) = [finding for finding in found if finding.kind == "compute-bound"]
    percent = int(best.words.split(", at ")[1].split("%")[0])
    assert 30 <= percent <= 95, found
    assert found[0] == best
    assert "launch-bound" not in [finding.kind for finding in found]

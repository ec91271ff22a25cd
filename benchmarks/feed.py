"""What the device feed is worth: the copy of the next batch beside computation, against in the training stream.

Batches are ready in pinned memory, so that fetching costs nothing and only the copy is left. Channels-last is measured
on the same convolutional network, with the feed on.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.data.batch import to_device
from drivetrain.run import assemble

ROUNDS = 5
STEPS = 80
FIRST = 20  # steps that are not counted
BATCHES = 4  # different ones, in turn


class InTheTrainingStream:
    """A run without a feed: the copy stands in line with the computation."""

    def __init__(self, device: torch.device, *, channels_last: bool = False) -> None:
        self._device, self._channels_last = device, channels_last

    def steps(self, steps: Iterator[Any]) -> Iterator[Any]:
        for step, micro_batches in steps:
            yield step, map(self._moved, micro_batches)

    def _moved(self, micro: Any) -> Any:
        return micro._replace(batch=to_device(micro.batch, self._device, channels_last=self._channels_last))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.short(images))


def residual_network() -> nn.Module:
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in pairwise((64, *widths))]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(3) for part in (nn.Linear(4096, 4096), nn.ReLU())), nn.Linear(4096, 1000)
    )


def measure() -> dict[str, list[float]]:
    if not torch.cuda.is_available():
        raise SystemExit("feed needs a GPU")
    images = _batches(256, 3, 224, 224)
    vectors = _batches(8192, 4096)
    cases: dict[str, Callable[[], float]] = {
        "residual network, feed (ms per step)": lambda: milliseconds(residual_network, images, with_feed=True),
        "residual network, no feed (ms per step)": lambda: milliseconds(residual_network, images, with_feed=False),
        "residual network, feed, channels last (ms per step)": lambda: milliseconds(
            residual_network, images, with_feed=True, channels_last="on"
        ),
        "perceptron, feed (ms per step)": lambda: milliseconds(perceptron, vectors, with_feed=True),
        "perceptron, no feed (ms per step)": lambda: milliseconds(perceptron, vectors, with_feed=False),
    }
    for case in cases.values():
        case()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            samples[name].append(case())
    for kind in ("residual network", "perceptron"):
        feed, none = samples[f"{kind}, feed (ms per step)"], samples[f"{kind}, no feed (ms per step)"]
        samples[f"{kind}: saved by the feed (%)"] = [100 * (1 - a / b) for a, b in zip(feed, none, strict=True)]
    return samples


def _batches(size: int, *shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, *shape, generator=generator).pin_memory(),
            torch.randint(0, 1000, (size,), generator=generator).pin_memory(),
        )
        for _ in range(BATCHES)
    ]


def milliseconds(
    model: Callable[[], nn.Module],
    batches: list[tuple[Tensor, Tensor]],
    *,
    with_feed: bool,
    channels_last: str = "off",
) -> float:
    """Return the median time of a step, with everything of a run around it."""
    marks: list[float] = []
    size = 8  # a sample stands for many rows: thousands of them, fetched one by one, would be what is measured

    def loss(model: nn.Module, batch: Any) -> Tensor:
        marks.append(time.perf_counter())
        return functional.cross_entropy(model(batch[0]), batch[1])

    def ready(items: list[int]) -> tuple[Tensor, Tensor]:
        return batches[items[0] // size % BATCHES]

    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            name="feed",
            model=model,
            data=list(range(size * BATCHES)),
            collate=ready,
            shuffle=False,
            loss=loss,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
            global_batch=size,
            max_steps=STEPS,
            checkpoint_every=STEPS,
        )
        config = configure(
            output_dir=folder, gpu_mode="single_gpu", precision="bf16", num_workers=0, channels_last=channels_last
        )
        with mock.patch.object(assemble, "feed_for", assemble.feed_for if with_feed else InTheTrainingStream):
            train(job, config, quiet=True)
    return statistics.median([b - a for a, b in pairwise(marks)][FIRST:]) * 1e3

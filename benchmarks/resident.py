"""What holding a data set on the device is worth: a small perceptron on data of MNIST's size, and the feeding alone.

With the perceptron everything of a run is around the step. The feeding alone is the host's time for the data of a step:
what its thread spends, not what it waits for.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.data.division import Division
from drivetrain.data.feed import feed_for
from drivetrain.data.loader import Loader
from drivetrain.data.resident import make_resident
from drivetrain.data.source import source_of

ROUNDS = 3
SAMPLES, BATCH = 60_000, 128
STEPS, FIRST = 1000, 200  # the first ones are not counted


class Items(Dataset[Any]):
    """The same samples one by one, as a user's data set has them."""

    def __init__(self, tensors: TensorDataset) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._tensors[index]


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )  # fmt: skip


def measure() -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 784, generator=generator)
    tensors = TensorDataset(images, torch.randint(0, 10, (SAMPLES,), generator=generator))
    cases: dict[str, Callable[[], float]] = {
        "tensors, resident (µs per step)": lambda: microseconds(tensors, "on"),
        "tensors, fetched (µs per step)": lambda: microseconds(tensors, "off"),
        "items, resident (µs per step)": lambda: microseconds(Items(tensors), "on"),
        "items, fetched (µs per step)": lambda: microseconds(Items(tensors), "off"),
        "tensors, resident: the host's time for the data alone (µs per step)": lambda: feeding(tensors, True),
        "tensors, fetched: the host's time for the data alone (µs per step)": lambda: feeding(tensors, False),
    }
    feeding(tensors, True)
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            samples[name].append(case())
    for kind in ("tensors", "items"):
        on, off = samples[f"{kind}, resident (µs per step)"], samples[f"{kind}, fetched (µs per step)"]
        samples[f"{kind}: times as fast"] = [b / a for a, b in zip(on, off, strict=True)]
    return samples


def microseconds(data: Any, resident: str) -> float:
    """Return the median time of a step, with everything of a run around it."""
    marks: list[float] = []
    # Nothing of the loop waits for the device, so that many steps between two marks are as good as their sum.
    steps = STEPS if isinstance(data, TensorDataset) else STEPS // 4

    def loss(model: nn.Module, batch: Any) -> Tensor:
        marks.append(time.perf_counter())
        return functional.cross_entropy(model(batch[0]), batch[1])

    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            name="resident",
            model=perceptron,
            data=data,
            loss=loss,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2),
            global_batch=BATCH,
            max_steps=steps,
            checkpoint_every=steps,
        )
        config = configure(
            output_dir=folder, precision="fp32", num_workers=0, resident=resident, auto_optimize=False, report=False
        )
        train(job, config, quiet=True)
    return statistics.median([b - a for a, b in pairwise(marks)][min(FIRST, steps // 4) :]) * 1e6


def feeding(tensors: TensorDataset, is_resident: bool) -> float:
    """Time the loader and the feed without a model, by the clock of this thread."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    resident = make_resident(source_of(tensors), default_collate, device, 1e12) if is_resident else None
    loader = Loader(
        tensors,
        Division(SAMPLES, BATCH, BATCH, 1),
        0,
        0,
        default_collate,
        pin_memory=device.type == "cuda",
        feed=feed_for(device),
        resident=resident,
    )
    began = 0.0
    for place, micro_batches in loader.batches(0, FIRST + STEPS):
        if place.step == FIRST:
            began = time.thread_time()
        for _ in micro_batches:
            pass
    return (time.thread_time() - began) / STEPS * 1e6

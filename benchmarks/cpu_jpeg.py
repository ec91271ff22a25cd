"""No flags on an input-bound job on a CPU: JPEGs are decoded, cropped and flipped; against each number of workers.

`python -m benchmarks cpu-jpeg`. The loops by hand differ in `num_workers` alone, and the best of them counts.
"""

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.contest import Aim, Competitor, Contest, Measured
from benchmarks.cpu import by_loader
from benchmarks.rivals import Pace, Workload, with_no_flags

NAMES = ("cpu-jpeg",)
SIDE, CROP, CLASSES = 320, 96, 10
MOST_WORKERS = 5


class Photographs(Dataset[tuple[Tensor, int]]):
    """JPEG files in memory, of which a random square is cut out, resized, and flipped half of the time."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(0)
        self._files = [_jpeg(generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        side = int(torch.randint(SIDE // 2, SIDE + 1, ()))
        left, top = (int(torch.randint(0, SIDE - side + 1, ())) for _ in range(2))
        with Image.open(io.BytesIO(self._files[number])) as image:
            found = image.convert("RGB").resize((CROP, CROP), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(found)).permute(2, 0, 1).float() / 255 - 0.5
        return pixels.flip(-1) if torch.rand(()) < 0.5 else pixels, number % CLASSES


def _jpeg(generator: np.random.Generator) -> bytes:
    """Return a picture with large shapes and fine grain, which compresses as photographs do."""
    coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((SIDE, SIDE))
    pixels = np.asarray(coarse, np.int16) + generator.integers(-12, 13, (SIDE, SIDE, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def contest(name: str, smoke: bool = False) -> Contest:
    work = Workload(
        model=network,
        loss=loss_of,
        dataset=lambda: Photographs(64 if smoke else 1600),
        global_batch=16 if smoke else 32,
        learning_rate=1e-3,
        pace=Pace(2, 2, 2) if smoke else Pace(60, 20, 5),
        job_steps=20 if smoke else 6_000,
    )
    numbers = range(2 if smoke else MOST_WORKERS + 1)
    hands = {f"hand-{number}": number for number in numbers}
    return Contest(
        name=name,
        module=__name__,
        workload={"model": "a small CNN", "data": f"JPEG of {SIDE} x {SIDE}", "global_batch": work.global_batch}
        | {"job": f"{work.job_steps} steps"},
        unit="samples/s",
        units_per_step=work.global_batch,
        competitors=(
            with_no_flags(work, cap_seconds=300, device="cpu"),
            *(
                Competitor(way, f"by hand, num_workers={number}", lambda _, n=number: _hand(work, n), cap_seconds=120)  # type: ignore[misc]
                for way, number in hands.items()
            ),
        ),
        order=("ours", *hands) if smoke else ("ours", *hands, "ours", "best:hand-", "ours"),
        aims=(Aim("the best number of workers set by hand", tuple(hands), 0.98),),
    )


def _hand(work: Workload, num_workers: int) -> Measured:
    assert work.dataset is not None
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return by_loader(work, DataLoader(work.dataset(), work.global_batch, shuffle=True, **workers))  # type: ignore[arg-type]

"""Checks a data loader with worker processes: every sample arrives once and in order, and how many per second."""

import tempfile
import time
from collections.abc import Iterable

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain.verify.child import LONGEST_TMPDIR
from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, passed

PROBES = (
    Probe(
        name="loader",
        title="data loader",
        function="drivetrain.verify.probes.loader:probe",
        measures_rates=True,
        order=100,
    ),
)

BATCH_SIZE = 32


class MadeUpImages(Dataset[tuple[torch.Tensor, int]]):
    """Samples that cost about what decoding a small image costs, and that contain their own index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, (3, 64, 64), generator=generator, dtype=torch.uint8)
        image = pixels.float().div_(255).sub_(0.5).flip(-1)
        image[0, 0, 0] = index
        return image, index


def worker_counts(num_usable_cores: int) -> tuple[int, ...]:
    return tuple(count for count in (0, 1, 2, 4) if count <= num_usable_cores)


def probe(setup: ProbeSetup) -> Outcome:
    if len(tempfile.gettempdir()) > LONGEST_TMPDIR:
        return failed(
            f"loader workers would hang: the path {tempfile.gettempdir()} is too long for their sockets",
            remedy="export TMPDIR=/tmp",
        )
    # One thread here as in the workers, where torch sets it: otherwise 0 workers would be measured with all cores.
    torch.set_num_threads(1)
    length = 512 if setup.quick else 4096
    rates: dict[int, float] = {}
    for num_workers in worker_counts(setup.hardware.cpu.num_usable):
        loader = DataLoader(
            MadeUpImages(length),
            batch_size=BATCH_SIZE,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=bool(setup.gpu_indices),
        )
        if problem := problem_with_order(loader, length):  # the first pass also starts the workers
            return failed(
                f"with {num_workers} workers {problem}",
                remedy="df -h /dev/shm shows its room (docker run --shm-size=8g); --num-workers 0 works without it",
            )
        started = time.perf_counter()
        for _ in loader:
            pass
        rates[num_workers] = length / (time.perf_counter() - started)
    best = max(rates, key=lambda count: rates[count])
    workers = "1 worker" if best == 1 else f"{best} workers"
    each = ", ".join(f"{count}: {rate:,.0f}" for count, rate in rates.items())
    return passed(f"{rates[best]:,.0f} samples/s ({workers})", detail=f"samples/s by workers: {each}; 64×64 images")


def problem_with_order(batches: Iterable[tuple[torch.Tensor, torch.Tensor]], length: int) -> str:
    """Return what is wrong with the batches; empty if every sample came once, in order, with its own content."""
    arrived: list[int] = []
    for images, indices in batches:
        if not torch.equal(images[:, 0, 0, 0], indices.to(images.dtype)):
            return "a sample arrived with another sample's content"
        arrived.extend(indices.tolist())
    if len(arrived) != length:
        return f"{len(arrived)} samples arrived instead of {length}"
    if arrived != list(range(length)):
        first = next(place for place, index in enumerate(arrived) if place != index)
        return f"samples arrived out of order from place {first} on"
    return ""

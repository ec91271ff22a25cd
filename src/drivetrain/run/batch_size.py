"""Which batch size is fastest here: steps of doubling sizes on a copy of the model, as far as memory and data go."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.plan.tune import Measurement
from drivetrain.run.measure import Journal, Probe, couples_samples
from drivetrain.run.needs import needs_of
from drivetrain.run.setup import Setup

SECONDS_PER_SIZE, BUDGET_SECONDS = 0.15, 20.0
EQUALLY_FAST = 0.03  # of such sizes the smallest is taken
MOST_SLOWER = 2  # sizes in a row that gain nothing, after which larger ones are not tried


@dataclass(frozen=True)
class BatchSearch:
    """What was measured, smallest size first, and why no larger one was."""

    tried: tuple[tuple[int, Measurement], ...]
    ended: str

    @property
    def _usable(self) -> list[tuple[int, float]]:
        return [(size, found.sample_seconds) for size, found in self.tried if not found.problem]

    @property
    def fastest(self) -> int:
        """The smallest size that is as fast as any."""
        least = min(seconds for _, seconds in self._usable)
        return next(size for size, seconds in self._usable if seconds <= least * (1 + EQUALLY_FAST))

    @property
    def largest(self) -> int:
        """The largest size that ran."""
        return self._usable[-1][0]

    def in_words(self) -> str:
        rates = ", ".join(f"{size}: {1 / seconds:,.0f}" for size, seconds in self._usable)
        return f"{self.fastest} is fastest (samples/s by size: {rates}; larger ones not tried: {self.ended})"


def search_batch_size(run: Setup, model: nn.Module, fraction: float, at_most: int | None = None) -> BatchSearch:
    """Measure forward, backward and optimizer step of batches that double in size. Called by all ranks together.

    Args:
        run: the job and its devices; nothing of it is changed.
        model: the model on its device; copies of it are run.
        fraction: the part of the free memory that a step may use; on a CPU the memory is forecast, not measured.
        at_most: largest size to try; None is a rank's part of the data set.
    """
    job, world = run.job, run.world
    if job.num_samples is None or not job.source.is_keyed:
        raise DrivetrainError(
            "the batch size cannot be measured on data that can only be iterated: its items would be used up",
            remedy="give a map-style data set, or a batch size",
        )
    most = min(at_most or job.num_samples, max(1, job.num_samples // world.size))
    limit = min(world.gather(_free_bytes(run))) * fraction
    fits = _forecast(run, model, most, limit)
    began, tried = time.monotonic(), list[tuple[int, Measurement]]()
    best, num_slower, ended = float("inf"), 0, "that is all of the data"
    for size in _sizes(2 if couples_samples(model) else 1, most):
        if size > fits:
            ended = f"they need more than {fraction:.0%} of the free memory (forecast)"
            break
        found = _measured(run, model, size)
        if found.out_of_memory or found.peak_bytes > limit:
            ended = "out of memory" if found.out_of_memory else f"they need more than {fraction:.0%} of the free memory"
            break
        tried.append((size, found))
        if found.problem:
            raise DrivetrainError(
                f"a step of {size} samples cannot be run: {found.problem}",
                remedy="train a few steps with --max-steps 2, which shows where",
            )
        num_slower = num_slower + 1 if found.sample_seconds > best * (1 - EQUALLY_FAST) else 0
        best = min(best, found.sample_seconds)
        if num_slower == MOST_SLOWER:
            ended = "they gain nothing any more"
            break
        if world.agree(time.monotonic() - began) > BUDGET_SECONDS:
            ended = f"{BUDGET_SECONDS:.0f} s were spent on it"
            break
    if not tried:
        raise DrivetrainError(
            f"not even one sample fits in {fraction:.0%} of the free memory",
            remedy="allow a larger part, or use a smaller model; `drivetrain plan` says what takes how much",
        )
    return BatchSearch(tuple(tried), ended)


def _measured(run: Setup, model: nn.Module, size: int) -> Measurement:
    job = replace(run.job, global_batch=size * run.world.size)
    probe = Probe(
        job,
        model,
        run.world,
        lambda division: run.loader(division, job.source, shuffle=job.shuffle),
        Journal(None),
        cudnn_benchmark=run.config.kernels.cudnn_benchmark,
    )
    return probe(run.way.but(micro_batch=size, capture=False), SECONDS_PER_SIZE)


def _sizes(least: int, most: int) -> Iterator[int]:
    size = least
    while size < most:
        yield size
        size *= 2
    yield most


def _forecast(run: Setup, model: nn.Module, most: int, limit: float) -> int:
    """Return the largest size that is forecast to fit; on a GPU the allocator counts, and nothing is forecast."""
    if run.world.device.type == "cuda":
        return most
    try:
        line = needs_of(run.job, model, run.way.precision, min(most, 16), limit).keep
    except Exception:  # noqa: BLE001 - a step that cannot be followed on shapes alone can still be run
        return most
    return max((size for size in _sizes(1, most) if line.peak_bytes(size) <= limit), default=0)


def _free_bytes(run: Setup) -> int:
    device = run.world.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else run.hardware.memory.free_bytes

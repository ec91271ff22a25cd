"""Watches device memory over the epochs: the peak of each, a warning near the limit, and the cache released.

Epochs that are over in a moment are reported together.

Releasing the cache costs time, and the memory is soon allocated again. It helps only where the cache holds much unused
memory while other processes find none left: then, and only at the end of an epoch, it is done.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from drivetrain.core.records import StepRecord

HIGH = 0.95  # of the device's memory
UNUSED_CACHE, LITTLE_LEFT = 0.25, 0.05
LEAST_SECONDS = 0.5  # between two looks: one takes a millisecond or two


class MemoryWatch(Protocol):
    def observe(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class NoMemoryWatch:
    """Watches nothing: torch does not count the memory of a CPU."""

    def observe(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class CudaMemoryWatch:
    """Watches a GPU. `tell` gets the facts of each epoch; `warn` a sentence, once per run."""

    def __init__(self, device: torch.device, tell: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._device, self._tell, self._warn = device, tell, warn
        self._epoch: int | None = None
        self._step = 0
        self._warned = False
        self._told = -math.inf
        torch.cuda.reset_peak_memory_stats(device)

    def observe(self, record: StepRecord) -> None:
        if self._epoch is None:
            self._epoch = record.epoch
        elif record.epoch != self._epoch:
            if time.monotonic() - self._told >= LEAST_SECONDS:
                self._end_epoch()
            self._epoch = record.epoch
        self._step = record.step

    def close(self) -> None:
        if self._epoch is not None:
            self._end_epoch()

    def _end_epoch(self) -> None:
        device = self._device
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_reserved(device)
        facts: dict[str, Any] = {
            "epoch": self._epoch,
            "step": self._step,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": peak,
            "total_bytes": total,
        }
        if peak > HIGH * total and not self._warned:
            self._warned = True
            self._warn(
                f"{peak / total:.0%} of the memory of {device} was held in epoch {(self._epoch or 0) + 1}. "
                "Remedy before it runs out: a smaller --batch-size (the global batch stays), or --activations recompute"
            )
        if reserved - allocated > UNUSED_CACHE * total and free < LITTLE_LEFT * total:
            torch.cuda.empty_cache()
            facts["cache_given_back_bytes"] = reserved - torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._told = time.monotonic()
        self._tell("memory", **facts)


def watch_memory(device: torch.device, tell: Callable[..., None], warn: Callable[[str], None]) -> MemoryWatch:
    return CudaMemoryWatch(device, tell, warn) if device.type == "cuda" else NoMemoryWatch()

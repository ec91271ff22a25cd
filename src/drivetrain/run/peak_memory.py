"""Measures the peak memory of a piece of work: by the allocator's own count on a GPU, by the kernel's on a CPU."""

import ctypes
from pathlib import Path
from typing import Protocol

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak of resident memory to what it is now


class PeakMeter(Protocol):
    is_coarse: bool  # whether it sees whole pages of the whole process, not tensors

    def reset(self) -> None:
        """Start counting here."""

    def peak_bytes(self) -> int:
        """Return the most memory held since `reset`, above what was held then; 0 where nothing is counted."""


class CudaPeakMeter:
    """Counts tensors, in the blocks that the allocator gave them."""

    is_coarse = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before)


class ResidentPeakMeter:
    """Counts the pages of the process, with those of every other thread: good to some ten megabytes."""

    is_coarse = True

    def __init__(self) -> None:
        self._before = 0

    def reset(self) -> None:
        _give_back_free_heap()
        _CLEAR.write_text(_RESET_PEAK)
        self._before = _status("VmRSS")

    def peak_bytes(self) -> int:
        return max(0, _status("VmHWM") - self._before)


class NoPeakMeter:
    """Counts nothing: for a CPU without Linux, or where /proc cannot be read."""

    is_coarse = True

    def reset(self) -> None: ...

    def peak_bytes(self) -> int:
        return 0


def peak_meter(device: torch.device) -> PeakMeter:
    if device.type == "cuda":
        return CudaPeakMeter(device)
    try:
        meter = ResidentPeakMeter()
        meter.reset()
    except (OSError, StopIteration):
        return NoPeakMeter()
    return meter


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _give_back_free_heap() -> None:
    """Give free heap pages back to the system: they would be used again without being counted."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # not glibc
        return

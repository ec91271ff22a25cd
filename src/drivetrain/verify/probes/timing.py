"""Measures and formats how often something can be done per second."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from drivetrain.core.value import format_digits
from drivetrain.core.world import synchronize
from drivetrain.hardware import Gpu


def use_all_cores(num_usable: int) -> None:
    """Use as many threads as this process has cores: torch's default counts the host's cores, not the cgroup's."""
    torch.set_num_threads(max(1, num_usable))


def seconds_per_call(work: Callable[[], object], device: torch.device, *, budget_seconds: float) -> float:
    """Return the median over several stretches, each long enough that the wait at its end does not count.

    The first call warms up (kernel choice, caches, clocks) and the second is timed to size the stretches.
    """
    work()
    synchronize(device)
    once = _stretch(work, device, 1)
    num_stretches = 5
    num_calls = max(1, int(budget_seconds / num_stretches / max(once, 1e-7)))
    if num_calls == 1:  # slow work: as many single calls as fit, at least two
        num_stretches = max(2, min(num_stretches, int(budget_seconds / once)))
    return statistics.median(_stretch(work, device, num_calls) / num_calls for _ in range(num_stretches))


def _stretch(work: Callable[[], object], device: torch.device, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        work()
    synchronize(device)
    return time.perf_counter() - start


def span(values: Sequence[float], unit: str) -> str:
    """Format one figure, or the range over several devices."""
    low, high = min(values), max(values)
    if format_digits(low) == format_digits(high):
        return f"{format_digits(low)} {unit}"
    return f"{format_digits(low)}-{format_digits(high)} {unit}"


def flops_span(tflops: Sequence[float]) -> str:
    """Format FLOP/s in the unit without leading zeros: a small CPU has less than a tenth of a TFLOP/s."""
    if max(tflops) < 0.1:
        return span([1000 * value for value in tflops], "GFLOP/s")
    return span(tflops, "TFLOP/s")


def slow_gpus(gpus: Sequence[Gpu], rates: Sequence[float], *, tolerance: float = 0.15) -> list[str]:
    """Return the GPUs that are more than `tolerance` below the median of their own model, each in a few words."""
    found = []
    for gpu, rate in zip(gpus, rates, strict=True):
        equals = [other_rate for other, other_rate in zip(gpus, rates, strict=True) if other.name == gpu.name]
        usual = statistics.median(equals)
        if rate < (1 - tolerance) * usual:
            below = round(100 * (1 - rate / usual))
            found.append(f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is {below} % below the median of its kind")
    return found

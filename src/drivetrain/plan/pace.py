"""Estimates how fast a machine that is not here may train: by FLOPs and data sheets, as a range."""

# The part of the data sheet's rate that training reaches: ResNet-50 and GPT-2 on an H200 (docs/benchmarks/index.md).
LEAST_OF_PEAK, MOST_OF_PEAK = 0.15, 0.45
SLOWEST_LINK = 10e9  # bytes per second between GPUs without NVLink, nothing overlapped
RECOMPUTING = 4 / 3  # forward once more
LEAST_SECONDS = 1e-3  # of computing per step; below, launching kernels takes most of the time, and FLOPs say nothing


def sample_seconds(
    flops: float, peak: float, num_gpus: int, global_batch: int, gradient_bytes: int, *, recomputes: bool
) -> tuple[float, float] | None:
    """Return seconds per sample on all GPUs together, at best and at worst; None where FLOPs cannot tell.

    Args:
        flops: of one sample, forward and backward.
        peak: FLOP/s of one GPU, by its data sheet.
        num_gpus: that share a step.
        global_batch: samples per step.
        gradient_bytes: that GPUs exchange in each step.
        recomputes: whether activations are recomputed in the backward.
    """
    if flops <= 0 or peak <= 0:
        return None
    ideal = flops * (RECOMPUTING if recomputes else 1.0) / (peak * num_gpus)
    if ideal * global_batch / MOST_OF_PEAK < LEAST_SECONDS:
        return None
    exchanged = 2 * gradient_bytes * (num_gpus - 1) / num_gpus / SLOWEST_LINK / global_batch
    return ideal / MOST_OF_PEAK, ideal / LEAST_OF_PEAK + exchanged

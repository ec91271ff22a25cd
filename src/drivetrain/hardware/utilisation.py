"""Reads the current utilisation of a GPU from NVML by UUID, without creating a CUDA context."""

from typing import Any

from drivetrain.hardware.facts import Gpu


def read_utilisation(gpu: Gpu, nvml: Any = None) -> tuple[float, float] | tuple[None, None]:
    """Return the share of time, in percent, in which the GPU computed and in which it moved memory.

    Returns `(None, None)` where NVML is missing or does not answer for this GPU.

    Args:
        gpu: the GPU, as `detect()` found it.
        nvml: the pynvml module or an object like it; None imports it.
    """
    try:
        if nvml is None:
            import pynvml

            nvml = pynvml
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, no driver, or a damaged library: all the same answer
        return None, None
    try:
        rates = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid.encode()))
        return float(rates.gpu), float(rates.memory)
    except Exception:  # noqa: BLE001 - a MIG device has no answer; older drivers raise other errors
        return None, None
    finally:
        nvml.nvmlShutdown()

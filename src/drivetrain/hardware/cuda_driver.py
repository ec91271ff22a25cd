"""Loads NVML, NVIDIA's management library, and reads a GPU's utilisation from it without creating a CUDA context."""

from typing import Any, TypeAlias

from drivetrain.hardware.facts import Gpu

Nvml: TypeAlias = Any
"""The pynvml module or an object like it: it has no type hints."""


def load_nvml() -> Nvml | None:
    """Return the pynvml module; None where the package nvidia-ml-py is missing or broken."""
    try:
        import pynvml
    except Exception:  # noqa: BLE001 - a broken installation of it counts as none
        return None
    return pynvml


def read_utilisation(gpu: Gpu, nvml: Nvml | None = None) -> tuple[float, float] | tuple[None, None]:
    """Return the share of time, in percent, in which the GPU computed and in which it moved memory.

    Returns `(None, None)` where NVML is missing or does not answer for this GPU.

    Args:
        gpu: the GPU, as `detect()` found it.
        nvml: the pynvml module or an object like it; None imports it.
    """
    nvml = nvml or load_nvml()
    if nvml is None:
        return None, None
    try:
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, or a damaged library: all the same answer
        return None, None
    try:
        rates = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid.encode()))
        return float(rates.gpu), float(rates.memory)
    except Exception:  # noqa: BLE001 - a MIG device has no answer; older drivers raise other errors
        return None, None
    finally:
        nvml.nvmlShutdown()

"""Reads what GPUs and the host do at the moment: utilization, memory, temperature, power, clocks. Loads no torch."""

from collections.abc import Sequence
from typing import Any

import psutil

from drivetrain.core.value import GIB
from drivetrain.hardware.cuda_driver import Nvml
from drivetrain.hardware.facts import Gpu

Row = dict[str, Any]

# Bits of NVML's word on why clocks are lower than they could be. Idle, and what the user set, is no throttling.
_THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software, too hot",
    0x40: "hardware, too hot",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}


def label(gpu: Gpu) -> str:
    """Return a GPU's name by nvidia-smi's numbers: ranks may each call their own GPU `cuda:0`."""
    return f"gpu{gpu.physical_index}" + (f"-{gpu.uuid[-4:]}" if gpu.mig else "")


class NvmlReader:
    """Reads figures of some GPUs. Those that a GPU, its driver or a MIG device has no answer for are left out."""

    def __init__(self, nvml: Nvml | None, gpus: Sequence[Gpu]) -> None:
        self._nvml = nvml
        self._handles: list[tuple[Gpu, Any, Any]] = []  # with its own handle, and that of the card it is on
        self.missing = self._open(gpus) if gpus else ""

    def _open(self, gpus: Sequence[Gpu]) -> str:
        """Open the GPUs. Returns why nothing can be read, or nothing of some; empty if all is well."""
        if all(gpu.vendor != "nvidia" for gpu in gpus):
            return "utilization, temperature and power are read of NVIDIA GPUs only"
        if self._nvml is None:
            return "the package nvidia-ml-py is not installed"
        try:
            self._nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001 - NVMLError, or OSError where the library is damaged
            return f"NVML does not start: {error}"
        lost = []
        for gpu in gpus:
            handle = self._ask("nvmlDeviceGetHandleByUUID", gpu.uuid.encode())
            if handle is None:
                lost.append(label(gpu))
                continue
            card = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if gpu.mig else handle
            self._handles.append((gpu, handle, card))
        return f"NVML does not answer for {', '.join(lost)}" if lost else ""

    def read(self) -> dict[str, Row]:
        return {label(gpu): self._row(handle, card) for gpu, handle, card in self._handles}

    def _row(self, handle: Any, card: Any) -> Row:
        nvml: Nvml = self._nvml
        ask = self._ask
        busy = ask("nvmlDeviceGetUtilizationRates", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        power = ask("nvmlDeviceGetPowerUsage", card)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", card)
        if reasons is None:  # as older drivers call it
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", card)
        row = {
            "utilisation_percent": None if busy is None else float(busy.gpu),
            "memory_utilisation_percent": None if busy is None else float(busy.memory),
            "memory_used_gib": None if memory is None else round(memory.used / GIB, 3),
            "memory_total_gib": None if memory is None else round(memory.total / GIB, 3),
            "temperature_c": ask("nvmlDeviceGetTemperature", card, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": None if power is None else power / 1000,
            "clock_sm_mhz": ask("nvmlDeviceGetClockInfo", card, nvml.NVML_CLOCK_SM),
            "clock_memory_mhz": ask("nvmlDeviceGetClockInfo", card, nvml.NVML_CLOCK_MEM),
            "throttled": None if reasons is None else [word for bit, word in _THROTTLING.items() if reasons & bit],
        }
        return {name: value for name, value in row.items() if value is not None}

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:  # noqa: BLE001 - pynvml has other errors than NVMLError for an older driver or library
            return None

    def close(self) -> None:
        if self._handles:
            self._ask("nvmlShutdown")


class HostReader:
    """Reads CPU and memory of the machine and of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._is_first = True
        self._cpu_percents()  # these are differences: the first answer means nothing

    def _cpu_percents(self) -> tuple[float, float]:
        return psutil.cpu_percent(), self._process.cpu_percent()

    def read(self) -> Row:
        memory = psutil.virtual_memory()
        row = {
            "memory_used_gib": round((memory.total - memory.available) / GIB, 3),
            "memory_total_gib": round(memory.total / GIB, 3),
            "process_memory_gib": round(self._process.memory_info().rss / GIB, 3),
        }
        percents = self._cpu_percents()
        if not self._is_first:
            row |= {"utilisation_percent": percents[0], "process_cpu_percent": percents[1]}
        self._is_first = False
        return row

"""Monitors the GPUs of this process on request: facts, records, and a summary with the same keys everywhere."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drivetrain.core.value import GIB
from drivetrain.hardware import Gpu, Hardware, detect
from drivetrain.hardware.gpu_drivers import HostReader, NvmlReader, label, load_nvml
from drivetrain.monitor.sampler import torch_memory

# By the name in a summary: the name in a row of figures, and what one of its units is in those of the summary.
_FIGURES = {
    "memory_allocated": ("memory_allocated_gib", GIB),
    "memory_reserved": ("memory_reserved_gib", GIB),
    "utilization": ("utilisation_percent", 1),
    "memory_utilization": ("memory_utilisation_percent", 1),
    "temperature": ("temperature_c", 1),
    "power": ("power_watts", 1),
}
_ZERO_WHERE_UNKNOWN = ("memory_allocated", "memory_reserved")  # without CUDA none is: torch does not count on a CPU


class GPUMonitor:
    """Records memory, utilization, temperature and power of GPUs. Without CUDA every key exists, with 0 or None.

    Args:
        hardware: what is here; None asks the machine.

    Example:
        >>> monitor = GPUMonitor()
        >>> monitor.record_gpu_metrics()
        >>> monitor.get_gpu_summary()["total_recordings"]
        1
    """

    def __init__(self, hardware: Hardware | None = None) -> None:
        self._hardware = hardware or detect()
        self._gpus = self._hardware.gpus if self._hardware.accelerator in ("cuda", "rocm") else ()
        self._nvml: NvmlReader | None = None
        self._host = HostReader()
        self._records: list[dict[str, dict[str, float]]] = []  # by device, figures under the names of the rows
        self._began: float | None = None

    def start_monitoring(self) -> None:
        """Start the clock of `total_monitoring_time`, and drop earlier records."""
        self._records = []
        self._began = time.monotonic()

    def record_gpu_metrics(self, device_ids: Sequence[int] | None = None) -> dict[str, dict[str, float]]:
        """Record the present figures of some GPUs, and return them by device; without a GPU, those of the host.

        Args:
            device_ids: GPUs as torch counts them; None is all.
        """
        if self._began is None:
            self._began = time.monotonic()
        if self._nvml is None:
            self._nvml = NvmlReader(load_nvml() if self._gpus else None, self._gpus)
        figures = self._nvml.read()
        rows: dict[str, dict[str, float]] = {"cpu": _numbers(self._host.read())}
        for gpu in self._gpus:
            if device_ids is None or gpu.index in device_ids:
                found = {**figures.get(label(gpu), {}), **torch_memory(torch.device("cuda", gpu.index))}
                rows[label(gpu)] = _numbers(found)
        self._records.append(rows)
        return rows

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of a run's gpu.jsonl, so that the summary covers what a training recorded by itself."""
        if self._began is None:
            self._began = time.monotonic()
        by_time: dict[str, dict[str, dict[str, float]]] = {}
        for row in rows:
            by_time.setdefault(str(row["time"]), {})[str(row["device"])] = _numbers(row)
        self._records += by_time.values()

    def get_gpu_summary(self) -> dict[str, Any]:
        """Return `_mean`, `_max` and `_min` of each figure over all records and GPUs, and each GPU's own in `devices`.

        Memory is in bytes, 0 without CUDA; utilization in percent, temperature in °C and power in watts are None where
        nothing answers.
        """
        names = dict.fromkeys(name for rows in self._records for name in rows if name != "cpu")
        on_gpus = [rows[name] for rows in self._records for name in rows if name != "cpu"]
        on_host = [rows["cpu"] for rows in self._records if "cpu" in rows]
        return {
            **_spread(on_gpus),
            **_three(
                "process_memory", [row["process_memory_gib"] * GIB for row in on_host if "process_memory_gib" in row]
            ),
            "devices": {name: _spread([rows[name] for rows in self._records if name in rows]) for name in names},
            "total_monitoring_time": 0.0 if self._began is None else time.monotonic() - self._began,
            "total_recordings": len(self._records),
        }

    def get_gpu_info(self) -> dict[str, Any]:
        """Return what GPUs are here. Without CUDA `device_count` is 0, `current_device` None and `devices` empty."""
        is_started = bool(self._gpus) and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_device() if is_started else 0
        return {
            "cuda_available": bool(self._gpus),
            "device_count": len(self._gpus),
            "current_device": current if self._gpus else None,
            "devices": {gpu.index: _facts(gpu) for gpu in self._gpus},
        }

    def close(self) -> None:
        """Shut NVML down."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None


def _facts(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "capability": gpu.capability,
        "total_memory": gpu.memory_total_bytes,
        "free_memory": gpu.memory_free_bytes,
        "multi_processor_count": gpu.num_sms,
        "uuid": gpu.uuid,
    }


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}


def _spread(rows: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, (figure, unit) in _FIGURES.items():
        values = [row[figure] * unit for row in rows if figure in row]
        found |= _three(name, values or ([0.0] if name in _ZERO_WHERE_UNKNOWN else []))
    return found


def _three(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_mean": statistics.fmean(values) if values else None,
        f"{name}_max": max(values, default=None),
        f"{name}_min": min(values, default=None),
    }

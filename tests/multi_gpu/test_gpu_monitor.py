"""The monitor's keys exist on every machine; what is known is right."""

import pytest

from drivetrain.multi_gpu import GPUMonitor
from tests.hardware_fixtures import load

FIGURES = ("memory_allocated", "memory_reserved", "utilization", "memory_utilization", "temperature", "power")
KEYS = {f"{name}_{kind}" for name in (*FIGURES, "process_memory") for kind in ("mean", "max", "min")}


def test_without_a_gpu() -> None:
    monitor = GPUMonitor(load("cpu-2core"))
    assert monitor.get_gpu_info() == {
        "cuda_available": False,
        "device_count": 0,
        "current_device": None,
        "devices": {},
    }
    empty = monitor.get_gpu_summary()
    assert set(empty) == KEYS | {"devices", "total_monitoring_time", "total_recordings"}
    assert empty["total_recordings"] == 0
    monitor.start_monitoring()
    for _ in range(3):
        monitor.record_gpu_metrics()
    found = monitor.get_gpu_summary()
    assert found["total_recordings"] == 3
    assert found["memory_allocated_mean"] / 1024**3 == 0.0  # as scripts print it
    assert found["utilization_mean"] is None
    assert found["process_memory_max"] > 1e6
    assert found["total_monitoring_time"] >= 0
    monitor.start_monitoring()
    assert monitor.get_gpu_summary()["total_recordings"] == 0


def test_facts_of_gpus_without_starting_cuda() -> None:
    info = GPUMonitor(load("4x-l4")).get_gpu_info()
    assert (info["cuda_available"], info["device_count"], info["current_device"]) == (True, 4, 0)
    assert set(info["devices"]) == {0, 1, 2, 3}
    assert info["devices"][3]["name"] == "NVIDIA L4"
    assert info["devices"][3]["capability"] == (8, 9)
    assert info["devices"][0]["total_memory"] / 1024**3 == pytest.approx(24, abs=2)


def test_rows_of_a_run() -> None:
    monitor = GPUMonitor(load("4x-l4"))
    for second, busy in enumerate((50, 100)):
        at = f"2026-01-01T00:00:0{second}"
        row = {"step": 1, "time": at, "utilisation_percent": busy, "memory_allocated_gib": 2.0, "throttled": []}
        monitor.add_rows([{**row, "device": "gpu0"}, {**row, "device": "gpu1", "utilisation_percent": 0}])
    found = monitor.get_gpu_summary()
    assert found["total_recordings"] == 2
    assert found["memory_allocated_mean"] == 2 * 1024**3
    assert (found["utilization_mean"], found["utilization_max"], found["utilization_min"]) == (37.5, 100, 0)
    assert found["devices"]["gpu0"]["utilization_mean"] == 75

"""The whole command on a real GPU: `pytest -m gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.hardware import detect
from drivetrain.verify.probe import Report

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """One full run for all tests here, with its cache folder."""
    folder = tmp_path_factory.mktemp("verify")
    environment = {**os.environ, "DRIVETRAIN_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "drivetrain", "verify", "--save", "--json"]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert finished.stdout, finished.stderr
    return Report.from_json(finished.stdout), folder


def test_everything_passes(measured: tuple[Report, Path]) -> None:
    report, _ = measured
    assert [result.model_dump() for result in report.results if result.status == "failed"] == []
    assert report.accelerator == "cuda"
    allowed = {"nccl"} if len(report.devices) == 1 else set()
    assert {result.name for result in report.results if result.status == "not applicable"} <= allowed


def test_the_rates_are_a_gpus(measured: tuple[Report, Path]) -> None:
    report, folder = measured
    rates = {
        (rate.quantity, rate.precision): rate.value
        for result in report.results
        for rate in result.rates
        if rate.of.startswith("GPU-")
    }
    hardware = detect(folder / "runs")
    if any(chip in hardware.gpus[0].name for chip in ("H100", "H200")):
        assert rates["matmul", "bf16"] > 100
        assert rates["matmul", "tf32"] > 2 * rates["matmul", "fp32"]
        assert rates["memory", None] > 1500
    assert rates["host to device", None] > 1
    assert rates["device to host", None] > 1


def test_detect_uses_what_was_saved(measured: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    report, folder = measured
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(folder / "cache"))
    gpu = detect(folder / "runs").gpus[0]
    saved = {
        rate.precision: rate.value
        for result in report.results
        for rate in result.rates
        if rate.of == gpu.uuid and rate.precision
    }
    assert saved
    for precision, value in saved.items():
        assert gpu.peaks[precision].value == value
        assert gpu.peaks[precision].origin == "measured"
    assert gpu.memory_bandwidth is not None
    assert gpu.memory_bandwidth.origin == "measured"
    assert gpu.host_to_device is not None

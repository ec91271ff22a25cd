"""Converts the rows of the checklist to the rates that Hardware keeps."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from drivetrain.hardware import CpuRates, DiskRates, GpuRates, Hardware, MeasuredRates, Precision, save_measured
from drivetrain.verify.result import MeasuredRate, ProbeResult, Quantity


def save_rates(hardware: Hardware, results: Sequence[ProbeResult], *, quick: bool) -> Path | None:
    """Save the rates, and return where; None if there is none to save."""
    rates = collect(results)
    if rates == MeasuredRates():
        return None
    if quick:
        rates = rates.model_copy(update={"source": f"drivetrain verify --quick, {datetime.now(UTC):%Y-%m-%d}"})
    return save_measured(hardware, rates)


def collect(results: Sequence[ProbeResult]) -> MeasuredRates:
    """Return the rates of what passed. A failed probe's figures say what is broken, not what the machine can do."""
    found = [rate for result in results if result.status == "passed" for rate in result.rates]
    cpu = [rate for rate in found if rate.of == "cpu"]
    disk = [rate for rate in found if rate.of == "disk"]
    gpus: dict[str, list[MeasuredRate]] = {}
    for rate in found:
        if rate.of not in ("cpu", "disk"):
            gpus.setdefault(rate.of, []).append(rate)
    return MeasuredRates(
        gpus={
            uuid: GpuRates(
                peaks=_peaks(rates),
                memory_bandwidth=_value(rates, "memory"),
                host_to_device=_value(rates, "host to device"),
                device_to_host=_value(rates, "device to host"),
            )
            for uuid, rates in gpus.items()
        },
        cpu=CpuRates(peaks=_peaks(cpu), memory_bandwidth=_value(cpu, "memory")) if cpu else None,
        disk=DiskRates(write=_value(disk, "write"), read=_value(disk, "read")) if disk else None,
    )


def _peaks(rates: Sequence[MeasuredRate]) -> dict[Precision, float]:
    return {rate.precision: rate.value for rate in rates if rate.quantity == "matmul" and rate.precision is not None}


def _value(rates: Sequence[MeasuredRate], quantity: Quantity) -> float | None:
    return next((rate.value for rate in rates if rate.quantity == quantity), None)

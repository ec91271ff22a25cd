"""Measures how fast bytes move: between host and device, and within a device's own memory."""

import time
from dataclasses import dataclass

import torch

from drivetrain.core.value import MIB
from drivetrain.core.world import synchronize
from drivetrain.verify.probe import MeasuredRate, Outcome, Probe, ProbeSetup, failed, not_applicable, passed
from drivetrain.verify.probes.timing import seconds_per_call, span, use_all_cores

PROBES = (
    Probe(
        name="memory",
        title="memory copy",
        function="drivetrain.verify.probes.copies:within_memory",
        measures_rates=True,
        order=80,
    ),
    Probe(
        name="copies",
        title="host-device copies",
        function="drivetrain.verify.probes.copies:host_and_device",
        measures_rates=True,
        order=90,
    ),
)


@dataclass(frozen=True)
class HostCopies:
    """The GB/s in each direction, with page-locked and with ordinary host memory."""

    to_device: float
    to_host: float
    to_device_pageable: float
    to_host_pageable: float
    returned_early: bool  # a pinned non-blocking copy gave the host back before it was done


def host_and_device(setup: ProbeSetup) -> Outcome:
    if not setup.gpu_indices:
        return not_applicable("no GPU was chosen; host and device memory are the same")
    gpus = setup.gpus
    all_copies = []
    for name in setup.devices:
        copies = measure_host_copies(torch.device(name), num_bytes=(64 if setup.quick else 512) * MIB)
        if isinstance(copies, str):
            return failed(f"{name}: {copies}", remedy="nvidia-smi -q -d ECC,PCI shows memory and bus errors")
        if not copies.returned_early:
            return failed(
                f"{name}: a non-blocking copy from pinned memory held the host until it was done",
                remedy="unset CUDA_LAUNCH_BLOCKING",
            )
        all_copies.append(copies)
    rates = tuple(
        MeasuredRate(of=gpu.uuid, quantity=quantity, value=value, unit="GB/s")
        for gpu, copies in zip(gpus, all_copies, strict=True)
        for quantity, value in (("host to device", copies.to_device), ("device to host", copies.to_host))
    )
    to_device = span([copies.to_device for copies in all_copies], "GB/s to GPU")
    to_host = span([copies.to_host for copies in all_copies], "back")
    pageable = (
        f"pageable memory: {span([copies.to_device_pageable for copies in all_copies], 'GB/s to the GPU')}, "
        f"{span([copies.to_host_pageable for copies in all_copies], 'GB/s back')}"
    )
    return passed(f"{to_device}, {to_host}, pinned", detail=pageable, rates=rates)


def measure_host_copies(device: torch.device, *, num_bytes: int) -> HostCopies | str:
    """Return the rates, or what is wrong with the bytes that arrived."""
    pageable = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    pinned = pageable.pin_memory()
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    back = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
    back_pageable = torch.empty(num_bytes, dtype=torch.uint8)

    there.copy_(pinned, non_blocking=True)
    back.copy_(there, non_blocking=True)
    synchronize(device)
    if not torch.equal(back, pageable):
        return "bytes changed on the way to the device and back"

    started = time.perf_counter()
    there.copy_(pinned, non_blocking=True)
    handed_over = time.perf_counter() - started
    synchronize(device)
    done = time.perf_counter() - started

    def gigabytes(target: torch.Tensor, source: torch.Tensor) -> float:
        seconds = seconds_per_call(lambda: target.copy_(source, non_blocking=True), device, budget_seconds=0.3)
        return num_bytes / seconds / 1e9

    return HostCopies(
        gigabytes(there, pinned),
        gigabytes(back, there),
        gigabytes(there, pageable),
        gigabytes(back_pageable, there),
        returned_early=handed_over < done / 2,
    )


def within_memory(setup: ProbeSetup) -> Outcome:
    """Measure a copy to another place of the same memory. Bytes read and bytes written both count."""
    use_all_cores(setup.hardware.cpu.num_usable)
    gpus = setup.gpus
    values, rates = [], []
    for position, name in enumerate(setup.devices):
        device = torch.device(name)
        # Far beyond any cache: an H200 has 60 MB, a large server CPU some hundred.
        num_bytes = (1024 if gpus else 256 if setup.quick else 512) * MIB
        num_bytes = min(num_bytes, _room(setup, position) // 4)
        gigabytes = measure_memory(device, num_bytes=num_bytes, budget_seconds=0.3 if setup.quick else 1.0)
        values.append(gigabytes)
        of = gpus[position].uuid if gpus else "cpu"
        rates.append(MeasuredRate(of=of, quantity="memory", value=gigabytes, unit="GB/s"))
    return passed(span(values, "GB/s read + written"), detail="copy within the device's memory", rates=tuple(rates))


def measure_memory(device: torch.device, *, num_bytes: int, budget_seconds: float) -> float:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = seconds_per_call(lambda: target.copy_(source), device, budget_seconds=budget_seconds)
    return 2 * source.nbytes / seconds / 1e9


def _room(setup: ProbeSetup, position: int) -> int:
    if setup.gpu_indices:
        return setup.gpus[position].memory_free_bytes
    return setup.hardware.memory.free_bytes

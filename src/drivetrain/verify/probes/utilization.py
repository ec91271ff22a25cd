"""Measures how busy a GPU can be kept: it gets work without a pause, and the driver is asked how busy it was."""

import statistics
import time

import torch

from drivetrain.hardware.cuda_driver import load_nvml
from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, not_applicable, passed
from drivetrain.verify.probes.timing import span

PROBES = (
    Probe(
        name="gpu-use",
        title="GPU use under load",
        function="drivetrain.verify.probes.utilization:probe",
        measures_rates=True,
        order=160,
    ),
)

WANTED_PERCENT = 80.0
MATRIX_SIZE = 4096
QUEUED_PER_ROUND = 20


def judge_busyness(percent_by_gpu: dict[str, float]) -> Outcome:
    figure = span(list(percent_by_gpu.values()), "% busy under load")
    idle = {name: percent for name, percent in percent_by_gpu.items() if percent < WANTED_PERCENT}
    if not idle:
        return passed(figure)
    which = ", ".join(f"{name} {percent:.0f} %" for name, percent in idle.items())
    return failed(
        f"under a load without a pause at least {WANTED_PERCENT:.0f} % is expected: {which}",
        remedy="nvidia-smi shows other programs on it, nvidia-smi -q -d PERFORMANCE what throttles it; top a busy host",
        figure=figure,
    )


def probe(setup: ProbeSetup) -> Outcome:
    if not setup.gpu_indices:
        return not_applicable("no GPU was chosen")
    gpus = setup.gpus
    if any(gpu.vendor != "nvidia" for gpu in gpus):
        return not_applicable("only NVIDIA's driver is asked for it")
    if any(gpu.mig is not None for gpu in gpus):
        return not_applicable("the driver does not report how busy a part of a GPU (MIG) is")
    nvml = load_nvml()
    if nvml is None:
        return not_applicable("the package nvidia-ml-py is not installed")
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
    matrices = [torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=name) for name in setup.devices]
    # The driver averages over up to a second: the first one after the start is not looked at.
    settle, watch = 1.2, (1.0 if setup.quick else 3.0)
    samples: list[list[float]] = [[] for _ in gpus]
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < settle + watch:
        for matrix in matrices:
            for _ in range(QUEUED_PER_ROUND):
                torch.mm(matrix, matrix)
        # Asked while the queue is full, so that asking does not count as a pause.
        if elapsed > settle:
            for position, handle in enumerate(handles):
                samples[position].append(float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        for matrix in matrices:
            torch.cuda.synchronize(matrix.device)
    names = [f"GPU {gpu.index}" for gpu in gpus]
    return judge_busyness({name: statistics.mean(values) for name, values in zip(names, samples, strict=True)})

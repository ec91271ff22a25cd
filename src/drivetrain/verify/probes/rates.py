"""Probes that measure how fast devices are: copies of bytes, matrix products, and how busy a GPU can be kept."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from drivetrain.core.value import MIB, format_digits
from drivetrain.core.world import synchronize
from drivetrain.hardware import Gpu, Precision
from drivetrain.hardware.gpu_drivers import load_nvml
from drivetrain.verify.probe import MeasuredRate, Outcome, Probe, ProbeSetup, failed, not_applicable, passed

# ----------------------------------------------------------------------------------------------------------------------
# Measures and formats how often something can be done per second.


def use_all_cores(num_usable: int) -> None:
    """Use as many threads as this process has cores: torch's default counts the host's cores, not the cgroup's."""
    torch.set_num_threads(max(1, num_usable))


def seconds_per_call(work: Callable[[], object], device: torch.device, *, budget_seconds: float) -> float:
    """Return the median over several stretches, each long enough that the wait at its end does not count.

    The first call warms up (kernel choice, caches, clocks) and the second is timed to size the stretches.
    """
    work()
    synchronize(device)
    once = _stretch(work, device, 1)
    num_stretches = 5
    num_calls = max(1, int(budget_seconds / num_stretches / max(once, 1e-7)))
    if num_calls == 1:  # slow work: as many single calls as fit, at least two
        num_stretches = max(2, min(num_stretches, int(budget_seconds / once)))
    return statistics.median(_stretch(work, device, num_calls) / num_calls for _ in range(num_stretches))


def _stretch(work: Callable[[], object], device: torch.device, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        work()
    synchronize(device)
    return time.perf_counter() - start


def span(values: Sequence[float], unit: str) -> str:
    """Format one figure, or the range over several devices."""
    low, high = min(values), max(values)
    if format_digits(low) == format_digits(high):
        return f"{format_digits(low)} {unit}"
    return f"{format_digits(low)}-{format_digits(high)} {unit}"


def flops_span(tflops: Sequence[float]) -> str:
    """Format FLOP/s in the unit without leading zeros: a small CPU has less than a tenth of a TFLOP/s."""
    if max(tflops) < 0.1:
        return span([1000 * value for value in tflops], "GFLOP/s")
    return span(tflops, "TFLOP/s")


def slow_gpus(gpus: Sequence[Gpu], rates: Sequence[float], *, tolerance: float = 0.15) -> list[str]:
    """Return the GPUs that are more than `tolerance` below the median of their own model, each in a few words."""
    found = []
    for gpu, rate in zip(gpus, rates, strict=True):
        equals = [other_rate for other, other_rate in zip(gpus, rates, strict=True) if other.name == gpu.name]
        usual = statistics.median(equals)
        if rate < (1 - tolerance) * usual:
            below = round(100 * (1 - rate / usual))
            found.append(f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is {below} % below the median of its kind")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Measures how fast bytes move: between host and device, and within a device's own memory.

PROBES_COPIES = (
    Probe(
        name="memory",
        title="memory copy",
        function="drivetrain.verify.probes.rates:within_memory",
        measures_rates=True,
        order=80,
    ),
    Probe(
        name="copies",
        title="host-device copies",
        function="drivetrain.verify.probes.rates:host_and_device",
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


# ----------------------------------------------------------------------------------------------------------------------
# Checks matrix products in every precision: how fast, and how far from float64.

PROBES_MATMUL = (
    Probe(
        name="matmul-fp32",
        title="matmul fp32",
        function="drivetrain.verify.probes.rates:fp32",
        measures_rates=True,
        order=20,
    ),
    Probe(
        name="matmul-tf32",
        title="matmul tf32",
        function="drivetrain.verify.probes.rates:tf32",
        measures_rates=True,
        order=30,
    ),
    Probe(
        name="matmul-fp16",
        title="matmul fp16",
        function="drivetrain.verify.probes.rates:fp16",
        measures_rates=True,
        order=40,
    ),
    Probe(
        name="matmul-bf16",
        title="matmul bf16",
        function="drivetrain.verify.probes.rates:bf16",
        measures_rates=True,
        order=50,
    ),
)

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
UNIT_ROUNDOFF: dict[Precision, float] = {"fp32": 2**-24, "tf32": 2**-11, "fp16": 2**-11, "bf16": 2**-8}

# A product this large keeps any present GPU busy: larger ones were not faster on an H200.
LARGEST_ON_GPU = 8192
LARGEST_ON_CPU = 2048
CHECKED_ROWS = 64


def error_bound(precision: Precision, inner: int) -> float:
    """Return the largest relative error (Frobenius norm) that correct hardware can be expected to give.

    fp16, bf16: the inputs are exact in their type and sums are kept in fp32, so what remains is rounding the result
    once: at most u per element, hence at most u in the norm. A library may split the sum and add parts in the short
    type, which rounds a few more times: 4 u.
    tf32: both inputs are rounded to 11 bits (some chips cut instead: twice the error), sums are fp32: 2·2u = 4 u.
    fp32: every addition rounds; the errors of a random sum grow like its square root: sqrt(inner) u. At the largest
    size that is 5e-6, 1/50 of what tf32 typically shows (half its u, whatever the size): tf32 in disguise is caught.
    """
    unit = UNIT_ROUNDOFF[precision]
    return math.sqrt(inner) * unit if precision == "fp32" else 4 * unit


def relative_error(product: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the error of the first rows against float64: enough to notice wrong arithmetic, at 1/100 of the cost."""
    exact = left[:CHECKED_ROWS].double() @ right.double()
    difference = product[:CHECKED_ROWS].double() - exact
    return float(difference.norm() / exact.norm())


@contextmanager
def fp32_products_in(precision: Precision) -> Iterator[None]:
    """Switch tf32 on or off. Nothing is left to a default: an environment variable may have set it."""
    if torch.cuda.is_available():
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
    else:
        yield


@dataclass(frozen=True)
class Product:
    """One measured shape on one device."""

    size: int
    tflops: float
    error: float


def measure_product(precision: Precision, device: torch.device, *, budget_seconds: float) -> Product:
    """Return the rate at a size that the device can repeat within the budget. Sizes grow until one takes much of it."""
    size = 64  # where an fp16 product is emulated, even 256 takes a fifth of a second
    largest = LARGEST_ON_CPU if device.type == "cpu" else LARGEST_ON_GPU
    while True:
        left, right = _operands(size, precision, device)
        seconds = seconds_per_call(lambda: left @ right, device, budget_seconds=budget_seconds / 20)  # noqa: B023
        # Twice the size takes eight times as long, and is measured five times.
        if size >= largest or seconds * 8 * 5 > budget_seconds:
            break
        size *= 2
    seconds = seconds_per_call(lambda: left @ right, device, budget_seconds=budget_seconds)
    error = relative_error(left @ right, left, right)
    return Product(size, 2 * size**3 / seconds / 1e12, error)


def _operands(size: int, precision: Precision, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # Random, since a GPU given zeros draws less power and runs at higher clocks than it ever will in training.
    generator = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(size, size, generator=generator, device=device, dtype=torch.float32)
    right = torch.randn(size, size, generator=generator, device=device, dtype=torch.float32)
    return left.to(DTYPES[precision]), right.to(DTYPES[precision])


def judge_error(precision: Precision, product: Product) -> Outcome | None:
    """Return the failure that the error indicates, if it does."""
    bound = error_bound(precision, product.size)
    figure = f"error {product.error:.1e}"
    # `not <=` also refuses NaN.
    if not product.error <= bound:
        if precision == "fp32" and product.error < 4 * UNIT_ROUNDOFF["tf32"]:
            return failed(
                f"fp32 has a relative error of {product.error:.1e}, as tf32 has: it is rounded where it should not be",
                remedy="unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE",
                figure=figure,
            )
        return failed(
            f"relative error {product.error:.1e} against float64, where at most {bound:.1e} can be explained",
            remedy="nvidia-smi -q -d ECC,PAGE_RETIREMENT shows memory errors; pip install --force-reinstall torch",
            figure=figure,
        )
    if precision == "tf32" and product.error <= error_bound("fp32", product.size):
        return failed(
            "tf32 was asked for, but the result has fp32's error: it is not used",
            remedy="unset NVIDIA_TF32_OVERRIDE",
            figure=figure,
        )
    return None


def _probe(setup: ProbeSetup, precision: Precision) -> Outcome:
    gpus = setup.gpus
    if precision == "tf32" and not gpus:
        return not_applicable("no GPU was chosen; tf32 exists on NVIDIA GPUs only")
    if precision != "fp32" and gpus and not all(precision in gpu.precisions for gpu in gpus):
        without = ", ".join(sorted({gpu.name for gpu in gpus if precision not in gpu.precisions}))
        return not_applicable(f"{without} has no {precision} hardware")
    use_all_cores(setup.hardware.cpu.num_usable)
    budget_seconds = (0.25 if setup.quick else 1.0) if gpus else (0.4 if setup.quick else 2.0)
    products, rates = [], []
    for position, name in enumerate(setup.devices):
        with fp32_products_in(precision):
            product = measure_product(precision, torch.device(name), budget_seconds=budget_seconds)
        if failure := judge_error(precision, product):
            return failure.model_copy(update={"detail": f"{name}: {failure.detail}"})
        products.append(product)
        of = gpus[position].uuid if gpus else "cpu"
        rates.append(MeasuredRate(of=of, quantity="matmul", precision=precision, value=product.tflops, unit="TFLOP/s"))
    error = max(product.error for product in products)
    figure = f"{flops_span([product.tflops for product in products])}, error {error:.0e}"
    if slow := slow_gpus(gpus, [product.tflops for product in products]) if gpus else []:
        return failed(
            "; ".join(slow),
            remedy="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER shows what holds it back",
            figure=figure,
        )
    sizes = "/".join(sorted({format_digits(product.size) for product in products}))
    return passed(figure, detail=f"{sizes}³, relative error against float64", rates=tuple(rates))


def fp32(setup: ProbeSetup) -> Outcome:
    # What a user gets without a word about precision must be fp32, too: checked before anything is switched.
    if setup.gpu_indices:
        product = measure_product("fp32", torch.device(setup.devices[0]), budget_seconds=0.05)
        if failure := judge_error("fp32", product):
            return failure
    return _probe(setup, "fp32")


def tf32(setup: ProbeSetup) -> Outcome:
    return _probe(setup, "tf32")


def fp16(setup: ProbeSetup) -> Outcome:
    return _probe(setup, "fp16")


def bf16(setup: ProbeSetup) -> Outcome:
    return _probe(setup, "bf16")


# ----------------------------------------------------------------------------------------------------------------------
# Measures how busy a GPU can be kept: it gets work without a pause, and the driver is asked how busy it was.

PROBES_UTILIZATION = (
    Probe(
        name="gpu-use",
        title="GPU use under load",
        function="drivetrain.verify.probes.rates:utilization",
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


def utilization(setup: ProbeSetup) -> Outcome:
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

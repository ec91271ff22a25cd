"""Checks matrix products in every precision: how fast, and how far from float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from drivetrain.core.value import format_digits
from drivetrain.hardware import Precision
from drivetrain.verify.probe import MeasuredRate, Outcome, Probe, ProbeSetup, failed, not_applicable, passed
from drivetrain.verify.probes.timing import flops_span, seconds_per_call, slow_gpus, use_all_cores

PROBES = (
    Probe(
        name="matmul-fp32",
        title="matmul fp32",
        function="drivetrain.verify.probes.matmul:fp32",
        measures_rates=True,
        order=20,
    ),
    Probe(
        name="matmul-tf32",
        title="matmul tf32",
        function="drivetrain.verify.probes.matmul:tf32",
        measures_rates=True,
        order=30,
    ),
    Probe(
        name="matmul-fp16",
        title="matmul fp16",
        function="drivetrain.verify.probes.matmul:fp16",
        measures_rates=True,
        order=40,
    ),
    Probe(
        name="matmul-bf16",
        title="matmul bf16",
        function="drivetrain.verify.probes.matmul:bf16",
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

"""Number formats: those that a model computes in, the widest for sums, FP8 layers, and attention that repeats."""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from drivetrain.core.value import Fp8Recipe, PrecisionName

# ----------------------------------------------------------------------------------------------------------------------
# The widest floating-point numbers of a device, for sums and counts: float64, except where a device has none.

WITHOUT_FLOAT64 = frozenset({"mps"})  # Apple's GPUs


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the type for sums on a device. In float32, counts are exact up to 2**24."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in the widest floating-point numbers of its device."""
    return tensor.to(wide_dtype(tensor.device))


# ----------------------------------------------------------------------------------------------------------------------
# Attention that repeats bit by bit: flex attention in compiled steps, where deterministic algorithms are on.
#
# With these torch cannot use cuDNN's attention, whose backward adds up in any order, and falls back to flash attention,
# which is slower. Flex attention always adds up in the same order, and is faster than that where it is compiled:
# `core.precision.numerics` has compiled steps use it.

_of_torch = functional.scaled_dot_product_attention
_BLOCK, _LEAST = 128, 512  # tokens: the unit of flex attention's masks; the shortest text for which it was measured
# A causal mask, or none, leaves something to attend to in every row, and its blocks follow each other.
_ANY_HEAD = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
# The backward blocks (two kernels, rows and columns each), warps and stages by head size: the fastest of ten on an
# H200. With torch's own a layer of GPT-2 takes 17 % longer. Chosen here, since autotuning would choose by timing.
_BACKWARD = {64: (32, 64, 64, 32, 4, 3), 128: (64, 64, 64, 64, 4, 2)}
_BACKWARD_OPTIONS = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")
_OPTIONS: dict[int, Any] = {
    head: {**_ANY_HEAD, **{f"bwd_{name}": value for name, value in zip(_BACKWARD_OPTIONS, values, strict=True)}}
    for head, values in _BACKWARD.items()
}


@contextmanager
def repeatable_attention() -> Iterator[None]:
    """Have `torch.nn.functional.scaled_dot_product_attention` call flex attention where a step is compiled."""
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with torch's arguments; cases that flex attention cannot do, or does no faster, go to torch."""
    if not torch.compiler.is_compiling() or attn_mask is not None or dropout_p or not _fits(query, key, value):
        return _of_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    mask = None
    if is_causal:
        mask = create_block_mask(_is_before, None, None, query.size(-2), key.size(-2), device=query.device)
    options = _OPTIONS.get(query.size(-1))
    result = flex_attention(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa, kernel_options=options
    )
    assert isinstance(result, Tensor)
    return result


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether shapes and types are those for which flex attention was measured."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dim() == key.dim() == value.dim() == 4
        and query.size(-1) == value.size(-1)
        and query.size(-1) in _OPTIONS
        and query.size(-2) == key.size(-2)
        and query.size(-2) >= _LEAST
        and query.size(-2) % _BLOCK == 0
    )


def _is_before(batch: Tensor, head: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return one >= other


# ----------------------------------------------------------------------------------------------------------------------
# The number formats that a model computes in, and torch's switches for precision and determinism.


@dataclass(frozen=True)
class Precision:
    """The precision of a run. Weights keep the model's dtype; matrix products run in the named format.

    With `fp8` those of the linear layers that `compute_in_fp8` changed do, and all others in bf16.
    """

    name: PrecisionName
    device_type: str

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled up before backward: fp16 has too few exponents for small gradients."""
        return self.name == "fp16"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        if self.fp8 is not None:
            return torch.bfloat16
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.name)

    @property
    def fp8(self) -> Fp8Recipe | None:
        """The way in which linear layers multiply in FP8; None if they do not."""
        return self.name if self.name == "fp8" or self.name == "fp8-tensor" else None

    def around_forward(self) -> AbstractContextManager[Any] | None:
        dtype = self.autocast_dtype
        return None if dtype is None else torch.autocast(self.device_type, dtype)


FP32_ON_CPU = Precision("fp32", "cpu")


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as real ones: of each complex number, its two parts in a dimension of their own."""
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's weights and buffers in place. Complex ones stay complex: `Module.to` would drop a part of each."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(dtype.to_complex())
        elif tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


@contextmanager
def numerics(
    precision: Precision, *, deterministic: bool, cudnn_benchmark: bool, cudnn_deterministic: bool = False
) -> Iterator[None]:
    """Set torch's process-wide numerics switches inside this context, and restore them on exit."""
    if precision.device_type == "cpu" and precision.autocast_dtype is torch.bfloat16:
        # Without instructions for it, torch computes the products in another way, and prints 50 lines of C++ frames.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")
    matmul = torch.get_float32_matmul_precision()
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    convolutions = torch.backends.cudnn.allow_tf32
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.set_float32_matmul_precision("high" if precision.name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision.name != "fp32"  # torch's own default would round convolutions
    torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        # Overwriting every new tensor with NaN would cost GPT-2 124M 1.6 % on an H200 and makes nothing repeat.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic or cudnn_deterministic:
        torch.backends.cudnn.deterministic = True
    try:
        with repeatable_attention() if deterministic else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextmanager
def num_threads(number: int | None) -> Iterator[None]:
    """Set the number of CPU threads inside this context; None leaves it as it is."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------------------
# Linear layers that multiply in 8-bit floating point (FP8), for the precisions `fp8` and `fp8-tensor`.
#
# Numbers are scaled to the range of the format right before each product, by what is in the tensor at that moment.
# Scales are powers of two, so that scaling rounds nothing: a number is rounded alike whatever else is in its tensor,
# unless it is some 2^14 times smaller than the largest there. Results are bf16. Parameters stay as they are, under
# their names; what a step leaves behind is what it leaves in bf16.
#
# `fp8` scales each row by itself, and computes gradients of weights in bf16: nothing depends on how a batch is divided.
# `fp8-tensor` has one scale for each tensor, and computes all three products of a layer in FP8, gradients in `e5m2`.

RECIPES: tuple[Fp8Recipe, ...] = ("fp8", "fp8-tensor")
MULTIPLE = 16  # of which the sizes of both factors have to be
LEAST_FEATURES = 256  # of a layer, in and out: smaller ones lose more by scaling than they gain
TINY = 1e-12  # the largest number of a tensor of zeros


def scaled(values: Tensor, kind: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return numbers in an 8-bit format, and the factor that turns them back.

    Args:
        values: The numbers.
        kind: The format, such as `torch.float8_e4m3fn`.
        dim: The dimension that is summed over in the product, along which all numbers share a scale; None: all do.
    """
    most = torch.finfo(kind).max
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    ratio = most / largest.float().clamp(min=TINY)
    scale = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)  # its power of two: the mantissa is cut off
    return (values.float() * scale).clamp(-most, most).to(kind), scale.reciprocal()


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *, is_forward: bool) -> Tensor:
    """Multiply, with `b` laid out column by column, as the tensor cores want it."""
    columns = b[0].t().contiguous().t()
    return torch._scaled_mm(
        a[0], columns, scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16, use_fast_accum=is_forward
    )


class _Fp8Product(torch.autograd.Function):
    """Multiplies rows of inputs by a weight in FP8, in forward and backward.

    The weight is scaled once, for both. By row its scales are those of outputs, over which the backward sums: so the
    gradient is multiplied by them before it is scaled itself, by powers of two, which rounds nothing.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        e4m3, dim = torch.float8_e4m3fn, 1 if by_row else None
        of_rows, of_weight = scaled(rows, e4m3, dim), scaled(weight, e4m3, dim)
        ctx.save_for_backward(*of_weight, *((rows,) if by_row else of_rows))
        ctx.by_row, ctx.weight_dtype = by_row, weight.dtype
        return _product(of_rows, (of_weight[0].t(), of_weight[1].t()), is_forward=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, factor, *rows = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = of_weight = None
        if ctx.by_row:
            in_fp8 = scaled(gradient.float() * factor.t(), torch.float8_e4m3fn, 1)
            factor = torch.ones_like(weight[:1], dtype=torch.float32)
        else:
            in_fp8 = scaled(gradient, torch.float8_e5m2, None)
        if ctx.needs_input_grad[0]:
            of_rows = _product(in_fp8, (weight, factor), is_forward=False)
        if ctx.needs_input_grad[1] and ctx.by_row:
            of_weight = (gradient.t() @ rows[0]).to(ctx.weight_dtype)
        elif ctx.needs_input_grad[1]:
            turned = in_fp8[0].t().contiguous(), in_fp8[1]
            of_weight = _product(turned, (rows[0], rows[1]), is_forward=False).to(ctx.weight_dtype)
        return of_rows, of_weight, None


class Fp8Linear(nn.Linear):
    """Is `nn.Linear`, which multiplies in FP8 inside bf16 autocast, and as ever outside."""

    recipe: Fp8Recipe

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (as torch has it: it may be given by name)
        """Multiply the input by the weight, and add the bias."""
        if not torch.is_autocast_enabled(input.device.type) or not input.numel():
            return super().forward(input)
        rows = input.to(torch.bfloat16).reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if num_rows % MULTIPLE:
            rows = functional.pad(rows, (0, 0, 0, -num_rows % MULTIPLE))  # zeros: they add nothing to any gradient
        product: Tensor = _Fp8Product.apply(rows, self.weight, self.recipe == "fp8")  # type: ignore[no-untyped-call]
        if num_rows % MULTIPLE:
            product = product[:num_rows]
        if self.bias is not None:
            product = product + self.bias.to(torch.bfloat16)
        return product.view(*input.shape[:-1], self.out_features)


def fits_fp8(layer: nn.Module) -> bool:
    """Return whether a layer can be, and is worth being, computed in FP8. A user's own kind of layer is left alone."""
    if type(layer) not in (nn.Linear, Fp8Linear) or not isinstance(layer, nn.Linear):
        return False
    sizes = layer.in_features, layer.out_features
    return min(sizes) >= LEAST_FEATURES and not any(size % MULTIPLE for size in sizes)


def _become(layer: nn.Module, kind: type[nn.Module]) -> None:
    layer.__class__ = kind


def compute_in_fp8(modules: list[nn.Module], recipe: Fp8Recipe | None) -> int:
    """Have the linear layers inside some modules multiply in FP8, in place; None undoes that. Return how many do."""
    count = 0
    for layer in {id(layer): layer for module in modules for layer in module.modules()}.values():
        if recipe is not None and fits_fp8(layer):
            _become(layer, Fp8Linear)
            layer.recipe = recipe  # type: ignore[assignment]
            count += 1
        elif type(layer) is Fp8Linear:
            _become(layer, nn.Linear)
    return count

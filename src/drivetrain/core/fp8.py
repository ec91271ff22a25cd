"""Linear layers that multiply in 8-bit floating point (FP8), for the precisions `fp8` and `fp8-tensor`.

Numbers are scaled to the range of the format right before each product, by what is in the tensor at that moment.
Scales are powers of two, so that scaling rounds nothing: a number is rounded alike whatever else is in its tensor,
unless it is some 2^14 times smaller than the largest there. Results are bf16. Parameters stay as they are, under their
names; what a step leaves behind is what it leaves in bf16.

`fp8` scales each row by itself, and computes gradients of weights in bf16: nothing depends on how a batch is divided.
`fp8-tensor` has one scale for each tensor, and computes all three products of a layer in FP8, gradients in `e5m2`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.core.value import Fp8Recipe

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
    """Multiplies rows of inputs by a weight in FP8, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.by_row = by_row
        e4m3 = torch.float8_e4m3fn
        factors = scaled(rows, e4m3, 1 if by_row else None), scaled(weight.t(), e4m3, 0 if by_row else None)
        return _product(*factors, is_forward=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        by_row, gradient = ctx.by_row, gradients[0].contiguous()
        kind = torch.float8_e4m3fn if by_row else torch.float8_e5m2
        in_fp8 = scaled(gradient, kind, 1 if by_row else None)
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            other = scaled(weight, torch.float8_e4m3fn, 0 if by_row else None)
            of_rows = _product(in_fp8, other, is_forward=False)
        if ctx.needs_input_grad[1] and by_row:
            of_weight = (gradient.t() @ rows).to(weight.dtype)
        elif ctx.needs_input_grad[1]:
            turned = in_fp8[0].t().contiguous(), in_fp8[1]
            of_weight = _product(turned, scaled(rows, torch.float8_e4m3fn, None), is_forward=False).to(weight.dtype)
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


def fits(layer: nn.Module) -> bool:
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
        if recipe is not None and fits(layer):
            _become(layer, Fp8Linear)
            layer.recipe = recipe  # type: ignore[assignment]
            count += 1
        elif type(layer) is Fp8Linear:
            _become(layer, nn.Linear)
    return count

"""The number formats that a model computes in, and torch's switches for precision and determinism."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.attention import repeatable_attention
from drivetrain.core.value import Fp8Recipe, PrecisionName


@dataclass(frozen=True)
class Precision:
    """The precision of a run. Weights keep the model's dtype; matrix products run in the named format.

    With `fp8` those of the linear layers that `core.fp8` changed do, and all others in bf16.
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

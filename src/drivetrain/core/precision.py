"""What numbers a model computes with."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

PrecisionName = Literal["fp32", "tf32", "fp16", "bf16"]


@dataclass(frozen=True)
class Precision:
    """Weights stay as the model has them; matrix products run in the named format."""

    name: PrecisionName
    device_type: str

    @property
    def scales_loss(self) -> bool:
        """fp16 has too few exponents for small gradients: the loss is scaled up before backward."""
        return self.name == "fp16"

    def around_forward(self) -> AbstractContextManager[Any] | None:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.name)
        return None if dtype is None else torch.autocast(self.device_type, dtype)

    def set_matmul(self) -> None:
        torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")


FP32_ON_CPU = Precision("fp32", "cpu")

"""The names of the number formats. Separate from `precision`, so that a plan needs no torch."""

from typing import Literal

PrecisionName = Literal["fp32", "tf32", "fp16", "bf16"]

"""Values that travel between stages: frozen, and the same after a trip through JSON; and quantities in words.

Messages and plans format bytes, seconds, counts and lists of words by the functions here and no others.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

Fp8Recipe = Literal["fp8", "fp8-tensor"]
"""The ways of multiplying in 8-bit floating point: scaled row by row, or tensor by tensor."""
PrecisionName = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp8-tensor"]
"""The number formats in which a model computes."""
FP8_CAPABILITY: dict[str, tuple[int, int]] = {"fp8": (9, 0), "fp8-tensor": (8, 9)}
"""The compute capability that a GPU needs for each: rows have scales of their own from Hopper on."""
KIB, MIB, GIB = 1024, 1024**2, 1024**3
"""Memory of GPUs and machines is told in GiB, as `nvidia-smi` and `free` do; sizes of data and weights in GB."""


class Value(BaseModel):
    """A frozen record. Equality is by content; an unknown key is an error, so that a typo cannot be lost in a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)


def format_digits(value: float) -> str:
    """Format a number with three significant digits and without an exponent: `3.3`, `0.05`, `12,345`."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_metric(value: float) -> str:
    """Format a loss or a metric such that it says something however small it is: `0.6766`, `12.3457`, `1.388e-05`."""
    return f"{value:.4f}" if 0.01 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"


def format_bytes(num_bytes: float) -> str:
    """Format a size in decimal units: `512 bytes`, `3.3 kB`, `1.6 GB`."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * size:  # 999,999 bytes are 1 MB, not 1,000 kB
            return f"{format_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} bytes"


def format_gib(num_bytes: float) -> str:
    """Format an amount of memory in binary units: `512 MiB`, `23.5 GiB`, `512 GiB`."""
    gib = num_bytes / GIB
    return f"{gib:.0f} GiB" if gib >= 100 else f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / MIB:.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Format a duration: `1.5 ms`, `12.3 s`, `4,000 s`."""
    return f"{format_digits(seconds * 1e3)} ms" if seconds < 0.9995 else f"{format_digits(seconds)} s"


def format_duration(seconds: float) -> str:
    """Format how long something takes: `12.3 s`, `3 min 20 s`, `2 h 5 min`, `3 days 5 h`."""
    whole = round(seconds)
    if whole < 60:
        return format_seconds(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24:,} days {hours % 24} h"


def parse_seconds(text: str) -> str:
    """Return the number in a duration in seconds, such as `60s` or `60`. The caller checks that it is one."""
    return text.removesuffix("s")


def format_count(number: int, noun: str) -> str:
    """Format a number of things: `1 worker`, `2 workers`, `no workers`."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def format_list(words: Sequence[str]) -> str:
    """Join words as a sentence does: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))

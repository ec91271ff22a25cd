"""Bounds of settings, and one error for all values outside them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import PERIODS, is_period


@dataclass(frozen=True)
class Whole:
    least: int
    or_none: bool = False

    def has(self, value: object) -> bool:
        if value is None:
            return self.or_none
        return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= self.least

    def __str__(self) -> str:
        return f"a whole number from {self.least}" + ", or None" * self.or_none


@dataclass(frozen=True)
class Number:
    """A number within bounds. Infinity is allowed where there is no `most`, unless the value has to be finite."""

    least: float = -math.inf
    most: float = math.inf
    finite: bool = False

    def has(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        return self.least <= float(value) <= self.most and (not self.finite or math.isfinite(value))

    def __str__(self) -> str:
        least = f" from {self.least:g}" if math.isfinite(self.least) else ""
        most = f" to {self.most:g}" if math.isfinite(self.most) else ""
        return f"a {'finite ' * self.finite}number{least}{most}"


Allowed = Whole | Number


def refuse_others(of: str, values: Mapping[str, object], allowed: Mapping[str, Allowed]) -> None:
    """Raise one error for all values that are not allowed: name, value, and what is allowed."""
    wrong = [name for name, these in allowed.items() if not these.has(values[name])]
    if wrong:
        raise DrivetrainError(
            f"{of}: " + ", ".join(f"{name} is {values[name]!r}" for name in wrong),
            remedy="give " + "; ".join(f"{name} {allowed[name]}" for name in wrong),
        )


def check_every(of: str, every: object) -> None:
    """Check a hook's period. A job checks it, too; here the error shows where the hook is made."""
    if not is_period(every):
        raise DrivetrainError(f"{of}: every is {every!r}", remedy=f"give {PERIODS}")

"""Bounds of settings, which stand at the fields themselves, and one error for all values outside them.

A field or an argument says them in its type: `far: Annotated[float, Number(0)] = 4.0`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, get_type_hints

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


Bound = Whole | Number


def check_fields(of: object) -> None:
    """Raise one error for all fields of a dataclass that are out of bounds: name, value, and what is allowed."""
    kind: Callable[..., Any] = type(of)
    _refuse(kind.__name__, vars(of), bounds_of(kind))


def check_arguments(of: str, function: Callable[..., Any], values: Mapping[str, object]) -> None:
    """Raise one error for all arguments of a function that are out of bounds."""
    _refuse(of, values, bounds_of(function))


@cache
def bounds_of(declared: Callable[..., Any]) -> dict[str, Bound]:
    """Return the bounds in the types of a class's fields or a function's arguments, by name."""
    hints = get_type_hints(declared, include_extras=True)
    return {
        name: bound for name, hint in hints.items() for bound in getattr(hint, "__metadata__", ()) if _is_bound(bound)
    }


def _is_bound(given: object) -> bool:
    return isinstance(given, Whole | Number)


def _refuse(of: str, values: Mapping[str, object], bounds: Mapping[str, Bound]) -> None:
    wrong = [name for name, bound in bounds.items() if not bound.has(values[name])]
    if wrong:
        raise DrivetrainError(
            f"{of}: " + ", ".join(f"{name} is {values[name]!r}" for name in wrong),
            remedy="give " + "; ".join(f"{name} {bounds[name]}" for name in wrong),
        )


def check_every(of: str, every: object) -> None:
    """Check a hook's period. A job checks it, too; here the error shows where the hook is made."""
    if not is_period(every):
        raise DrivetrainError(f"{of}: every is {every!r}", remedy=f"give {PERIODS}")

"""An automatic value with its reason. Nothing is decided without saying why."""

from typing import Generic, TypeVar

from drivetrain.core.value import Value

T = TypeVar("T")


class Choice(Value, Generic[T]):
    """A value, why it was taken, what else there is, and whether the user pinned it."""

    value: T
    reason: str
    alternatives: tuple[str, ...] = ()
    pinned: bool = False

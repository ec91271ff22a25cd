"""The switches of torch that a way of running a step needs."""

from typing import TypedDict

from drivetrain.plan.knobs import Way


class Switches(TypedDict):
    """Keyword arguments of `core.precision.numerics`."""

    deterministic: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool


def switches_of(way: Way, cudnn_benchmark: bool) -> Switches:
    """Return the switches for a way, where the user allows cuDNN to choose by timing or not."""
    return Switches(
        deterministic=way.repeat == "strict",
        cudnn_benchmark=cudnn_benchmark and way.repeat == "off",
        cudnn_deterministic=way.repeat != "off",
    )

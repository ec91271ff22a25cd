"""Detects optimizers that recompute the loss inside their step, which a run's step does not support."""

import inspect

from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure that computes the loss, as far as can be detected."""
    if callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None)):
        return True  # SAM and its kin: two steps around a second backward
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.default is inspect.Parameter.empty and each.kind not in kinds for each in parameters)


def closure_error(optimizer: Optimizer) -> DrivetrainError:
    """Return the error to raise before, or in place of, the first step."""
    return DrivetrainError(
        f"{type(optimizer).__name__} computes the loss several times in a step (it needs a closure), and a step has "
        "one forward and backward for each micro-batch here",
        remedy="use an optimizer that steps once per gradient, such as AdamW or SGD; LBFGS and SAM need another loop",
    )

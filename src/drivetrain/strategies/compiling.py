"""The loss function and the model inside it, compiled as one.

The loss alone can take as much time and memory as several layers: over a large vocabulary its input is the largest
tensor of the step. Compiled together with the model, it is fused into what makes that input.
"""

import inspect
from typing import Any

import torch

from drivetrain.strategies.base import LossFunction


def num_graphs() -> int:
    """What the compiler has made so far in this process: it can do nothing, and say nothing."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(loss: LossFunction, mode: str) -> LossFunction:
    if inspect.isfunction(loss) or inspect.ismethod(loss):
        return torch.compile(loss, mode=mode)

    def call(model: Any, batch: Any) -> Any:
        return loss(model, batch)

    return torch.compile(call, mode=mode)

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


def compiled(loss: LossFunction, mode: str, *, fixed: bool = False) -> LossFunction:
    """Compiles the loss function. With `fixed`, no kernel whose choice changes results is chosen by timing."""
    how = compile_options(mode, fixed=fixed)
    if inspect.isfunction(loss) or inspect.ismethod(loss):
        return torch.compile(loss, **how)

    def call(model: Any, batch: Any) -> Any:
        return loss(model, batch)

    return torch.compile(call, **how)


def compile_options(mode: str, *, fixed: bool) -> dict[str, Any]:
    """What `torch.compile` is called with. A mode is a set of options, and torch takes either the one or the others."""
    if not fixed:
        return {"mode": mode}
    of_mode = torch._inductor.list_mode_options(mode) if mode != "default" else {}
    # With deterministic algorithms on, the generator that inductor puts into compiled dropout draws other numbers in
    # each call, whatever the seed (torch 2.11): torch's own is called instead, which draws what an eager step draws.
    return {"options": {**of_mode, "deterministic": True, "fallback_random": True}}

"""Counts what a step holds for any micro-batch, from the tensors themselves: no formula per optimizer."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.value import Value


class Held(Value):
    """The memory held at all times, in bytes, on one device."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0  # once every parameter that trains has one
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer


def count_held(model: nn.Module, optimizer: Optimizer) -> Held:
    """Return what model and optimizer hold once the optimizer has stepped. Shared memory counts once."""
    return Held(
        parameters=num_bytes(model.parameters()),
        buffers=num_bytes(model.buffers()),
        gradients=num_bytes(parameter for parameter in model.parameters() if parameter.requires_grad),
        optimizer=num_bytes(tensor for state in optimizer.state.values() for tensor in _tensors(state)),
    )


def forecast_held(model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> Held | None:
    """Return the same before anything ran: the optimizer steps once on tensors that have a shape and no memory.

    So it holds for any optimizer, not only for a list of known ones. None for one that has to look at values.
    """
    ghost = without_memory(model)
    optimizer = make_optimizer(ghost)
    for parameter in ghost.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except (NotImplementedError, RuntimeError):
        # It looked at a value. Most have made their state by then.
        if any(not optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]):
            return None
    return count_held(ghost, optimizer)


def without_memory(model: nn.Module, make: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have a shape and no memory. Tied weights stay tied."""
    make = make or (lambda tensor: torch.empty_like(tensor, device="meta"))
    known: dict[int, Any] = {}
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(make(parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        known.setdefault(id(buffer), make(buffer.detach()))
    return copy.deepcopy(model, known)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages: a storage that two of them share counts once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(state: Any) -> Iterable[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)

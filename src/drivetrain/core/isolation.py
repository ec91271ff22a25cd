"""Runs something beside the training without a trace: generators, memory, modes and buffers are as before."""

import gc
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

_OF_THE_HOST = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device, or the host, has no memory left: also one inside a compiler's."""
    inner = raised_while_compiling(error)
    return isinstance(inner or error, torch.OutOfMemoryError) or _OF_THE_HOST in str(error)


def raised_while_compiling(error: BaseException) -> BaseException | None:
    """Return what was raised inside the compiler of torch, which wraps it in an error of its own; else None."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch's CPU on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Restore the generators afterwards, the device's too, and give the memory that was used back."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with generators_kept():
        try:
            yield
        finally:
            if device.type == "cuda":
                gc.collect()  # on a CPU the memory is not needed that soon
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
                assert on_device is not None
                torch.cuda.set_rng_state(on_device, device)


def modes_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, bool]]:
    """Return each module with its mode: whether it is in training mode."""
    return [(module, module.training) for module in modules]


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Give each module its mode back, as `modes_of` found it."""
    for module, is_training in modes:
        module.training = is_training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; on exit each submodule gets back its mode, which may differ between them."""
    modes = modes_of(model.modules())
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo on exit what is done to the model's buffers, in place or by putting others there."""
    before = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, saved in before:
            buffer.data.copy_(saved)  # `data`: leaves autograd's version counter alone, as backward may need it
            buffers[name] = buffer


_uncounted = [0]


def is_counted() -> bool:
    """Return False while a rank without samples left runs one at weight 0, to stay in step with the others."""
    return not _uncounted[0]


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Run a forward whose samples are not part of the step: its changes to the model's buffers are undone."""
    _uncounted[0] += 1
    try:
        with buffers_kept(model):
            yield
    finally:
        _uncounted[0] -= 1

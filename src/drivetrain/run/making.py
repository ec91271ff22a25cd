"""The user's model, made where there is memory for it: weights without end would end the process without a word."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from drivetrain.core.errors import DrivetrainError
from drivetrain.plan.fitting import in_words

MOST = 0.9  # of the free memory: the process itself, and others, need some too


def make_model(factory: Callable[[], Any], free_bytes: int) -> nn.Module:
    """`free_bytes` is the host's memory; 0: not known."""
    with _within(free_bytes):
        return checked(factory())


def checked(made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise DrivetrainError(f"the model factory returned {type(made).__name__}", remedy="return a torch.nn.Module")
    return made


def refuse_lazy(model: nn.Module) -> None:
    """Raises where shapes of weights or buffers follow from a first batch, which nothing has seen yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise DrivetrainError(
                f"{name} of the model has no shape yet: a lazy module takes it from the first batch",
                remedy="run one batch through the model inside the model function, before it is returned",
            )


@contextmanager
def _within(free_bytes: int) -> Iterator[None]:
    """Weights are counted when a module gets them, before they are filled: until then they take no memory."""
    total = 0
    counted: dict[int, Any] = {}

    def forget(key: int, size: int) -> None:
        nonlocal total
        total -= size
        del counted[key]

    def count(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal total
        if weight is None or weight.device.type != "cpu" or id(weight) in counted:
            return
        counted[id(weight)] = weakref.finalize(weight, forget, id(weight), weight.nbytes)
        total += weight.nbytes
        if total > MOST * free_bytes:
            shape = " × ".join(map(str, weight.shape))
            raise DrivetrainError(
                f"the model does not fit in this machine's memory: {in_words(free_bytes)} are free, and its weights "
                f"take {in_words(total)} up to {name} ({shape}) of a {type(module).__name__}",
                remedy="a machine with more memory, or a smaller model; with --parallel-strategy fsdp no process makes "
                "all of it",
            )

    handle = register_module_parameter_registration_hook(count) if free_bytes else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        for finalizer in counted.values():
            finalizer.detach()

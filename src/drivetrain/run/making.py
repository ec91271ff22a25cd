"""The user's model, made where there is memory for it: weights without end would end the process without a word."""

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from drivetrain.core.errors import DrivetrainError
from drivetrain.plan.fitting import in_words
from drivetrain.plan.held import num_bytes

MOST = 0.95  # of the memory: the process itself needs some, too


def make_model(factory: Callable[[], Any], total_bytes: int) -> nn.Module:
    """`total_bytes` is all that the process may use of the host's memory; 0: not known.

    Not what is free of it: the kernel gives up more for it than it calls free, and only what is sure is refused.
    """
    with _within(total_bytes):
        return checked(factory())


def checked(made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise DrivetrainError(f"the model factory returned {type(made).__name__}", remedy="return a torch.nn.Module")
    return made


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model itself without what others wrapped it in, and what is to be said of that.

    Wrappers put words of their own into the names of weights. What was compiled stays so: the module is called as the
    wrapper would have called it. What copies a model or reduces its gradients is left out: a run does that itself.
    """
    notes = list[str]()
    while _is_compiled(model) or isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        if _is_compiled(model):
            model = _compiled_in_place(model)
        else:
            notes.append(f"the model came wrapped in {type(model).__name__}: its module is trained, and divided here")
            model = cast(nn.Module, model.module)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and _is_compiled(child):
                module._modules[name] = _compiled_in_place(child)
    return model, notes


def _is_compiled(model: nn.Module) -> bool:
    """Whether it is what `torch.compile` made of a module. What defines that class is slow to import."""
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


def _compiled_in_place(wrapper: Any) -> nn.Module:
    """As `nn.Module.compile` does it, with what the wrapper was made with."""
    model: nn.Module = wrapper._orig_mod
    model._compiled_call_impl = wrapper.dynamo_ctx(model._call_impl)
    return model


def refuse_meta(model: nn.Module) -> None:
    """Raises where weights or buffers have a shape and no values: training could not begin with anything."""
    named = [*model.named_parameters(), *model.named_buffers()]
    found = [name for name, tensor in named if tensor.is_meta]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise DrivetrainError(
            f"{len(found)} of the model's {len(named)} tensors are on the meta device and have no values: "
            f"{', '.join(found[:3])}{more}",
            remedy="build the model outside torch.device('meta'), or call model.to_empty(device='cpu') and initialise "
            "or load every weight and buffer before the model function returns it",
        )


def refuse_lazy(model: nn.Module) -> None:
    """Raises where shapes of weights or buffers follow from a first batch, which nothing has seen yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise DrivetrainError(
                f"{name} of the model has no shape yet: a lazy module takes it from the first batch",
                remedy="run one batch through the model inside the model function, before it is returned",
            )


@contextmanager
def _within(total_bytes: int) -> Iterator[None]:
    """Weights are counted when a module gets them, before they are filled: until then they take no memory."""
    taken = 0
    weights: list[weakref.ref[nn.Parameter]] = []

    def held() -> int:
        """Now: some are gone since, or became smaller, or are on a device. What two share counts once."""
        live = [weight for ref in weights if (weight := ref()) is not None and weight.device.type == "cpu"]
        return num_bytes(live)

    def count(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal taken
        if weight is None or weight.device.type != "cpu":
            return
        weights.append(weakref.ref(weight))
        taken += weight.nbytes
        if taken <= MOST * total_bytes:
            return
        taken = held()
        if taken > MOST * total_bytes:
            shape = " × ".join(map(str, weight.shape))
            raise _too_large(total_bytes, taken, f" up to {name} ({shape}) of a {type(module).__name__}")

    handle = register_module_parameter_registration_hook(count) if total_bytes else None
    try:
        yield
    except RuntimeError as error:  # the kernel may refuse a large weight before a module gets it
        refused = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        if refused is None or not total_bytes:
            raise
        raise _too_large(total_bytes, held() + int(refused[1]), "") from error
    finally:
        if handle is not None:
            handle.remove()


def _too_large(total_bytes: int, taken: int, where: str) -> DrivetrainError:
    return DrivetrainError(
        f"the model does not fit in this machine's memory: it has {in_words(total_bytes)}, and the weights "
        f"take {in_words(taken)}{where}",
        remedy="a machine with more memory, or a smaller model; with --parallel-strategy fsdp no process makes "
        "all of it",
    )

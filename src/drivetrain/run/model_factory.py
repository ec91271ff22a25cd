"""Builds the user's model under a host-memory limit, to fail with an error instead of being OOM-killed."""

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
from drivetrain.core.units import format_bytes
from drivetrain.plan.held import num_bytes

MOST = 0.95  # of the memory: the process itself needs some, too


def make_model(factory: Callable[[], Any], total_bytes: int) -> nn.Module:
    """Make the model. `total_bytes` is all that the process may use of the host's memory; 0: not known.

    The limit is not the free memory: the kernel frees more on demand than it reports as free, and only a model that is
    sure not to fit is refused.
    """
    with _within(total_bytes):
        return checked(factory())


def checked(made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise DrivetrainError(f"the model factory returned {type(made).__name__}", remedy="return a torch.nn.Module")
    return made


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the model itself without the wrappers of others, and what is to be reported about that.

    Wrappers add prefixes to the names of weights. A compiled model stays compiled: the module is called as the wrapper
    would have called it. Wrappers that copy a model or reduce its gradients are left out: a run does that itself.
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
    """Return whether `torch.compile` wrapped the module. Checked by name: the class is slow to import."""
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


def _compiled_in_place(wrapper: Any) -> nn.Module:
    """Compile the wrapped model in place as `nn.Module.compile` does, with the wrapper's own options."""
    model: nn.Module = wrapper._orig_mod
    model._compiled_call_impl = wrapper.dynamo_ctx(model._call_impl)
    return model


def refuse_meta(model: nn.Module) -> None:
    """Raise where weights or buffers have a shape and no values: training could not begin with anything."""
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
    """Raise where shapes of weights or buffers follow from a first batch, which nothing has seen yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise DrivetrainError(
                f"{name} of the model has no shape yet: a lazy module takes it from the first batch",
                remedy="run one batch through the model inside the model function, before it is returned",
            )


@contextmanager
def _within(total_bytes: int) -> Iterator[None]:
    """Count weights when a module gets them, before they are filled: until then they take no memory."""
    taken = 0
    weights: list[weakref.ref[nn.Parameter]] = []

    def held() -> int:
        """Return what is held now: some is freed since, or shrunk, or on a device. Shared memory counts once."""
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
        f"the model does not fit in this machine's memory: it has {format_bytes(total_bytes)}, and the weights "
        f"take {format_bytes(taken)}{where}",
        remedy="a machine with more memory, or a smaller model; with --parallel-strategy fsdp no process makes "
        "all of it",
    )

"""Runs something beside the training without a trace: generators, memory, modes and buffers are as before."""

import copy
import gc
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# The second is what torch's allocator says where it is mimalloc, as in the wheels for aarch64.
_OF_THE_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device, or the host, has no memory left: also one inside a compiler's."""
    inner = raised_while_compiling(error)
    return isinstance(inner or error, torch.OutOfMemoryError) or any(words in str(error) for words in _OF_THE_HOST)


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


def seed_torch(seed: int) -> None:
    """Seed torch's generators, as `torch.manual_seed` does.

    For devices that are not initialized yet, `torch.manual_seed` keeps each call with its traceback, which takes memory
    and up to a millisecond. That is left out where there is no accelerator.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def draws_kept() -> Iterator[None]:
    """Restore the global generators on exit, those of GPUs that are in use too: what a script draws is its own.

    A run seeds them. A script that makes its next model, or draws the next learning rate to try, after a run would get
    the same one each time.
    """
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with generators_kept():
        try:
            yield
        finally:
            for number, state in enumerate(on_gpus):
                torch.cuda.set_rng_state(state, number)


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


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode under which everything runs eagerly, also what the user compiled.

    Otherwise torch would not compile what is called under a dispatch mode, then and ever after; and higher-order
    operators, such as flex attention, would raise.
    """

    supports_higher_order_operators = True
    is_eager = True
    _stance: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        # To import the compiler takes seconds: where nothing has, nothing is compiled. Flex attention compiles itself.
        if self.is_eager and not {"torch._dynamo", "torch.nn.attention.flex_attention"}.isdisjoint(sys.modules):
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


def modes_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, bool]]:
    """Return each module with its mode: whether it is in training mode."""
    return [(module, module.training) for module in modules]


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Give each module its mode back, as `modes_of` found it."""
    for module, is_training in modes:
        module.training = is_training


def heeds_mode(model: nn.Module) -> bool:
    """Return whether training and evaluation mode differ for a model, as far as its modules and their code show."""
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)
        if isinstance(module, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)):
            return True
        if getattr(module, "dropout", 0) and isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            return True
        if code is not None and "training" in code.co_names and not type(module).__module__.startswith("torch."):
            return True
    return False


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; on exit each submodule gets back its mode, which may differ between them."""
    modes = modes_of(model.modules())
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model, also of one with sparse buffers: torch cannot copy those of every layout."""
    sparse = {id(buffer): buffer.detach().clone() for buffer in model.buffers() if buffer.layout is not torch.strided}
    return copy.deepcopy(model, sparse)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo on exit what is done to the model's buffers, in place or by putting others there."""
    before = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.layout is torch.strided  # a sparse one is taken for a constant
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, saved in before:
            put_back(buffer, saved)
            buffers[name] = buffer


def put_back(tensor: Tensor, saved: Tensor) -> None:
    """Give a buffer its former numbers, and its former shape: those of some observers get theirs in a forward."""
    if tensor.shape != saved.shape:
        tensor.resize_(saved.shape)
    tensor.data.copy_(saved)  # `data`: leaves autograd's version counter alone, as backward may need it


_OF_MODULES = frozenset(vars(nn.Module()))  # what torch keeps in every module
_NUMBERS = (int, float, bool, str, type(None))


def own_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return what modules of the user's keep beside parameters and buffers: numbers, tensors, small collections."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        if type(module).__module__.split(".")[0] not in ("torch", "drivetrain")
        for attribute, value in vars(module).items()
        if attribute not in _OF_MODULES
        if type(value) in (*_NUMBERS, tuple, list, dict, deque) or isinstance(value, Tensor)
    }


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Give the user's modules the numbers, tensors and tuples back that were their attributes; nothing is copied."""
    attributes = {
        place: value for place, value in own_attributes(model).items() if not isinstance(value, (list, dict, deque))
    }
    try:
        yield
    finally:
        modules = dict(model.named_modules())
        for (name, attribute), value in attributes.items():
            modules[name].__dict__[attribute] = value


@contextmanager
def model_kept(model: nn.Module) -> Iterator[None]:
    """Undo on exit what a trial of the loss did to the model besides its buffers.

    That is: modes, `requires_grad`, gradients, frozen weights that follow the trained ones, and what modules keep as
    attributes, such as a counter of calls or the hidden state of the batch before.
    """
    frozen = [(parameter, parameter.detach().clone()) for parameter in frozen_to_copy(model)]
    modes = modes_of(model.modules())
    weights = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    attributes = {place: (value, _copy_of(value)) for place, value in own_attributes(model).items()}
    try:
        yield
    finally:
        set_modes(modes)
        for parameter, saved in frozen:
            if not torch.equal(parameter.detach(), saved):
                parameter.data.copy_(saved)
        for parameter, requires_grad, gradient in weights:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient
        modules = dict(model.named_modules())
        for name, attribute in own_attributes(model).keys() - attributes.keys():
            delattr(modules[name], attribute)
        for (name, attribute), (value, copied) in attributes.items():
            _put_back(value, copied)
            modules[name].__dict__[attribute] = value


def frozen_to_copy(model: nn.Module) -> list[nn.Parameter]:
    """Return the frozen weights that may follow trained ones, as a teacher's do.

    A base model under an adapter has many more frozen weights than trained ones: these are too many to copy.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if any(hasattr(parameter, "to_local") or parameter.is_meta for parameter in frozen):
        return []  # sharded
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return frozen if sum(parameter.numel() for parameter in frozen) <= 2 * num_trained else []


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.requires_grad else value.detach().clone()
    return None if isinstance(value, (*_NUMBERS, tuple)) else value.copy()


def _put_back(value: Any, copied: Any) -> None:
    if isinstance(value, Tensor):
        if copied is not None and value.shape == copied.shape:
            value.data.copy_(copied)
    elif isinstance(value, dict):
        value.clear()
        value.update(copied)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(copied)


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

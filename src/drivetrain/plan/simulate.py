"""Counts what a step holds and computes: from its tensors, or from a simulated step on fake tensors.

A simulated step is the job's own loss, forward and backward. Every storage that an operation makes is recorded when it
is made and when it is freed, so the most that was held at once is known, with the temporaries of backward, and which
module's forward made what backward needs. What kernels take inside themselves (workspaces of cuDNN and cuBLAS) is not
seen. A loss that looks at values cannot be simulated with shapes alone: then it runs for real, once, on the CPU.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from drivetrain.core.isolation import EagerDispatchMode
from drivetrain.core.metrics import LossSum, NamedLosses
from drivetrain.core.precision import Precision
from drivetrain.core.value import Value
from drivetrain.data.batch import map_leaves


def flops_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> int:
    """Return the FLOPs of a matrix product, convolution or attention; 0 for others, and where no formula fits."""
    formula = flop_registry.get(getattr(operation, "_overloadpacket", operation))  # a higher-order one has none
    if formula is None:
        return 0
    try:
        return int(formula(*args, **(kwargs or {}), out_val=result))
    except Exception:  # noqa: BLE001 - a formula that does not know these arguments must not end the run
        return 0


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


ROUNDING = 512  # of torch's allocator on a GPU


class Simulated(Value):
    """The memory of one forward and backward, in bytes, beyond weights and buffers."""

    peak_bytes: int  # with gradients as they come
    activation_bytes: int  # that backward waits for, at the end of forward
    module_bytes: dict[str, int]  # of these, by the module whose forward made them
    flops: int = 0  # of matrix products, convolutions and attention
    num_operations: int = 0  # that compute something: views of a tensor are none
    is_real: bool = False  # it ran on the CPU: the loss looks at values


Loss = Callable[[nn.Module, Any], Tensor | LossSum | NamedLosses]


def simulate(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    precision: Precision,
    change: Callable[[nn.Module], object] | None = None,
    *,
    accumulates: bool = False,
) -> Simulated:
    """Simulate forward and backward over a batch. `change` may alter the copy of the model before it runs.

    With `accumulates` the gradients of an earlier micro-batch exist already, and do not count.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            ghost, shapes = without_memory(model, _shape), map_leaves(_shape, batch)
            return _followed(ghost, loss, shapes, precision, change, accumulates)
    except Exception:  # noqa: BLE001  (whatever shapes alone cannot do, the real thing may)
        with torch.random.fork_rng(devices=[]):
            real, values = without_memory(model, _on_cpu), map_leaves(_on_cpu, batch)
            found = _followed(real, loss, values, precision, change, accumulates)
        return found.model_copy(update={"is_real": True})


def _shape(leaf: Any) -> Any:
    """Return a fake CPU tensor of the same shape, from any device: in fake mode it takes no memory."""
    return torch.empty_like(leaf, device="cpu") if isinstance(leaf, Tensor) else leaf


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _followed(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    precision: Precision,
    change: Callable[[nn.Module], object] | None,
    accumulates: bool,
) -> Simulated:
    if change is not None:
        change(model)
    known = [*model.parameters(), *model.buffers(), *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))]
    if accumulates:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        known += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    live = _Live(known)
    with ExitStack() as stack:
        stack.enter_context(_told_of_modules(model, live))
        stack.enter_context(live)
        casting = precision.around_forward()
        if casting is None:
            result = loss(model, batch)
        else:
            with casting:
                result = loss(model, batch)
        value: Any = result.total if isinstance(result, LossSum) else result
        if isinstance(value, Mapping):
            value = sum(part.total if isinstance(part, LossSum) else part for part in value.values())
        activations, by_module = live.current, dict(live.by_module)
        torch.autograd.backward(value)
    return Simulated(
        peak_bytes=live.peak,
        activation_bytes=activations,
        module_bytes=by_module,
        flops=live.flops,
        num_operations=live.num_operations,
    )


_DEVICE = torch.ops.prim.device.default  # asked of a tensor that has a shape only; it makes nothing


class _Live(EagerDispatchMode):
    """Counts the bytes of storages that operations made and that are still held."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current, self.peak, self.flops, self.num_operations = 0, 0, 0, 0
        self.module = ""  # whose forward runs
        self.by_module: Counter[str] = Counter()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two of three calls
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs, result)
        self.num_operations += not getattr(func, "is_view", False)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        self.peak = max(self.peak, self.current)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._seen:
            return
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        self._seen.add(key)
        self.current += size
        self.by_module[self.module] += size
        weakref.finalize(storage, self._let_go, key, size, self.module)

    def _let_go(self, key: int, size: int, module: str) -> None:
        self._seen.discard(key)
        self.current -= size
        self.by_module[module] -= size


@contextmanager
def _told_of_modules(model: nn.Module, live: _Live) -> Iterator[None]:
    """Set `live.module`, inside the context, to the name of the innermost module whose forward runs."""
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        stack.append(live.module)
        live.module = names[module]

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        live.module = stack.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

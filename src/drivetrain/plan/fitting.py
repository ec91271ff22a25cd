"""What a step holds and computes, and how a job can be laid out so that it fits, cheapest first."""

import copy
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import EagerDispatchMode
from drivetrain.core.metrics import LossSum, NamedLosses
from drivetrain.core.plugins import strategy_facts
from drivetrain.core.precision import Precision
from drivetrain.core.value import Value, format_bytes
from drivetrain.data.batch import map_leaves
from drivetrain.plan.forecast import FRAGMENTATION, MemoryModel
from drivetrain.plan.plan import MemoryForecast

# ----------------------------------------------------------------------------------------------------------------------
# Counts what a step holds and computes: from its tensors, or from a simulated step on fake tensors.
#
# A simulated step is the job's own loss, forward and backward. Every storage that an operation makes is recorded when
# it is made and when it is freed, so the most that was held at once is known, with the temporaries of backward, and
# which module's forward made what backward needs. What kernels take inside themselves (workspaces of cuDNN and cuBLAS)
# is not seen. A loss that looks at values cannot be simulated with shapes alone: then it runs for real, once, on the
# CPU.


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
    return forecast_held_by(without_memory(model), make_optimizer)


def forecast_held_by(ghost: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> Held | None:
    """Return the same for a copy of a model that has no memory. Gradients are put into it."""
    optimizer = make_optimizer(ghost)
    stepped = {parameter: 1 for parameter in ghost.parameters() if parameter.requires_grad}
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if is_torchs and not optimizer.state and not isinstance(optimizer, torch.optim.LBFGS):
        stepped = _unlike(stepped, optimizer)
    for parameter in stepped:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except (NotImplementedError, RuntimeError):
        # It looked at a value. Most have made their state by then.
        given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(not optimizer.state.get(parameter) for parameter in given & stepped.keys()):
            return None
    held = count_held(ghost, optimizer)
    others = sum((count - 1) * num_bytes(_tensors(optimizer.state.get(p, {}))) for p, count in stepped.items())
    return held.model_copy(update={"optimizer": held.optimizer + others})


def _unlike(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return one parameter of each kind, and how many of that kind there are.

    For parameters of a group that have the same shape and type, torch's own optimizers keep the same, and large models
    have many layers that are alike. A step of each would take a millisecond even without memory.
    """
    groups = {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    first: dict[Any, nn.Parameter] = {}
    kinds = [first.setdefault((groups.get(p), p.shape, p.dtype), p) for p in parameters]
    return Counter(kinds)


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
    storages = {part.untyped_storage()._cdata: part.untyped_storage() for tensor in tensors for part in _dense(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with storage that a tensor consists of: a sparse one has its values and their indices."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


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
        self._known = {part.untyped_storage()._cdata for tensor in known for part in _dense(tensor)}
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
        if tensor.layout is not torch.strided:
            return  # its parts are noted where they are made
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


# ----------------------------------------------------------------------------------------------------------------------
# Finds how a job can be laid out so that it fits, cheapest first; else explains what takes how much memory.
#
# Pure functions of what a step needs and of what the machine has. Figures of layouts that were not measured are rules:
# sharded state is divided by the number of GPUs, and the weights of three blocks are whole at a time (the one that is
# computed, the one that is prefetched, and an in-flight gradient).

WHOLE_BLOCKS = 3
MOST_GPUS = 4096
LEAST_INPUT = 0.02  # of a sample: to suggest less than this would be no help


class Needs(Value):
    """The memory that a step takes with everything on one device, gradients of earlier micro-batches included."""

    held: Held
    keep: MemoryModel  # peak by micro-batch, held included
    recompute: MemoryModel | None = None  # the same with blocks recomputed; None: the model has no repeated blocks
    activation_bytes: int = 0  # of one sample: what backward waits for
    block_bytes: int = 0  # weights of the largest block
    flops: float = 0.0  # of one sample, forward and backward; 0: none that are counted
    num_operations: int = 0  # of forward and backward: kernels to launch
    weights: dict[str, int] = Field(default_factory=dict)  # by module
    activations: dict[str, int] = Field(default_factory=dict)  # of one sample, by module
    notes: tuple[str, ...] = ()


class MemoryLayout(Value):
    """The placement of state, and whether activations are recomputed."""

    strategy: str
    num_gpus: int = 1
    zero_stage: int = 0
    offloads_optimizer: bool = False
    recomputes: bool = False

    def line(self, needs: Needs) -> MemoryModel | None:
        """Return the peak by micro-batch on each device."""
        line = needs.recompute if self.recomputes else needs.keep
        if line is None:
            return None
        moved = self._held(needs) - needs.held.total
        floor = max(0.0, line.floor_bytes + moved) if line.floor_bytes else 0.0
        return line.model_copy(update={"fixed_bytes": line.fixed_bytes + moved, "floor_bytes": floor})

    def largest(self, needs: Needs, limit_bytes: float, at_most: int) -> int:
        """Return the largest micro-batch that fits; 0 if none does."""
        line = self.line(needs)
        return 0 if line is None else line.largest(limit_bytes, at_most)

    def forecast(self, needs: Needs, micro_batch: int) -> MemoryForecast:
        line = self.line(needs)
        assert line is not None
        parts = self._parts(needs.held)
        activations = round(line.sample_bytes * micro_batch)
        # Weights that are cast or gathered for the time of a step, and what backward needs besides.
        workspace = max(0, line.peak_bytes(micro_batch) - parts.total - activations)
        return MemoryForecast(
            parameters=parts.parameters + parts.buffers,
            gradients=parts.gradients,
            optimizer=parts.optimizer,
            activations=activations,
            workspace=workspace,
        )

    @property
    def is_whole(self) -> bool:
        """Whether each device holds a whole copy of everything."""
        return strategy_facts(self.strategy).memory == "whole"

    @property
    def _stage(self) -> int:
        """The ZeRO stage that divides as much; shards are divided like its third."""
        return 3 if strategy_facts(self.strategy).memory == "shards" else self.zero_stage

    def _held(self, needs: Needs) -> int:
        return self._parts(needs.held).total + self._gathered(needs)

    def _gathered(self, needs: Needs) -> int:
        return WHOLE_BLOCKS * needs.block_bytes if self._stage == 3 else 0

    def _parts(self, held: Held) -> Held:
        """Return this device's part of what is held."""
        stage = self._stage

        def share(size: int, from_stage: int) -> int:
            return -(-size // self.num_gpus) if stage >= from_stage else size

        return Held(
            parameters=share(held.parameters, 3),
            buffers=held.buffers,
            gradients=share(held.gradients, 2),
            optimizer=0 if self.offloads_optimizer else share(held.optimizer, 1),
        )

    def __str__(self) -> str:
        facts = strategy_facts(self.strategy)
        words = {
            "whole": "one device" if facts.processes == "one" else f"{self.strategy}, whole copies",
            "shards": f"{self.strategy} over {self.num_gpus} GPUs",
            "zero": f"{self.strategy}, ZeRO stage {self.zero_stage} over {self.num_gpus} GPU(s)",
        }[facts.memory]
        words += ", optimizer in host memory" if self.offloads_optimizer else ""
        return words + (", activations recomputed" if self.recomputes else "")


def layouts(num_gpus: int) -> Iterator[MemoryLayout]:
    """Yield layouts, from the one that costs the least time to the one that takes the least memory."""
    whole = "ddp" if num_gpus > 1 else "single"
    for recomputes in (False, True):
        yield MemoryLayout(strategy=whole, num_gpus=num_gpus, recomputes=recomputes)
    if num_gpus > 1:
        for recomputes in (False, True):
            yield MemoryLayout(strategy="fsdp", num_gpus=num_gpus, recomputes=recomputes)
    for stage in (2, 3) if num_gpus > 1 else (2,):
        for recomputes in (False, True):
            yield MemoryLayout(
                strategy="deepspeed",
                num_gpus=num_gpus,
                zero_stage=stage,
                offloads_optimizer=True,
                recomputes=recomputes,
            )


def first_that_fits(needs: Needs, limit_bytes: float, num_gpus: int, micro_batch: int = 1) -> MemoryLayout | None:
    """Return the cheapest layout in which this many samples at a time fit."""
    return next(
        (layout for layout in layouts(num_gpus) if layout.largest(needs, limit_bytes, micro_batch) >= micro_batch),
        None,
    )


class WayOut(Value):
    """A remedy that a user can apply, and what it saves."""

    what: str
    saves_bytes: int
    is_enough: bool


def ways_out(
    needs: Needs, limit_bytes: float, num_gpus: int, micro_batch: int = 1, *, recomputes: bool = False
) -> list[WayOut]:
    """Return the remedies, cheapest first; those that are enough by themselves before those that are not."""
    found = list(_ways_out(needs, limit_bytes, num_gpus, micro_batch, recomputes))
    return sorted(found, key=lambda way: not way.is_enough)


def _ways_out(needs: Needs, limit_bytes: float, num_gpus: int, micro_batch: int, recomputes: bool) -> Iterator[WayOut]:
    whole = "ddp" if num_gpus > 1 else "single"
    recomputes = recomputes and needs.recompute is not None
    now = MemoryLayout(strategy=whole, num_gpus=num_gpus, recomputes=recomputes)
    line = now.line(needs) or needs.keep
    peak, room = line.peak_bytes(micro_batch), limit_bytes * (1 - FRAGMENTATION)
    smaller = line.largest(limit_bytes, micro_batch - 1)
    if smaller:
        yield WayOut(
            what=f"--batch-size {smaller}, or less: the global batch stays",
            saves_bytes=peak - line.peak_bytes(smaller),
            is_enough=True,
        )
    if needs.recompute is not None and not recomputes:
        saves = peak - needs.recompute.peak_bytes(micro_batch)
        if saves > 0:
            yield WayOut(
                what="--activations recompute: computes each block twice, about a third more time",
                saves_bytes=saves,
                is_enough=peak - saves <= room,
            )
    beyond = max(1, peak - needs.held.total)
    part = (room - needs.held.total) / beyond
    if LEAST_INPUT < part < 1:
        yield WayOut(
            what=f"shorter sequences or smaller images, so that a sample takes {part:.0%} of what it takes now",
            saves_bytes=round(peak - room),
            is_enough=True,
        )
    if needs.activation_bytes and not recomputes:
        saves = min(needs.activation_bytes * micro_batch, beyond)
        yield WayOut(
            what="--activations offload: keeps them in host memory, at the speed of the bus",
            saves_bytes=saves,
            is_enough=peak - saves <= room,
        )
    sharded = _smallest_fsdp(needs, limit_bytes, num_gpus, micro_batch)
    if sharded is not None:
        sharded_line = sharded.line(needs)
        assert sharded_line is not None
        also = " and --activations recompute" if sharded.recomputes else ""
        yield WayOut(
            what=f"{sharded.num_gpus} GPUs like this one with FSDP{also}: divides weights, gradients and optimizer",
            saves_bytes=peak - sharded_line.peak_bytes(micro_batch),
            is_enough=True,
        )
    if needs.held.optimizer:
        offloads = now.model_copy(update={"strategy": "deepspeed", "zero_stage": 2, "offloads_optimizer": True})
        offloaded = offloads.line(needs)
        assert offloaded is not None
        host = needs.held.optimizer + needs.held.gradients
        yield WayOut(
            what="DeepSpeed ZeRO with the optimizer in host memory, which needs "
            f"{format_bytes(host)} there; slower steps",
            saves_bytes=peak - offloaded.peak_bytes(micro_batch),
            is_enough=offloaded.peak_bytes(micro_batch) <= room,
        )


def _smallest_fsdp(needs: Needs, limit_bytes: float, at_least: int, micro_batch: int) -> MemoryLayout | None:
    """Return the FSDP layout with the fewest GPUs like these that fits.

    Numbers of GPUs are doubled, each first without recomputing, then with.
    """
    number = 2
    while number <= MOST_GPUS:
        for recomputes in (False, True):
            layout = MemoryLayout(strategy="fsdp", num_gpus=number, recomputes=recomputes)
            if number >= at_least and layout.largest(needs, limit_bytes, micro_batch) == micro_batch:
                return layout
        number *= 2
    return None


def does_not_fit(
    needs: Needs,
    limit_bytes: float,
    where: str,
    how_much: str,
    num_gpus: int = 1,
    micro_batch: int = 1,
    *,
    recomputes: bool = False,
) -> DrivetrainError:
    """Return the error with what takes how much, by kind and by module, and remedies. `how_much` explains the limit."""
    line = (needs.recompute if recomputes else None) or needs.keep
    peak, held = line.peak_bytes(micro_batch), needs.held
    kinds = {
        "parameters": held.parameters + held.buffers,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": round(line.sample_bytes * micro_batch),
        "workspace": max(0, peak - held.total - round(line.sample_bytes * micro_batch)),
    }
    what = "not even one sample at a time fits" if micro_batch == 1 else f"{micro_batch} samples at a time do not fit"
    lines = [f"{what} on {where}: a step needs {format_bytes(peak)}, and there is {how_much}"]
    lines += [f"  {kind:<12} {format_bytes(size):>9}" for kind, size in kinds.items()]
    lines += [f"  weights by module: {_listed(needs.weights)}"] if needs.weights else []
    lines += [f"  activations by module: {_listed(needs.activations)}"] if needs.activations else []
    lines += [f"  {note}" for note in needs.notes]
    ways = ways_out(needs, limit_bytes, num_gpus, micro_batch, recomputes=recomputes)
    told = [
        f"{number}. {way.what} (saves {format_bytes(way.saves_bytes)}{'' if way.is_enough else ', not enough alone'})"
        for number, way in enumerate(ways, 1)
    ]
    remedy = "cheapest first:\n    " + "\n    ".join(told) if told else "a GPU with more memory, or a smaller model"
    return DrivetrainError("\n".join(lines), remedy=remedy)


def by_group(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sum modules of one list, largest first: `blocks.0.mlp` and `blocks.1.mlp` belong to `blocks`."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        group = re.split(r"\.?\b\d+\b", name, maxsplit=1)[0] or name or "the loss and the rest"
        found[group] = found.get(group, 0) + size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _listed(sizes: Mapping[str, int], most: int = 4) -> str:
    found: Sequence[tuple[str, int]] = list(by_group(sizes).items())
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in found[:most] if size)
    rest = sum(size for _, size in found[most:])
    return told + (f", others {format_bytes(rest)}" if rest else "")

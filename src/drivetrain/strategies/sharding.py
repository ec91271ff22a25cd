"""Shards a model, so that no device ever holds more of it than one block whole; and collectives over sharded gradients.

Each repeated block becomes a unit, and the rest of the model another: a unit's weights are gathered before its forward
and its backward, and freed after them (torch's `fully_shard`). Rank 0's weights count. They are sent unit by unit, so
other ranks may build the model without memory for it.

The global norm, the inf flag and the sums of losses are collectives: all ranks call them together.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.muon import Muon
from drivetrain.core.optimizers import members_of
from drivetrain.core.precision import Precision
from drivetrain.core.state import is_distributed, local_part, offsets_of, put_value
from drivetrain.core.value import format_bytes
from drivetrain.core.world import World
from drivetrain.moe.mixture import mixtures_in
from drivetrain.plan.fitting import Held, forecast_held_by, without_memory
from drivetrain.strategies.compiling import CompileOptions, compile_each
from drivetrain.strategies.layers import repeated_blocks
from drivetrain.strategies.shared_experts import SharedExperts

_MESHES = count()
ROOT = ""  # the name of the unit that holds what is in no block
# They treat every element of a weight alike, so a rank's part of a weight is all they need. One of another kind (it
# takes norms or products of whole weights) would compute something else on parts, in silence.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class ShardOptions:
    """Options of sharding. `cast`: what mixed precision casts. `accumulate`: form of gradients between micro-steps."""

    offload: bool = False  # shards and optimizer in host memory; the optimizer steps there
    cast: Literal["operations", "blocks"] = "operations"
    accumulate: Literal["whole", "shards"] = "whole"
    broadcast_buffers: bool = True
    reduces_unused: bool = False  # a weight that one rank did not use still takes part, with a gradient of zero
    reshard: bool = True  # whether a unit's weights are freed after its forward, and gathered again for its backward
    unit_blocks: int = 1  # that are gathered together
    gather_ahead: int = 0  # units, while another one computes; 0: as torch does it
    replicas: int = 1  # copies of the model, each of which as many ranks share


@dataclass(frozen=True)
class Unit:
    """Modules whose weights are gathered together: some blocks that follow one another, or the rest of the model."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    parameters: dict[str, nn.Parameter]

    @property
    def name(self) -> str:
        """The name of the first module."""
        return self.names[0]

    def may_join(self, other: "Unit") -> bool:
        """Return whether another unit is of the same list of blocks and of the same type of weights."""
        lists = {name.rpartition(".")[0] for name in (*self.names, *other.names)}
        kinds = {p.dtype for unit in (self, other) for p in unit.parameters.values() if p.requires_grad}
        return ROOT not in (self.name, other.name) and len(lists) == 1 and len(kinds) <= 1


@dataclass(frozen=True)
class ShardLayout:
    """The layout in which a model is to be sharded."""

    units: tuple[Unit, ...]  # blocks first, the rest of the model last
    replicated: dict[str, nn.Parameter]  # stay whole on every rank
    shared_out: dict[str, nn.Parameter]  # of experts, which others see to: each rank has some rows of them
    routers: frozenset[str]  # of these experts: names among the replicated

    def in_words(self) -> str:
        """Describe which weights are gathered together, and their sizes."""
        sizes = {unit.names: _num_bytes(unit.parameters.values()) for unit in self.units if unit.parameters}
        rest = format_bytes(sizes.pop((ROOT,), 0))
        blocks = [name for names in sizes for name in names]
        found = f"no repeated blocks were found: the whole model at once ({rest})"
        if blocks:
            most = max(map(len, sizes))
            at_once = f", {most} at a time" if most > 1 else ""
            largest = f"{format_bytes(max(sizes.values()))} at most"
            found = f"{len(blocks)} blocks ({blocks[0]} to {blocks[-1]}{at_once}, {largest}), and the rest ({rest})"
        others = [name for name in self.replicated if name not in self.routers]
        whole = f"; whole on every rank: {', '.join(others)}" if others else ""
        size = format_bytes(_num_bytes(self.shared_out.values()))
        experts = f"; experts are shared out ({size}), routers whole" if self.shared_out else ""
        return f"gathered in turn: {found}{whole}{experts}"


@dataclass(frozen=True, eq=False)
class Sharded:
    """A model that was sharded."""

    model: nn.Module
    options: ShardOptions
    unit_names: tuple[str, ...]
    in_words: str
    replicated: dict[str, nn.Parameter]
    parameters: dict[str, Tensor]  # distributed ones, by name
    fully_sharded: "tuple[FSDPModule, ...]"
    # What the optimizer holds: each part, and the parameter it is of.
    owners: dict[Tensor, Tensor] = field(default_factory=dict)
    replaced: Mapping[Tensor, str] = field(default_factory=dict)  # the model's parameters as they were before

    def take_over(self, optimizer: Optimizer) -> None:
        """Make the optimizer hold this rank's parts, as plain tensors, of what it held."""
        refuse_unless_elementwise(optimizer, "fsdp")
        state, optimizer.state = dict(optimizer.state), type(optimizer.state)(dict)
        optimizer.state.update({key: value for key, value in state.items() if not isinstance(key, Tensor)})
        for group in optimizer.param_groups:
            held = group["params"]
            group["params"] = [self._part_of(parameter) for parameter in held]
            for before, part in zip(held, group["params"], strict=True):
                if before in state:
                    optimizer.state[part] = {name: self._cut(value, part) for name, value in state[before].items()}
        for member in members_of(optimizer).values():
            if isinstance(member, Muon):
                member.take_rows(self.owners)

    def _part_of(self, parameter: Tensor) -> Tensor:
        owner = self.parameters.get(self.replaced.get(parameter, ""), parameter)
        if not is_distributed(owner):
            return parameter
        known = next((part for part, other in self.owners.items() if other is owner), None)
        if known is not None:
            return known
        part = nn.Parameter(local_part(owner), requires_grad=owner.requires_grad)
        self.owners[part] = owner
        return part

    def _cut(self, value: Any, part: Tensor) -> Any:
        """Return this rank's part of what an optimizer kept for each element; anything else as it is."""
        if not isinstance(value, Tensor) or part not in self.owners or value.shape != self.owners[part].shape:
            return value
        if is_distributed(value):
            return local_part(value)
        first = offsets_of(self.owners[part])[0]
        return value[first : first + part.shape[0]].to(part.device, copy=True)


def layout_of(model: nn.Module, *, shares_experts: bool = False, unit_blocks: int = 1) -> ShardLayout:
    """Return the units of a model. A block that shares a weight with something outside it is not a unit.

    Such a block would need both gathered. With `shares_experts`, experts are in no unit. Their routers stay whole: they
    are small, and experts that are added or removed change rows of them on every rank. `unit_blocks` that follow one
    another are one unit.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    mixtures = mixtures_in(model).values() if shares_experts else ()
    experts = {parameter for layer in mixtures for parameter in layer.experts.parameters()}
    routers = {parameter for layer in mixtures for parameter in layer.router.parameters()}
    uses = Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )  # by modules, however often a module is used
    units = []
    taken: set[nn.Parameter] = set()
    for name, block in repeated_blocks(model).items():
        own = set(block.parameters()) - experts - routers
        inside = Counter(parameter for module in block.modules() for parameter in module.parameters(recurse=False))
        if not own or own & taken or any(inside[parameter] < uses[parameter] for parameter in own):
            continue
        if type(block).forward is nn.Module.forward:
            continue  # a container: it is never called, so nothing would gather its weights
        taken |= own
        units.append((name, block, [parameter for parameter in names if parameter in own]))
    rest = [parameter for parameter in names if parameter not in taken | experts | routers]
    units.append((ROOT, model, rest))
    replicated = {names[parameter]: parameter for _, _, own in units for parameter in _left_whole(own)}
    replicated |= {names[parameter]: parameter for parameter in names if parameter in routers}
    single = [
        Unit((name,), (module,), {names[p]: p for p in own if names[p] not in replicated})
        for name, module, own in units
    ]
    return ShardLayout(
        tuple(_joined(single, unit_blocks)),
        replicated,
        {name: parameter for parameter, name in names.items() if parameter in experts},
        frozenset(names[parameter] for parameter in routers),
    )


def _joined(units: Iterable[Unit], most: int) -> list[Unit]:
    """Return units of up to so many blocks, of those that follow one another in one list."""
    found: list[Unit] = []
    for unit in units:
        last = found[-1] if found else None
        if last is None or len(last.names) == most or not last.may_join(unit):
            found.append(unit)
            continue
        parameters = {**last.parameters, **unit.parameters}
        found[-1] = Unit((*last.names, *unit.names), (*last.modules, *unit.modules), parameters)
    return found


def _left_whole(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters to replicate: scalars, and those of a dtype other than the unit's most frequent one.

    A scalar has no rows to distribute, and the gradients of a unit are reduced as one dtype.
    """
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.dim() and parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    usual = sizes.most_common(1)[0][0] if sizes else None
    return [p for p in parameters if p.dim() == 0 or (p.requires_grad and p.dtype != usual)]


def build(make: Callable[[], nn.Module], world: World) -> nn.Module:
    """Build the model on rank 0; others build it without memory, where its code allows."""
    if world.is_main:
        return make()
    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # noqa: BLE001  (it looks at values, or loads some: what is really wrong is found by making it)
        return make()
    if not isinstance(model, nn.Module) or _holds_loose_tensors(model):
        return make()
    return model


def _holds_loose_tensors(model: nn.Module) -> bool:
    """Return whether there are tensors that are neither parameters nor buffers: they could not be found and filled."""

    def is_loose(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(is_loose, value))
        if isinstance(value, dict):
            return any(map(is_loose, value.values()))
        return isinstance(value, Tensor) and value.is_meta

    hidden = ("_parameters", "_buffers", "_modules")
    return any(
        is_loose(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in hidden  # what is registered is sent by rank 0
    )


def compile_blocks(model: nn.Module, options: CompileOptions, *, shares_experts: bool = False) -> None:
    """Compile what each unit computes. Gathering stays outside: compiled with it, nothing might be compiled at all."""
    layout = layout_of(model, shares_experts=shares_experts)
    blocks = [module for unit in layout.units if unit.name != ROOT for module in unit.modules]
    compile_each(blocks or [model], options)


def shard(
    model: nn.Module,
    world: World,
    options: ShardOptions,
    precision: Precision,
    experts: SharedExperts | None = None,
) -> Sharded:
    """Shard the model, in place, on all ranks together. It then has rank 0's weights, and its parameters are shards.

    Given `experts` are distributed by rows instead of sharded.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

    refuse_uncuttable(model)
    _refuse_options(options, precision)
    _refuse_replicas(options, world, experts)
    _refuse_other_models(model, world)
    layout = layout_of(model, shares_experts=experts is not None, unit_blocks=options.unit_blocks)
    replaced: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    copies = f"; {options.replicas} copies, each shared by {world.size // options.replicas} ranks"
    words = layout.in_words() + (copies if options.replicas > 1 else "")
    mesh = _mesh(world, options.replicas)
    pinned = world.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if options.offload else OffloadPolicy()
    left_whole = set(layout.replicated.values())
    fully_sharded = []
    for unit in layout.units:
        others = [*layout.replicated.values(), *model.buffers()] if unit.name == ROOT else []
        for tensor in [*unit.parameters.values(), *others]:  # in one order on all ranks
            _settle(tensor, world)
        if not unit.parameters and unit.name != ROOT:
            continue
        fully_shard(
            list(unit.modules),
            mesh=mesh,
            # With one rank there is nothing to gain from forgetting. The rest of the model is needed again at once.
            reshard_after_forward=options.reshard and world.size > options.replicas and unit.name != ROOT,
            mp_policy=_mixed_precision(unit, options, precision),
            offload_policy=offload,
            ignored_params=left_whole | set(layout.shared_out.values()),
        )
        modules = cast("tuple[FSDPModule, ...]", unit.modules)
        _sum_gradients(modules[0], world, options)  # the modules of a unit share all settings
        fully_sharded.append(modules)
        for parameter in unit.parameters.values():
            # Who is asked later which parameter was whose keeps these: without their values, of which the shards are
            # copies. Kept whole, every rank would hold the whole model beside its part.
            parameter.data = parameter.data.new_empty(0)
    assert all(isinstance(module, FSDPModule) for modules in fully_sharded for module in modules)
    _gather_ahead([modules[0] for modules in fully_sharded], options.gather_ahead)
    if experts is not None:
        experts.deal()
    return Sharded(
        model=model,
        options=options,
        unit_names=tuple(", ".join(unit.names) for unit in layout.units if unit.parameters),
        in_words=words,
        replicated={name: parameter for name, parameter in model.named_parameters() if name in layout.replicated},
        parameters={name: parameter for name, parameter in model.named_parameters() if is_distributed(parameter)},
        fully_sharded=tuple(module for modules in fully_sharded for module in modules),
        replaced=replaced,
    )


def _refuse_options(options: ShardOptions, precision: Precision) -> None:
    from torch.distributed.fsdp import FSDPModule

    if options.reduces_unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise DrivetrainError(
            f"torch {torch.__version__} cannot reduce gradients that only some ranks have with fsdp",
            remedy="drop --find-unused-parameters, use --parallel-strategy ddp, or a newer torch",
        )
    if options.offload and precision.scales_loss:
        raise DrivetrainError(
            "fsdp steps an offloaded optimizer in host memory, and fp16 scales gradients on the GPU",
            remedy="use --precision bf16 or fp32, or drop --fsdp-offload",
        )


def _refuse_replicas(options: ShardOptions, world: World, experts: SharedExperts | None) -> None:
    if options.replicas > 1 and experts is not None:
        raise DrivetrainError(
            "copies of a model whose experts are shared out are not supported",
            remedy="drop --fsdp-replicas, or use --parallel-strategy fsdp",
        )
    if world.size % options.replicas:
        raise DrivetrainError(
            f"{world.size} ranks cannot share {options.replicas} copies of the model evenly",
            remedy=f"--fsdp-replicas with a divisor of {world.size}; usual is the number of machines",
        )


def _mesh(world: World, replicas: int) -> Any:
    """Return the ranks as torch's mesh: those that share a copy follow one another, as ranks of one machine do."""
    from torch.distributed.device_mesh import DeviceMesh

    if replicas == 1:
        return DeviceMesh.from_group(world.own_group(), world.device.type)
    ranks = torch.arange(world.size).view(replicas, -1)
    # torch keeps what it found for operations on distributed tensors, by the mesh. Meshes of the same ranks and names
    # are equal: it would go on with the groups of an earlier run, which are closed.
    number = next(_MESHES)
    names = (f"replicate_{number}", f"shard_{number}")
    return DeviceMesh.from_group(list(world.grid(replicas)), world.device.type, mesh=ranks, mesh_dim_names=names)


def _gather_ahead(units: "Sequence[FSDPModule]", number: int) -> None:
    """Have the units that follow gathered while one computes, in forward and in backward.

    By itself torch enqueues the next unit of a forward when its turn comes, and gathers one unit ahead in backward. The
    rest of the model comes last in the list, and first in both.
    """
    *blocks, rest = units
    for index, unit in enumerate((rest, *blocks) if number else ()):
        unit.set_modules_to_forward_prefetch(list(blocks[index : index + number]))
    for index, unit in enumerate((rest, *reversed(blocks)) if number else ()):
        unit.set_modules_to_backward_prefetch(list(reversed(blocks))[index : index + number])


def _sum_gradients(module: Any, world: World, options: ShardOptions) -> None:
    """Have FSDP sum gradients over ranks. Averages would have to be undone, and gloo knows only sums."""
    if world.size > 1:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if options.reduces_unused:
        module.set_reduce_scatter_unused_params(True, recurse=False)


def _mixed_precision(unit: Unit, options: ShardOptions, precision: Precision) -> Any:
    """Return FSDP's policy for the weights that are gathered together: blocks may compute in low precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low = precision.autocast_dtype if options.cast == "blocks" and unit.name != ROOT else None
    full = next((p.dtype for p in unit.parameters.values() if p.requires_grad), torch.float32)
    return MixedPrecisionPolicy(
        param_dtype=low if full == torch.float32 else None,
        # Sums of many small numbers are what low precision is worst at.
        reduce_dtype=torch.float32 if low or full in (torch.bfloat16, torch.float16) else None,
    )


def forecast_local(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    world_size: int,
    rank: int,
    rows_of_experts: Mapping[str, int] | None = None,
) -> Held | None:
    """Return what this rank will hold between steps once the optimizer has stepped, before anything is sharded.

    Every rank's part of a weight has as much memory as the largest one; of experts that are shared out a rank has just
    the rows it is given (`SharedExperts.num_rows`). None for an optimizer that looks at values.
    """
    layout = layout_of(model, shares_experts=rows_of_experts is not None)
    ghost = without_memory(model)
    parts = {}
    for name, parameter in ghost.named_parameters():
        if rows_of_experts is not None and name in rows_of_experts:
            parameter.data = parameter.new_empty((rows_of_experts[name], *parameter.shape[1:]))
        if name in layout.replicated or name in layout.shared_out:
            parts[name] = (parameter.numel(), parameter)
            continue
        most = -(-parameter.shape[0] // world_size)
        rows = max(0, min(parameter.shape[0] - rank * most, most))
        padded = parameter.new_empty((most, *parameter.shape[1:]))
        parts[name] = (padded.numel(), parameter)
        parameter.data = padded[:rows]
    held = forecast_held_by(ghost, make_optimizer)
    if held is None:
        return None
    sizes = [(count * parameter.element_size(), parameter.requires_grad) for count, parameter in parts.values()]
    return held.model_copy(
        update={
            "parameters": sum(size for size, _ in sizes),
            "gradients": sum(size for size, is_trained in sizes if is_trained),
        }
    )


def _settle(tensor: Tensor, world: World) -> None:
    """Put rank 0's values on the device, in place: references to the tensor stay valid."""
    with torch.no_grad():
        if tensor.layout is not torch.strided:  # every rank makes the same
            tensor.data = tensor.data.to(world.device)
            return
        if world.is_main:
            value = tensor.detach().to(world.device).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.group is not None and value.numel():
            sent = value.to(world.collective_device)
            dist.broadcast(sent.view(-1).view(torch.uint8), 0, world.group)
            value = sent.to(world.device)
        put_value(tensor, value)


def refuse_cut(model: nn.Module) -> None:
    """Raise for a model that is sharded already, which no strategy can divide or save."""
    is_wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if is_wrapped or any(is_distributed(parameter) for parameter in model.parameters()):
        raise DrivetrainError(
            "the model is cut into shards already, by an earlier run or by its own code",
            remedy="leave fully_shard, FullyShardedDataParallel and parallelize_module out: --parallel-strategy fsdp "
            "shards it. For several runs, make the model anew for each: give the job a function that makes it",
        )


def refuse_uncuttable(model: nn.Module) -> None:
    """Raise for a model that cannot be sharded, before anything is planned or moved."""
    refuse_cut(model)
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    if sparse:
        raise DrivetrainError(
            f"{sparse[0]} makes sparse gradients, which fsdp cannot reduce",
            remedy="use sparse=False there, or --parallel-strategy ddp",
        )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise DrivetrainError(
            f"the shape of {lazy[0]} is not known before the first forward, and it cannot be cut before that",
            remedy="use modules that are told their shapes, or --parallel-strategy ddp",
        )
    is_list = type(model) in (nn.ModuleDict, nn.ModuleList)  # of models that a loop calls one by one
    if is_list and any(unit.name == ROOT and unit.parameters for unit in layout_of(model).units):
        raise DrivetrainError(
            f"with fsdp weights are whole only inside the forward of the model, and {type(model).__name__} has none: "
            "the loop or the loss calls what is in it",
            remedy="make one module of all models, with a forward that calls them, or use --parallel-strategy ddp",
        )


def _refuse_other_models(model: nn.Module, world: World) -> None:
    """Check that every rank made the same model: a gather over unlike shapes would hang, or mix weights up."""
    own = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    digests = world.gather(hashlib.sha256(json.dumps(own).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise DrivetrainError(
            f"rank {others[0]} made another model than rank 0: its parameters have other names, shapes or types",
            remedy="make the same model on every rank; rank 0's weights are given to the others",
        )


def refuse_unless_elementwise(optimizer: Optimizer, strategy: str) -> None:
    for member in members_of(optimizer).values():
        kind = type(member)
        is_torchs = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
        if strategy == "fsdp" and isinstance(member, Muon):
            continue  # it gathers the matrices that it needs whole
        if kind is torch.optim.Muon and strategy == "fsdp":
            raise DrivetrainError(
                "torch.optim.Muon needs whole matrices, and with fsdp a rank has only rows of each",
                remedy="use dt.Muon, which takes the same arguments and gathers them",
            )
        if not is_torchs and not getattr(member, "elementwise", False):
            raise DrivetrainError(
                f"{kind.__name__} is not known to treat every element of a weight alike, and with {strategy} a rank "
                "has only a part of each weight",
                remedy=f"use one of torch's {', '.join(ELEMENTWISE)}; or --parallel-strategy ddp; or, if it does, set "
                "optimizer.elementwise = True",
            )
    refuse_hooks(optimizer, strategy)


def refuse_hooks(optimizer: Optimizer, strategy: str) -> None:
    """Raise for the user's hooks around the optimizer's step: a norm that they compute would be of this rank's parts.

    The ranks would clip by other norms than one device does, and each by its own.
    """
    for member in members_of(optimizer).values():
        hooks = [*member._optimizer_step_pre_hooks.values(), *member._optimizer_step_post_hooks.values()]
        own = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("drivetrain.")]
        if own and not getattr(member, "elementwise", False):
            raise DrivetrainError(
                f"a step hook of {type(member).__name__} sees only this rank's part of the weights and gradients with "
                f"{strategy}: a norm over them is another one on every rank",
                remedy="Job(clip_norm=…) clips by the norm over all ranks; or --parallel-strategy ddp; or, if the hook "
                "treats every element alike, as clip_grad_value_ does, set optimizer.elementwise = True",
            )


def _num_bytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def norm_over_ranks(parts: Iterable[Tensor], world: World, dtype: torch.dtype) -> Tensor:
    """Return the norm of all gradients of all ranks, from each rank's own parts."""
    gradients = [part.grad for part in parts if part.grad is not None and part.numel()]
    own = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    squared = own.to(world.device, torch.float64).square()
    dist.all_reduce(squared, group=world.group)
    return squared.sqrt().to(dtype.to_real())


def share_infinities(found: Iterable[Tensor], world: World) -> None:
    """Set the inf flag on all ranks if it is set on one: a step is skipped by all or by none."""
    for flag in found:
        dist.all_reduce(flag, dist.ReduceOp.MAX, world.group)


class Sums:
    """Loss sum, count and stop requests over all ranks: sent before backward, taken after it, so that no rank waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.stop = 0.0  # this rank's wish, which travels with the next sums
        self._sums: Tensor | None = None
        self._on_its_way: dist.Work | None = None

    def send(self, losses: Iterable[tuple[Tensor, float]], count: Tensor | float) -> None:
        """Start the all-reduce, in float64: counts stay exact, and sums are as good as the losses they are made of."""
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        for value, factor in losses:
            self._sums[0] += value.double() * factor
        self._sums[1] += count
        self._sums[2] += float(self.stop)
        if self._world.group is not None:
            self._on_its_way = dist.all_reduce(self._sums, group=self._world.group, async_op=True)

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss sum, count, and how many ranks want to stop."""
        assert self._sums is not None, "backward comes before step"
        if self._on_its_way is not None:
            self._on_its_way.wait()  # of the stream, on a GPU; elsewhere backward took longer than three numbers do
        total, count, stopping = self._sums.unbind()
        self._sums = self._on_its_way = None
        return total, count, stopping

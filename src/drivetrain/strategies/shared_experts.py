"""Distributes experts over ranks: which rank holds which rows, and how rows are dealt out, saved and read again.

The strategy that trains the rest of the model leaves these parameters alone. Checkpoints name slots, not ranks, so they
load into any other number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import Shard, TensorSource, put_value
from drivetrain.core.world import World
from drivetrain.moe.layer.mixture import MixtureOfExperts, mixtures_in
from drivetrain.moe.layer.placement import Placement, costs_of, place, slots_of
from drivetrain.strategies.dispatcher import ExchangeDispatcher
from drivetrain.strategies.ema import Average
from drivetrain.strategies.optimizer_state import NESTED

_PLACEMENT = "expert_placement"
_Facts = tuple[Tensor, Tensor, Tensor | None]  # of a layer: its load, its mask, who works with whom


class _Run(NamedTuple):
    """Neighboring slots that this rank holds: where they begin, in the whole and here, and how many."""

    slot: int
    row: int
    num_rows: int


class HeldExperts(NamedTuple):
    """A parameter of which this rank holds some rows."""

    parameter: nn.Parameter
    num_slots: int
    runs: tuple[_Run, ...]

    def shards(self, key: str, rows: Tensor) -> list[Shard]:
        shape = (self.num_slots, *rows.shape[1:])
        rest = (0,) * (rows.dim() - 1)
        return [Shard(key, rows[run.row : run.row + run.num_rows], shape, (run.slot, *rest)) for run in self.runs]

    def read(self, read: Callable[[tuple[int, ...], tuple[int, ...]], Tensor], shape: Sequence[int]) -> Tensor:
        """Read this rank's rows of what is stored in `shape`; `read` is asked for ranges: offsets, shape."""
        rest = (0,) * (len(shape) - 1)
        parts = [read((run.slot, *rest), (run.num_rows, *shape[1:])) for run in self.runs]
        return torch.cat(parts) if parts else self.parameter.detach().cpu()[:0]

    def is_of(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape has a row for each slot, or for each of those here."""
        return tuple(shape[1:]) == tuple(self.parameter.shape[1:]) and len(shape) == self.parameter.dim()


class _HeldHere:
    """A checkpoint as this rank sees it: of experts, only the rows that it holds."""

    def __init__(self, source: TensorSource, held: Mapping[str, HeldExperts]) -> None:
        self._source, self._held = source, held

    @property
    def meta(self) -> Mapping[str, Any]:
        return self._source.meta

    @cached_property
    def keys(self) -> Mapping[str, Any]:
        return {key: _Shape(self._shape(key, info)) for key, info in self._source.keys.items()}

    def read(self, key: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        whole = self._source.keys[key].shape
        found = _held_by(key, whole, self._held)
        if found is None:
            return self._source.read(key, offsets, shape)
        return found.read(partial(self._source.read, key), whole)

    def _shape(self, key: str, info: Any) -> tuple[int, ...]:
        found = _held_by(key, info.shape, self._held)
        return tuple(info.shape) if found is None else (len(found.parameter), *info.shape[1:])


class _Shape(NamedTuple):
    shape: tuple[int, ...]


def _held_by(key: str, shape: Sequence[int], held: Mapping[str, HeldExperts]) -> HeldExperts | None:
    """Find the parameter whose rows a tensor has: `model/NAME`, `ema/NAME`, or `optimizer/NAME/FIELD` of its shape."""
    kind, _, name = key.partition("/")
    found = held.get(name.rpartition("/")[0] if kind == "optimizer" else name)
    return found if found is not None and found.is_of(shape) else None


class SharedExperts:
    """The experts of a model's mixtures. They are placed when this is made, and moved by `deal`.

    Rank 0's values count: others may have built the model without memory. All ranks call everything together.
    """

    held: Mapping[str, HeldExperts]  # by the parameter's names, once they were dealt out

    def __init__(self, model: nn.Module, world: World, capability: float = 0.0) -> None:
        self.layers = mixtures_in(model)
        if not self.layers:
            raise DrivetrainError(
                "the model has no mixture of experts, so there are no experts to share out",
                remedy="use --parallel-strategy ddp or fsdp, or a drivetrain.moe.MixtureOfExperts in the model",
            )
        if world.group is None:
            raise DrivetrainError(
                "expert parallel is several processes, and this is the only one", remedy="start it with a launcher"
            )
        if any(layer.experts.num_slots != layer.num_slots for layer in self.layers.values()):
            raise DrivetrainError(
                "the model holds only some of its experts: an earlier run shared them out",
                remedy="give a function that makes the model, or a new one; the whole is in the checkpoint",
            )
        self._model, self._world = model, world
        capabilities: list[float] = world.gather(capability)
        self._capabilities = capabilities if all(capabilities) else [1.0] * world.size
        self._group: dist.ProcessGroup | None = None
        self.held = {}
        self.placements: Mapping[str, Placement] = {
            name: self._placed(partial(_facts_of, layer)) for name, layer in self.layers.items()
        }

    # Who holds what

    def _placed(self, facts: Callable[[], _Facts]) -> Placement:
        """Place experts on rank 0, for all: hosts may round differently where two placements are equally good."""
        found, problem = [], None
        if self._world.is_main:
            try:
                load, mask, together = facts()
            except Exception as error:  # noqa: BLE001  (of a checkpoint, say: the others wait for an answer)
                problem = {
                    "message": f"experts cannot be placed: {getattr(error, 'message', repr(error))}",
                    "remedy": getattr(error, "remedy", None) or "look at the checkpoint with drivetrain status",
                }
            else:
                found = list(place(costs_of(load.tolist(), (mask == 0).tolist()), self._capabilities, together))
        found, problem = self._world.agree([found, problem])
        if problem is not None:
            raise DrivetrainError(problem["message"], remedy=problem["remedy"])
        return tuple(found)

    def num_rows(self, rank: int) -> dict[str, int]:
        """Return how many rows of each parameter a rank holds."""
        return {name: self.placements[layer].count(rank) for name, (layer, _) in self._parameters.items()}

    @property
    def fullest_rank(self) -> int:
        def weight(rank: int) -> int:
            held = self.num_rows(rank)
            return sum(held[name] * parameter.shape[1:].numel() for name, (_, parameter) in self._parameters.items())

        return max(range(self._world.size), key=weight)

    @cached_property
    def _parameters(self) -> dict[str, tuple[str, nn.Parameter]]:
        """The experts' parameters by name, each with its layer. Those of a layer with two names are under both."""
        layers = {p: name for name, layer in self.layers.items() for p in layer.experts.parameters()}
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: (layers[parameter], parameter) for name, parameter in named if parameter in layers}

    def deal(self, average: Average | None = None) -> None:
        """Make every layer hold this rank's experts only, with rank 0's values."""
        self._share_out(self.placements, self._dealt, average)

    def room_for(self, source: TensorSource, average: Average | None = None) -> TensorSource:
        """Allocate this rank's experts of a checkpoint, at 0; returns the checkpoint as this rank sees it.

        In a world of the same size experts stay where they were; in another they are placed by what they cost.
        """
        self._share_out({name: self._placed_for(name, source) for name in self.layers}, self._room, average)
        return self.seen(source)

    def seen(self, source: TensorSource) -> TensorSource:
        """Return a checkpoint as this rank sees it: of experts, only the rows that it holds."""
        return _HeldHere(source, self.held)

    def _placed_for(self, name: str, source: TensorSource) -> Placement:
        stored = source.meta.get(_PLACEMENT, {}).get(name)
        if stored is not None and source.meta["plan"]["world_size"] == self._world.size:
            return tuple(stored)
        prefix = f"model/{name}." if name else "model/"

        def facts() -> _Facts:
            together = source.read(prefix + "together") if prefix + "together" in source.keys else None
            return source.read(prefix + "load"), source.read(prefix + "router.mask"), together

        return self._placed(facts)

    def _share_out(
        self, placements: Mapping[str, Placement], fill: Callable[..., Tensor], average: Average | None
    ) -> None:
        """Replace the experts' parameters. `fill` makes a tensor of this rank's rows from one of any rows."""
        self.placements = dict(placements)
        # A separate group: the exchange is not queued behind collectives of gradients and gathered weights.
        self._group = self._group or dist.new_group()
        for name, layer in self.layers.items():
            placement = placements[name]
            layer.dispatcher = ExchangeDispatcher(self._world, self._group, placement, self._capabilities)
            for parameter in layer.experts.parameters():
                # The same parameter with fewer rows: optimizer, average and whatever else holds it go on holding it.
                put_value(parameter, fill(parameter.detach(), placement=placement))
                parameter.grad = None
                if average is not None:
                    average.cut(parameter, partial(fill, placement=placement))
        runs = {name: _runs(placement, self._world.rank) for name, placement in placements.items()}
        self.held = {
            name: HeldExperts(parameter, len(placements[layer]), runs[layer])
            for name, (layer, parameter) in self._parameters.items()
        }

    def _dealt(self, rows: Tensor, placement: Placement) -> Tensor:
        """Send rank 0's rows one by one, so that no device ever holds more than its own experts and one more."""
        world = self._world
        own = torch.empty(placement.count(world.rank), *rows.shape[1:], dtype=rows.dtype, device=world.device)
        filled = 0
        for slot, holder in enumerate(placement):
            row = torch.empty(rows.shape[1:], dtype=rows.dtype, device=world.collective_device)
            if world.is_main:
                row.copy_(rows[slot])
            dist.broadcast(row.view(-1).view(torch.uint8), 0, world.group)  # whatever its type is
            if holder == world.rank:
                own[filled] = row
                filled += 1
        return own

    def _room(self, rows: Tensor, placement: Placement) -> Tensor:
        return rows.new_zeros(placement.count(self._world.rank), *rows.shape[1:])

    def cut_state(self, optimizer: Optimizer) -> None:
        """Keep this rank's rows of what an optimizer kept for all experts before they were distributed."""
        for name, (layer, parameter) in self._parameters.items():
            whole = (self.held[name].num_slots, *parameter.shape[1:])
            own = slots_of(self.placements[layer], self._world.rank)
            state = optimizer.state.get(parameter, {})
            for field, value in state.items():
                if isinstance(value, Tensor) and value.shape == whole and value.shape != parameter.shape:
                    state[field] = value[own].clone()

    # A step

    @property
    def parameters(self) -> set[Tensor]:
        return {held.parameter for held in self.held.values()}

    def complete_gradients(self, factor: float) -> None:
        """Fill in missing gradients of experts, and rescale all: they are the sum over all ranks' objectives already.

        An expert sees the tokens of all ranks. `factor` undoes what the objectives were multiplied by where the other
        gradients are averaged.
        """
        gradients = []
        used = self._take_used()
        for parameter in self.parameters:
            if parameter.requires_grad and parameter in used:
                if parameter.grad is None:  # none of its experts got a token: the optimizer must move them alike
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        if gradients and factor != 1.0:  # none, where all experts are frozen
            torch._foreach_mul_(gradients, factor)

    def _take_used(self) -> set[Tensor]:
        """Return the parameters of the layers that ran since the last call. A layer that did not keeps no gradient."""
        used: set[Tensor] = set()
        for layer in self.layers.values():
            dispatcher = layer.dispatcher
            if not isinstance(dispatcher, ExchangeDispatcher) or dispatcher.ran:
                used.update(layer.experts.parameters())
            if isinstance(dispatcher, ExchangeDispatcher):
                dispatcher.ran = False
        return used

    def clear_gradients(self) -> None:
        self._take_used()
        for parameter in self.parameters:
            parameter.grad = None

    # Checkpoints

    def saved(self, shards: Sequence[Shard], meta: Mapping[str, Any]) -> tuple[list[Shard], dict[str, Any]]:
        """Return this rank's experts and parts; on rank 0 also what all ranks have."""
        kept: list[Shard] = []
        for shard in shards:
            _refuse_nested(shard.key, self.held)
            held = _held_by(shard.key, shard.global_shape, self.held)
            if held is not None:
                kept += held.shards(shard.key, shard.tensor)
            elif shard.is_part or self._world.is_main:
                kept.append(shard)
        return kept, {**meta, _PLACEMENT: {name: list(ranks) for name, ranks in self.placements.items()}}

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _refuse_nested(key: str, held: Mapping[str, HeldExperts]) -> None:
    """Refuse tensors inside of other values: every rank has other rows, and which rows these belong to is not known."""
    for name in held:
        if key.startswith(f"{NESTED}state/{name}/"):
            raise DrivetrainError(
                f"the optimizer keeps tensors of {name} inside of other values, and experts are shared out by rows",
                remedy="keep each tensor under a key of its own, or use --parallel-strategy ddp",
            )


def _facts_of(layer: MixtureOfExperts) -> _Facts:
    return layer.load, layer.router.mask, layer.together if layer.can_grow else None


def _runs(placement: Placement, rank: int) -> tuple[_Run, ...]:
    found = []
    for _, pairs in groupby(enumerate(slots_of(placement, rank)), key=lambda pair: pair[1] - pair[0]):
        rows = list(pairs)
        found.append(_Run(rows[0][1], rows[0][0], len(rows)))
    return tuple(found)

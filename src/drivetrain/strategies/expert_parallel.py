"""Expert parallel: every rank holds some of the experts, and tokens travel to the experts that were chosen for them.

All else is as with DDP. An expert sees the tokens of all ranks, so its gradient is the sum over ranks already, of
objectives that were scaled by the number of ranks for DDP's averaging: it is divided by that number, once. The norm
that clips is over what all ranks hold. Checkpoints name slots, not ranks, so they load into any other number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import Shard, TensorSource
from drivetrain.core.world import World
from drivetrain.moe.balance import mixtures_in
from drivetrain.moe.layer import MixtureOfExperts
from drivetrain.moe.placement import Placement, costs_of, place, slots_of
from drivetrain.strategies.base import ObjectiveCall, StrategyParts, Trial
from drivetrain.strategies.ddp import DdpOptions, DdpStrategy
from drivetrain.strategies.exchange import ExchangeDispatcher
from drivetrain.strategies.replicated import load_whole_state, whole_state
from drivetrain.strategies.together import norm_over_ranks, share_infinities

_PLACEMENT = "expert_placement"


class _Run(NamedTuple):
    """Neighbouring slots that this rank holds: where they begin, in the whole and here, and how many."""

    slot: int
    row: int
    num_rows: int


class _Held(NamedTuple):
    """A parameter of which this rank holds some rows."""

    parameter: nn.Parameter
    num_slots: int
    runs: tuple[_Run, ...]

    def shards(self, key: str, rows: Tensor) -> list[Shard]:
        shape = (self.num_slots, *rows.shape[1:])
        rest = (0,) * (rows.dim() - 1)
        return [Shard(key, rows[run.row : run.row + run.num_rows], shape, (run.slot, *rest)) for run in self.runs]

    def read(self, source: TensorSource, key: str) -> Tensor:
        shape = tuple(source.keys[key].shape[1:])
        rest = (0,) * len(shape)
        parts = [source.read(key, (run.slot, *rest), (run.num_rows, *shape)) for run in self.runs]
        return torch.cat(parts) if parts else self.parameter.detach().cpu()[:0]


class _HeldHere:
    """A checkpoint as this rank sees it: of experts, the rows that it holds."""

    def __init__(self, source: TensorSource, held: Mapping[str, _Held]) -> None:
        self._source, self._held = source, held

    @property
    def meta(self) -> Mapping[str, Any]:
        return self._source.meta

    @property
    def keys(self) -> Mapping[str, Any]:
        return {key: _Shape(self._shape(key, info)) for key, info in self._source.keys.items()}

    def read(self, key: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        found = _held_by(key, self._source.keys[key].shape, self._held)
        return self._source.read(key, offsets, shape) if found is None else found.read(self._source, key)

    def _shape(self, key: str, info: Any) -> tuple[int, ...]:
        found = _held_by(key, info.shape, self._held)
        return tuple(info.shape) if found is None else (len(found.parameter), *info.shape[1:])


class _Shape(NamedTuple):
    shape: tuple[int, ...]


def _held_by(key: str, shape: Sequence[int], held: Mapping[str, _Held]) -> _Held | None:
    """Whose rows a stored tensor has: `model/NAME`, `ema/NAME`, or `optimizer/NAME/FIELD` of the parameter's shape."""
    kind, _, name = key.partition("/")
    found = held.get(name.rpartition("/")[0] if kind == "optimizer" else name)
    if found is None or tuple(shape[1:]) != tuple(found.parameter.shape[1:]) or len(shape) != found.parameter.dim():
        return None
    return found


class ExpertParallelStrategy(DdpStrategy):
    """DDP for all but the experts, of which every rank holds its own."""

    name = "expert_parallel"

    def __init__(self, world: World, options: DdpOptions | None = None, capability: float = 0.0) -> None:
        super().__init__(world, options)
        self._capability = capability
        self._group: dist.ProcessGroup | None = None

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        self._layers = mixtures_in(parts.model)
        if not self._layers:
            raise DrivetrainError(
                "the model has no mixture of experts, so there are no experts to share out",
                remedy="use --parallel-strategy ddp, or a drivetrain.moe.MixtureOfExperts in the model",
            )
        if self._world.group is None:
            raise DrivetrainError(
                "expert parallel is several processes, and this is the only one", remedy="start it with a launcher"
            )
        self._parts = parts
        capabilities: list[float] = self._world.gather(self._capability)
        self._capabilities = capabilities if all(capabilities) else [1.0] * self._world.size
        # A group of its own: what the exchange sends does not stand in line with DDP's gradients.
        self._group = dist.new_group()
        self._share_out({name: self._placed(layer) for name, layer in self._layers.items()}, self._cut)
        self.ignored = [f"model.{name}" for name in self._held]
        return super().prepare(parts, trial)

    # Who holds what

    def _placed(self, layer: MixtureOfExperts) -> Placement:
        together = layer.together if layer.can_grow else None
        return self._agreed(place(self._costs(layer.load, layer.router.mask), self._capabilities, together))

    def _costs(self, load: Tensor, mask: Tensor) -> list[float]:
        return costs_of(load.tolist(), (mask == 0).tolist())

    def _agreed(self, placement: Placement) -> Placement:
        """Hosts of different kinds may round differently, where two placements are equally good."""
        return tuple(self._world.agree(list(placement)))

    def _share_out(self, placements: Mapping[str, Placement], fill: Callable[..., Tensor]) -> None:
        """Make every layer hold this rank's experts only. `fill` makes a tensor of its rows from one of any rows."""
        self._placements = dict(placements)
        self._held: dict[str, _Held] = {}
        average = self._parts.average
        for name, layer in self._layers.items():
            placement = placements[name]
            assert self._group is not None
            layer.dispatcher = ExchangeDispatcher(self._world, self._group, placement, self._capabilities)
            runs = _runs(placement, self._world.rank)
            for key, parameter in layer.experts.named_parameters():
                # The same parameter with fewer rows: optimizer, average and whatever else holds it go on holding it.
                parameter.data = fill(parameter.data, placement=placement)
                parameter.grad = None
                full = f"{name}.experts.{key}" if name else f"experts.{key}"
                self._held[full] = _Held(parameter, layer.num_slots, runs)
                if average is not None:
                    average.cut(parameter, partial(fill, placement=placement))

    def _cut(self, rows: Tensor, placement: Placement) -> Tensor:
        """Rank 0's values, as DDP has it for everything else."""
        dist.broadcast(rows, 0, self._world.group)
        return rows[slots_of(placement, self._world.rank)].clone()

    # A step

    def step(self, stop: bool) -> Any:
        gradients = []
        for held in self._held.values():
            if held.parameter.requires_grad:
                if held.parameter.grad is None:  # none of its experts got a token: the optimizer must move them alike
                    held.parameter.grad = torch.zeros_like(held.parameter)
                gradients.append(held.parameter.grad)
        torch._foreach_mul_(gradients, self.gradient_factor)
        return super().step(stop)

    @property
    def gradient_factor(self) -> float:
        """DDP averages what the objective was multiplied for; nothing averages the experts' gradients."""
        return 1.0 / self._world.size

    @property
    def together(self) -> "ExpertParallelStrategy":
        return self

    def norm(self, parts: list[Tensor]) -> Tensor:
        """Of all gradients of all ranks: what every rank has counts once."""
        if not self._world.is_main:
            own = {held.parameter for held in self._held.values()}
            parts = [part for part in parts if part in own]
        return norm_over_ranks(parts, self._world, self._parts.trained[0].dtype)

    def share_infinities(self, found: list[Tensor]) -> None:
        share_infinities(found, self._world)

    # Checkpoints

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        """Every rank its experts; rank 0 also what all have."""
        shards, meta = whole_state(self._parts)
        kept: list[Shard] = []
        for shard in shards:
            held = _held_by(shard.key, shard.global_shape, self._held)
            if held is not None:
                kept += held.shards(shard.key, shard.tensor)
            elif self._world.is_main:
                kept.append(shard)
        return kept, meta | {_PLACEMENT: {name: list(ranks) for name, ranks in self._placements.items()}}

    def load(self, source: TensorSource) -> None:
        """In a world of the same size experts stay where they were; in another they are placed by what they cost."""
        self._share_out({name: self._placed_for(name, source) for name in self._layers}, self._room)
        load_whole_state(self._parts, _HeldHere(source, self._held))

    def _placed_for(self, name: str, source: TensorSource) -> Placement:
        prefix = f"model/{name}." if name else "model/"
        stored = source.meta.get(_PLACEMENT, {}).get(name)
        if stored is not None and source.meta["plan"]["world_size"] == self._world.size:
            return tuple(stored)
        load, mask = (source.read(prefix + key) for key in ("load", "router.mask"))
        together = source.read(prefix + "together") if prefix + "together" in source.keys else None
        return self._agreed(place(self._costs(load, mask), self._capabilities, together))

    def _room(self, rows: Tensor, placement: Placement) -> Tensor:
        return rows.new_zeros(placement.count(self._world.rank), *rows.shape[1:])

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _runs(placement: Placement, rank: int) -> tuple[_Run, ...]:
    found = []
    for _, pairs in groupby(enumerate(slots_of(placement, rank)), key=lambda pair: pair[1] - pair[0]):
        rows = list(pairs)
        found.append(_Run(rows[0][1], rows[0][0], len(rows)))
    return tuple(found)

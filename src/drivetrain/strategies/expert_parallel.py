"""Expert parallel: every rank holds some of the experts, and tokens travel to the experts that were chosen for them.

All else is as with DDP. An expert sees the tokens of all ranks, so its gradient is the sum over ranks already, of
objectives that were scaled by the number of ranks for DDP's averaging: it is divided by that number, once. The norm
that clips is over what all ranks hold. Checkpoints name slots, not ranks, so they load into any other number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import Shard, TensorSource
from drivetrain.core.world import World
from drivetrain.moe.balance import mixtures_in
from drivetrain.moe.dispatch import run_rows, work_of
from drivetrain.moe.experts import Experts
from drivetrain.moe.layer import MixtureOfExperts
from drivetrain.moe.placement import Placement, costs_of, place
from drivetrain.moe.router import Routing
from drivetrain.moe.rows import Order, from_rows, order_of, to_rows
from drivetrain.moe.ways import Way, grouped_obstacle
from drivetrain.strategies.base import ObjectiveCall, StrategyParts, Trial
from drivetrain.strategies.ddp import DdpOptions, DdpStrategy
from drivetrain.strategies.replicated import load_whole_state, whole_state
from drivetrain.strategies.together import norm_over_ranks, share_infinities

_PLACEMENT = "expert_placement"


class _Exchange(Function):
    """All-to-all of rows. Backward sends each gradient the way its row came."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    # gloo sends from host memory: two ranks on one GPU, as in tests.
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else rows.device
    result = rows.new_empty(sum(received), rows.shape[1], device=device)
    dist.all_to_all_single(result, rows.to(device).contiguous(), received, sent, group=group)
    return result.to(rows.device)


class ExchangeDispatcher:
    """Sends each row to the rank of its expert and brings the result back. The host waits for the counts."""

    def __init__(
        self, world: World, group: dist.ProcessGroup, placement: Placement, capabilities: Sequence[float]
    ) -> None:
        self._rank_of_slot, self.num_ranks, self._capabilities = placement, world.size, capabilities
        self._rows = {slot: row for row, slot in enumerate(_slots(placement, world.rank))}
        self._rank, self._group = world.rank, group
        by_rank = sorted(range(len(placement)), key=lambda slot: (placement[slot], slot))
        self._places = torch.empty(len(placement), dtype=torch.int64)  # of each slot, in the order of ranks
        self._places[by_rank] = torch.arange(len(placement))
        self._held = [placement.count(rank) for rank in range(world.size)]
        # gloo takes CPU tensors with any device, and the host has to know the counts anyway.
        self._counts_on_host = dist.get_backend(group) == "gloo"

    def way(self, experts: Experts, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> Way:
        work = work_of(experts, num_tokens, k, dtype, device)
        obstacle = grouped_obstacle(work) if device.type == "cuda" else "this is no GPU"
        if obstacle is None:
            return Way("grouped", "tokens of all ranks arrive sorted by expert, and one kernel has groups")
        return Way("loop", f"tokens of all ranks arrive sorted by expert, and {obstacle}")

    def placement(self, num_slots: int) -> tuple[Placement, Sequence[float]]:
        return self._rank_of_slot, self._capabilities

    def row_of(self, slot: int) -> int | None:
        return self._rows.get(slot)

    def fetch(self, rows: Tensor, slot: int) -> Tensor:
        here = self.row_of(slot)
        row = rows.new_empty(rows.shape[1:]) if here is None else rows[here].clone()
        dist.broadcast(row, dist.get_global_rank(self._group, self._rank_of_slot[slot]), self._group)
        return row

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        if torch.is_grad_enabled() and not tokens.requires_grad:
            # A rank whose experts get no token would have nothing to differentiate, and miss the exchange in backward.
            tokens = tokens.detach().requires_grad_()
        self._places = self._places.to(tokens.device)
        order = order_of(self._places[routing.chosen], len(self._rank_of_slot))
        table = self._counts_of_all(order.ends)
        bounds = [sum(self._held[:rank]) for rank in range(self.num_ranks + 1)]
        sent = [sum(table[self._rank][first:last]) for first, last in pairwise(bounds)]
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        received = [sum(counts[own]) for counts in table]
        arrived = _exchange(to_rows(tokens, order), sent, received, self._group)
        by_expert = _by_expert([counts[own] for counts in table], tokens.device)
        way = self.way(experts, tokens.shape[0], routing.chosen.shape[1], tokens.dtype, tokens.device).name
        results = run_rows(experts, to_rows(arrived, by_expert), by_expert.ends, way)
        returned = _exchange(to_rows(results, _reverse(by_expert)), received, sent, self._group)
        return from_rows(returned, routing.weights, order)

    def _counts_of_all(self, ends: Tensor) -> list[list[int]]:
        """How many rows each rank has for each slot, in the order of ranks. The host waits here."""
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
        counts = counts.cpu() if self._counts_on_host else counts
        everyones = [torch.empty_like(counts) for _ in range(self.num_ranks)]
        dist.all_gather(everyones, counts, self._group)
        table: list[list[int]] = torch.stack(everyones).tolist()
        return table


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


def _by_expert(counts: Sequence[Sequence[int]], device: torch.device) -> Order:
    """Rows arrive rank by rank, each sorted by expert; this sorts them by expert."""
    num_experts = len(counts[0])
    table = torch.tensor(counts, dtype=torch.int64).view(len(counts), num_experts)
    experts = torch.arange(num_experts).repeat(len(counts)).repeat_interleave(table.flatten())
    return order_of(experts.to(device).unsqueeze(1), num_experts)


def _reverse(order: Order) -> Order:
    """Of an order with one row for each token."""
    return Order(order.places, order.places, order.pairs, order.ends)


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
        return rows[_slots(placement, self._world.rank)].clone()

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


def _slots(placement: Placement, rank: int) -> list[int]:
    return [slot for slot, holder in enumerate(placement) if holder == rank]


def _runs(placement: Placement, rank: int) -> tuple[_Run, ...]:
    found = []
    for _, pairs in groupby(enumerate(_slots(placement, rank)), key=lambda pair: pair[1] - pair[0]):
        rows = list(pairs)
        found.append(_Run(rows[0][1], rows[0][0], len(rows)))
    return tuple(found)

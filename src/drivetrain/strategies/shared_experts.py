"""Experts over ranks: which rank holds which, how tokens are sent to them, and how they are saved and read again."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import Shard, TensorSource, put_value
from drivetrain.core.world import World
from drivetrain.moe.dispatch import (
    Order,
    Spread,
    Way,
    copied,
    from_rows,
    grouped_obstacle,
    order_of,
    run_rows,
    summed,
    to_rows,
    work_of,
)
from drivetrain.moe.experts import Experts, Placement, Routing, costs_of, place, slots_of
from drivetrain.moe.mixture import MixtureOfExperts, mixtures_in
from drivetrain.strategies.optimizer_state import NESTED, Average

# ----------------------------------------------------------------------------------------------------------------------
# Sends tokens to the experts that were chosen for them, on whichever rank these are, and the results back.
#
# Routing tables say which rows are sent to which rank. A *choice* is one of the k experts of a token. All choices of a
# token on one rank share a row. The first of them has turn 0 there, the second turn 1, and so on: choices are sent by
# rank, there by turn, there by token. So those of turn 0 are in the order of the rows, and sums over the choices of a
# row go turn by turn. The tensors that are sorted have a size that is known beforehand; the host needs the number of
# rows once, and then knows all sizes.


class Homes(NamedTuple):
    """The ranks and positions of the experts."""

    ranks: Tensor  # (slots): the rank of a slot
    places: Tensor  # (slots): its place when all are sorted by rank
    rows: Tensor  # (slots): its place among those of its rank
    held: Tensor  # (ranks): how many a rank has


def homes_of(placement: Placement, held: Sequence[int]) -> Homes:
    by_rank = sorted(range(len(placement)), key=lambda slot: (placement[slot], slot))
    places = torch.empty(len(placement), dtype=torch.int64)
    places[by_rank] = torch.arange(len(placement))
    ranks, numbers = torch.tensor(placement), torch.tensor(held)
    return Homes(ranks, places, places - _before(numbers)[ranks], numbers)


class Parcels(NamedTuple):
    """The routing tables of a rank's choices that can be computed before the host knows how many rows there are."""

    by_rank: Order  # the choices as they are sent
    by_nth: Order  # the choices that have a row: tokens' first rows, then second ones, ...; then all other choices
    rows: Tensor  # (choices): the row of each, among all that leave here
    codes: Tensor  # (choices, 1), as they are sent: row × experts + expert, both as the rank that gets them counts
    counts: Tensor  # for all ranks to know: choices by rank and turn; tokens that have a first row, a second, ...


def parcels_of(chosen: Tensor, homes: Homes, num_ranks: int) -> Parcels:
    k = chosen.shape[1]
    ranks = homes.ranks[chosen]
    # (tokens, k, k): of each choice, how many of the choices up to each are on its rank.
    up_to = (ranks.unsqueeze(2) == ranks.unsqueeze(1)).cumsum(2, dtype=torch.int32)
    turns = up_to.diagonal(dim1=1, dim2=2) - 1
    leader = (up_to == 0).sum(2)  # the choice of turn 0 on its rank
    by_rank = order_of(ranks * k + turns, num_ranks * k)
    nth = (turns == 0).cumsum(1) - 1
    by_nth = order_of(nth.where(turns == 0, k), k + 1)
    counts = sizes_of(by_rank.ends).view(num_ranks, k)
    rows = by_rank.places.view(chosen.shape).gather(1, leader) - _before(counts.sum(1))[ranks]  # of those to its rank
    codes = rows * homes.held[ranks] + homes.rows[chosen]
    return Parcels(
        by_rank,
        by_nth,
        (rows + _before(counts[:, 0])[ranks]).flatten(),
        codes.view(-1, 1).index_select(0, by_rank.pairs),
        torch.cat([counts.flatten(), sizes_of(by_nth.ends)[:k]]),
    )


class Traffic(NamedTuple):
    """The numbers sent and received, by the other rank, which the host has to know."""

    rows_sent: list[int]
    rows_received: list[int]
    choices_sent: list[int]
    choices_received: list[int]
    leaving: tuple[int, ...]  # tokens that have a first row, a second, ...
    arriving: tuple[int, ...]  # rows that have a choice of turn 0, of turn 1, ...
    here: slice  # which of the counts are of choices for this rank


def traffic_of(table: list[list[int]], rank: int, k: int) -> Traffic:
    """Return the traffic of a rank from every rank's `Parcels.counts`."""
    own, here = table[rank], slice(rank * k, (rank + 1) * k)
    sent = [own[other * k : (other + 1) * k] for other in range(len(table))]
    received = [counts[here] for counts in table]
    return Traffic(
        [turns[0] for turns in sent],
        [turns[0] for turns in received],
        [sum(turns) for turns in sent],
        [sum(turns) for turns in received],
        tuple(own[-k:]),
        tuple(sum(turn) for turn in zip(*received, strict=True)),
        here,
    )


def leaving_rows(parcels: Parcels, counts: Tensor, traffic: Traffic) -> Spread:
    """Return tokens, with a copy for each rank that has experts of theirs, by rank. `counts` are this rank's."""
    k, num_rows = len(traffic.leaving), sum(traffic.leaving)
    choices = counts[:-k].view(-1, k)
    with_row = _blocks(_before(choices.sum(1)), choices[:, 0], num_rows)
    rows = parcels.rows.index_select(0, parcels.by_nth.pairs[:num_rows])
    return Spread(parcels.by_rank.tokens.index_select(0, with_row), rows, traffic.leaving)


def arriving_rows(codes: Tensor, counts: Tensor, traffic: Traffic, num_held: int) -> tuple[Order, Spread]:
    """Return the received choices, by expert; and the rows, with a copy for each choice. `counts`: (ranks, turns)."""
    num_choices = sum(traffic.arriving)
    experts = max(num_held, 1)  # without any, there are no codes either
    by_expert = order_of(codes % experts, num_held)
    first_rows = _before(counts[:, 0]).repeat_interleave(counts.sum(1), output_size=num_choices)
    rows = torch.div(codes.squeeze(1), experts, rounding_mode="floor") + first_rows
    starts = _before(counts.flatten()).view(counts.shape)
    by_turn = _blocks(starts.t().flatten(), counts.t().flatten(), num_choices)
    places = by_expert.places.index_select(0, by_turn)
    return by_expert, Spread(rows.index_select(0, by_expert.pairs), places, traffic.arriving)


def sizes_of(ends: Tensor) -> Tensor:
    return torch.diff(ends.long(), prepend=ends.new_zeros(1).long())


def _before(counts: Tensor) -> Tensor:
    """Return where each of some blocks begins."""
    return counts.cumsum(0) - counts


def _blocks(starts: Tensor, counts: Tensor, total: int) -> Tensor:
    """Return so many numbers from each start on, block after block. `total` keeps the host from waiting for it."""
    shift = (starts - _before(counts)).repeat_interleave(counts, output_size=total)
    return torch.arange(total, device=starts.device) + shift


class _Exchange(Function):
    """An all-to-all of rows. Backward sends each gradient back the way its row came."""

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
    """Sends each row to the ranks of its experts, once to each, and brings one result back from each.

    The host waits for the counts.
    """

    def __init__(
        self, world: World, group: dist.ProcessGroup, placement: Placement, capabilities: Sequence[float]
    ) -> None:
        self._rank_of_slot, self.num_ranks, self._capabilities = placement, world.size, capabilities
        self._rows = {slot: row for row, slot in enumerate(slots_of(placement, world.rank))}
        self._rank, self._group = world.rank, group
        self.ran = False  # with gradients, since the caller has set this to False; ranks run it together or not at all
        self._held = [placement.count(rank) for rank in range(world.size)]
        self._homes = homes_of(placement, self._held)
        # gloo takes CPU tensors with any device, and the host has to know the counts anyway.
        self._counts_on_host = dist.get_backend(group) == "gloo"

    def way(self, experts: Experts, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> Way:
        work = work_of(experts, num_tokens, k, dtype, device)
        obstacle = grouped_obstacle(work) if device.type == "cuda" else "this is no GPU"
        if obstacle is None:
            return Way("grouped", "tokens of all ranks are sorted by expert, and one kernel has groups")
        return Way("loop", f"tokens of all ranks are sorted by expert, and {obstacle}")

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
        self.ran |= torch.is_grad_enabled()
        if torch.is_grad_enabled() and not tokens.requires_grad:
            # A rank whose experts get no token would have nothing to differentiate, and miss the exchange in backward.
            tokens = tokens.detach().requires_grad_()
        self._homes = Homes(*(table.to(tokens.device) for table in self._homes))
        send = self._to_ranks if self.shares_rows(routing.chosen.shape[1]) else self._to_experts
        return send(experts, tokens, routing)

    def shares_rows(self, k: int) -> bool:
        """Return whether two experts of a token can be on one rank. If not, only rows have to be sent."""
        return min(k, max(self._held)) > 1

    def _to_experts(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        """Send a row for each choice; it comes back to be weighted here."""
        order = order_of(self._homes.places[routing.chosen], len(self._rank_of_slot))
        _, table = self._counts_of_all(sizes_of(order.ends))
        bounds = [sum(self._held[:rank]) for rank in range(self.num_ranks + 1)]
        sent = [sum(table[self._rank][first:last]) for first, last in pairwise(bounds)]
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        received = [sum(counts[own]) for counts in table]
        by_expert = _by_expert([counts[own] for counts in table], tokens.device)
        arrived = _exchange(to_rows(tokens, order), sent, received, self._group)
        results = self._run(experts, to_rows(arrived, by_expert), by_expert, tokens, routing)
        returned = _exchange(to_rows(results, _reverse(by_expert)), received, sent, self._group)
        return from_rows(returned, routing.weights, order)

    def _to_ranks(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        """Send a row to each rank that has experts of a token; it returns as the weighted sum of their outputs."""
        weights, chosen = routing.weights, routing.chosen
        parcels = parcels_of(chosen, self._homes, self.num_ranks)
        counts, table = self._counts_of_all(parcels.counts)
        traffic = traffic_of(table, self._rank, chosen.shape[1])
        leaving = leaving_rows(parcels, counts[self._rank], traffic)
        weights = to_rows(weights.reshape(-1, 1), parcels.by_rank._replace(tokens=parcels.by_rank.pairs))
        arrived, weights, codes = _deliver(copied(tokens, leaving), weights, parcels.codes, traffic, self._group)
        by_expert, arriving = arriving_rows(codes, counts[:, traffic.here], traffic, self._held[self._rank])
        results = self._run(experts, copied(arrived, arriving), by_expert, tokens, routing)
        sums = summed(results, arriving, weights.dtype, to_rows(weights, by_expert).squeeze(1))
        returned = _exchange(sums, traffic.rows_received, traffic.rows_sent, self._group)
        return summed(returned, leaving, weights.dtype)

    def _run(self, experts: Experts, rows: Tensor, order: Order, tokens: Tensor, routing: Routing) -> Tensor:
        way = self.way(experts, tokens.shape[0], routing.chosen.shape[1], tokens.dtype, tokens.device).name
        return run_rows(experts, rows, order.ends, way)

    def _counts_of_all(self, counts: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Gather every rank's counts, as a tensor on the device and as a list on the host, which waits here."""
        device = counts.device
        counts = counts.cpu() if self._counts_on_host else counts
        everyones = [torch.empty_like(counts) for _ in range(self.num_ranks)]
        dist.all_gather(everyones, counts, self._group)
        found = torch.stack(everyones)
        table: list[list[int]] = found.tolist()
        return found.to(device), table


class _Delivery(Function):
    """Sends rows, and each choice's weight and code, in one node: all ranks send gradients back in the same order."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, codes: Tensor, traffic: Traffic, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.traffic, ctx.group = traffic, group
        # Weights and codes are few bytes: sent as one, they cost one delay.
        notes = torch.cat([weights.view(torch.int32), codes.view(torch.int32)], 1)
        notes = _exchanged(notes, traffic.choices_sent, traffic.choices_received, group)
        # Copies: a part of one row, or of none, counts as contiguous, but 8 bytes have to begin at a multiple of 8.
        parts = torch.split(notes, [notes.shape[1] - 2, 2], 1)
        kept, numbers = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        found = kept.view(weights.dtype), numbers.view(codes.dtype)
        ctx.mark_non_differentiable(found[1], *(() if ctx.needs_input_grad[1] else found[:1]))
        return _exchanged(rows, traffic.rows_sent, traffic.rows_received, group), *found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        traffic, of_weights = ctx.traffic, None
        if ctx.needs_input_grad[1]:
            of_weights = _exchanged(gradients[1], traffic.choices_received, traffic.choices_sent, ctx.group)
        of_rows = _exchanged(gradients[0], traffic.rows_received, traffic.rows_sent, ctx.group)
        return of_rows, of_weights, None, None, None


def _deliver(
    rows: Tensor, weights: Tensor, codes: Tensor, traffic: Traffic, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = _Delivery.apply(rows, weights, codes, traffic, group)  # type: ignore[no-untyped-call]
    return result


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


def _by_expert(counts: Sequence[Sequence[int]], device: torch.device) -> Order:
    """Return the order that sorts rows by expert: they arrive rank by rank, each sorted by expert."""
    num_experts = len(counts[0])
    table = torch.tensor(counts, dtype=torch.int64).view(len(counts), num_experts)
    experts = torch.arange(num_experts).repeat(len(counts)).repeat_interleave(table.flatten())
    return order_of(experts.to(device).unsqueeze(1), num_experts)


def _reverse(order: Order) -> Order:
    """Return the reverse of an order with one row for each token."""
    return Order(order.places, order.places, order.pairs, order.ends)


# ----------------------------------------------------------------------------------------------------------------------
# Distributes experts over ranks: which rank holds which rows, and how rows are dealt out, saved and read again.
#
# The strategy that trains the rest of the model leaves these parameters alone. Checkpoints name slots, not ranks, so
# they load into any other number of ranks.

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
                "expert parallel needs several processes, and this is the only one", remedy="start it with a launcher"
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

"""Sends tokens to the experts that were chosen for them, on whichever rank these are, and the results back.

Routing tables say which rows are sent to which rank. A *choice* is one of the k experts of a token. All choices of a
token on one rank share a row. The first of them has turn 0 there, the second turn 1, and so on: choices are sent by
rank, there by turn, there by token. So those of turn 0 are in the order of the rows, and sums over the choices of a row
go turn by turn. The tensors that are sorted have a size that is known beforehand; the host needs the number of rows
once, and then knows all sizes.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from drivetrain.core.world import World
from drivetrain.moe.layer.dispatch import (
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
from drivetrain.moe.layer.experts import Experts
from drivetrain.moe.layer.placement import Placement, slots_of
from drivetrain.moe.layer.router import Routing


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

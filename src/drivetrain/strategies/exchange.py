"""Tokens travel to the experts that were chosen for them, on whichever rank these live, and the results back."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from drivetrain.core.world import World
from drivetrain.moe.dispatch import run_rows, work_of
from drivetrain.moe.experts import Experts
from drivetrain.moe.placement import Placement, slots_of
from drivetrain.moe.router import Routing
from drivetrain.moe.rows import Order, from_rows, order_of, to_rows
from drivetrain.moe.ways import Way, grouped_obstacle


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
        self._rows = {slot: row for row, slot in enumerate(slots_of(placement, world.rank))}
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

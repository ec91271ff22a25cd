"""Computes which rows are sent to which rank, and the metadata that the receiver needs: arithmetic on index tensors.

A *choice* is one of the k experts of a token. All choices of a token on one rank share a row. The first of them has
turn 0 there, the second turn 1, and so on: choices are sent by rank, there by turn, there by token. So those of turn 0
are in the order of the rows, and sums over the choices of a row go turn by turn. The tensors that are sorted have a
size that is known beforehand; the host needs the number of rows once, and then knows all sizes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.moe.layer.permute import Order, Spread, order_of
from drivetrain.moe.layer.placement import Placement


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

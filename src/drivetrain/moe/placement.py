"""Which rank each expert lives on: by what it costs, and by what the rank's device can do."""

from collections.abc import Sequence
from itertools import pairwise

Placement = tuple[int, ...]  # the rank of each slot


def place(costs: Sequence[float], capabilities: Sequence[float]) -> Placement:
    """The dearest first, each to the rank that would be done with it soonest; free slots are spread evenly.

    Where all cost the same and all ranks are alike, each rank gets a block of neighbours: fewer parts to save.
    """
    num_ranks = len(capabilities)
    if len(set(costs)) <= 1 and len(set(capabilities)) == 1:
        bounds = [len(costs) * rank // num_ranks for rank in range(num_ranks + 1)]
        return tuple(rank for rank, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last))
    ranks = [0] * len(costs)
    work, held = [0.0] * num_ranks, [0] * num_ranks
    for slot in sorted(range(len(costs)), key=lambda slot: -costs[slot]):
        cost = costs[slot]
        # A slot that costs nothing now will hold an expert one day: it goes where the fewest are.
        ranks[slot] = min(
            range(num_ranks),
            key=lambda rank: ((work[rank] + cost) / capabilities[rank] if cost else 0.0, held[rank], rank),
        )
        work[ranks[slot]] += cost
        held[ranks[slot]] += 1
    return tuple(ranks)


def costs_of(load: Sequence[int], active: Sequence[bool]) -> list[float]:
    """What each slot costs: the tokens of the last step; before the first, every expert the same.

    An expert without tokens still costs something: it will get some.
    """
    total, count = sum(load), sum(active)
    least = 0.01 * total / max(count, 1)
    return [
        (max(float(tokens), least) if total else 1.0) if is_active else 0.0
        for tokens, is_active in zip(load, active, strict=True)
    ]


def free_slot(
    load: Sequence[int],
    active: Sequence[bool],
    taken: Sequence[bool],
    placement: Placement,
    capabilities: Sequence[float],
) -> int | None:
    """Where a new expert goes: a free slot of the rank with the least to do. None: there is no free slot."""
    costs = costs_of(load, active)
    work = [0.0] * len(capabilities)
    held = [0] * len(capabilities)
    for cost, rank, is_taken in zip(costs, placement, taken, strict=True):
        work[rank] += cost / capabilities[rank]
        held[rank] += is_taken
    free = [slot for slot, is_taken in enumerate(taken) if not is_taken]
    return min(free, key=lambda slot: (work[placement[slot]], held[placement[slot]], slot), default=None)

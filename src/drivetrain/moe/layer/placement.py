"""Assigns experts to ranks: by cost, by the capability of the rank's device, and by co-activation."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

Placement = tuple[int, ...]  # the rank of each slot
SLACK = 0.1  # how much longer than without the slowest rank may take, for experts that work together to be together
WORTH = 0.005  # of all that works together: less is not worth moving an expert for


def slots_of(placement: Placement, rank: int) -> list[int]:
    """Return the slots of a rank."""
    return [slot for slot, holder in enumerate(placement) if holder == rank]


def place(costs: Sequence[float], capabilities: Sequence[float], together: Tensor | None = None) -> Placement:
    """Place slots by cost; then swap slots while that puts more co-activation (`together`) on one rank."""
    ranks = list(_by_cost(costs, capabilities))
    for one, other in exchanges(costs, ranks, capabilities, together) if together is not None else ():
        ranks[one], ranks[other] = ranks[other], ranks[one]
    return tuple(ranks)


def exchanges(
    costs: Sequence[float], placement: Sequence[int], capabilities: Sequence[float], together: Tensor
) -> list[tuple[int, int]]:
    """Return pairs of slots to swap, one after the other, so that experts that are chosen together share a rank.

    `together` is (slots, slots): the fraction of all tokens that two experts both get. Every rank keeps its number of
    slots, and none gets more work than the slowest would have if only costs mattered, plus a tenth. Where one has more
    than that now, it is relieved first.
    """
    tied = together.detach().cpu().double()
    if len(capabilities) < 2 or not tied.any():
        return []
    return _Exchanges(costs, placement, capabilities, (tied + tied.T) / 2).found()


class _Exchanges:
    def __init__(
        self, costs: Sequence[float], placement: Sequence[int], capabilities: Sequence[float], tied: Tensor
    ) -> None:
        self._cost = torch.tensor([float(value) for value in costs], dtype=torch.float64)
        self._power = torch.tensor([float(value) for value in capabilities], dtype=torch.float64)
        self._ranks = torch.tensor(list(placement))
        self._tied = tied.fill_diagonal_(0.0)
        by_cost = torch.tensor(_by_cost(costs, capabilities))
        self._limit = float(self._times(by_cost).max()) * (1 + SLACK) + 1e-9

    def found(self) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        for wanted in (self._relieved, self._gained):
            for _ in range(4 * len(self._cost)):
                worth, least = wanted()
                one, other = divmod(int(worth.argmax()), len(self._cost))
                if not worth[one, other] > least:
                    break
                self._ranks[[one, other]] = self._ranks[[other, one]]
                pairs.append((one, other))
        return pairs

    def _times(self, ranks: Tensor) -> Tensor:
        """Return the time that each rank takes."""
        return torch.zeros(len(self._power), dtype=torch.float64).index_add_(0, ranks, self._cost) / self._power

    def _slower(self) -> Tensor:
        """Return (slots, slots): the longer of the times of both their ranks, if these two swap."""
        ranks, power = self._ranks, self._power[self._ranks].unsqueeze(1)
        after = self._times(ranks)[ranks].unsqueeze(1) + (self._cost - self._cost.unsqueeze(1)) / power
        return torch.maximum(after, after.T)

    def _relieved(self) -> tuple[Tensor, float]:
        """Return how much sooner the slowest rank would be done, while it takes too long."""
        times = self._times(self._ranks)
        if times.max() <= self._limit:
            return torch.zeros_like(self._tied), 0.0
        of_slowest = (self._ranks == times.argmax()).unsqueeze(1) & (self._ranks != times.argmax())
        return (times.max() - self._slower()).where(of_slowest, 0.0), 1e-9 * float(times.max())

    def _gained(self) -> tuple[Tensor, float]:
        """Return how much more co-activation would be within a rank."""
        at = torch.nn.functional.one_hot(self._ranks, len(self._power)).double()
        ties = self._tied @ at  # of each slot to each rank
        nearer = ties[:, self._ranks] - ties.gather(1, self._ranks.unsqueeze(1))  # to the rank of the other
        gain = nearer + nearer.T - 2 * self._tied
        fits = self._slower().le(self._limit) & (self._ranks.unsqueeze(1) != self._ranks)
        return gain.where(fits, 0.0).triu(1), WORTH * float(self._tied.sum())


def share_together(placement: Sequence[int], together: Tensor) -> float:
    """Return the fraction of co-activation within a rank; 1 where there is none."""
    tied = together.detach().cpu().double()
    ranks = torch.tensor(list(placement))
    total = tied.sum()
    return float((tied * (ranks.unsqueeze(1) == ranks)).sum() / total) if total > 0 else 1.0


def _by_cost(costs: Sequence[float], capabilities: Sequence[float]) -> Placement:
    """Assign the most expensive first, each to the rank that would be done soonest; free slots are spread evenly.

    Where all cost the same and all ranks are equal, each rank gets a block of neighbors: fewer parts to save.
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
    """Return the cost of each slot: the tokens of the last step; before the first, every expert the same.

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
    """Return the slot for a new expert: a free one of the rank with the least work. None: there is no free slot."""
    costs = costs_of(load, active)
    work = [0.0] * len(capabilities)
    held = [0] * len(capabilities)
    for cost, rank, is_taken in zip(costs, placement, taken, strict=True):
        work[rank] += cost / capabilities[rank]
        held[rank] += is_taken
    free = [slot for slot, is_taken in enumerate(taken) if not is_taken]
    return min(free, key=lambda slot: (work[placement[slot]], held[placement[slot]], slot), default=None)

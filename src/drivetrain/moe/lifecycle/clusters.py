"""Concepts without labels: online clusters of a layer's inputs, equal on all ranks.

Tokens are mapped by a fixed projection to a few numbers, which nearly preserves distances: so the state is small,
whatever the width of the layer.
"""

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.world import World

DIMENSIONS = 16
MEMORY = 0.9  # how much of a centre stays at each look
FAR = 6.0  # times the usual square distance: new
NEW_SHARE = 0.1  # the least fraction of a look's tokens for a new cluster
FORGOTTEN_SHARE = 0.005  # of tokens, over looks: the cluster goes
_ROUNDS = 8  # of looking for the first centres


@dataclass
class Clusters:
    """The clusters of a layer's inputs. Numbers are never reused. The whole state is JSON."""

    first: int = 8  # how many to begin with
    most: int = 16
    numbers: list[int] = field(default_factory=list)
    centres: list[list[float]] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)  # mean square distance from the centre
    shares: list[float] = field(default_factory=list)  # of tokens, over looks
    next_number: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, tokens: Tensor, world: World) -> tuple[Tensor, list[str]]:
        """Return each token's cluster as an index into the names, -1 if far from all, and the names.

        Then learn from the tokens. All ranks call it together.
        """
        points = tokens.double() @ _projection(tokens.shape[1]).to(tokens.device)
        if not self.numbers:
            self._begin(points, world)
        if not self.numbers:  # rank 0 had no tokens
            return torch.full((len(points),), -1, device=points.device), []
        names = [f"cluster {number}" for number in self.numbers]
        centres = torch.tensor(self.centres, dtype=torch.float64, device=points.device)
        spreads = torch.tensor(self.spreads, dtype=torch.float64, device=points.device)
        least, nearest = torch.cdist(points, centres).square().min(1)
        is_new = (least > FAR * spreads[nearest]) & (spreads[nearest] > 0)
        self._learn(points, nearest, least, is_new, world)
        return torch.where(is_new, -1, nearest), names

    def _begin(self, points: Tensor, world: World) -> None:
        """Place the first centres by rank 0's tokens: far apart at first, then each the mean of its nearest tokens."""
        centres = world.agree(_first_centres(points, self.first).tolist() if world.is_main else None)
        for centre in centres:
            self._add(centre, 0.0)

    def _learn(self, points: Tensor, nearest: Tensor, least: Tensor, is_new: Tensor, world: World) -> None:
        count, width = len(self.numbers), points.shape[1]
        facts = points.new_zeros(count + 1, width + 2)  # of each cluster and of what is new: sum, squares, tokens
        to = torch.where(is_new, count, nearest)
        facts[:, :width].index_add_(0, to, points)
        facts[:, width].index_add_(0, to, least)
        facts[:, width + 1].index_add_(0, to, torch.ones_like(least))
        table = world.all_reduce(facts).tolist()  # the host waits
        everything = sum(row[-1] for row in table) or 1.0
        for place, (*sums, squares, tokens) in enumerate(table[:-1]):
            share = tokens / everything
            is_first = self.spreads[place] == 0.0
            memory = 0.0 if is_first else MEMORY
            self.shares[place] = memory * self.shares[place] + (1 - memory) * share
            if tokens:
                centre = self.centres[place]
                self.centres[place] = [
                    memory * c + (1 - memory) * s / tokens for c, s in zip(centre, sums, strict=True)
                ]
                self.spreads[place] = memory * self.spreads[place] + (1 - memory) * squares / tokens
        *sums, _, tokens = table[-1]
        known = [spread for spread in self.spreads if spread > 0]
        if tokens > NEW_SHARE * everything and known and self._has_room():
            self._add([total / tokens for total in sums], sum(known) / len(known), tokens / everything)

    def _has_room(self) -> bool:
        """Return whether a cluster can be added; if necessary, remove one that is hardly seen any more."""
        if len(self.numbers) < self.most:
            return True
        least = min(range(len(self.numbers)), key=lambda place: self.shares[place])
        if self.shares[least] > FORGOTTEN_SHARE:
            return False
        for kept in (self.numbers, self.centres, self.spreads, self.shares):
            del kept[least]
        return True

    def _add(self, centre: list[float], spread: float, share: float = 0.0) -> None:
        self.numbers.append(self.next_number)
        self.centres.append(centre)
        self.spreads.append(spread)
        self.shares.append(share)
        self.next_number += 1


@lru_cache(maxsize=16)
def _projection(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, DIMENSIONS, generator=generator, dtype=torch.float64).div(DIMENSIONS**0.5)


def _first_centres(points: Tensor, count: int) -> Tensor:
    centres = points[:1]
    for _ in range(1, min(count, len(torch.unique(points, dim=0)))):
        furthest = torch.cdist(points, centres).min(1).values.argmax()
        centres = torch.cat([centres, points[furthest : furthest + 1]])
    for _ in range(_ROUNDS if len(points) else 0):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=len(centres)).unsqueeze(1)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres

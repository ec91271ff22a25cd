"""The darkroom: a square room in which a goal is hidden, for many walkers at once.

A walker starts in the middle, sees only where it is, and is paid 1 for each step that ends on the goal. Cells are
numbered row by row: cell `x * size + y` lies at `(x, y)`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NUM_ACTIONS = 5
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # by action; walls stop a move


@dataclass(frozen=True)
class Darkroom:
    """The rules of the room.

    Args:
        size: Cells along each side, an odd number.
        horizon: Steps of an episode.

    Example:
        >>> room = Darkroom(size=9, horizon=20)
        >>> cells, goals = torch.tensor([room.start, 0]), torch.tensor([49, 8])
        >>> room.step(cells, torch.tensor([0, 1]), goals)
        (tensor([49,  0]), tensor([1., 0.]))
    """

    size: int
    horizon: int

    @property
    def num_cells(self) -> int:
        return self.size**2

    @property
    def start(self) -> int:
        return self.num_cells // 2

    @cached_property
    def neighbors(self) -> Tensor:
        """The cell that each action leads to, for each cell: (cells, actions)."""
        cells, last = torch.arange(self.num_cells), self.size - 1
        x, y = cells // self.size, cells % self.size
        return torch.stack([(x + i).clamp(0, last) * self.size + (y + j).clamp(0, last) for i, j in MOVES], dim=1)

    def step(self, cells: Tensor, actions: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next cells and the rewards of one action of each walker."""
        after = self.neighbors.to(cells.device)[cells, actions]
        return after, (after == goals).float()

    def distance(self, cells: Tensor) -> Tensor:
        """Returns how many steps each cell is from the start."""
        middle = self.size // 2
        return (cells // self.size - middle).abs() + (cells % self.size - middle).abs()

    def best_return(self, goals: Tensor) -> Tensor:
        """Returns the most that an episode can pay: every step but those on the way, and the last of these pays."""
        return (self.horizon + 1 - self.distance(goals)).clamp(0, self.horizon).float()

    def split(self, num_held_out: int) -> tuple[Tensor, Tensor]:
        """Returns goals to learn from and held-out goals.

        The held-out ones are spread evenly over all cells in the order of their distance from the start; which cells of
        a distance they are is drawn once, the same for every seed.
        """
        drawn = torch.randperm(self.num_cells, generator=torch.Generator().manual_seed(0))
        ordered = drawn[self.distance(drawn).argsort(stable=True)]
        places = (torch.arange(num_held_out) * 2 + 1) * self.num_cells // (2 * num_held_out)
        is_held_out = torch.zeros(self.num_cells, dtype=torch.bool)
        is_held_out[ordered[places]] = True
        cells = torch.arange(self.num_cells)
        return cells[~is_held_out], ordered[places]

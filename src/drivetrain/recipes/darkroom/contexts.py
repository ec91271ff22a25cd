"""Contexts: the part of a learning history that the transformer reads, in training and in play alike."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain.recipes.darkroom.source import History
from drivetrain.recipes.darkroom.transformer import BEGIN, CURRENT, CUT, PREVIOUS

Kind = Literal["plain", "two-region"]
UNCOUNTED = 255  # the label of a step whose prediction does not count


class Steps(NamedTuple):
    """The tokens of some steps, as the transformer takes them: (batch, steps), uint8."""

    cells: Tensor
    before: Tensor  # the action before, or BEGIN or CUT
    rewards: Tensor  # what the action before brought
    regions: Tensor


@dataclass(frozen=True)
class Context:
    """Says what is seen of a history from each of its episodes; all numbers are of episodes.

    A plain context holds the last `num_episodes - 1` episodes and the one that is being played. A two-region context
    has two halves: the current region grows until it is full; then it becomes the previous region, and what was there
    before is dropped.

    Args:
        kind: `plain` or `two-region`.
        num_episodes: How many a context holds at most; an even number.
        horizon: Steps of an episode.
    """

    kind: Kind
    num_episodes: int
    horizon: int

    @property
    def num_current(self) -> int:
        """The number of episodes that the current region holds."""
        return self.num_episodes if self.kind == "plain" else self.num_episodes // 2

    def bounds(self, episode: int) -> tuple[int, int]:
        """Returns the first episode that is seen from `episode`, and the first of the current region."""
        if self.kind == "plain":
            first = max(0, episode - self.num_episodes + 1)
            return first, first
        current = episode // self.num_current * self.num_current
        return max(0, current - self.num_current), current

    def read(self, history: History, bounds: tuple[int, int], steps: slice) -> Steps:
        """Returns the tokens of `steps`, a piece of the context with these bounds.

        Nothing before the context is read, not even the action that led to its first step.

        Args:
            history: As `History`, but (walkers, steps), from the very first step.
            bounds: What `bounds` returned.
            steps: Counted from the first step of the history.
        """
        first, current = (self.horizon * each for each in bounds)
        cells = history.cells[:, steps]
        number = torch.arange(steps.start, steps.stop, device=cells.device)
        places = (number - 1).clamp(min=0)
        opens = number == first
        before = history.actions[:, places].masked_fill(opens, CUT if first else BEGIN)
        rewards = history.rewards[:, places].masked_fill(opens, 0)
        regions = torch.where(number < current, PREVIOUS, CURRENT).to(torch.uint8).expand_as(cells)
        return Steps(cells, before, rewards, regions)

    def training_set(self, history: History) -> TensorDataset:
        """Returns contexts with the actions that were taken: the `Steps`, and a label for each.

        Every history gives its beginning, and full contexts that start half a context after one another. Labels count
        where predictions are read in play: not in the previous region, and not in the padding behind a beginning that
        is shorter than a full context, which no step before it sees.
        """
        num_episodes, length = history.cells.shape[1], self.num_episodes * self.horizon
        flat = History(*(each.flatten(1) for each in history))
        pieces = [((0, 0), slice(0, self.num_current * self.horizon))]
        begins = range(0, num_episodes - self.num_episodes + 1, max(1, self.num_episodes // 2))
        for begin in begins[1:] if self.kind == "plain" else begins:  # a plain beginning is a full context
            current = begin + self.num_episodes - self.num_current
            pieces.append(((begin, current), slice(begin * self.horizon, begin * self.horizon + length)))
        items = []
        for bounds, steps in pieces:
            read = self.read(flat, bounds, steps)
            labels = flat.actions[:, steps].masked_fill(read.regions == PREVIOUS, UNCOUNTED)
            missing = length - labels.shape[1]
            padded = [functional.pad(each, (0, missing)) for each in read]
            items.append((*padded, functional.pad(labels, (0, missing), value=UNCOUNTED)))
        return TensorDataset(*(torch.cat(each) for each in zip(*items, strict=True)))

"""The learner whose histories are distilled: a tabular actor-critic for each goal, many side by side.

The actor is a softmax over five preferences per cell, improved by policy gradient after every episode; the critic is a
value per cell. A bonus for cells that were rarely visited makes it look around, so that far goals are found, too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from drivetrain.recipes.darkroom.environment import NUM_ACTIONS, Darkroom


class History(NamedTuple):
    """The histories of learners, from first episode to last; each tensor is (learners, episodes, horizon), uint8."""

    cells: Tensor  # where the action was taken
    actions: Tensor
    rewards: Tensor

    def subsampled(self, stride: int) -> "History":
        """Returns `stride` histories for each, of every `stride`-th episode: the same progress in fewer episodes."""
        num, num_episodes, horizon = self.cells.shape
        kept = num_episodes // stride
        return History(
            *(
                each[:, : kept * stride].view(num, kept, stride, horizon).transpose(1, 2).reshape(-1, kept, horizon)
                for each in self
            )
        )


@dataclass(frozen=True)
class ActorCritic:
    """The learner's settings.

    Args:
        actor_rate: Step of the preferences along the policy gradient.
        critic_rate: Part of the advantage by which a value is corrected.
        discount: Weight of a reward one step later.
        trace: Weight of later temporal differences in an advantage (the lambda of GAE).
        bonus: Reward for entering a cell for the first time; the n-th time pays `bonus / sqrt(n)`.
    """

    actor_rate: float = 0.2
    critic_rate: float = 0.3
    discount: float = 0.95
    trace: float = 0.9
    bonus: float = 0.3

    def learn(self, room: Darkroom, goals: Tensor, num_episodes: int, seed: int) -> History:
        """Returns the histories of one learner per entry of `goals`, each from knowing nothing."""
        generator = torch.Generator().manual_seed(seed)
        num, rows = len(goals), torch.arange(len(goals))
        preferences = torch.zeros(num, room.num_cells, NUM_ACTIONS)
        values, visits = torch.zeros(num, room.num_cells), torch.zeros(num, room.num_cells)
        history = History(*(torch.empty(num, num_episodes, room.horizon, dtype=torch.uint8) for _ in range(3)))
        learner = rows[:, None].expand(-1, room.horizon)
        for episode in range(num_episodes):
            cell = torch.full((num,), room.start)
            taken, chances = [], []
            for _ in range(room.horizon):
                chance = preferences[rows, cell].softmax(1)
                action = torch.multinomial(chance, 1, generator=generator).squeeze(1)
                after, reward = room.step(cell, action, goals)
                taken.append((cell, action, reward, after))
                chances.append(chance)
                cell = after
            cells, actions, rewards, afters = (torch.stack(each, dim=1) for each in zip(*taken, strict=True))
            for kept, values_now in zip(history, (cells, actions, rewards), strict=True):
                kept[:, episode] = values_now
            visits.scatter_add_(1, afters, torch.ones_like(rewards))
            paid = rewards + self.bonus * visits.gather(1, afters).rsqrt()
            known = values.gather(1, cells)
            advantages = self._advantages(paid + self.discount * values.gather(1, afters) - known)
            gradient = functional.one_hot(actions, NUM_ACTIONS) - torch.stack(chances, dim=1)  # of the log probability
            step = self.actor_rate * advantages.clamp(-2, 2).unsqueeze(2) * gradient
            preferences.index_put_((learner, cells), step, accumulate=True).clamp_(-8, 8)
            values.scatter_(1, cells, known + self.critic_rate * advantages)
        return history

    def _advantages(self, differences: Tensor) -> Tensor:
        """Sums temporal differences backwards; the end of an episode is a limit of time, so values count there."""
        total, found = torch.zeros(len(differences)), []
        for difference in differences.flip(1).unbind(1):
            total = difference + self.discount * self.trace * total
            found.append(total)
        return torch.stack(found[::-1], dim=1)

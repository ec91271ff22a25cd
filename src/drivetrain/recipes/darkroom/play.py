"""Plays with frozen weights: whatever is learned in play is learned from the context alone."""

import torch
from torch import Tensor

from drivetrain.recipes.darkroom.contexts import Context
from drivetrain.recipes.darkroom.environment import NUM_ACTIONS, Darkroom
from drivetrain.recipes.darkroom.source import History
from drivetrain.recipes.darkroom.transformer import Cache, DistillationTransformer


@torch.no_grad()
def play(
    model: DistillationTransformer, room: Darkroom, context: Context, goals: Tensor, num_episodes: int, seed: int
) -> Tensor:
    """Returns what each walker was paid in each episode: (walkers, episodes).

    Walkers act at the same time and know nothing of each other. Keys and values of the context are cached: they are
    recomputed only when the context moves on, and a step then costs one token.

    Args:
        model: Is used as it is, and where it is; call `eval()` before.
        room: The room to walk in.
        context: What is seen of the episodes before.
        goals: One per walker.
        num_episodes: How many each walker plays.
        seed: Of the actions, which are drawn from the model's probabilities.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    goals, horizon, num = goals.to(device), room.horizon, len(goals)
    history = History(*(torch.zeros(num, num_episodes * horizon, dtype=torch.uint8, device=device) for _ in range(3)))
    cache: Cache | None = None
    for episode in range(num_episodes):
        bounds, begin = context.bounds(episode), episode * horizon
        if episode == 0 or bounds != context.bounds(episode - 1):
            seen = slice(bounds[0] * horizon, begin)
            cache = model.extend(*context.read(history, bounds, seen))[1] if seen.start < seen.stop else None
        cell = torch.full((num,), room.start, device=device)
        for step in range(begin, begin + horizon):
            history.cells[:, step] = cell
            logits, cache = model.extend(*context.read(history, bounds, slice(step, step + 1)), cache=cache)
            action = torch.multinomial(logits[:, 0].float().softmax(1), 1, generator=generator).squeeze(1)
            cell, reward = room.step(cell, action, goals)
            history.actions[:, step], history.rewards[:, step] = action, reward
    return history.rewards.view(num, num_episodes, horizon).sum(2).float()


def random_return(room: Darkroom, goals: Tensor) -> Tensor:
    """Returns what an episode of random actions pays on average: by probabilities of cells, not by drawing."""
    leads_to = torch.zeros(room.num_cells, room.num_cells, dtype=torch.float64)
    for action in range(NUM_ACTIONS):
        leads_to[torch.arange(room.num_cells), room.neighbors[:, action]] += 1 / NUM_ACTIONS
    chances = torch.zeros(room.num_cells, dtype=torch.float64)
    chances[room.start] = 1
    total = torch.zeros_like(chances)
    for _ in range(room.horizon):
        chances = chances @ leads_to
        total += chances
    return total[goals].float()

"""The algorithm-distillation transformer: reads how a learner has fared so far, and says what it would do next.

There is one token per step: where the walker is, and the action and reward that brought it there. What is predicted for
a step is read at its own token, the query; attention is causal: no prediction sees its own action or a later step.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.recipes.darkroom.environment import NUM_ACTIONS, Darkroom

# What stands in the place of the action before the first step of a context: nothing was done yet, or it was cut off.
BEGIN, CUT = NUM_ACTIONS, NUM_ACTIONS + 1
NUM_BEFORE = NUM_ACTIONS + 2
PREVIOUS, CURRENT = 0, 1  # the regions of a context

Cache = list[tuple[Tensor, Tensor]]  # keys and values of each layer, for the tokens so far


class CausalBlock(nn.Module):
    """A pre-norm transformer block that can go on from cached keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, and keys and values of all tokens so far; with a past, `hidden` is a single token."""
        batch, length, width = hidden.shape
        heads = self.attention_in(self.before_attention(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = hidden + self.mlp_out(functional.gelu(self.mlp_in(self.before_mlp(hidden))))
        return hidden, key, value


class DistillationTransformer(nn.Module):
    """Predicts a learner's next action from its history.

    Args:
        room: The room, for the number of cells.
        n_transit: The longest context, in steps.
        n_embd: Width of the hidden states.
        n_layer: Number of blocks.
        n_head: Attention heads of each block.
    """

    def __init__(self, room: Darkroom, n_transit: int, n_embd: int, n_layer: int, n_head: int) -> None:
        super().__init__()
        self.size = room.size
        # Rows and columns have vectors of their own, so that a cell that never held a goal is made of known parts.
        self.tokens = nn.Linear(2 * room.size + NUM_BEFORE + 1, n_embd)
        self.positions, self.regions = nn.Embedding(n_transit, n_embd), nn.Embedding(2, n_embd)
        self.blocks = nn.ModuleList(CausalBlock(n_embd, n_head) for _ in range(n_layer))
        self.last_norm, self.out = nn.LayerNorm(n_embd), nn.Linear(n_embd, NUM_ACTIONS)
        for embedding in (self.positions, self.regions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, cells: Tensor, before: Tensor, rewards: Tensor, regions: Tensor) -> Tensor:
        """Returns logits of the action of every step; all arguments are (batch, steps)."""
        return self.extend(cells, before, rewards, regions)[0]

    def extend(
        self, cells: Tensor, before: Tensor, rewards: Tensor, regions: Tensor, cache: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Returns the logits of new steps and the cache with them, for the steps after."""
        first = cache[0][0].shape[2] if cache else 0
        cells, before, regions = cells.long(), before.long(), regions.long()
        features = torch.cat(
            [
                functional.one_hot(cells // self.size, self.size),
                functional.one_hot(cells % self.size, self.size),
                functional.one_hot(before, NUM_BEFORE),
                rewards.long().unsqueeze(2),
            ],
            dim=2,
        )
        places = torch.arange(first, first + cells.shape[1], device=cells.device)
        hidden = self.tokens(features.to(self.tokens.weight.dtype)) + self.positions(places) + self.regions(regions)
        after: Cache = []
        for number, block in enumerate(self.blocks):
            hidden, key, value = block(hidden, cache[number] if cache else None)
            after.append((key, value))
        return self.out(self.last_norm(hidden)), after

"""A small transformer over characters, as people train it first."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload

WORDS = "GPT of 6 layers, width 384, 6 heads, 256 characters"


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        parts = self.qkv(self.before(hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        hidden = hidden + self.out(found.transpose(1, 2).reshape(rows, length, width))
        more: Tensor = self.narrow(functional.gelu(self.wide(self.between(hidden))))
        return hidden + more


class CharGpt(nn.Module):
    def __init__(self, kinds: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(kinds, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, kinds)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def workload(smoke: bool) -> Workload:
    kinds, length, width, layers, heads, num_samples = (16, 8, 8, 2, 2, 96) if smoke else (96, 256, 384, 6, 6, 8192)

    def data() -> tuple[Tensor, ...]:
        return (torch.randint(0, kinds, (num_samples, length + 1), generator=torch.Generator().manual_seed(0)),)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        tokens = batch[0]
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(
        model=lambda: CharGpt(kinds, length, width, layers, heads),
        loss=loss,
        data=data,
        global_batch=16 if smoke else 64,
        pace=Pace(2, 2, 2) if smoke else Pace(100, 50, 8),
        job_steps=40 if smoke else 20_000,
    )

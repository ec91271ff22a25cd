"""BERT on texts of different lengths: a batch is padded to its longest text, so that hardly two have the same shape."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload

WORDS = "BERT-base, 109.5 million weights, texts of 32 to 256 tokens, padded to the longest of a batch"
MASKED, IGNORED = 103, -100


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.between, self.after = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        parts = self.qkv(hidden).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        hidden = self.between(hidden + self.dropout(self.out(found.transpose(1, 2).reshape(rows, length, width))))
        changed: Tensor = self.after(hidden + self.dropout(self.narrow(functional.gelu(self.wide(hidden)))))
        return changed


class Bert(nn.Module):
    """A model that guesses masked tokens, with the word embedding as its last matrix."""

    def __init__(
        self, kinds: int = 30_522, places: int = 512, width: int = 768, layers: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.tokens, self.places, self.segments = (nn.Embedding(count, width) for count in (kinds, places, 2))
        self.before = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.change, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(kinds))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (places < lengths[:, None])[:, None, None]
        embedded = self.tokens(tokens) + self.places(places) + self.segments.weight[0]
        hidden = self.dropout(self.before(embedded))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return functional.linear(self.norm(functional.gelu(self.change(hidden))), self.tokens.weight, self.bias)


def trimmed(rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Make a batch of rows of equal width, the last entry of each its length: as wide as the longest needs."""
    *columns, lengths = (torch.stack(column) for column in zip(*rows, strict=True))
    longest = int(lengths.max())
    return [*(column[:, :longest].contiguous() for column in columns), lengths]


def workload(smoke: bool) -> Workload:
    kinds, shortest, longest, num_samples = (128, 4, 16, 96) if smoke else (30_522, 32, 256, 8192)

    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, longest + 1, (num_samples,), generator=generator)
        lies_within = torch.arange(longest) < lengths[:, None]
        tokens = torch.randint(MASKED + 1, kinds, (num_samples, longest), generator=generator) * lies_within
        is_masked = (torch.rand(tokens.shape, generator=generator) < 0.15) & lies_within
        is_masked[:, 0] = True  # at least one of every text
        labels = torch.where(is_masked, tokens, IGNORED)
        return torch.where(is_masked, MASKED, tokens), labels, lengths

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        tokens, labels, lengths = batch
        return functional.cross_entropy(model(tokens, lengths).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    return Workload(
        model=lambda: Bert(kinds, longest, 16, 2, 2) if smoke else Bert(),
        loss=loss,
        data=data,
        collate=trimmed,
        loader={} if smoke else {"num_workers": 4, "pin_memory": True, "persistent_workers": True},
        global_batch=16 if smoke else 64,
        pace=Pace(2, 2, 2) if smoke else Pace(40, 15, 8),
        job_steps=40 if smoke else 20_000,
    )

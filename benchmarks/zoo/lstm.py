"""A recurrent language model: many small kernels, one after the other, which a host can hardly launch in time."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals import Pace, Workload

WORDS = "LSTM of 2 layers of 1,024 with dropout between them, 256 tokens of 256 kinds"


class Recurrent(nn.Module):
    def __init__(self, width: int, kinds: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, kinds)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return logits


def workload(smoke: bool) -> Workload:
    width, kinds, length, num_samples = (8, 16, 8, 96) if smoke else (1024, 256, 256, 4096)

    def data() -> tuple[Tensor, ...]:
        return (torch.randint(0, kinds, (num_samples, length + 1), generator=torch.Generator().manual_seed(0)),)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        tokens = batch[0]
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(
        model=lambda: Recurrent(width, kinds),
        loss=loss,
        data=data,
        global_batch=16 if smoke else 64,
        pace=Pace(2, 2, 2) if smoke else Pace(60, 20, 8),
        job_steps=40 if smoke else 10_000,
    )

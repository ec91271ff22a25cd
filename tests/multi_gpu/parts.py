"""A small model and data that samples of multi-GPU scripts leave undefined."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 40, 6


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of tokens; the class says whether the first is larger than the last."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.labels = (self.tokens[:, 0] > self.tokens[:, -1]).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.labels[index]


class SequenceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.out = nn.Linear(8 * LENGTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embedding(tokens).flatten(1))
        return logits

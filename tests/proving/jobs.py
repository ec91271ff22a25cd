"""Small jobs for the prover's own tests."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drivetrain import Job, WarmupCosine


class Sentences(Dataset[Any]):
    """Token sequences of unequal length, padded with -100 in the labels."""

    def __init__(self, num_samples: int = 60, length: int = 9, vocabulary: int = 13) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, vocabulary, (num_samples, length), generator=generator)
        self.lengths = torch.randint(2, length, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        labels = self.tokens[number, 1:].clone()
        labels[self.lengths[number] :] = -100
        return {"tokens": self.tokens[number, :-1], "labels": labels}


class TokenModel(nn.Module):
    def __init__(self, vocabulary: int = 13, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.hidden(self.embedding(tokens))))
        return result


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean over valid tokens, as `transformers` computes it."""
    return functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean over samples."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def vectors(num_samples: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (num_samples,), generator=generator)
    return TensorDataset(torch.randn(num_samples, 6, generator=generator), labels)


def mlp(dropout: float = 0.0, norm: type[nn.Module] | None = None) -> nn.Module:
    layers = [nn.Linear(6, 12), *([norm(12)] if norm else []), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 4)]
    return nn.Sequential(*layers)


def vector_job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": "vectors",
        "model": mlp,
        "data": vectors(),
        "loss": mean_loss,
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        "global_batch": 9,
        "max_steps": 200,
        "seed": 3,
        "schedule": WarmupCosine(warmup_steps=4, floor=0.1),
        "weight_decay": 0.1,
    }
    return Job(**{**values, **changes})


def token_job(**changes: Any) -> Job:
    return vector_job(**{"name": "tokens", "model": TokenModel, "data": Sentences(), "loss": token_loss, **changes})

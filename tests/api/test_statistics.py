"""What random jobs learn, over several seeds: as much as a plain loop's, which draws other numbers.

Tests of exactness do not see draws that are wrong in a way that repeats, such as the same mask in every batch.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler, default_collate

import drivetrain as dt

NUM_TRAINED, EPOCHS, BATCH, SEEDS = 600, 12, 64, 8
# Standard errors, of eight and sixteen runs: of thirty comparisons, hardly one is ever as far off by chance.
FARTHEST = 5.0

digits = load_digits()
order = np.random.RandomState(0).permutation(len(digits.target))
pictures, labels = torch.tensor(digits.data[order] / 16, dtype=torch.float32), torch.tensor(digits.target[order])
TRAINED = TensorDataset(pictures[:NUM_TRAINED], labels[:NUM_TRAINED])


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_TRAINED

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, label = TRAINED[index]
        moved = picture.view(8, 8).roll((random.randint(-1, 1), int(np.random.randint(-1, 2))), (0, 1))
        return moved.flatten() + 0.1 * torch.randn(64), label


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in np.random.permutation(NUM_TRAINED):
            picture, label = TRAINED[index]
            yield picture + 0.2 * torch.randn(64), label


class WithLayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.first(pictures).relu()
        for layer in self.layers:
            if not self.training or random.random() > 0.5:
                hidden = hidden + layer(hidden).relu()
        result: Tensor = self.last(hidden)
        return result


def mixing(items: list[Any]) -> Any:
    inputs, targets = default_collate(items)
    targets = functional.one_hot(targets, 10).float()
    part, others = float(np.random.beta(0.4, 0.4)), torch.randperm(len(items))
    return part * inputs + (1 - part) * inputs[others], part * targets + (1 - part) * targets[others]


def masking(items: list[Any]) -> Any:
    inputs, targets = default_collate(items)
    return inputs * (torch.rand_like(inputs) > 0.4), targets


def weighted() -> DataLoader[Any]:
    weights = torch.where(TRAINED.tensors[1] < 3, 0.2, 1.0)
    return DataLoader(TRAINED, BATCH, sampler=WeightedRandomSampler(weights.tolist(), NUM_TRAINED))


def perceptron(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def with_noise(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0] + 0.5 * torch.randn_like(batch[0])), batch[1])


class Way(NamedTuple):
    data: Callable[[], Any] = lambda: TRAINED
    model: Callable[[], nn.Module] = perceptron
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy
    collate: Callable[[list[Any]], Any] | None = None


WAYS = {
    "nothing but the order": Way(),
    "MixUp when batches are made": Way(lambda: list(TRAINED), collate=mixing),
    "masks when batches are made": Way(collate=masking),
    "augmented items": Way(Augmented),
    "augmented items, MixUp, dropout": Way(Augmented, lambda: perceptron(0.2), collate=mixing),
    "dropout": Way(model=lambda: perceptron(0.5)),
    "dropped layers": Way(lambda: list(TRAINED), WithLayerDrop),
    "noise in the loss": Way(loss=with_noise),
    "a stream": Way(Stream),
    "a weighted sampler": Way(weighted),
}


def loss_of(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(functional.cross_entropy(model(pictures[NUM_TRAINED:]), labels[NUM_TRAINED:]))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_hand(way: Way, seed: int) -> float:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    model = way.model()
    optimizer, data = optimizer_of(model.parameters()), way.data()
    if not isinstance(data, DataLoader):
        data = DataLoader(data, BATCH, shuffle=not isinstance(data, IterableDataset), collate_fn=way.collate)
    for _ in range(EPOCHS):
        for batch in data:
            optimizer.zero_grad()
            way.loss(model, batch).backward()
            optimizer.step()
    return loss_of(model)


def by_train(way: Way, seed: int, folder: Path, **settings: Any) -> float:
    data = way.data()
    job = dt.Job(
        name=f"seed-{seed}",
        model=way.model,
        data=data,
        loss=way.loss,
        optimizer=optimizer_of,
        max_steps=EPOCHS * -(-NUM_TRAINED // BATCH),
        seed=seed,
        **({} if isinstance(data, DataLoader) else {"global_batch": BATCH}),
        **({} if way.collate is None else {"collate": way.collate}),
    )
    config = dt.configure(output_dir=folder, gpu_mode="cpu", report=False, compile=False, **settings)
    return loss_of(dt.train(job, config, quiet=True).model)


def distance(some: Sequence[float], others: Sequence[float]) -> float:
    """Return how far two means are apart, in standard errors of their difference."""
    variance = statistics.variance(some) / len(some) + statistics.variance(others) / len(others)
    return abs(statistics.mean(some) - statistics.mean(others)) / variance**0.5


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WAYS)
def test_as_much_is_learned_as_by_a_plain_loop(tmp_path: Path, name: str) -> None:
    way = WAYS[name]
    expected = [by_hand(way, seed) for seed in range(2 * SEEDS)]
    for kind, settings in {"whole": {}, "divided": {"batch_size": 16}, "workers": {"num_workers": 1}}.items():
        found = [by_train(way, seed, tmp_path / kind, **settings) for seed in range(SEEDS)]
        assert distance(found, expected) < FARTHEST, (kind, found, expected)

"""Data in every shape, whose items are their own number; and what a plain reading of each gives."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)


class Numbers(Dataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Counting(IterableDataset[Tensor]):
    """Iterates, with noise from a global generator in every item; no state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.size):
            yield torch.tensor(number + random.random() / 2, dtype=torch.float64)


class ShuffledInABuffer(IterableDataset[Tensor]):
    """Draws while it iterates, to choose what comes next."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        for number in range(self.size):
            buffer.append(number)
            if len(buffer) == 4:
                yield torch.tensor(buffer.pop(random.randrange(4)))
        random.shuffle(buffer)
        yield from (torch.tensor(number) for number in buffer)


class WithState(IterableDataset[Tensor]):
    """Remembers where it is in itself, as many data sets do: iterating again goes on from there."""

    def __init__(self, size: int) -> None:
        self.size, self.position, self.epoch = size, 0, 0
        self.items_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.size:
            number = (self.position + 3 * self.epoch) % self.size
            self.position += 1
            self.items_read += 1
            yield torch.tensor(number)
        self.position = 0


class Shrinking(IterableDataset[Tensor]):
    """One item less in every epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(number) for number in range(max(1, self.size - self.epoch)))


class Backwards(Sampler[int]):
    """Somebody's own: from the end, from another place in every epoch; draws, and has an epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))[::-1]
        turn = (self.epoch + random.randrange(self.size)) % self.size
        yield from order[turn:] + order[:turn]


class Lazy(Sampler[int]):
    """Draws while it is read, and does not say how long it is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.size))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Unequal(Sampler[list[int]]):
    """Batches of one, two, three, … samples."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order, length = list(range(self.size)), 1
        random.shuffle(order)
        while order:
            yield [order.pop() for _ in range(min(length, len(order)))]
            length += 1


def loaders(size: int, batch: int) -> dict[str, Any]:
    """Everything that a job can be given as data, each sample once per epoch."""
    data = Numbers(size)
    own = torch.Generator().manual_seed(9)
    return {
        "map": data,
        "list": [torch.tensor(number) for number in range(size)],
        "tensor": torch.arange(size),
        "loader": DataLoader(data, batch),
        "shuffled loader": DataLoader(data, batch, shuffle=True),
        "sequential sampler": DataLoader(data, batch, sampler=SequentialSampler(data)),
        "own generator": DataLoader(data, batch, sampler=RandomSampler(data, num_samples=size, generator=own)),
        "own sampler": DataLoader(data, batch, sampler=Backwards(size)),
        "lazy sampler": DataLoader(data, batch, sampler=Lazy(size)),
        "batch sampler": DataLoader(data, batch_sampler=Unequal(size)),
        "iterable": Counting(size),
        "loader of an iterable": DataLoader(Counting(size), batch),
        "shuffling iterable": ShuffledInABuffer(size),
        "iterable with state": WithState(size),
    }


def weighted(size: int, batch: int) -> DataLoader[Any]:
    weights = torch.arange(1, size + 1, dtype=torch.float64)
    return DataLoader(Numbers(size), batch, sampler=WeightedRandomSampler(weights.tolist(), size))


KINDS = tuple(loaders(4, 2))

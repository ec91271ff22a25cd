"""Samples that come twice, never, or in another order."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tests.proving.loops import Loop


class OwnOrder(Loop):
    """A loop that chooses its samples itself: `chosen` gives those of a step, over all ranks."""

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        """The samples of each rank."""
        numbers = self.case.order[step]
        return [
            numbers[len(numbers) * rank // self.world : len(numbers) * (rank + 1) // self.world]
            for rank in range(self.world)
        ]

    def own(self, step: int) -> list[tuple[int, ...]]:
        own, size = self.chosen(step)[self.rank], self.case.micro_batch
        return [own[start : start + size] for start in range(0, len(own), size)] or [()]

    def micro_batches(self) -> list[tuple[int, ...]]:
        return self.own(self.step)

    def weight(self, batch: Any, numbers: tuple[int, ...], number: int, num_micro_batches: int) -> float:
        return len(numbers) / sum(map(len, self.chosen(self.step)))

    def batches(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        chosen = [n for step in range(self.step, self.case.num_steps) for n in self.own(step) if n]
        loader = DataLoader(
            self.case.data, batch_sampler=chosen, collate_fn=self.case.collate, num_workers=self.case.num_workers
        )
        return zip(chosen, loader, strict=True)

    def epoch(self, epoch: int, seed: int | None = None) -> list[int]:
        generator = torch.Generator().manual_seed((self.case.seed if seed is None else seed) + 1000 * epoch)
        return torch.randperm(self.case.num_samples, generator=generator).tolist()

    @property
    def per_epoch(self) -> int:
        return -(-self.case.num_samples // self.case.global_batch)


class PaddedToDivide(OwnOrder):
    """pytorch#25162: DistributedSampler repeats samples so that every rank gets as many."""

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        numbers = self.case.order[step]
        missing = -len(numbers) % self.world
        earlier = self.case.order[step - 1] if step % self.per_epoch else ()
        numbers = (*numbers, *(earlier or numbers)[:missing])
        return [numbers[rank :: self.world] for rank in range(self.world)]


class LastDropped(OwnOrder):
    """pytorch#41171: drop_last leaves out what does not fill a batch, in every epoch."""

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        epoch, place = divmod(step, self.case.num_samples // self.case.global_batch)
        start = place * self.case.global_batch
        numbers = tuple(self.epoch(epoch)[start : start + self.case.global_batch])
        return [numbers[rank :: self.world] for rank in range(self.world)]


class SameOrderEveryEpoch(OwnOrder):
    """pytorch#31771: set_epoch is not called, so every epoch has the first one's order."""

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        start = step % self.per_epoch * self.case.global_batch
        numbers = tuple(self.epoch(0)[start : start + self.case.global_batch])
        return [
            numbers[len(numbers) * rank // self.world : len(numbers) * (rank + 1) // self.world]
            for rank in range(self.world)
        ]


class OrderByWorld(OwnOrder):
    """ray#37633: the number of workers decides which samples come when."""

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        epoch, place = divmod(step, self.per_epoch)
        start = place * self.case.global_batch
        numbers = tuple(self.epoch(epoch, self.world)[start : start + self.case.global_batch])
        return [numbers[rank :: self.world] for rank in range(self.world)]


class EveryRankTheSame(OwnOrder):
    """dinov2#341, and every loop without a distributed sampler: all ranks train on the same samples."""

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        share = -(-len(self.case.order[step]) // self.world)
        return [self.case.order[step][:share]] * self.world


class BatchTimesWorld(OwnOrder):
    """accelerate#1013: the batch size is per process, so that a step grows with the number of processes."""

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        size = self.case.global_batch * self.world
        epoch, place = divmod(step, -(-self.case.num_samples // size))
        numbers = tuple(self.epoch(epoch)[place * size : (place + 1) * size])
        return [numbers[rank :: self.world] for rank in range(self.world)]


class OrderNotSeeded(OwnOrder):
    """fvdb-reality-capture#159: nothing seeds the order, so that no two runs have the same."""

    def __call__(self) -> Any:
        self.key = int.from_bytes(open("/dev/urandom", "rb").read(3), "big")  # noqa: SIM115, PTH123
        return super().__call__()

    def chosen(self, step: int) -> list[tuple[int, ...]]:
        epoch, place = divmod(step, self.per_epoch)
        start = place * self.case.global_batch
        numbers = tuple(self.epoch(epoch, self.key)[start : start + self.case.global_batch])
        return [numbers[rank :: self.world] for rank in range(self.world)]


class Noisy(Dataset[Any]):
    """Items with noise from numpy's global generator: an augmentation as it is mostly written."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        inputs, label = self.items[number]
        return inputs + 0.1 * float(np.random.random()) + 0.1 * random.random(), label


class NumpySeededByWorker(Loop):
    """pytorch#5059: what an item draws follows from the process that reads it, not from the sample."""

    def __call__(self) -> Any:
        np.random.seed(self.rank)
        random.seed(self.rank)
        return super().__call__()

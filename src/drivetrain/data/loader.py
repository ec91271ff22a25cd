"""From the stream to batches: each rank's micro-batches of each step, in order, from any step on.

There is one pass for the whole job: workers live until its end and fetch ahead over the ends of epochs. Where to start
is a step's number, so resuming needs no state and no replay. Every strategy gets its data here; there is no way round
it.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain.core.errors import DrivetrainError
from drivetrain.data.division import Division, MicroStep, Place
from drivetrain.data.items import Collate, KeyedItems, exactness_warnings, gather, gathers, map_tensors
from drivetrain.data.stream import SampleStream


class MicroBatch(NamedTuple):
    """The data of one forward and backward."""

    batch: Any
    num_samples: int
    weight: int
    number: int  # within the step
    is_last: bool


class Loader:
    """The batches of one rank. `batches(first_step, last_step)` yields each step's place and its micro-batches."""

    def __init__(
        self,
        dataset: Dataset[Any],
        division: Division,
        rank: int,
        seed: int,
        collate: Collate,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
    ) -> None:
        self.division, self.rank = division, rank
        self.items = KeyedItems(dataset, seed)
        self.stream = SampleStream(division.num_samples, seed, shuffle=shuffle)
        self._dataset, self._collate = dataset, collate
        self._num_workers, self._pin_memory, self._prefetch_factor = num_workers, pin_memory, prefetch_factor
        self._gathers = gathers(dataset, collate) and num_workers == 0
        self._iterator: Iterator[Any] | None = None

    def warn_if_inexact(self) -> list[str]:
        """Say once what stands in the way of exact repetition."""
        if gathers(self._dataset, self._collate):
            return []
        found = exactness_warnings(self.items, self._collate)
        for text in found:
            warnings.warn(text, stacklevel=2)
        return found

    def samples_of(self, place: Place) -> list[int]:
        """The samples of a whole step, all ranks together, in the order of the stream."""
        found: list[int] = self.stream.samples(place.epoch, place.start, place.stop).tolist()
        return found

    def micro_batch(self, place: Place, number: int) -> MicroBatch:
        """One micro-batch by itself, fetched in this process."""
        parts = self.division.micro_steps(place, self.rank)
        return self._made(self._fetch(place, parts[number]), parts, number)

    def batches(self, first_step: int, last_step: int) -> Iterator[tuple[Place, Iterable[MicroBatch]]]:
        """Every step from `first_step` up to `last_step`, which is not included."""
        if self._num_workers == 0:
            for step in range(first_step, last_step):
                place = self.division.place(step)
                yield place, self._fetched_here(place)
            return
        fetched = self._fetched_by_workers(first_step, last_step)
        try:
            for step in range(first_step, last_step):
                place = self.division.place(step)
                yield place, self._taken_from(fetched, place)
        finally:
            self.close()

    def _fetched_here(self, place: Place) -> Iterable[MicroBatch]:
        parts = self.division.micro_steps(place, self.rank)
        if len(parts) == 1:
            return (self._made(self._fetch(place, parts[0]), parts, 0),)
        return self._one_by_one(place, parts)

    def _one_by_one(self, place: Place, parts: list[MicroStep]) -> Iterator[MicroBatch]:
        for number, part in enumerate(parts):
            yield self._made(self._fetch(place, part), parts, number)

    def _taken_from(self, fetched: Iterator[Any], place: Place) -> Iterator[MicroBatch]:
        parts = self.division.micro_steps(place, self.rank)
        for number in range(len(parts)):
            yield self._made(next(fetched), parts, number)

    @staticmethod
    def _made(batch: Any, parts: list[MicroStep], number: int) -> MicroBatch:
        part = parts[number]
        return MicroBatch(batch, part.num_samples, part.weight, number, number == len(parts) - 1)

    def _fetch(self, place: Place, part: MicroStep) -> Any:
        samples = self.stream.samples(place.epoch, part.start, part.stop)
        if self._gathers:
            batch: Any = gather(cast(TensorDataset, self._dataset), torch.from_numpy(samples))
        else:
            batch = self._collate(self.items.__getitems__([(place.epoch, sample) for sample in samples.tolist()]))
        return map_tensors(Tensor.pin_memory, batch) if self._pin_memory else batch

    def _fetched_by_workers(self, first_step: int, last_step: int) -> Iterator[Any]:
        loader = DataLoader(
            self.items,
            batch_sampler=_Keys(self, first_step, last_step),
            collate_fn=self._collate,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            prefetch_factor=self._prefetch_factor,
        )
        try:
            self._iterator = iter(loader)
        except (AttributeError, TypeError, OSError, RuntimeError) as error:
            raise DrivetrainError(
                f"the loader's {self._num_workers} workers could not be started: {error}",
                remedy="make the data set picklable (no lambdas, no open files), or use --num-workers 0",
            ) from error
        return self._iterator

    def close(self) -> None:
        """End the workers now.

        Left to the garbage collector after an error, they would outlive the run for a while, and Python 3.12 would
        close their pipes twice and say so in a traceback.
        """
        iterator, self._iterator = self._iterator, None
        end_workers = getattr(iterator, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()


class _Keys:
    """The (epoch, sample) keys of each micro-batch of this rank, for torch's loader."""

    def __init__(self, loader: Loader, first_step: int, last_step: int) -> None:
        self._loader, self._first_step, self._last_step = loader, first_step, last_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        loader = self._loader
        for step in range(self._first_step, self._last_step):
            place = loader.division.place(step)
            for part in loader.division.micro_steps(place, loader.rank):
                samples = loader.stream.samples(place.epoch, part.start, part.stop).tolist()
                yield [(place.epoch, sample) for sample in samples]

"""Orders from elsewhere, which have to be read: a sampler's, or that of iterable data.

As with the keyed order, which is a formula (`stream`), there is one order for the whole world. Every rank reads all of
it and takes its slices, so nothing comes twice and nothing is missed, for any number of ranks and workers.
"""

import hashlib
import itertools
import json
import operator
import random
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice
from drivetrain.core.world import World
from drivetrain.data.batch import leaves
from drivetrain.data.division import Indices, Place, Position, key_of
from drivetrain.data.keyed_items import ItemError, seed_all

_BEGIN = 2**64 - 1  # replaces a position in the key of draws at the beginning of an epoch
_READ_AHEAD = 1024


Content = Indices | Sequence[Any]  # samples by number, or by whatever key a sampler has; or the items themselves


class Portion(NamedTuple):
    """One step of an order: its place, its entries for all ranks, and the position of the run after it."""

    place: Place
    entries: Sequence[Any]
    after: Position

    def cut(self, start: int, stop: int) -> Sequence[Any]:
        """Return the entries at some positions of the epoch, all of this step."""
        return self.entries[start - self.place.start : stop - self.place.start]


class Entries(Protocol):
    """The entries that are read one by one: a sampler's samples, its batches of them, or the items themselves."""

    def begin(self, epoch: int, start: int, state: Any) -> Iterator[Any]:
        """Begin an epoch, from `start` samples on."""

    def state(self) -> Any:
        """Return what `begin` needs to continue after the entry read last; None if it reads from the beginning."""

    def nothing(self, epoch: int) -> DrivetrainError:
        """Return the error for an epoch without entries."""


class ReadOrder:
    """An order that is read from its source. Steps are as many entries as the global batch, or one batch of them."""

    def __init__(self, entries: Entries, global_batch: int, *, in_batches: bool = False, drop_last: bool = False):
        self._entries, self._in_batches = entries, in_batches
        self._global_batch = 1 if in_batches else global_batch
        self._least = self._global_batch if drop_last else 1

    def steps(self, position: Position) -> Iterator[Portion]:
        """Yield the steps from a position on, without end."""
        step, epoch, start, state = position
        while True:
            ahead = _Ahead(self._entries.begin(epoch, start, state))
            if not ahead.has(self._least):
                raise self._entries.nothing(epoch)
            more = True
            while more:
                found = ahead.take(self._global_batch)
                samples = found[0] if self._in_batches else found
                if not samples:
                    raise DrivetrainError(
                        f"the batch sampler's batch for step {step} is empty", remedy="let it yield no empty batches"
                    )
                state = self._entries.state()  # before looking further
                more = ahead.has(self._least)
                place = Place(step, epoch, start, start + len(samples), not more)
                step, start = step + 1, place.stop
                yield Portion(
                    place, samples, Position(step, epoch, start, state) if more else Position(step, epoch + 1)
                )
            epoch, start, state = epoch + 1, 0, None


class _Ahead:
    """Looks ahead in an iterator. An error raised while looking ahead is raised when its turn comes, not before."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._seen: deque[Any] = deque()
        self._ended = False
        self._error: Exception | None = None

    def has(self, count: int) -> bool:
        while len(self._seen) < count and not self._ended:
            try:
                self._seen.append(next(self._iterator))
            except StopIteration:
                self._ended = True
            except Exception as error:  # noqa: BLE001  (it is raised later, as it is)
                self._ended, self._error = True, error
        return len(self._seen) >= count or self._error is not None

    def take(self, count: int) -> list[Any]:
        """Return the next `count` entries, or as many as are left."""
        self.has(count)
        if len(self._seen) < count and self._error is not None:
            raise self._error
        return [self._seen.popleft() for _ in range(min(count, len(self._seen)))]


class SamplerEntries:
    """A user's sampler, with all its random draws keyed by (seed, epoch): equal on every rank.

    It is read some way ahead, and its draws are kept apart from all others.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, *, in_batches: bool = False) -> None:
        self._sampler, self._seed, self._in_batches = sampler, seed, in_batches
        self._mark = 0  # of the entries of the epoch that were read so far

    def begin(self, epoch: int, start: int, state: Any) -> Iterator[Any]:
        entries = self._read(epoch)
        self._mark = done = 0
        while done < start:  # only numbers are skipped; no item is fetched for it
            try:
                entry = next(entries)
            except StopIteration:
                return
            self._mark = crc32(repr(entry).encode(), self._mark)
            done += len(entry) if self._in_batches else 1
        if start and state not in (None, self._mark):
            notice(
                f"the sampler ({type(self._sampler).__name__}) does not yield what it did before the interruption: "
                f"some samples of epoch {epoch} come twice, and some not at all. Its order has to follow from its "
                "draws and from set_epoch(epoch) alone, and not from a counter or from what training has changed"
            )
        for entry in entries:
            self._mark = crc32(repr(entry).encode(), self._mark)
            yield entry

    def _read(self, epoch: int) -> Iterator[Any]:
        key = key_of(self._seed, epoch)
        part: Any
        for part in (self._sampler, getattr(self._sampler, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(key >> 1)
        seed_all(key)
        entries = iter(self._sampler)
        plain = _plain_batch if self._in_batches else _plain
        while chunk := [plain(entry) for entry in itertools.islice(entries, _READ_AHEAD)]:
            drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
            yield from chunk
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
            torch.set_rng_state(drawn[2])

    def largest_batch(self) -> int | None:
        """Return the size of the largest of an epoch's first batches; None if there is none.

        The batches are drawn by a key: the same in every process.
        """
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return max(map(len, itertools.islice(self._read(0), _READ_AHEAD)), default=None)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def state(self) -> Any:
        return self._mark

    def nothing(self, epoch: int) -> DrivetrainError:
        return DrivetrainError(
            f"the sampler ({type(self._sampler).__name__}) yields nothing to train on in epoch {epoch}",
            remedy="check its length, or its drop_last",
        )


def _plain(sample: Any) -> Any:
    """Return a whole number of any type as an int; a key of another kind unchanged."""
    return operator.index(sample) if hasattr(sample, "__index__") else sample


def _plain_batch(samples: Iterable[Any]) -> list[Any]:
    return [_plain(sample) for sample in samples]


class ItemEntries:
    """An iterable dataset, with each item's random draws keyed by (seed, epoch, position)."""

    def __init__(self, dataset: Iterable[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._has_state = has_state(dataset)
        self._was_read = False

    def begin(self, epoch: int, start: int, state: Any) -> Iterator[Any]:
        dataset: Any = self._dataset
        if self._was_read and is_iterator(dataset):
            return
        self._was_read = True
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        position = 0
        if start and state is not None and self._has_state:
            dataset.load_state_dict(state)
            position = start
        seed_all(key_of(self._seed, epoch, _BEGIN))
        items = iter(dataset)
        while True:
            seed_all(key_of(self._seed, epoch, position))
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception as error:
                raise _item_error(position, epoch, error) from error
            position += 1
            if position > start:  # items before it were trained on already, and are only read again
                yield item

    def state(self) -> Any:
        if not self._has_state:
            return None
        state = self._dataset.state_dict()  # type: ignore[attr-defined]
        try:
            return json.loads(json.dumps(state, allow_nan=False))  # a copy, too: it may be the live one
        except (TypeError, ValueError) as error:
            raise DrivetrainError(
                f"what state_dict() of {type(self._dataset).__name__} returns cannot be saved as JSON: {error}",
                remedy="let it return numbers, texts, lists and dictionaries, or leave state_dict out: then a resumed "
                "run reads again what it has seen",
            ) from None

    def nothing(self, epoch: int) -> DrivetrainError:
        kind = type(self._dataset).__name__
        if epoch and is_iterator(self._dataset):
            return DrivetrainError(
                f"the {kind} ended with epoch {epoch - 1}, and an iterator can be read only once",
                remedy="give an object whose __iter__ begins anew, or epochs=1; the run can go on from its last "
                "checkpoint",
            )
        return DrivetrainError(
            f"the data set ({kind}) yields nothing to train on in epoch {epoch}",
            remedy="check the path or the filter it was made with",
        )


def has_state(dataset: Any) -> bool:
    """Return whether a dataset can go on by its state, and not only by being read again."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not loses_items(dataset)


def loses_items(dataset: Any) -> bool:
    """Return whether the state of an iterable dataset of Hugging Face leaves out what its shuffle buffer holds."""
    nodes = [getattr(dataset, "_ex_iterable", None)]
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "BufferShuffledExamplesIterable" and getattr(node, "buffer_size", 0) > 1:
            return True
        if node is not None:
            nodes += [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())]
    return False


def is_iterator(data: Any) -> bool:
    """Return whether reading uses it up: a generator, a file, a map."""
    return hasattr(data, "__next__")


def _item_error(position: int, epoch: int, error: Exception) -> ItemError:
    trace = "".join(traceback.format_exception(error)).rstrip()
    return ItemError(
        f"reading item {position} of epoch {epoch} raised {type(error).__name__}: {error}\n"
        f"  remedy: iterate over the data set alone up to there, to see it by itself\n{trace}"
    )


def refuse_unequal_orders(mark: str, world: World) -> None:
    """Raise unless all ranks read the same order; a collective call.

    Ranks that read different data would train on parts of it, some twice and some never.
    """
    marks = world.gather(mark)
    if len(set(marks)) > 1:
        raise DrivetrainError(
            "the ranks do not read the same data in the same order: the first step has "
            + "; ".join(f"{found} on rank {rank}" for rank, found in enumerate(marks)),
            remedy="let the data set or sampler yield the same on every rank: drivetrain divides it, so it must not "
            "divide itself, nor draw from a generator that is seeded by nothing",
        )


def fingerprint(entries: Sequence[Any]) -> str:
    """Return a mark that is equal for equal entries: a check that all ranks read the same order."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves(entries):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
            digest.update(leaf.detach().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            digest.update(leaf.tobytes())
        elif isinstance(leaf, (str, bytes, int, float, bool)):
            digest.update(repr(leaf).encode())
    return f"{len(entries)} entries, {digest.hexdigest()}"

"""Which samples belong to which step: their order over all epochs, divided over ranks, then into micro-steps.

The sample stream is a pure function of (seed, epoch, position): a keyed permutation computed position by position, so
there is no table of the data set's size, nothing to save, and starting in the middle of an epoch of a billion samples
costs what starting at its beginning does. It knows nothing of devices, micro-batches or workers; `Division` cuts what
it yields. Only work is divided; what a step means is not.

A step takes the next `global_batch` samples of the stream, the last of an epoch what is left. Where the global batch
changes at some steps, the same stream is cut into steps of the new size from there on. Each rank takes one
contiguous slice, as equal as can be; each slice is cut into micro-steps of at most `micro_batch` samples. (A fixed
division is cut first and then distributed: any number of ranks sees the same micro-batches.) All ranks run equally many
micro-steps, since collectives need them to; a rank with nothing left repeats one sample at weight 0.

A model that normalizes over a batch cannot train on one sample. For it no slice and no micro-step has less than `least`
samples, as long as the step has as many: a step that is too small for all ranks goes to the first ones.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drivetrain.core.aims import BatchSizes

Indices = NDArray[np.int64]

# Four rounds make a Feistel network a strong pseudo-random permutation if its round function is random; the mixing
# below is not cryptographic, so twice as many are spent.
_ROUNDS = 8
_BLOCK = 8192
# Samples are grouped by length within pools of so many global batches, but at most a quarter of an epoch: other samples
# come together in each epoch.
POOL_BATCHES, LEAST_POOLS = 64, 4
_BATCH_ORDER = 2**64 - 2  # replaces a position in the key of the order of a pool's batches


def key_of(*parts: int) -> int:
    """Return a 64-bit key of several numbers, in this order. The same on every machine and in every version."""
    packed = struct.pack(f"<{len(parts)}Q", *(part & 0xFFFFFFFFFFFFFFFF for part in parts))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def mix(value: int) -> int:
    """Return a 64-bit number of which every bit depends on every bit of the input (the finalizer of splitmix64)."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def _mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `mix` to many numbers at once."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Permutation:
    """A permutation of `range(size)`, computed for any positions without a table.

    A balanced Feistel network permutes the smallest even-bit domain that holds `size`; positions that land outside
    walk on until they land inside, which takes at most four tries on average.
    """

    size: int
    key: int

    @cached_property
    def _round_keys(self) -> list[np.uint64]:
        return [np.uint64(key_of(self.key, number)) for number in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        if self.size <= 1:
            return np.zeros_like(positions)
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        values = self._round_trip(positions.astype(np.uint64), half_bits)
        outside = values >= np.uint64(self.size)
        while outside.any():
            values[outside] = self._round_trip(values[outside], half_bits)
            outside = values >= np.uint64(self.size)
        return values.astype(np.int64)

    def _round_trip(self, values: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
        shift = np.uint64(half_bits)
        mask = np.uint64((1 << half_bits) - 1)
        left, right = values >> shift, values & mask
        for round_key in self._round_keys:
            left, right = right, left ^ (_mix_all(right + round_key) & mask)
        return (left << shift) | right


class SampleStream:
    """The sample at each position of each epoch."""

    def __init__(self, num_samples: int, seed: int, *, shuffle: bool = True) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._block_at: tuple[int, int] = (-1, -1)  # (epoch, first position) of the block at hand
        self._block: Indices = np.zeros(0, np.int64)

    def copy(self) -> "SampleStream":
        """Return the same stream for another thread: the block at hand must not be shared."""
        return SampleStream(self.num_samples, self.seed, shuffle=self.shuffle)

    def samples(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the samples at positions `start` to `stop` of an epoch, all within it."""
        self._check(start, stop)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first = start - start % _BLOCK
        if stop <= first + _BLOCK:
            return self._cached_block(epoch, first)[start - first : stop - first]
        return self._permuted(epoch, start, stop)

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.num_samples:
            raise ValueError(f"positions {start} to {stop} are not within an epoch of {self.num_samples} samples")

    def _cached_block(self, epoch: int, first: int) -> Indices:
        """Compute a whole block: numpy's cost per call is then spread over thousands of samples."""
        if self._block_at != (epoch, first):
            self._block = self._permuted(epoch, first, min(first + _BLOCK, self.num_samples))
            self._block_at = (epoch, first)
        return self._block

    def _permuted(self, epoch: int, start: int, stop: int) -> Indices:
        permutation = Permutation(self.num_samples, key_of(self.seed, epoch))
        return permutation(np.arange(start, stop, dtype=np.int64))


class LengthGroupedStream(SampleStream):
    """A sample stream whose global batches hold samples of similar length, longest first within a batch.

    It is a function of seed, epoch, global batch and lengths. The shuffled epoch is cut into pools; the samples of a
    pool are sorted by length and cut into global batches, and these batches are shuffled. What does not fill a batch is
    the end of the shuffled epoch, whatever its lengths. The first batch of an epoch is the longest of its pool, since
    memory is planned by it.
    """

    def __init__(self, lengths: Indices, seed: int, global_batch: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths, self.global_batch = lengths, global_batch
        num_batches = min(POOL_BATCHES, self.num_samples // (LEAST_POOLS * global_batch))
        self._pool_size = max(1, num_batches) * global_batch

    def copy(self) -> "LengthGroupedStream":
        return LengthGroupedStream(self.lengths, self.seed, self.global_batch)

    def samples(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the samples at positions `start` to `stop` of an epoch, all within it."""
        self._check(start, stop)
        size, found = self._pool_size, []
        while start < stop:
            first = start - start % size
            pool = self._cached_block(epoch, first)
            found.append(pool[start - first : stop - first])
            start = first + size
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _cached_block(self, epoch: int, first: int) -> Indices:
        if self._block_at != (epoch, first):
            self._block = self._grouped(epoch, first, min(first + self._pool_size, self.num_samples))
            self._block_at = (epoch, first)
        return self._block

    def _grouped(self, epoch: int, first: int, stop: int) -> Indices:
        drawn = self._permuted(epoch, first, stop)
        num_batches = len(drawn) // self.global_batch
        whole, rest = np.split(drawn, [num_batches * self.global_batch])
        batches = self._longest_first(whole).reshape(num_batches, self.global_batch)
        order = Permutation(num_batches, key_of(self.seed, epoch, first, _BATCH_ORDER))(np.arange(num_batches))
        if first == 0:
            order = np.concatenate([order[order == 0], order[order != 0]])
        return np.concatenate([batches[order].reshape(-1), self._longest_first(rest)])

    def _longest_first(self, samples: Indices) -> Indices:
        return samples[np.argsort(-self.lengths[samples], kind="stable")]


class MicroStep(NamedTuple):
    """One forward and backward on one rank. Positions are within the epoch."""

    start: int
    stop: int
    weight: int  # 1; or 0 for a sample that only keeps the rank in step with the others

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


class Place(NamedTuple):
    """A step's place in the job: which epoch, and the positions it covers there."""

    step: int  # counted over the whole job, from 0
    epoch: int
    start: int
    stop: int
    ends_epoch: bool = False

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


class Stretch(NamedTuple):
    """Consecutive steps of one epoch, each of as many samples as the first, and none the epoch's last."""

    first: Place
    num_steps: int
    start: int  # of its samples, in the window of numbers at hand

    def shortened(self, num_steps: int) -> "Stretch":
        return self if num_steps >= self.num_steps else self._replace(num_steps=max(0, num_steps))

    @property
    def last(self) -> Place:
        step, epoch, start, stop, _ = self.first
        further = self.num_steps - 1
        samples = further * (stop - start)
        return Place(step + further, epoch, start + samples, stop + samples)


class Position(NamedTuple):
    """The state of a run between two steps: the work that is done, and so what comes next."""

    step: int = 0
    epoch: int = 0
    start: int = 0  # samples of this epoch that are done
    state: Any = None  # the state that the dataset needs to continue from here: JSON

    @classmethod
    def from_json(cls, step: int, found: Mapping[str, Any] | None) -> "Position":
        return cls(step, found["epoch"], found["start"], found["state"]) if found else cls(step)

    def to_json(self) -> dict[str, Any]:
        """Return the fields except the step, which a checkpoint stores itself."""
        return {"epoch": self.epoch, "start": self.start, "state": self.state}

    def is_over(self, last_step: int | None, last_epoch: int | None) -> bool:
        """Return whether no step is left, if steps or epochs end here."""
        return (last_step is not None and self.step >= last_step) or (
            last_epoch is not None and self.epoch >= last_epoch
        )


class _Segment(NamedTuple):
    """Steps of one size, from a step on, and where in the data that step begins."""

    first_step: int
    size: int
    epoch: int
    start: int
    first_steps: int  # of the epoch that it begins in; its other epochs have `epoch_steps`
    epoch_steps: int

    def begins(self, epoch: int) -> int:
        """Return the step that a later epoch begins with, if steps keep this size."""
        return self.first_step + self.first_steps + (epoch - self.epoch - 1) * self.epoch_steps

    def position(self, step: int) -> tuple[int, int]:
        """Return epoch and start of one of its steps."""
        number = step - self.first_step
        if number < self.first_steps:
            return self.epoch, self.start + number * self.size
        epochs, number = divmod(number - self.first_steps, self.epoch_steps)
        return self.epoch + 1 + epochs, number * self.size


@dataclass(frozen=True)
class Division:
    """The division of `num_samples` per epoch into steps, and of steps over `world_size` ranks and micro-steps."""

    num_samples: int
    global_batch: int  # where it changes, the largest
    micro_batch: int
    world_size: int
    least: int = 1  # samples of a micro-step
    is_fixed: bool = False  # whether steps are cut into the same micro-steps by any number of ranks
    batch_sizes: BatchSizes = ()  # from which step on a step has how many samples; empty: always `global_batch`
    drops_last: bool = False  # with `batch_sizes`: an epoch ends where less than a whole step is left

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch, all of `global_batch` samples but the last."""
        return -(-self.num_samples // self.global_batch)

    def place(self, step: int) -> Place:
        if self.batch_sizes:
            return self._place_in_segment(step)
        epoch, number = divmod(step, self.steps_per_epoch)
        start = number * self.global_batch
        stop = start + self.global_batch
        if stop < self.num_samples:
            return Place(step, epoch, start, stop)
        return Place(step, epoch, start, self.num_samples, True)

    def first_step_of(self, epoch: int) -> int:
        """Return the step that an epoch begins with."""
        if not self.batch_sizes or epoch == 0:
            return epoch * self.steps_per_epoch
        *others, last = self._segments
        for segment, following in zip(others, self._segments[1:], strict=True):
            if following.epoch >= epoch:  # it begins before the next size, or with it
                return min(segment.begins(epoch), following.first_step)
        return last.begins(epoch)

    def num_alike(self, place: Place) -> int:
        """Return how many steps from this one on have as many samples and do not end the epoch."""
        ends = [
            self.first_step_of(place.epoch + 1) - 1,
            *(first for first, _ in self.batch_sizes if first > place.step),
        ]
        return min(ends) - place.step

    @cached_property
    def _segments(self) -> tuple[_Segment, ...]:
        found: list[_Segment] = []
        for first_step, size in self.batch_sizes:
            epoch, start = found[-1].position(first_step - 1) if found else (0, 0)
            start = min(start + found[-1].size, self.num_samples) if found else 0  # behind the step before
            first_steps = self._num_steps(self.num_samples - start, size)
            if first_steps == 0:  # the epoch is over, for steps of this size
                epoch, start = epoch + 1, 0
            epoch_steps = self._num_steps(self.num_samples, size)
            found.append(_Segment(first_step, size, epoch, start, first_steps or epoch_steps, epoch_steps))
        return tuple(found)

    def _num_steps(self, num_samples: int, size: int) -> int:
        return num_samples // size if self.drops_last else -(-num_samples // size)

    def _position(self, step: int) -> tuple[int, int, int]:
        segment = self._segments[bisect_right(self.batch_sizes, step, key=itemgetter(0)) - 1]
        return *segment.position(step), segment.size

    def _place_in_segment(self, step: int) -> Place:
        epoch, start, size = self._position(step)
        return Place(step, epoch, start, min(start + size, self.num_samples), self._position(step + 1)[0] > epoch)

    def rank_slice(self, place: Place, rank: int) -> tuple[int, int]:
        """Return this rank's positions: contiguous, and together with the others' exactly the step's."""
        if self.is_fixed:
            parts = self._share(place, rank)
            return (parts[0].start, parts[-1].stop) if parts else (place.stop, place.stop)
        count, num_ranks = place.num_samples, self._num_ranks(place)
        rank = min(rank, num_ranks)  # the last ones get nothing
        last = min(rank + 1, num_ranks)
        return place.start + count * rank // num_ranks, place.start + count * last // num_ranks

    def _num_ranks(self, place: Place) -> int:
        """Return the number of ranks that have samples of this step, or may have."""
        return self.world_size if self.least == 1 else max(1, min(self.world_size, place.num_samples // self.least))

    def largest_slice(self, place: Place) -> int:
        """Return the size of the largest of a step's slices."""
        if self.is_fixed:
            slices = (self.rank_slice(place, rank) for rank in range(self.world_size))
            return max(stop - start for start, stop in slices)
        return -(-place.num_samples // self._num_ranks(place))

    def num_micro_steps(self, place: Place) -> int:
        """Return the number of micro-steps, the same on every rank: as many as the largest slice needs."""
        if self.is_fixed:
            return max(1, -(-len(self._cut(place.start, place.stop)) // self.world_size))
        largest = self.largest_slice(place)
        if self.least > 1:
            return max(1, len(self._cut(0, largest)))
        return max(1, -(-largest // self.micro_batch))

    def num_batches(self, first_step: int, last_step: int) -> int:
        """Return the number of micro-steps of a rank in the steps from the first one up to, not including, the last."""
        total, step = 0, first_step
        while step < last_step:
            place = self.place(step)
            num_alike = max(1, min(self.num_alike(place), last_step - step))
            total, step = total + num_alike * self.num_micro_steps(place), step + num_alike
        return total

    def _cut(self, start: int, stop: int) -> list[MicroStep]:
        """Cut a slice into micro-steps."""
        size, least = self.micro_batch, self.least
        found = [MicroStep(first, min(first + size, stop), 1) for first in range(start, stop, size)]
        if least > 1 and len(found) > 1 and found[-1].num_samples < least <= size:
            before, last = found[-2:]
            middle = last.stop - least
            if middle - before.start >= least:
                found[-2:] = [MicroStep(before.start, middle, 1), MicroStep(middle, stop, 1)]
            else:  # none to spare: one of them is larger than asked for
                found[-2:] = [MicroStep(before.start, stop, 1)]
        return found

    def _share(self, place: Place, rank: int) -> list[MicroStep]:
        """Return this rank's micro-steps where the step is cut before it is distributed.

        The first rank always has some: the buffers that its samples update, such as statistics, are used by all ranks.
        """
        parts = self._cut(place.start, place.stop)
        return parts[-(-len(parts) * rank // self.world_size) : -(-len(parts) * (rank + 1) // self.world_size)]

    def micro_steps(self, place: Place, rank: int) -> list[MicroStep]:
        if self.world_size == 1 and place.num_samples <= self.micro_batch:
            return [MicroStep(place.start, place.stop, 1)]
        start, stop = self.rank_slice(place, rank)
        found = self._share(place, rank) if self.is_fixed else self._cut(start, stop)
        # What is repeated is of this step, so that no other data is touched.
        num_spare = min(self.least, place.num_samples)
        spare = min(start, place.stop - num_spare)
        while len(found) < self.num_micro_steps(place):
            found.append(MicroStep(spare, spare + num_spare, 0))
        return found

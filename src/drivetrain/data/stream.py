"""The sample stream: the order of all samples of all epochs, as a pure function of (seed, epoch, position).

It is a keyed permutation computed position by position, so there is no table of the data set's size, nothing to save,
and starting in the middle of an epoch of a billion samples costs what starting at its beginning does. It knows nothing
of devices, micro-batches or workers; `division` cuts what it yields.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

# Four rounds make a Feistel network a strong pseudo-random permutation if its round function is random; the mixing
# below is not cryptographic, so twice as many are spent.
_ROUNDS = 8
_BLOCK = 8192


def key_of(*parts: int) -> int:
    """Return a 64-bit key of several numbers, in this order. The same on every machine and in every version."""
    packed = struct.pack(f"<{len(parts)}Q", *(part & 0xFFFFFFFFFFFFFFFF for part in parts))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def mix(value: int) -> int:
    """Return a 64-bit number of which every bit depends on every bit of the input (the finaliser of splitmix64)."""
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

    def samples(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the samples at positions `start` to `stop` of an epoch, all within it."""
        if not 0 <= start <= stop <= self.num_samples:
            raise ValueError(f"positions {start} to {stop} are not within an epoch of {self.num_samples} samples")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first = start - start % _BLOCK
        if stop <= first + _BLOCK:
            return self._cached_block(epoch, first)[start - first : stop - first]
        return self._permuted(epoch, start, stop)

    def _cached_block(self, epoch: int, first: int) -> Indices:
        """Compute a whole block: numpy's cost per call is then spread over thousands of samples."""
        if self._block_at != (epoch, first):
            self._block = self._permuted(epoch, first, min(first + _BLOCK, self.num_samples))
            self._block_at = (epoch, first)
        return self._block

    def _permuted(self, epoch: int, start: int, stop: int) -> Indices:
        permutation = Permutation(self.num_samples, key_of(self.seed, epoch))
        return permutation(np.arange(start, stop, dtype=np.int64))

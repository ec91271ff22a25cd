"""Checksums of tensors, computed on their device: they show whether weights are still those that were stored.

The checksum of a tensor is a sum over its elements modulo 2**64, in which each element's bits count by a factor that
depends on the element's place in the whole tensor. So a change of any single element always changes it, elements that
trade places do, too, and the checksums of a tensor's parts add up to that of the whole, however ranks divide its rows.
All of it is integer arithmetic: every device computes the same number.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK_WORDS = 2**16  # places in a block have a factor each, and so have blocks
# How much is multiplied at a time. On a CPU it should stay in the cache; on a GPU each piece costs two launches.
CPU_WORDS, DEVICE_WORDS = 2**16, 2**23

MODULUS = 2**64
_WORD_TYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class Region(NamedTuple):
    """A tensor that is all rows, or some successive rows, of a whole."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    first_row: int = 0


class _Piece(NamedTuple):
    """Some words of a region: a part of one block, or several whole blocks."""

    start: int
    stop: int
    place: int  # of the first word in its block
    block: int  # the number of the first block in the whole tensor


Values = Callable[[], list[int]]


def start_checksums(regions: Sequence[Region]) -> Values:
    """Start computing the checksum of each region. Return a function that waits for the device and returns them.

    On a GPU this only enqueues work on the current stream, so the checksums are of what the tensors hold at that point
    of the stream. On a CPU they are computed at once.
    """
    by_device: dict[torch.device, list[int]] = {}
    for number, region in enumerate(regions):
        by_device.setdefault(region.tensor.device, []).append(number)
    started = [
        (numbers, _start_on(device, [regions[number] for number in numbers])) for device, numbers in by_device.items()
    ]

    def values() -> list[int]:
        found = [0] * len(regions)
        for numbers, wait in started:
            for number, value in zip(numbers, wait(), strict=True):
                found[number] = value
        return found

    return values


def checksums(regions: Sequence[Region]) -> list[int]:
    """Return the checksum of each region. The host waits for the device here."""
    return start_checksums(regions)()


@torch.no_grad()
def _start_on(device: torch.device, regions: Sequence[Region]) -> Values:
    most = CPU_WORDS if device.type == "cpu" else DEVICE_WORDS
    words = [_words(region) for region in regions]
    pieces = [_pieces(region, len(own), most) for region, own in zip(regions, words, strict=True)]
    num_sums = sum(_num_blocks(piece) for own in pieces for piece in own)
    sums = torch.zeros(num_sums, dtype=torch.int64, device=device)
    longest = max((piece.stop - piece.start for own in pieces for piece in own), default=0)
    products, factors = torch.empty(longest + 2, dtype=torch.int32, device=device), _place_factors(device)
    at = 0
    for own_words, own_pieces in zip(words, pieces, strict=True):
        for piece in own_pieces:
            at = _sum_piece(own_words, piece, products, factors, sums, at)
    weights = [_block_factors(own) for own in pieces]
    if device.type == "cuda":
        host = torch.empty(num_sums, dtype=torch.int64, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
    else:
        host, copied = sums.cpu(), None

    def values() -> list[int]:
        if copied is not None:
            copied.synchronize()
        found, first = [], 0
        for own in weights:
            part = host[first : first + len(own)].numpy().view(np.uint64)
            found.append(int((part * own).sum(dtype=np.uint64)))
            first += len(own)
        return found

    return values


def _sum_piece(words: Tensor, piece: _Piece, products: Tensor, factors: Tensor, sums: Tensor, at: int) -> int:
    """Write the sum of each block of the piece into `sums`, from `at` on; return where the next ones belong.

    Products of 32 bits are added two at a time, as numbers of 64: those at places 2n and 2n + 1. A product whose
    neighbour belongs to another part of the tensor has a zero beside it.
    """
    length, num_blocks = piece.stop - piece.start, _num_blocks(piece)
    width, before = length // num_blocks, piece.place % 2
    padded = before + length + (before + length) % 2
    if padded != length:
        products[:padded].zero_()
    rows = words[piece.start : piece.stop].view(num_blocks, width)
    out = products[before : before + length].view(num_blocks, width)
    torch.mul(rows, factors[piece.place : piece.place + width], out=out)
    pairs = products[:padded].view(torch.int64).view(num_blocks, padded // (2 * num_blocks))
    torch.sum(pairs, 1, out=sums[at : at + num_blocks])
    return at + num_blocks


def _words(region: Region) -> Tensor:
    """Return the region's bits as integers, in the order of its elements."""
    tensor = region.tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    kind = _word_type(region)
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % kind.itemsize:
        flat = flat.clone()
    return flat.view(torch.uint8).view(kind) if flat.numel() else torch.empty(0, dtype=kind, device=flat.device)


def _word_type(region: Region) -> torch.dtype:
    """Return the widest integer type that a row is a whole number of."""
    row_bytes = math.prod(region.global_shape[1:]) * region.tensor.element_size()
    return _WORD_TYPES[next(size for size in _WORD_TYPES if row_bytes % size == 0)]


def _row_words(region: Region) -> int:
    return math.prod(region.global_shape[1:]) * region.tensor.element_size() // _word_type(region).itemsize


def _pieces(region: Region, num_words: int, most: int) -> list[_Piece]:
    first = region.first_row * _row_words(region)
    pieces, start = [], 0
    while start < num_words:
        block, place = divmod(first + start, BLOCK_WORDS)
        left = num_words - start
        length = min(BLOCK_WORDS - place, left)
        if length == BLOCK_WORDS:
            length = min(left, most) // BLOCK_WORDS * BLOCK_WORDS
        pieces.append(_Piece(start, start + length, place, block))
        start += length
    return pieces


def _num_blocks(piece: _Piece) -> int:
    return max(1, (piece.stop - piece.start) // BLOCK_WORDS)


def _block_factors(pieces: Sequence[_Piece]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    blocks = [np.arange(piece.block, piece.block + _num_blocks(piece), dtype=np.uint64) for piece in pieces]
    return _mixed(np.concatenate(blocks) + np.uint64(2**32)) if blocks else np.zeros(0, dtype=np.uint64)


_on_devices: dict[torch.device, Tensor] = {}


def _place_factors(device: torch.device) -> Tensor:
    if device not in _on_devices:
        _on_devices[device] = _host_factors().to(device)
    return _on_devices[device]


@cache
def _host_factors() -> Tensor:
    mixed = _mixed(np.arange(BLOCK_WORDS, dtype=np.uint64))
    return torch.from_numpy((mixed & np.uint64(2**32 - 1)).astype(np.uint32).view(np.int32))


def _mixed(numbers: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return odd numbers that look random (splitmix64). Odd ones have an inverse, so no change is multiplied away."""
    state = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def total(parts: Iterable[int]) -> int:
    """Return the checksum of a whole tensor, from those of its parts."""
    return sum(parts) % MODULUS

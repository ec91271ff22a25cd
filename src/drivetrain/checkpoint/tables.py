"""Tables of what is in which file of a checkpoint, computed once for each layout of a state and kept.

Most tensors are divided evenly over all ranks, or whole on one. Of those that are divided evenly a rank sends only a
hash of the list: where all ranks send the same, the list of rank 0 stands for all. Only if they differ does each rank
list its parts.
"""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from drivetrain.checkpoint.errors import CheckpointError
from drivetrain.checkpoint.manifest import (
    Part,
    RankTable,
    StoredTensor,
    even_rows,
    file_name,
    merged_tensors,
    parts_problem,
)
from drivetrain.checkpoint.tensor_file import CODES, RESERVED_NAME, Arrangement, Entry, arranged
from drivetrain.core.state import Shard

Layout = tuple[tuple[Any, ...], ...]
Even = dict[str, StoredTensor]


class FileTable(NamedTuple):
    """Values that depend only on the layout of a state, kept from its last save. The next state usually has the same.

    A save runs beside training in an interpreter that runs one thread at a time: 592 tensors, as GPT-2 with AdamW has
    them, took 68 ms of it before this was kept.
    """

    layout: Layout
    file: Arrangement | None  # None: there is nothing to write
    even: Even  # tensors that are divided evenly over all ranks
    even_hash: str
    others: str  # a RankTable, as JSON: compared as text to detect changes


class Handed(NamedTuple):
    """What the ranks say about their files: hashes of evenly divided tensors, and tables of the others."""

    even_hashes: list[str]
    tables: list[str]
    files: set[str]


class Tables:
    """The tables of a rank's files; on rank 0 also the merged ones of all ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._known: dict[bool, FileTable] = {}  # by whether ranks divide tensors alike
        self._hashed: tuple[Layout, str] = ((), "")
        self._merged: tuple[Handed, dict[str, StoredTensor]] | None = None

    def of_world(self, rank: int, size: int) -> "Tables":
        """Return a copy for another process group."""
        other = copy.copy(self)
        other._known = {} if (rank, size) != (self._rank, self._size) else dict(self._known)
        if (rank, size) != (self._rank, self._size):
            other._merged = None
        other._rank, other._size = rank, size
        return other

    def knows(self, shards: Sequence[Shard]) -> bool:
        """Return whether the last state had the same layout."""
        layout = _layout(shards)
        return any(known.layout == layout for known in self._known.values())

    def of(self, shards: Sequence[Shard], *, follows_rules: bool = True) -> FileTable:
        """Return the table and the arrangement of this rank's file."""
        known = self._known.get(follows_rules)
        if known is None or known.layout != _layout(shards):
            known = self._known[follows_rules] = self.tabled(shards, follows_rules=follows_rules)
        return known

    def even_hash_of(self, shards: Sequence[Shard]) -> str:
        """Return a hash that is equal on ranks that divide the same tensors evenly over all of them."""
        layout = _layout(shards)
        if self._hashed[0] != layout:
            self._hashed = layout, self.tabled(shards).even_hash
        return self._hashed[1]

    def tabled(self, shards: Sequence[Shard], folder: str = "", *, follows_rules: bool = True) -> FileTable:
        """Compute the table of a file.

        Args:
            shards: What is in the file.
            folder: The folder that several checkpoints share, if it is in one.
            follows_rules: Whether the ranks divide tensors alike; otherwise all parts are listed.
        """
        file = f"{folder}/{file_name(self._rank)}" if folder else file_name(self._rank)
        entries: list[Entry] = []
        taken = {RESERVED_NAME}
        even: Even = {}
        others: list[tuple[str, StoredTensor]] = []
        times = Counter(shard.key for shard in shards)
        for shard in shards:
            code, shape, whole = CODES[shard.tensor.dtype], tuple(shard.tensor.shape), tuple(shard.global_shape)
            parts: tuple[Part, ...] = ()
            if shard.tensor.numel():  # an empty part needs no data; its tensor's type and shape are still listed
                name = _free_name(shard.key, taken)
                taken.add(name)
                entries.append(Entry(name, code, shape))
                parts = (Part(file=file, name=name, offsets=tuple(shard.offsets), shape=shape),)
            in_parts = StoredTensor(dtype=code, shape=whole, parts=parts)
            has_its_name = times[shard.key] == 1 and all(part.name == shard.key for part in parts)
            over = self._over(shard) if follows_rules and has_its_name and shard.key != RESERVED_NAME else None
            if over is None:
                others.append((shard.key, in_parts))
                continue
            tensor = StoredTensor(dtype=code, shape=whole, over=over, folder=folder)
            if over == (0, self._size):
                even[shard.key] = tensor
            else:
                others.append((shard.key, tensor))
        return FileTable(
            _layout(shards),
            arranged(entries) if entries else None,
            even,
            _hash(even) if follows_rules else "",
            RankTable(tensors=tuple(others)).model_dump_json(),
        )

    def _over(self, shard: Shard) -> tuple[int, int] | None:
        """Return the ranks that a tensor is divided over by the looks of this rank's part; None if by no rule."""
        part, whole, offsets = tuple(shard.tensor.shape), tuple(shard.global_shape), tuple(shard.offsets)
        if part == whole and not any(offsets) and not (shard.is_part and part):
            return (self._rank, 1) if shard.tensor.numel() else None
        if not part or part[1:] != whole[1:] or any(offsets[1:]):
            return None
        start, stop = even_rows(whole[0], self._rank, self._size)
        is_there = (offsets[0] == start or start == stop) and part[0] == stop - start
        return (0, self._size) if is_there and all(whole) else None

    def merged(self, handed: Handed, own: FileTable) -> dict[str, StoredTensor]:
        """Return each tensor with the parts of all ranks, which have to hold every element once."""
        if self._merged is None or self._merged[0] != handed:
            self._merged = handed, merged(handed, own)
        return self._merged[1]


def merged(handed: Handed, own: FileTable) -> dict[str, StoredTensor]:
    """Return the tensors of all ranks' files; `own` is the table of rank 0's."""
    tables = [RankTable.from_json(table).tensors for table in handed.tables]
    if len(set(handed.even_hashes)) > 1:
        raise not_whole("the ranks divide tensors differently")
    even = own.even if handed.even_hashes[0] else {}
    for rank, table in enumerate(tables):
        if twice := next((key for key, _ in table if key in even), ""):
            raise not_whole(f"the tensor {twice!r} is divided over all ranks, and rank {rank} has it besides")
    tensors = {**even, **merged_tensors(tables)}
    if problem := parts_problem(tensors, handed.files):
        raise not_whole(problem)
    return tensors


def not_whole(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the parts that the ranks handed in do not make whole tensors: {problem}",
        remedy="hand in each element once: replicated tensors on one rank, sharded ones part by part",
    )


def _hash(even: Even) -> str:
    listed = sorted((key, tensor.dtype, tensor.shape) for key, tensor in even.items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _layout(shards: Sequence[Shard]) -> Layout:
    """Return everything that a save depends on except the numbers themselves."""
    return tuple(
        (shard.key, type(shard.tensor), *_kind(shard.tensor), shard.global_shape, shard.offsets, shard.is_part)
        for shard in shards
    )


def _kind(tensor: Any) -> tuple[Any, ...]:
    """Return dtype, layout and shape; empty for anything that is not a tensor, whatever a user's state holds."""
    return (tensor.dtype, tensor.layout, tensor.shape) if isinstance(tensor, torch.Tensor) else ()


def _free_name(key: str, taken: set[str]) -> str:
    """Return the key, so that other tools show it; numbered where one rank holds several parts of it."""
    name, number = key, 1
    while name in taken:
        number += 1
        name = f"{key}#{number}"
    return name

"""The contents of a checkpoint: its manifest, which is written last, and the tables that it is made of."""

import copy
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from drivetrain.checkpoint.files import SHARED_NAME, CheckpointDamagedError, CheckpointError, NewerFormatError
from drivetrain.checkpoint.tensor_file import (
    CODES,
    DTYPES,
    RESERVED_NAME,
    Arrangement,
    Box,
    Entry,
    arranged,
    tiling_problem,
)
from drivetrain.core.state import Shard
from drivetrain.core.value import Value

# ----------------------------------------------------------------------------------------------------------------------
# The manifest: the contents of a checkpoint, with files and hashes. It is written last.
#
# The file is `{"sha256":"…","manifest":{…}}`, one line of JSON. The hash is over the exact bytes of the inner object
# and is compared before anything is parsed, so that a flipped bit anywhere in the file is found. This envelope, and
# `format_version` in it, stay the same in all formats to come: an older drivetrain can tell a newer checkpoint from a
# damaged one.
#
# Older formats are still read. Format 2 added two things to format 1. `shared` names folders beside the checkpoint with
# files of frozen weights that several checkpoints have in common; `frozen` has the checksums of those weights, and
# `moved` names parameters that were found to change though no optimizer holds them.
#
# Format 3 lists no parts of a tensor whose rows are divided evenly over successive ranks, as by `torch.chunk`: `over`
# has the first of these ranks and their number, and part i of n is in that rank's file under the tensor's own key. A
# whole tensor is one that is divided over one rank. So the manifest grows with the number of tensors plus that of
# ranks, not with their product. And the hash of a file is one over the hashes of its pieces of `piece_bytes`, so that
# several threads can compute it.

FORMAT_VERSION = 3
MANIFEST_NAME = "manifest.json"
LARGEST_MANIFEST_BYTES = 256 * 2**20
LARGEST_TENSOR_BYTES = 2**63 - 1
MOST_DIMENSIONS = 64

_OPENING = b'{"sha256":"'
_BETWEEN = b'","manifest":'
_CLOSING = b"}\n"
_BODY_START = len(_OPENING) + 64 + len(_BETWEEN)
_FILE_NAME = re.compile(
    r"rank-[0-9]{5,9}\.safetensors"
)  # no separator, no `..`: nothing outside the folder is ever opened

Size = Annotated[int, Field(ge=0, le=2**63 - 1)]


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class StoredFile(Value):
    size: Size
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    piece_bytes: Annotated[int, Field(ge=2**10, le=2**30)] | None = None  # None: `sha256` is of all bytes in a row

    @model_serializer(mode="wrap")
    def _brief(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_defaults(handler(self))


class Part(Value):
    """A box of a tensor, and where its data is."""

    file: str
    name: str  # in the file
    offsets: tuple[Size, ...]
    shape: tuple[Size, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)


def even_rows(num_rows: int, index: int, count: int) -> tuple[int, int]:
    """Return the first row of one of `count` even parts, and the row after its last: the last parts may be empty."""
    length = -(-num_rows // count)
    return min(num_rows, index * length), min(num_rows, (index + 1) * length)


class StoredTensor(Value):
    """A tensor, and where its elements are: in `parts`, or divided `over` ranks."""

    dtype: str  # as safetensors writes it: `BF16`
    shape: tuple[Size, ...]  # of the whole
    parts: tuple[Part, ...] = ()  # that hold each element once; none for a tensor without elements
    over: tuple[Size, Annotated[int, Field(ge=1)]] | None = None  # the first rank, and the number of ranks
    folder: str = ""  # of the ranks' files, where they are shared with other checkpoints

    @model_serializer(mode="wrap")
    def _brief(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_defaults(handler(self))

    @property
    def folders(self) -> set[str]:
        """The shared folders that hold it; empty if it is in the checkpoint's own files."""
        named = {part.file.rpartition("/")[0] for part in self.parts} | {self.folder}
        return named - {""}

    @property
    def num_over(self) -> int:
        """The number of ranks that hold rows of it, where it is divided over ranks."""
        if self.over is None or not math.prod(self.shape):
            return 0
        return -(-self.shape[0] // -(-self.shape[0] // self.over[1])) if self.shape else 1

    def part_of(self, key: str, rank: int) -> Part | None:
        """Return the part in the file of a rank, where it is divided over ranks; None if it has none there."""
        if self.over is None or not 0 <= rank - self.over[0] < self.num_over:
            return None
        file = f"{self.folder}/{file_name(rank)}" if self.folder else file_name(rank)
        if not self.shape:
            return Part(file=file, name=key, offsets=(), shape=())
        start, stop = even_rows(self.shape[0], rank - self.over[0], self.over[1])
        rest = self.shape[1:]
        return Part(file=file, name=key, offsets=(start, *(0 for _ in rest)), shape=(stop - start, *rest))

    def parts_in(self, key: str, wanted: Box) -> Iterator[Part]:
        """Yield the parts that may overlap a box of it, which must not be empty."""
        yield from self.parts
        if self.over is None:
            return
        first, last = 0, self.num_over - 1
        if self.shape:
            length = -(-self.shape[0] // self.over[1])
            first, last = wanted.offsets[0] // length, (wanted.offsets[0] + wanted.shape[0] - 1) // length
        for index in range(first, last + 1):
            part = self.part_of(key, self.over[0] + index)
            if part is not None:
                yield part

    def in_parts(self, key: str) -> "StoredTensor":
        """Return the same tensor with all its parts listed."""
        if self.over is None:
            return self
        listed = (self.part_of(key, self.over[0] + index) for index in range(self.num_over))
        parts = tuple(part for part in listed if part is not None)
        return StoredTensor(dtype=self.dtype, shape=self.shape, parts=(*self.parts, *parts))


def _without_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what most tensors and files do not have: the manifest is read by every rank."""
    left_out: dict[str, tuple[Any, ...]] = {"parts": ((), []), "over": (None,), "folder": ("",), "piece_bytes": (None,)}
    return {name: value for name, value in fields.items() if value not in left_out.get(name, ())}


class RankTable(Value):
    """The tensors that a rank handed in, with that rank's parts only; a key may occur several times."""

    tensors: tuple[tuple[str, StoredTensor], ...] = ()


Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class Manifest(Value):
    """The manifest. Fields are written in this order: `drivetrain status` finds `shared` without reading the rest."""

    format_version: int
    step: Size
    world_size: Annotated[int, Field(ge=1)]
    shared: dict[str, dict[str, StoredFile]] = Field(default_factory=dict)  # by folder beside the checkpoint, and name
    tables: dict[str, StoredFile] = Field(default_factory=dict, max_length=0)  # of format 2, which never wrote any
    meta: dict[str, Any]
    files: dict[str, StoredFile]
    frozen: dict[str, Checksum] = Field(default_factory=dict)  # by key, of whole tensors that are in shared files
    moved: tuple[str, ...] = ()  # keys of parameters in no optimizer that have changed all the same
    tensors: dict[str, StoredTensor]

    @property
    def all_files(self) -> dict[str, StoredFile]:
        """All files; shared ones are named like `frozen-0123456789abcdef/rank-00000.safetensors`."""
        shared = {f"{folder}/{name}": file for folder, files in self.shared.items() for name, file in files.items()}
        return self.files | shared

    def problem(self) -> str:
        """Return a contradiction in the manifest; empty if there is none.

        Nothing is allocated or opened before this check.
        """
        for name in (*self.files, *(name for files in self.shared.values() for name in files)):
            if not _FILE_NAME.fullmatch(name):
                return f"{name!r} is not the name of a file in a checkpoint"
        for name in self.shared:
            if not SHARED_NAME.fullmatch(name):
                return f"{name!r} is not the name of a folder of frozen weights"
        for key in self.frozen:
            if key not in self.tensors:
                return f"the frozen weight {key!r} is not one of the tensors"
        for key, tensor in self.tensors.items():
            # Frozen weights may have been written by another world.
            if tensor.over is not None and not tensor.folder and sum(tensor.over) > self.world_size:
                return f"the tensor {key!r} is divided over more ranks than the {self.world_size} that wrote it"
        return parts_problem(self.tensors, self.all_files)

    def refuse_contradictions(self, path: Path) -> None:
        if problem := self.problem():
            raise CheckpointDamagedError(f"{path} contradicts itself: {problem}", path=path)

    def sealed(self) -> bytes:
        """Return the content of the file."""
        body = self.model_dump_json().encode()
        content = b"".join((_OPENING, _hash(body), _BETWEEN, body, _CLOSING))
        if len(content) > LARGEST_MANIFEST_BYTES:
            raise CheckpointError(
                f"the manifest would take {len(content)} bytes; {LARGEST_MANIFEST_BYTES} are allowed",
                remedy="store large state as tensors, not in meta",
            )
        return content

    @classmethod
    def unsealed(cls, content: bytes, path: Path) -> "Manifest":
        """Parse a file's content. The result is free of contradictions."""
        body = content[_BODY_START : -len(_CLOSING)]
        if content != b"".join((_OPENING, _hash(body), _BETWEEN, body, _CLOSING)):
            raise CheckpointDamagedError(f"{path} is not what was written: its hash does not match", path=path)
        try:
            version = _AnyVersion.model_validate_json(body, strict=True).format_version
            if version > FORMAT_VERSION:
                raise NewerFormatError(
                    f"{path} has checkpoint format {version}; this drivetrain reads formats up to {FORMAT_VERSION}",
                    remedy="install the drivetrain that wrote it, or a newer one; the checkpoint is left as it is",
                    path=path,
                )
            manifest = cls.model_validate_json(body, strict=True)
        except ValidationError as error:
            raise CheckpointDamagedError(f"{path} is not a manifest: {_first(error)}", path=path) from None
        manifest.refuse_contradictions(path)
        return manifest


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}"


def parts_problem(tensors: Mapping[str, StoredTensor], files: Collection[str]) -> str:
    """Return a problem, or empty if the parts of each tensor lie in these files and hold each of its elements once."""
    there = _FilesByRank(files)
    return next((f"the tensor {key!r}: {p}" for key, t in tensors.items() if (p := _problem_of(t, there))), "")


class _FilesByRank:
    """The files of a checkpoint, and how many of them there are from rank 0 on without a gap, by folder."""

    def __init__(self, files: Collection[str]) -> None:
        self.names = frozenset(files)
        self._unbroken: dict[str, int] = {}

    def missing(self, tensor: StoredTensor) -> str:
        """Return a file that a tensor divided over ranks needs and that is not there; empty if all are."""
        if tensor.over is None:
            return ""
        start = f"{tensor.folder}/" if tensor.folder else ""
        if tensor.folder not in self._unbroken:
            self._unbroken[tensor.folder] = next(n for n in count() if start + file_name(n) not in self.names)
        first, unbroken = tensor.over[0], self._unbroken[tensor.folder]
        if first + tensor.num_over <= unbroken:
            return ""
        needed = (start + file_name(rank) for rank in range(first, first + tensor.num_over))
        return next((name for name in needed if name not in self.names), "")


def _problem_of(tensor: StoredTensor, there: _FilesByRank) -> str:
    if tensor.dtype not in DTYPES:
        return f"its type {tensor.dtype!r} is unknown"
    if len(tensor.shape) > MOST_DIMENSIONS:
        return f"it has {len(tensor.shape)} dimensions"
    # Sizes of 0 are left out, so that [0, 2**62, 2**62], which torch cannot make, is refused, too.
    if math.prod(size for size in tensor.shape if size) * DTYPES[tensor.dtype].itemsize > LARGEST_TENSOR_BYTES:
        return f"its shape {list(tensor.shape)} is impossible"
    if tensor.over is not None:
        if tensor.parts:
            return "it is divided over ranks and in parts"
        if not tensor.shape and tensor.over[1] > 1:
            return f"it has no rows to be divided over {tensor.over[1]} ranks"
        missing = there.missing(tensor)
        return f"its part is in {missing!r}, which is not one of the files" if missing else ""
    for part in tensor.parts:
        if part.file not in there.names:
            return f"its part is in {part.file!r}, which is not one of the files"
        if not part.box.fits_in(tensor.shape):
            return f"its part at {list(part.offsets)} of shape {list(part.shape)} reaches out of {list(tensor.shape)}"
    return tiling_problem(tensor.shape, [part.box for part in tensor.parts])


class _AnyVersion(BaseModel):
    """The fields that a manifest of any format has."""

    format_version: Annotated[int, Field(ge=1)]


def _hash(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def merged_tensors(by_rank: Sequence[Sequence[tuple[str, StoredTensor]]]) -> dict[str, StoredTensor]:
    """Return the tensors by key, each with the parts of all ranks."""
    first_seen: dict[str, tuple[int, StoredTensor]] = {}
    held: dict[str, list[StoredTensor]] = {}
    for rank, tensors in enumerate(by_rank):
        for key, tensor in tensors:
            first_rank, first = first_seen.setdefault(key, (rank, tensor))
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"the tensor {key!r} is {tensor.dtype} {list(tensor.shape)} on rank {rank},"
                    f" but {first.dtype} {list(first.shape)} on rank {first_rank}",
                    remedy="hand in the parts of one tensor with the same type and global shape on all ranks",
                )
            held.setdefault(key, []).append(tensor)
    return {key: _joined(key, tensors) for key, tensors in held.items()}


def _joined(key: str, tensors: Sequence[StoredTensor]) -> StoredTensor:
    solid = [tensor for tensor in tensors if tensor.parts or tensor.over]
    if len(solid) < 2:
        return solid[0] if solid else tensors[0]
    parts = tuple(part for tensor in solid for part in tensor.in_parts(key).parts)
    return StoredTensor(dtype=tensors[0].dtype, shape=tensors[0].shape, parts=parts)


# ----------------------------------------------------------------------------------------------------------------------
# Tables of what is in which file of a checkpoint, computed once for each layout of a state and kept.
#
# Most tensors are divided evenly over all ranks, or whole on one. Of those that are divided evenly a rank sends only a
# hash of the list: where all ranks send the same, the list of rank 0 stands for all. Only if they differ does each rank
# list its parts.

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
            _hash_of(even) if follows_rules else "",
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


def _hash_of(even: Even) -> str:
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

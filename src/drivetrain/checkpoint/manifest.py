"""The manifest: the contents of a checkpoint, with files and hashes. It is written last.

The file is `{"sha256":"…","manifest":{…}}`, one line of JSON. The hash is over the exact bytes of the inner object and
is compared before anything is parsed, so that a flipped bit anywhere in the file is found. This envelope, and
`format_version` in it, stay the same in all formats to come: an older drivetrain can tell a newer checkpoint from a
damaged one.

Format 2 added three things to format 1, which is still read. `shared` names folders beside the checkpoint with files of
frozen weights that several checkpoints have in common; `frozen` has the checksums of those weights, and `moved` names
parameters that were found to change though no optimizer holds them. `tables` may name further files of the checkpoint
that list tensors (a `RankTable` each), so that a world of thousands of ranks does not have to put all of its parts into
this one file. It is read, and not written so far.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from drivetrain.checkpoint.errors import CheckpointDamagedError, CheckpointError, NewerFormatError
from drivetrain.checkpoint.files import SHARED_NAME
from drivetrain.checkpoint.tensor_file import DTYPES, Box, tiling_problem
from drivetrain.core.value import Value

FORMAT_VERSION = 2
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

_TABLE_NAME = re.compile(r"tensors-[0-9]{5,9}\.json")

Size = Annotated[int, Field(ge=0, le=2**63 - 1)]


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class StoredFile(Value):
    size: Size
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Part(Value):
    """A box of a tensor, and where its data is."""

    file: str
    name: str  # in the file
    offsets: tuple[Size, ...]
    shape: tuple[Size, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)


class StoredTensor(Value):
    dtype: str  # as safetensors writes it: `BF16`
    shape: tuple[Size, ...]  # of the whole
    parts: tuple[Part, ...]  # that hold each element once; none for a tensor without elements


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
    tables: dict[str, StoredFile] = Field(default_factory=dict)
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
        return parts_problem(self.tensors, self.all_files)

    def with_tables(self, read: Callable[[str, StoredFile], bytes], path: Path) -> "Manifest":
        """Return the manifest with all tensors, also those listed in separate files, which `read` returns."""
        if not self.tables:
            return self
        tables = [list(self.tensors.items())]
        for name, file in self.tables.items():
            if not _TABLE_NAME.fullmatch(name):
                problem = f"{name!r} is not the name of a table in a checkpoint"
                raise CheckpointDamagedError(f"{path} contradicts itself: {problem}", path=path)
            try:
                tables.append(list(RankTable.model_validate_json(read(name, file), strict=True).tensors))
            except ValidationError as error:
                raise CheckpointDamagedError(
                    f"{path.with_name(name)} is not a table of tensors: {_first(error)}", path=path
                ) from None
        try:
            return self.model_copy(update={"tensors": merged_tensors(tables)})
        except CheckpointError as error:
            raise CheckpointDamagedError(f"{path} contradicts itself: {error.message}", path=path) from None

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
        """Parse a file's content. Unless tables have to be read first, the result is free of contradictions."""
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
        if not manifest.tables:
            manifest.refuse_contradictions(path)
        return manifest


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}"


def parts_problem(tensors: Mapping[str, StoredTensor], files: Collection[str]) -> str:
    """Return a problem, or empty if the parts of each tensor lie in these files and hold each of its elements once."""
    return next((f"the tensor {key!r}: {p}" for key, t in tensors.items() if (p := _problem_of(t, files))), "")


def _problem_of(tensor: StoredTensor, files: Collection[str]) -> str:
    if tensor.dtype not in DTYPES:
        return f"its type {tensor.dtype!r} is unknown"
    if len(tensor.shape) > MOST_DIMENSIONS:
        return f"it has {len(tensor.shape)} dimensions"
    # Sizes of 0 are left out, so that [0, 2**62, 2**62], which torch cannot make, is refused, too.
    if math.prod(size for size in tensor.shape if size) * DTYPES[tensor.dtype].itemsize > LARGEST_TENSOR_BYTES:
        return f"its shape {list(tensor.shape)} is impossible"
    for part in tensor.parts:
        if part.file not in files:
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
    parts: dict[str, list[Part]] = {}
    for rank, tensors in enumerate(by_rank):
        for key, tensor in tensors:
            first_rank, first = first_seen.setdefault(key, (rank, tensor))
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"the tensor {key!r} is {tensor.dtype} {list(tensor.shape)} on rank {rank},"
                    f" but {first.dtype} {list(first.shape)} on rank {first_rank}",
                    remedy="hand in the parts of one tensor with the same type and global shape on all ranks",
                )
            parts.setdefault(key, []).extend(tensor.parts)
    return {
        key: StoredTensor(dtype=tensor.dtype, shape=tensor.shape, parts=tuple(parts[key]))
        for key, (_, tensor) in first_seen.items()
    }

"""A verified checkpoint, which reads any range of any of its tensors, whatever world wrote it; and the folder of them.

`CheckpointFolder` is the folder of a run's checkpoints on the disk: drafts, renames, removals. Only the main process
uses it.
"""

import contextlib
import errno
import hashlib
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from drivetrain.checkpoint.files import (
    CheckpointDamagedError,
    CheckpointError,
    Files,
    SharedFileError,
    draft_name,
    hash_of_pieces,
    leftovers_in,
    set_aside_in,
    shared_draft_name,
    shared_in,
    shared_name,
    shared_trash_name,
    step_name,
    steps_in,
    trash_name,
)
from drivetrain.checkpoint.manifest import LARGEST_MANIFEST_BYTES, MANIFEST_NAME, Manifest, StoredFile, StoredTensor
from drivetrain.checkpoint.tensor_file import DTYPES, Box, TensorFile, in_file, not_finite

MOST_OPEN_FILES = 64  # a checkpoint of thousands of ranks must not use up the process's file descriptors
# The disk or the folder lost something. Other errors (no permission, a server that does not answer, too many files)
# say nothing about the checkpoint: nothing may be set aside because of them.
_SIGNS_OF_DAMAGE = {errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENODATA, errno.EUCLEAN}


@dataclass(frozen=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """A checkpoint. `open` returns one whose every byte was compared with its hash."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        self._open_files: dict[str, TensorFile] = {}

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Open and verify all of it in this process; not collective."""
        checkpoint = cls(path, read_manifest(path))
        checkpoint.verify(checkpoint.files)
        return checkpoint

    @classmethod
    def latest_in(cls, folder: Path) -> "Checkpoint | None":
        """Return the newest valid checkpoint; None if there is none.

        Not collective; changes nothing: damaged ones stay.

        If the only problem is that shared files are missing, that is raised: they can be copied there.
        """
        incomplete: SharedFileError | None = None
        with _reading(folder):
            steps = steps_in(folder)
        for step in reversed(steps):
            try:
                return cls.open(folder / step_name(step))
            except SharedFileError as error:
                incomplete = incomplete or error
            except CheckpointDamagedError:
                continue
        if incomplete is not None:
            raise incomplete
        return None

    @property
    def step(self) -> int:
        return self._manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        return self._manifest.meta

    @property
    def format_version(self) -> int:
        return self._manifest.format_version

    @property
    def world_size(self) -> int:
        """The number of ranks of the run that wrote it."""
        return self._manifest.world_size

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def files(self) -> list[str]:
        """All files that hold its tensors. Those with a folder in their names are shared with other checkpoints."""
        return sorted(self._stored_files)

    @property
    def frozen(self) -> frozenset[str]:
        """The keys of frozen weights, which are in shared files."""
        return frozenset(self._manifest.frozen)

    @cached_property
    def _stored_files(self) -> dict[str, StoredFile]:
        return self._manifest.all_files

    def _path_of(self, name: str) -> Path:
        """Return a file's path.

        Shared files lie beside the checkpoint's folder, also where that was opened through a link.
        """
        return self.path.resolve().parent / name if "/" in name else self.path / name

    @cached_property
    def keys(self) -> Mapping[str, TensorInfo]:
        return {key: TensorInfo(DTYPES[t.dtype], t.shape) for key, t in self._manifest.tensors.items()}

    def read(self, key: str, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """Read a range of the global tensor: from `offsets` (default: its start), of `shape` (default: all the rest).

        Returns a new tensor on the CPU, put together from the stored parts that overlap the range.
        """
        stored = self._stored(key)
        start = tuple(offsets) if offsets is not None else (0,) * len(stored.shape)
        if shape is None and len(start) == len(stored.shape):
            shape = [total - first for total, first in zip(stored.shape, start, strict=True)]
        wanted = Box(start, tuple(shape or ()))
        if not wanted.fits_in(stored.shape):
            raise CheckpointError(
                f"the range at {list(wanted.offsets)} of shape {list(wanted.shape)} is not inside the tensor {key!r}"
                f" of shape {list(stored.shape)}",
                remedy="ask for a range inside the tensor",
                path=self.path,
            )
        result = torch.empty(wanted.shape, dtype=DTYPES[stored.dtype])
        for part in stored.parts_in(key, wanted) if wanted.volume else ():
            if common := part.box.intersection(wanted):
                piece = self._file(part.file).read(part.name, common.slices_in(part.box), stored.dtype)
                result[common.slices_in(wanted)].copy_(piece)
        return result

    def verify(self, names: Iterable[str]) -> None:
        """Raise a CheckpointDamagedError if a file is not what was written, or not what the manifest says."""
        for name in names:
            if "/" not in name:
                self._verify(name)
                continue
            try:
                self._verify(name)
            except CheckpointDamagedError as error:
                raise SharedFileError(
                    f"{error.message}; {self.path.name} cannot be used without it: frozen weights are stored once"
                    " for all checkpoints of a run",
                    remedy=f"put {name} beside {self.path.name}, from where these checkpoints were copied",
                    path=error.path,
                ) from None

    def _verify(self, name: str) -> None:
        expected, path = self._stored_files[name], self._path_of(name)
        size, sha256 = _fingerprint(path, expected.piece_bytes)
        if size != expected.size:
            raise CheckpointDamagedError(f"{path} has {size} bytes, not {expected.size}", path=path)
        if sha256 != expected.sha256:
            raise CheckpointDamagedError(f"{path} is not what was written: its hash does not match", path=path)
        file = self._file(name)
        for key, part_name, code, shape in self._parts_in(name):
            if file.layout(part_name) != in_file(code, shape):
                raise CheckpointDamagedError(
                    f"{path} does not hold the part {part_name!r} of {key!r} as {code} {list(shape)}", path=path
                )

    def refuse_nan(self, names: Iterable[str], keys: Collection[str]) -> None:
        """Raise a CheckpointDamagedError if one of these tensors has a NaN in one of these files."""
        for name in names:
            for key, part_name, _, _ in self._parts_in(name):
                if key in keys and not_finite(self._file(name).read(part_name, ())) == "nan":
                    path = self._path_of(name)
                    raise CheckpointDamagedError(f"{key} in {path} holds nan: it was saved when it was bad", path=path)

    def close(self) -> None:
        """Close the files; the next `read` opens them again."""
        self._open_files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parts_in(self, name: str) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
        """Yield key, name, type and shape of each part in a file."""
        yield from self._listed_parts.get(name, ())
        folder, _, file = name.rpartition("/")
        rank = int(file.removeprefix("rank-").removesuffix(".safetensors"))
        for key, tensor in self._manifest.tensors.items():
            if tensor.folder == folder and (part := tensor.part_of(key, rank)) is not None:
                yield key, part.name, tensor.dtype, part.shape

    @cached_property
    def _listed_parts(self) -> dict[str, list[tuple[str, str, str, tuple[int, ...]]]]:
        by_file: dict[str, list[tuple[str, str, str, tuple[int, ...]]]] = {}
        for key, tensor in self._manifest.tensors.items():
            for part in tensor.parts:
                by_file.setdefault(part.file, []).append((key, part.name, tensor.dtype, part.shape))
        return by_file

    def _stored(self, key: str) -> StoredTensor:
        try:
            return self._manifest.tensors[key]
        except KeyError:
            raise CheckpointError(
                f"{self.path} holds no tensor {key!r}",
                remedy=f"`keys` lists the {len(self._manifest.tensors)} that it holds",
                path=self.path,
            ) from None

    def _file(self, name: str) -> TensorFile:
        if name not in self._open_files:
            if len(self._open_files) >= MOST_OPEN_FILES:
                self._open_files.clear()
            path = self._path_of(name)
            with _reading(path):
                self._open_files[name] = TensorFile(path)
        return self._open_files[name]


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in this folder."""
    file = path / MANIFEST_NAME
    with _reading(file):
        size = _size_of_plain_file(file)
        if size > LARGEST_MANIFEST_BYTES:
            raise CheckpointDamagedError(
                f"{file} has {size} bytes; a manifest has {LARGEST_MANIFEST_BYTES} at most", path=file
            )
        return Manifest.unsealed(file.read_bytes(), file)


def _fingerprint(path: Path, piece_bytes: int | None = None) -> tuple[int, str]:
    """Return a file's size and its hash: of all bytes in a row, or over the hashes of its pieces."""
    with _reading(path):
        size = _size_of_plain_file(path)
        with path.open("rb") as file:
            if piece_bytes is None:
                return size, hashlib.file_digest(file, "sha256").hexdigest()
            return size, hash_of_pieces(file, size, piece_bytes)


def _size_of_plain_file(path: Path) -> int:
    """Return a file's size. Called before opening it: a pipe would block for ever, a link may lead anywhere."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamagedError(f"{path} is not a file", path=path)
    return status.st_size


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise CheckpointDamagedError(f"{path} is missing", path=path) from None
        if error.errno in _SIGNS_OF_DAMAGE:
            raise CheckpointDamagedError(f"{path} cannot be read: {error.strerror}", path=path) from None
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}", remedy="make it readable and start again", path=path
        ) from None


class CheckpointFolder:
    """Makes, renames and removes the folders of checkpoints. Whatever fails is a problem to report or an OSError."""

    def __init__(
        self, path: Path, files: Files, problems: list[str], refuse_lost: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self._files, self._problems, self._refuse_lost = path, files, problems, refuse_lost

    def prepare(self) -> list[str]:
        """Make the folder and remove leftovers of a crash. Only names made by a save or removal are touched."""
        self.path.mkdir(mode=0o775, parents=True, exist_ok=True)
        problems = []
        for path in leftovers_in(self.path):
            try:
                self._files.remove_tree(path)
            except OSError as error:
                problems.append(f"{path}, left by a crash, could not be removed: {error.strerror}")
        return problems

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, not verified; ascending."""
        return steps_in(self.path)

    def num_bytes_in_drafts(self) -> int:
        """Return the size of all files in drafts; those that come and go meanwhile do not matter."""
        num_bytes = 0
        with contextlib.suppress(OSError):
            for draft in leftovers_in(self.path):
                with contextlib.suppress(OSError):
                    num_bytes += sum(path.stat().st_size for path in draft.iterdir())
        return num_bytes

    def begin(self, step: int, *, shares: bool) -> tuple[str, str, int]:
        """Make a folder to write into, and one for frozen weights if they are to be written.

        Returns the names of both, and the bytes that were free before.
        """
        self._refuse_lost()
        final = self.path / step_name(step)
        if final.exists() or final.is_symlink():
            raise CheckpointError(
                f"{final} is there already, and is left as it is",
                remedy="save each step once; to save it anew, move that folder away",
                path=final,
            )
        name = draft_name(step)
        free_bytes = shutil.disk_usage(self.path).free
        self._files.make_folder(self.path / name)
        if not shares:
            return name, "", free_bytes
        shared = shared_name()
        try:
            self._files.make_folder(self.path / shared_draft_name(shared))
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove_tree(self.path / name)
            raise
        return name, shared, free_bytes

    def discard(self, step: int, draft: Path, shared: str, renamed: bool) -> None:
        """Remove everything that a failed save wrote. If even this fails, the first error is still the one reported."""
        try:
            if renamed:
                self._remove_checkpoint(step)
            else:
                self._files.remove_tree(draft)
            if shared and (self.path / shared).exists():
                self._remove_shared(shared)
            elif shared:
                self._files.remove_tree(self.path / shared_draft_name(shared))
        except OSError as error:
            self._problems.append(f"what is left of step {step} could not be removed: {error.strerror}")

    def prune(self, keep_last: int, kept: set[int]) -> list[str]:
        """Remove all but the last checkpoints and those to be kept.

        One that cannot be removed costs space, and does not end the run: returns what to report.
        """
        problems = []
        try:
            steps = self.steps()
        except OSError as error:
            return [f"old checkpoints could not be listed: {error.strerror}"]
        for step in steps[:-keep_last]:
            try:
                if step not in kept:
                    self._remove_checkpoint(step)
            except OSError as error:
                problems.append(f"{self.path / step_name(step)} could not be removed: {error.strerror}")
        return problems

    def prune_shared(self, used: set[str], forget: Callable[[str], object]) -> list[str]:
        """Remove shared folders that no checkpoint needs, and forget each; `used` are those of the newest checkpoint.

        Checkpoints that were set aside count: they may still be valuable. If one does not list what it needs, all
        folders stay.
        """
        problems = []
        try:
            others = [name for name in shared_in(self.path) if name not in used]
            if not others:
                return []
            for name in (*map(step_name, self.steps()), *set_aside_in(self.path)):
                used = used | read_manifest(self.path / name).shared.keys()
        except (OSError, CheckpointError):
            return []
        for name in others:
            if name in used:
                continue
            try:
                self._remove_shared(name)
                forget(name)
            except OSError as error:
                problems.append(f"{self.path / name} could not be removed: {error.strerror}")
        return problems

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints after `step`, and return their steps."""
        self._refuse_lost()
        later = [found for found in self.steps() if found > step]
        trash = []
        for found in reversed(later):
            trash.append(self.path / trash_name(found))
            self._files.rename(self.path / step_name(found), trash[-1])
        self._files.fsync_folder(self.path)
        for path in trash:
            try:
                self._files.remove_tree(path)
            except OSError as error:
                self._problems.append(f"{path} could not be removed: {error.strerror}")
        return later

    def _remove_checkpoint(self, step: int) -> None:
        """Remove a checkpoint, after renaming it: a crash inside the removal must leave no half under a valid name."""
        trash = self.path / trash_name(step)
        self._files.rename(self.path / step_name(step), trash)
        self._files.remove_tree(trash)

    def _remove_shared(self, name: str) -> None:
        """Rename and remove a shared folder: a crash inside the removal must leave no half under a valid name."""
        trash = self.path / shared_trash_name(name)
        self._files.rename(self.path / name, trash)
        self._files.remove_tree(trash)

    def set_aside(self, name: str) -> str:
        """Rename a damaged checkpoint, and return what became of it, in words."""
        self._refuse_lost()
        path = self.path / name
        number, target = 1, path.with_name(f"{name}.corrupt")
        while target.exists():
            number += 1
            target = path.with_name(f"{name}.corrupt-{number}")
        try:
            self._files.rename(path, target)
            self._files.fsync_folder(self.path)
        except OSError as error:
            return f"could not be set aside ({error.strerror})"
        return f"was set aside as {target.name}"

    def publish_shared(self, name: str) -> None:
        """Make a written folder of frozen weights a valid one. When this returns, it is on the disk."""
        draft = self.path / shared_draft_name(name)
        self._files.fsync_folder(draft)
        self._files.rename(draft, self.path / name)
        self._files.fsync_folder(self.path)

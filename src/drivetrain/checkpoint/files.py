"""All changes that a save makes on the disk, the names of checkpoint folders, and the errors of checkpoints."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.value import Value

# ----------------------------------------------------------------------------------------------------------------------
# Errors of checkpoints, in the user's terms; a failure on one rank can be sent as JSON and raised on all.


class CheckpointError(DrivetrainError):
    """A checkpoint cannot be written or read. For a full disk, the bytes are available as numbers, too."""

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        path: Path | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes


class CheckpointDamagedError(CheckpointError):
    """The files on the disk are not what was written, or were never a checkpoint."""


class SharedFileError(CheckpointDamagedError):
    """A checkpoint is whole, but frozen weights that it shares with others are missing or damaged."""


class NewerFormatError(CheckpointError):
    """The checkpoint was written by a newer drivetrain. Nothing is wrong with it: it is left where it is."""


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_KINDS: dict[str, type[CheckpointError]] = {
    "shared": SharedFileError,
    "damaged": CheckpointDamagedError,
    "newer": NewerFormatError,
    "other": CheckpointError,
}


class SaveFailure(Value):
    message: str
    remedy: str = ""
    path: str = ""
    needed_bytes: int | None = None
    free_bytes: int | None = None
    kind: Literal["shared", "damaged", "newer", "other"] = "other"

    @classmethod
    def of(
        cls, error: Exception, folder: Path, doing: str, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> "SaveFailure":
        if isinstance(error, CheckpointError):
            return cls(
                message=error.message,
                remedy=error.remedy,
                path=str(error.path or folder),
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
                kind=_kind_of(error),
            )
        if isinstance(error, DrivetrainError):
            return cls(message=f"{doing}: {error.message}", path=str(folder), remedy=error.remedy)
        start = f"{doing} in {folder}"
        if not isinstance(error, OSError):
            return cls(message=f"{start}: {type(error).__name__}: {error}", path=str(folder))
        if error.errno not in _NO_SPACE or needed_bytes is None:
            remedy = "make that folder writable, or name another one"
            return cls(message=f"{start}: {error.strerror or error}", path=str(folder), remedy=remedy)
        free = "" if free_bytes is None else f", and {free_bytes} were free when it began"
        return cls(
            message=f"{start}: {error.strerror}; it needs {needed_bytes} bytes{free}",
            remedy="free space there, keep fewer checkpoints, or name another folder; older ones are as they were",
            path=str(folder),
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )

    @classmethod
    def joined(cls, by_rank: Sequence["SaveFailure | None"]) -> "SaveFailure | None":
        """Join the failures of all ranks into one, with each failed rank's message; None if none failed."""
        ranks: dict[str, list[int]] = {}
        for rank, failure in enumerate(by_rank):
            if failure is not None:
                ranks.setdefault(failure.message, []).append(rank)
        first = next((failure for failure in by_rank if failure is not None), None)
        if first is None or len(by_rank) == 1:
            return first
        told = [f"rank {', '.join(map(str, numbers))}: {message}" for message, numbers in ranks.items()]
        more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
        return first.model_copy(update={"message": "; ".join(told[:3]) + more})

    def error(self) -> CheckpointError:
        return _KINDS[self.kind](
            self.message,
            remedy=self.remedy,
            path=Path(self.path) if self.path else None,
            needed_bytes=self.needed_bytes,
            free_bytes=self.free_bytes,
        )


def _kind_of(error: CheckpointError) -> Literal["shared", "damaged", "newer", "other"]:
    if isinstance(error, SharedFileError):
        return "shared"
    if isinstance(error, CheckpointDamagedError):
        return "damaged"
    return "newer" if isinstance(error, NewerFormatError) else "other"


# ----------------------------------------------------------------------------------------------------------------------
# All changes that a save makes on the disk, one operation at a time; and the names of checkpoint folders.
#
# The crash tests kill the process before, inside and after each of these operations; so an operation that is not here
# is one that is not tested.

PIECE_BYTES = 16 * 2**20  # hashed and written by one thread
BLOCK_BYTES = 2**20  # read and hashed at a time
SMALL_BYTES = 2**18  # what is smaller is joined: most tensors are, and each call costs
MOST_THREADS = 4  # more than these hash faster than disks write
MOST_SEGMENTS = 512  # in one call of the system

Segments = list[memoryview]


@dataclass(frozen=True)
class Written:
    """A file that was written. Its `sha256` is over the hashes of its pieces, as `hash_of_pieces` computes it."""

    size: int
    sha256: str
    piece_bytes: int = PIECE_BYTES


class Files:
    """The operations on the disk. Modes follow the umask, but nothing is ever writable by everyone."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o775)

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        """Write a new file that is on the disk when this returns. The hash is of the bytes that were to be written.

        Threads hash and write pieces of it, so that hashing, copying and the disk do not wait for each other. They
        hold the GIL only between calls. What does not fill one piece is written by this thread.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
        try:
            digests, size = _written_pieces(descriptor, _pieces(_joined(chunks)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return Written(size, _hash_over(digests))

    def fsync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_file(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with everything in it. Entries that another process removes at the same time are no error."""
        try:
            with os.scandir(path) as entries:
                inside = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
        except FileNotFoundError:
            return
        for inner, is_folder in inside:
            if is_folder:
                self.remove_tree(inner)
            else:
                self.remove_file(inner)
        self.remove_folder(path)


def num_threads() -> int:
    """Return how many threads hash and write: those that this process has cores for, and few beside CPU training."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores //= max(1, int(local)) if local.isdecimal() else 1
    return max(1, min(MOST_THREADS, cores if cores <= 2 else cores // 2))


def _written_pieces(descriptor: int, pieces: Iterable[Segments]) -> tuple[list[bytes], int]:
    """Write the pieces of a file one after the other; return their hashes, and the size of all."""
    size = 0
    first: Segments | None = None
    waiting: deque[Future[bytes]] = deque()
    digests: list[bytes] = []
    with contextlib.ExitStack() as stack:
        pool: ThreadPoolExecutor | None = None
        try:
            for segments in pieces:
                offset, size = size, size + sum(map(len, segments))
                if pool is None and first is None:
                    first = segments  # perhaps the only one
                    continue
                if pool is None:
                    pool = stack.enter_context(ThreadPoolExecutor(num_threads(), "drivetrain-write"))
                    waiting.append(pool.submit(_write_piece, descriptor, first or [], 0))
                waiting.append(pool.submit(_write_piece, descriptor, segments, offset))
                if len(waiting) > 2 * MOST_THREADS:  # the tensors of a piece stay in memory until it is written
                    digests.append(waiting.popleft().result())
            if pool is None:
                return ([_write_piece(descriptor, first, 0)] if first else []), size
            digests += [future.result() for future in waiting]
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
    return digests, size


def _write_piece(descriptor: int, segments: Segments, offset: int) -> bytes:
    digest = hashlib.sha256()
    start, size = offset, sum(map(len, segments))
    for segment in segments:
        digest.update(segment)
    left = [segment for segment in segments if len(segment)]
    while left:
        written = os.pwritev(descriptor, left[:MOST_SEGMENTS], offset)  # the system may take less than it was given
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left and written:
            left[0] = left[0][written:]
    if hasattr(os, "posix_fadvise"):
        # The system begins to write this to the disk; otherwise most of it would wait for fsync.
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
    return digest.digest()


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[Segments]:
    """Yield the same bytes in pieces, all of one size except for the last."""
    piece: Segments = []
    room = PIECE_BYTES
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view) >= room:
            yield [*piece, view[:room]]
            view, piece, room = view[room:], [], PIECE_BYTES
        if len(view):
            piece.append(view)
            room -= len(view)
    if piece:
        yield piece


def hash_of_pieces(file: BinaryIO, size: int, piece_bytes: int) -> str:
    """Return the hash over the hashes of a file's pieces, which several threads read."""
    descriptor = file.fileno()

    def digest_of(start: int) -> bytes:
        digest = hashlib.sha256()
        stop = min(size, start + piece_bytes)
        while start < stop:
            block = os.pread(descriptor, min(BLOCK_BYTES, stop - start), start)
            if not block:
                break  # the file has become shorter
            digest.update(block)
            start += len(block)
        return digest.digest()

    starts = range(0, size, piece_bytes)
    if len(starts) < 2:
        return _hash_over([digest_of(start) for start in starts])
    with ThreadPoolExecutor(num_threads(), "drivetrain-verify") as pool:
        return _hash_over(pool.map(digest_of, starts))


def _hash_over(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _joined(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes with small chunks joined."""
    waiting: list[bytes | memoryview] = []
    num_bytes = 0
    for chunk in chunks:
        # For the thread that trains: it gives the interpreter up with every operation, and would get it back only
        # after the 5 ms that a thread may keep it. It loses as much, but a little at a time: devices do not notice.
        time.sleep(0)
        length = chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)
        if length < SMALL_BYTES:
            waiting.append(chunk)
            num_bytes += length
            if num_bytes < PIECE_BYTES:
                continue
        if waiting:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
        if length >= SMALL_BYTES:
            yield chunk
    if waiting:
        yield b"".join(waiting)


_STEP = re.compile(r"step-([0-9]{8,18})")
_SET_ASIDE = re.compile(r"step-[0-9]{8,18}\.corrupt(-[0-9]+)?")
SHARED_NAME = re.compile(r"frozen-[0-9a-f]{16}")  # no separator, no `..`: nothing outside the folder is ever opened
_LEFTOVER = re.compile(
    r"\.step-[0-9]{8,18}\.tmp-[0-9a-f]{16}|\.trash-step-[0-9]{8,18}-[0-9a-f]{16}"
    r"|\.frozen-[0-9a-f]{16}\.tmp|\.trash-frozen-[0-9a-f]{16}"
)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def draft_name(step: int) -> str:
    """Return a folder name for a save in progress: hidden, and unique to this attempt."""
    return f".{step_name(step)}.tmp-{secrets.token_hex(8)}"


def trash_name(step: int) -> str:
    """Return a folder name for a checkpoint that is being removed."""
    return f".trash-{step_name(step)}-{secrets.token_hex(8)}"


def shared_name() -> str:
    """Return a new name for a folder of frozen weights, which several checkpoints share."""
    return f"frozen-{secrets.token_hex(8)}"


def shared_draft_name(name: str) -> str:
    return f".{name}.tmp"


def shared_trash_name(name: str) -> str:
    return f".trash-{name}"


def shared_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if SHARED_NAME.fullmatch(path.name))


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending."""
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    matches = (_STEP.fullmatch(name) for name in names)
    return sorted(step for match in matches if match and step_name(step := int(match[1])) == match[0])


def leftovers_in(folder: Path) -> list[Path]:
    """Return drafts and trash: those of a crash, or of a save in progress."""
    return [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)]


def set_aside_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _SET_ASIDE.fullmatch(path.name))

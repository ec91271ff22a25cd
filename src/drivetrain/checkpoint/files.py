"""All changes that a save makes on the disk, one operation at a time; and the names of checkpoint folders.

The crash tests kill the process before, inside and after each of these operations; so an operation that is not here is
one that is not tested.
"""

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 16 * 2**20  # hashed while it is in the cache, then written
SMALL_BYTES = 2**18  # what is smaller is joined: most tensors are, and each call costs


@dataclass(frozen=True)
class Written:
    size: int
    sha256: str


class Files:
    """The operations on the disk. Modes follow the umask, but nothing is ever writable by everyone."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o775)

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        """Write a new file that is on the disk when this returns. The hash is of the bytes that were to be written."""
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123  (a path cannot be opened with these flags)
            for chunk in _joined(chunks):
                view = memoryview(chunk).cast("B")
                size += len(view)
                for start in range(0, len(view), CHUNK_BYTES):
                    left = view[start : start + CHUNK_BYTES]
                    digest.update(left)
                    while left:  # the system may take less than it was given
                        left = left[file.write(left) :]
            os.fsync(file.fileno())
        return Written(size, digest.hexdigest())

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
            if num_bytes < CHUNK_BYTES:
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

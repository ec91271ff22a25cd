"""Keeps what the ranks print: each in its own file, some on the screen, and the last lines for the diagnosis."""

import contextlib
import os
import shutil
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO

_KEPT_LINES = 40
_LONGEST_LINE = 2000


class RankLogs:
    """The logs of one attempt. They begin in `folder` and move to the run folder once that is known."""

    def __init__(self, folder: Path, attempt: int, shown: str) -> None:
        self._attempt = attempt
        self._shown = shown
        self._folder = folder / f"attempt-{attempt}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, BinaryIO] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._begun: dict[int, bytes] = {}  # a line that has no end yet

    @property
    def folder(self) -> Path:
        return self._folder

    def path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def stacks(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.stacks"

    def write(self, rank: int, data: bytes, *, show: bool = True) -> None:
        if rank not in self._files:
            self._files[rank] = self.path(rank).open("ab")
        with contextlib.suppress(OSError):  # a full disk must not end the watch
            self._files[rank].write(data)
            self._files[rank].flush()
        tail = self._tails.setdefault(rank, deque(maxlen=_KEPT_LINES))
        *lines, rest = (self._begun.get(rank, b"") + data).split(b"\n")
        tail.extend(lines)
        self._begun[rank] = rest[-_LONGEST_LINE:]
        if show and self.shows(rank):
            self._print(rank, data, lines)

    def shows(self, rank: int) -> bool:
        return self._shown == "all" or str(rank) in self._shown.split(",")

    def tail(self, rank: int) -> str:
        lines = [*self._tails.get(rank, ()), self._begun.get(rank, b"")]
        return b"\n".join(line[:_LONGEST_LINE] for line in lines).decode(errors="replace").strip("\n")

    def move(self, folder: Path) -> None:
        """Move the logs into the run folder. Where that is on another disk, files are copied."""
        target = folder / f"attempt-{self._attempt}"
        if target == self._folder:
            return
        with contextlib.suppress(OSError):
            target.mkdir(parents=True, exist_ok=True)
            self.close()
            for path in self._folder.iterdir():
                shutil.move(path, target / path.name)
            before, self._folder = self._folder, target
            for empty in (before, before.parent, before.parent.parent):  # up to `launch`, while they are empty
                empty.rmdir()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _print(self, rank: int, data: bytes, lines: list[bytes]) -> None:
        if "," in self._shown or self._shown == "all":
            data = b"".join(f"[{rank}] ".encode() + line + b"\n" for line in lines)
        if data:
            to_screen(data)


def to_screen(data: bytes) -> None:
    """Write bytes to the screen as the rank wrote them. A screen that went away ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        view = memoryview(data)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]

"""Supervises processes: none outlives what started it, and whole trees of them can be killed.

Three means work together. The kernel kills a process when its parent dies (`die_with_parent`). A process that adopts
orphans finds those that a child left behind (`adopt_orphans`, `kill_strays`). What the kernel does not kill, the
children of workers such as loader processes, an `OrphanGuard` kills by their process groups.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.02
_REAP_SECONDS = 3.0


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent dies, however that happens.

    Args:
        parent: the parent's process id, where it is known: if it is gone already, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before the line above


def adopt_orphans() -> None:
    """Become the parent of orphans below this process, and so find them even if they left their process group."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list["psutil.Process"]:
    """Return the processes below a process; none where it is gone."""
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_group(leader: int) -> None:
    """Kill a process group. It outlives its leader: this reaches what a process left behind when it ended, too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_tree(pid: int, below: "list[psutil.Process] | None" = None) -> None:
    """Kill a process, its group, and those of its descendants that moved to another group.

    Args:
        pid: the process, which leads a group of its own.
        below: its descendants as they were before it was stopped; None asks for them now.
    """
    kill_processes(descendants(pid) if below is None else below)
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_processes(processes: "list[psutil.Process]") -> None:
    """Kill each process that is still there."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_strays() -> None:
    """Kill and reap everything below this process, adopted or not."""
    kill_processes(descendants(os.getpid()))
    deadline = time.monotonic() + _REAP_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_POLL_SECONDS)


class OrphanGuard:
    """A small process that outlives a killed supervisor just long enough to kill the groups that it started.

    It is forked when made: make it before anything else runs.
    """

    def __init__(self) -> None:
        heard, self._say = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._say)
            _keep_watch(heard)
        os.close(heard)

    def add(self, group: int) -> None:
        """Watch over a process group."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group, before its number can be reused by another."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Kill the groups that are left, and end."""
        os.close(self._say)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed; the kernel still ends the workers
            os.write(self._say, line.encode())


def _keep_watch(heard: int) -> NoReturn:
    try:
        os.setsid()  # neither a terminal's Ctrl-C nor a kill of the supervisor's group reaches it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, heard)
        os.closerange(heard + 1, 4096)  # a terminal or pipe of the supervisor's must not stay open for its sake
        groups: set[int] = set()
        rest = b""
        while piece := os.read(heard, 4096):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
        for group in groups:
            kill_group(group)
    finally:
        os._exit(0)


def _prctl(option: int, argument: int) -> None:
    """Call prctl on Linux. Elsewhere nothing happens: process groups alone have to do there."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)

"""Supervises processes: none outlives what started it, trees of them can be killed, forks and signals are safe.

Three means work together. The kernel kills a process when its parent dies (`die_with_parent`). A process that adopts
orphans finds those that a child left behind (`adopt_orphans`, `kill_strays`). What the kernel does not kill, the
children of workers such as loader processes, an `OrphanGuard` kills by their process groups. Scripts that would train
again in a process that was started by spawn are refused.
"""

import ast
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.stopping import STOP_SIGNALS, held_back

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.02
_REAP_SECONDS = 3.0
MAIN_GUARD_REMEDY = 'put what starts the training below `if __name__ == "__main__":` at the end of the script'
_forks = [False, True]  # whether a process is being started; whether collecting was on before

if TYPE_CHECKING:
    import psutil


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
        ready, closed_when_ready = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._say)
            _keep_watch(heard, closed_when_ready)
        os.close(heard)
        os.close(closed_when_ready)
        os.read(ready, 1)  # until then it could be killed together with the supervisor
        os.close(ready)

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


def _keep_watch(heard: int, closed_when_ready: int) -> NoReturn:
    try:
        os.setsid()  # neither a terminal's Ctrl-C nor a kill of the supervisor's group reaches it
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.close(closed_when_ready)
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


def refuse_while_importing() -> None:
    """Raise in a process that was started by spawn or forkserver and is just importing the script it belongs to."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DrivetrainError(
            "the training was started again by a child process: processes that are started by spawn (loader workers, "
            "mp.spawn) import the script, and it starts the training when it is imported",
            remedy=MAIN_GUARD_REMEDY,
        )


def trains_when_imported() -> bool:
    """Return whether the running script called this from code that importing the script would run as well."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    line = _line_of_main()
    if path is None or line is None:
        return False
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    here = [each for each in statements if each.lineno <= line <= (each.end_lineno or each.lineno)]
    return bool(here) and not any(isinstance(each, ast.If) and _asks_for_name(each.test) for each in here)


def _line_of_main() -> int | None:
    """Return the line that the script's top level is executing; None if it is not being run, as in a notebook."""
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is main:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _asks_for_name(test: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(test))


class SetAside:
    """Freezes all objects from `begin` to `end`, so that garbage collections do not pause the training loop.

    A full collection visits every object: some 300,000 with torch loaded, 100 to 170 ms in which no thread runs Python.
    Any code that allocates objects can trigger it, including a background save. Objects that exist when a run has begun
    live until it ends; once frozen, they are not visited again.

    Only one run holds it at a time; a second `begin` does nothing.
    """

    _held_by: "SetAside | None" = None

    def begin(self) -> None:
        """Collect once, then freeze: garbage must not be kept for the duration of the run."""
        if SetAside._held_by is None:
            SetAside._held_by = self
            gc.collect()
            gc.freeze()

    def end(self) -> None:
        if SetAside._held_by is self:
            SetAside._held_by = None
            gc.unfreeze()


@contextmanager
def forking() -> Iterator[None]:
    """Keep existing objects out of the garbage collector of a process that may be forked inside this context.

    Signals that ask the job to stop are blocked in it from its birth: they are not meant for it.

    The remains of an earlier run, such as a process group in a cycle, have threads that do not exist in the child:
    destroying them there ends in a segmentation fault. Collection is off from before the fork, because other at-fork
    handlers run in the child before the one here.
    """
    _forks[:] = True, gc.isenabled()
    gc.disable()
    try:
        with held_back():
            yield
    finally:
        _forks[0] = False
        if _forks[1]:
            gc.enable()


def _in_child() -> None:
    if _forks[0]:
        gc.freeze()
        if _forks[1]:
            gc.enable()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing is forked
    os.register_at_fork(after_in_child=_in_child)

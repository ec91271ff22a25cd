"""A small process that outlives a killed supervisor just long enough to end everything it started.

The kernel kills the workers when the supervisor dies, but not their children (loader workers, compilers).
"""

import contextlib
import os
import signal
from typing import NoReturn


class Guard:
    """Knows the process groups of the workers. Forked before anything else runs."""

    def __init__(self) -> None:
        heard, self._say = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._say)
            _keep_watch(heard)
        os.close(heard)

    def add(self, group: int) -> None:
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group, before its number can be reused by another."""
        self._write(f"-{group}\n")

    def close(self) -> None:
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
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)

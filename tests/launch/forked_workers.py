"""`python -m tests.launch.forked_workers launch …`: `drivetrain launch` with workers forked from it, torch imported.

A fresh worker takes four seconds of CPU time to import torch. Apart from that these are what they are elsewhere: with
the same words, environment, streams and open files, in a session of their own, to be killed and waited for. Tests of
the supervisor without training, and `test_two_processes_from_python`, start fresh interpreters.

`--inside NAME`, as the first words, is `ip netns exec NAME` for a process that is forked, too.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import drivetrain.api.training  # noqa: F401  (all that workers need, where the server of `warm_python.py` is not used)
from drivetrain.cli import main
from drivetrain.core.launchers import CHANNEL, supervision
from drivetrain.launch import workers
from tests.warm_python import become


class Forked(subprocess.Popen[Any]):
    """`Popen` of `[python, -c, CODE, ...]` with descriptors of the caller as its streams."""

    def __init__(
        self, words: list[str], *, env: dict[str, str], stdin: int, stdout: int, stderr: int, **more: Any
    ) -> None:
        assert stdin == subprocess.DEVNULL
        assert more.pop("start_new_session")
        self._environment, self._streams, self._kept = env, (stdout, stderr), more.pop("pass_fds")
        assert not more
        super().__init__(words)

    def _execute_child(self, args: list[str], *more: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(args)
            finally:
                os._exit(99)  # never back into the supervisor
        self._child_created = True

    def _run(self, args: list[str]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream, descriptor in enumerate((nothing, *self._streams)):
            os.dup2(descriptor, stream)
        kept = {0, 1, 2, *self._kept}
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  (as exec closes them)
            if descriptor not in kept:
                with suppress(OSError):  # that of the listing itself
                    os.close(descriptor)
        for descriptor in self._kept:
            os.set_inheritable(descriptor, True)
        channel = self._environment.get(CHANNEL)  # one that stands by has none yet
        supervision.__init__(None if channel is None else int(channel))  # type: ignore[misc]  # it is made when it is imported
        become(args[1:], str(Path.cwd()), self._environment)


def enter_network(name: str) -> None:
    """Move this process, and what it starts, into a network namespace."""
    clone_newnet = 0x40000000
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, clone_newnet):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.close(descriptor)


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        enter_network(sys.argv[2])
        del sys.argv[1:3]
    workers.subprocess.Popen = Forked  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))

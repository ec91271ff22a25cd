"""The process that starts probes: imports torch once, forks one process per probe, watches over them, cleans up.

It computes nothing itself, so that no OpenMP pool and no CUDA context exists at the time of a fork. It ends, and takes
every process below it along, as soon as the other end of its control socket closes, however that came about.
"""

import contextlib
import importlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from drivetrain.core.processes import adopt_orphans, descendants, die_with_parent, kill_strays, kill_tree
from drivetrain.core.value import Value
from drivetrain.verify.child import Request, run_request

POLL_SECONDS = 0.02
REAP_SECONDS = 3.0
ABORT_SECONDS = 0.5
TAIL_BYTES = 4096
READS_AT_ONCE = 64  # a probe that prints faster than it is read must not keep the zygote from its clock

StartMethod = Literal["fork", "spawn"]


class Cleanup(Value):
    """The folders to remove at the end: some with all that is in them, then others if they are empty."""

    folders: tuple[str, ...] = ()
    folders_if_empty: tuple[str, ...] = ()

    def perform(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self.folders_if_empty:
            with contextlib.suppress(OSError):  # not there, or not empty any more: not ours to remove
                Path(folder).rmdir()


class ZygoteSettings(Value):
    """The first line that the zygote reads."""

    preload: tuple[str, ...]
    start_method: StartMethod
    cleanup: Cleanup


class Ready(Value):
    """Sent once, when probes can be started."""

    kind: Literal["ready"] = "ready"


class Ended(Value):
    """Sent for every request. `returncode` is negative for a signal, as in `subprocess`."""

    kind: Literal["ended"] = "ended"
    name: str
    returncode: int
    timed_out: bool
    seconds: float
    outcome: str | None = Field(description="the Outcome as JSON, if the probe got that far")
    output_tail: str


@dataclass
class _Running:
    request: Request
    pid: int
    started: float
    output: int  # the reading end of a pipe; a file would grow with a probe that prints without end
    popen: subprocess.Popen[bytes] | None = None
    tail: bytes = b""

    def drain(self) -> bool:
        """Take what it has printed, and keep the end of it. False once it cannot print any more."""
        for _ in range(READS_AT_ONCE):
            try:
                data = os.read(self.output, 1 << 20)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.tail = (self.tail + data)[-TAIL_BYTES:]
        return True

    def has_ended(self) -> bool:
        """Return whether it has ended. It is not reaped, so that its process id cannot be reused in the meantime."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def abort(self) -> None:
        """Make it print its stack, and give it the moment that takes."""
        os.kill(self.pid, signal.SIGABRT)
        deadline = time.monotonic() + ABORT_SECONDS
        while not self.has_ended() and time.monotonic() < deadline:
            self.drain()  # or it could not say it
            time.sleep(POLL_SECONDS)

    def reap(self) -> int:
        """Return its exit code, once killed. A process stuck in the kernel (a dead driver or mount) is left behind."""
        deadline = time.monotonic() + REAP_SECONDS
        while not self.has_ended():
            if time.monotonic() > deadline:
                return -signal.SIGKILL
            time.sleep(POLL_SECONDS)
        if self.popen is not None:
            return self.popen.wait()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._running: dict[str, _Running] = {}
        self._received = b""
        self._settings = self._receive_settings()

    def serve(self) -> None:
        try:
            adopt_orphans()
            for module in self._settings.preload:
                importlib.import_module(module)
            self._send(Ready())
            self._loop()
        finally:
            for probe in list(self._running.values()):
                kill_tree(probe.pid)
            kill_strays()
        # Only with the other side gone. After an error it is there, reads this process's output, and cleans up.
        self._settings.cleanup.perform()

    def _loop(self) -> None:
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            ready = self._selector.select(POLL_SECONDS if self._running else None)
            if any(key.fileobj is self._control for key, _ in ready) and not self._receive():
                return
            for probe in list(self._running.values()):
                self._look_after(probe)

    def _receive_settings(self) -> ZygoteSettings:
        while b"\n" not in self._received:
            if not (data := self._control.recv(1 << 20)):
                raise SystemExit("the process that started this one is gone")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return ZygoteSettings.from_json(line)

    def _receive(self) -> bool:
        """Start what is asked for. False when the other side is gone."""
        try:
            data = self._control.recv(1 << 20)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if not data:
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._start(Request.from_json(line))
        return True

    def _start(self, request: Request) -> None:
        # Readable by this user only: a store for a rendezvous is put there.
        Path(request.setup.scratch).mkdir(mode=0o700)
        started = time.monotonic()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        popen = None
        if self._settings.start_method == "fork":
            pid = os.fork()
            if pid == 0:
                self._become(request, reading, writing)
        else:
            told = request.outcome_path.with_suffix(".request.json")
            told.write_text(request.to_json(), encoding="utf-8")
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain.verify.child", str(told)],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
            pid = popen.pid
        os.close(writing)
        self._running[request.name] = _Running(request, pid, started, reading, popen)
        self._selector.register(reading, selectors.EVENT_READ)

    def _become(self, request: Request, reading: int, writing: int) -> None:
        """Run as the forked process: nothing of the zygote stays but its modules. Never returns."""
        try:
            os.setsid()
            die_with_parent()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._control.close()
            self._selector.close()
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (writing, 1), (writing, 2)):
                os.dup2(source, target)
            for unused in (nothing, reading, writing, *(other.output for other in self._running.values())):
                os.close(unused)
            run_request(request)
            os._exit(0)
        finally:
            os._exit(70)  # never back into the zygote's loop, whatever was raised

    def _look_after(self, probe: _Running) -> None:
        if not probe.drain() and probe.output in self._selector.get_map():
            self._selector.unregister(probe.output)  # closed: it would wake this loop without end
        has_ended = probe.has_ended()
        seconds = time.monotonic() - probe.started
        timed_out = not has_ended and seconds > probe.request.time_limit_seconds
        if not has_ended and not timed_out:
            return
        below = descendants(probe.pid)
        if timed_out:
            probe.abort()
        # Also after a clean end: loader workers or peers may have been left behind.
        kill_tree(probe.pid, below)
        returncode = probe.reap()
        probe.drain()
        if probe.output in self._selector.get_map():
            self._selector.unregister(probe.output)
        os.close(probe.output)
        del self._running[probe.request.name]
        if not self._running:
            kill_strays()  # no probe runs: every child is a stray
        self._send(self._ended(probe, returncode, timed_out, seconds))
        shutil.rmtree(probe.request.setup.scratch, ignore_errors=True)
        shutil.rmtree(probe.request.setup.run_scratch, ignore_errors=True)

    def _ended(self, probe: _Running, returncode: int, timed_out: bool, seconds: float) -> Ended:
        outcome = None
        with contextlib.suppress(FileNotFoundError):
            outcome = probe.request.outcome_path.read_text(encoding="utf-8")
        return Ended(
            name=probe.request.name,
            returncode=returncode,
            timed_out=timed_out,
            seconds=seconds,
            outcome=outcome,
            output_tail=probe.tail.decode("utf-8", "replace"),
        )

    def _send(self, message: Value) -> None:
        self._control.setblocking(True)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(message.model_dump_json().encode() + b"\n")
        self._control.setblocking(False)


def main() -> None:
    # Ctrl-C is the business of the process at the terminal; this one hears of it by its socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Zygote(socket.socket(fileno=int(sys.argv[1]))).serve()
    os._exit(0)  # unloading torch would take another second


if __name__ == "__main__":
    main()

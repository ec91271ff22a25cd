"""Runs probes, each in a separate process with a time limit, and turns any ending of one into a row."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from drivetrain.core.processes import descendants, kill_processes
from drivetrain.hardware import Hardware
from drivetrain.verify.child import LONGEST_TMPDIR, Request
from drivetrain.verify.probe import Outcome, Probe, ProbeResult, ProbeSetup, failed, not_applicable
from drivetrain.verify.zygote import Cleanup, Ended, Ready, StartMethod, ZygoteSettings

START_LIMIT_SECONDS = 120.0  # `import torch` from a cold network disk
# The second is what the first optimizer step loads, 1.4 s of a small machine's time in every probe that makes one.
PRELOAD = ("torch", "torch._dynamo")
GRACE_SECONDS = 15.0  # beyond a probe's own limit, before the zygote itself counts as hung


class Watcher(Protocol):
    """Gets the events of the probes, to show progress."""

    def started(self, probe: Probe) -> None: ...
    def ended(self, result: ProbeResult) -> None: ...


class Unwatched:
    def started(self, probe: Probe) -> None:
        pass

    def ended(self, result: ProbeResult) -> None:
        pass


def run_probes(
    probes: Sequence[Probe],
    *,
    hardware: Hardware,
    gpu_indices: tuple[int, ...] = (),
    run_folder: Path,
    quick: bool = False,
    num_at_once: int = 1,
    watcher: Watcher | None = None,
    preload: tuple[str, ...] = PRELOAD,
    start_method: StartMethod | None = None,
) -> tuple[ProbeResult, ...]:
    """Return one result per probe, in their order. Leaves no process and no file behind, also when it is interrupted.

    `num_at_once` holds for the probes that do not measure rates; those that do run alone, after the others.
    """
    run = _Run(hardware, gpu_indices, run_folder.absolute(), quick, watcher or Unwatched(), preload, start_method)
    try:
        together = sorted((probe for probe in probes if not probe.measures_rates), key=lambda probe: not probe.is_slow)
        results = run.perform(together, num_at_once) | run.perform([p for p in probes if p.measures_rates], 1)
    finally:
        run.close()
    return tuple(results[probe.name] for probe in probes)


class _ZygoteLostError(Exception):
    """Raised if the process that starts probes ended, or does not answer."""


class _Run:
    def __init__(
        self,
        hardware: Hardware,
        gpu_indices: tuple[int, ...],
        run_folder: Path,
        quick: bool,
        watcher: Watcher,
        preload: tuple[str, ...],
        start_method: StartMethod | None,
    ) -> None:
        self._hardware = hardware
        self._gpu_indices = gpu_indices
        self._run_folder = run_folder
        self._quick = quick
        self._watcher = watcher
        self._scratch = Path(tempfile.mkdtemp(prefix="drivetrain-verify-"))
        self._run_scratch = run_folder / f".drivetrain-verify-{secrets.token_hex(4)}"
        missing = [folder for folder in self._run_scratch.parents if not folder.exists()]
        self._cleanup = Cleanup(
            folders=(str(self._scratch), str(self._run_scratch)),
            folders_if_empty=tuple(map(str, missing)),  # deepest first, as `parents` gives them
        )
        # On macOS a forked process may not use the system's frameworks; on Windows there is no fork.
        default: StartMethod = "fork" if sys.platform == "linux" else "spawn"
        method = start_method or default
        self._settings = ZygoteSettings(
            preload=preload if method == "fork" else (), start_method=method, cleanup=self._cleanup
        )
        self._zygote: _ZygoteHandle | None = None

    def perform(self, probes: Sequence[Probe], num_at_once: int) -> dict[str, ProbeResult]:
        waiting, running = list(probes), dict[str, tuple[Probe, float]]()
        results: dict[str, ProbeResult] = {}

        def end(probe: Probe, outcome: Outcome, seconds: float, output_tail: str = "") -> None:
            running.pop(probe.name, None)
            kept = {"output_tail": output_tail} if outcome.status == "failed" else {}
            results[probe.name] = ProbeResult(
                name=probe.name, title=probe.title, seconds=seconds, **kept, **outcome.model_dump()
            )
            self._watcher.ended(results[probe.name])

        while waiting or running:
            try:
                zygote = self._zygote or self._start_zygote()
                while waiting and len(running) < num_at_once:
                    probe = waiting.pop(0)
                    running[probe.name] = (probe, time.monotonic())
                    self._watcher.started(probe)
                    zygote.send(self._request(probe))
                deadline = (
                    min(started + probe.time_limit_seconds for probe, started in running.values()) + GRACE_SECONDS
                )
                event = zygote.receive(deadline)
            except _ZygoteLostError as lost:
                # Those that ran fail. The others get a new zygote, unless none can be had at all.
                self._end_zygote()
                if not running:
                    running = {probe.name: (probe, time.monotonic()) for probe in waiting}
                    waiting = []
                for probe, started in list(running.values()):
                    outcome = failed(
                        f"the process that starts probes {lost}",
                        remedy='python -c "import torch" shows whether torch itself works',
                    )
                    end(probe, outcome, time.monotonic() - started, self._zygote_output())
            else:
                probe, _ = running[event.name]
                left_out = event.timed_out and self._limit(probe) < probe.time_limit_seconds
                outcome = (
                    not_applicable(f"takes more than {self._limit(probe):g} s, left out by --quick")
                    if left_out
                    else judge_ending(probe, event)
                )
                end(probe, outcome, event.seconds, event.output_tail)
        return results

    def close(self) -> None:
        self._end_zygote()
        self._cleanup.perform()

    def _request(self, probe: Probe) -> Request:
        setup = ProbeSetup(
            quick=self._quick,
            hardware=self._hardware,
            gpu_indices=self._gpu_indices,
            run_folder=str(self._run_folder),
            run_scratch=str(self._run_scratch / probe.name),
            scratch=str(self._scratch / probe.name),
        )
        limit = self._limit(probe)
        return Request(name=probe.name, function=probe.function, setup=setup, time_limit_seconds=limit)

    def _limit(self, probe: Probe) -> float:
        quick_limit = probe.quick_limit_seconds if self._quick else None
        return min(probe.time_limit_seconds, quick_limit or probe.time_limit_seconds)

    def _start_zygote(self) -> "_ZygoteHandle":
        self._zygote = _ZygoteHandle(self._settings, self._scratch / "zygote.output.txt")
        self._zygote.wait_until_ready()
        return self._zygote

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            zygote.close()

    def _zygote_output(self) -> str:
        try:
            return (self._scratch / "zygote.output.txt").read_text(encoding="utf-8", errors="replace")[-4096:]
        except FileNotFoundError:
            return ""


class _ZygoteHandle:
    def __init__(self, settings: ZygoteSettings, output_path: Path) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._received = b""
        with theirs, output_path.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain.verify.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(output_path.parent),
                start_new_session=True,  # Ctrl-C at the terminal reaches this process only
            )
        self._send_line(settings.model_dump_json())

    def wait_until_ready(self) -> None:
        Ready.from_json(self._receive_line(time.monotonic() + START_LIMIT_SECONDS))

    def send(self, request: Request) -> None:
        self._send_line(request.model_dump_json())

    def receive(self, deadline: float) -> Ended:
        return Ended.from_json(self._receive_line(deadline))

    def close(self) -> None:
        """End it and all below it. The closed socket is the signal; it is killed if it does not react."""
        below = descendants(self._process.pid)
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kill_processes(below)

    def _send_line(self, line: str) -> None:
        try:
            self._socket.settimeout(GRACE_SECONDS)
            self._socket.sendall(line.encode() + b"\n")
        except OSError as error:
            raise _ZygoteLostError(self._ending()) from error

    def _receive_line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError as error:
                raise _ZygoteLostError("does not answer") from error
            except OSError as error:
                raise _ZygoteLostError(self._ending()) from error
            if not data:
                raise _ZygoteLostError(self._ending())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _ending(self) -> str:
        try:
            return describe_returncode(self._process.wait(timeout=5))
        except subprocess.TimeoutExpired:
            return "closed its connection"


def _environment(scratch: Path) -> dict[str, str]:
    """Return the environment in which the zygote finds the same modules as this process, by whatever path."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    # The import of torch's compiler makes folders, too.
    temporary = {"TMPDIR": str(scratch)} if len(str(scratch)) <= LONGEST_TMPDIR else {}
    return {
        **os.environ,
        **temporary,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",  # what a probe printed before it crashed is the best hint there is
        "ONEDNN_JIT_PROFILE": "0",  # or torch on aarch64 leaves /tmp/perf-<pid>.map files behind
    }


def describe_returncode(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"was killed by signal {-returncode}"
    meaning = {
        signal.SIGKILL: ", as the kernel does where memory runs out",
        signal.SIGSEGV: ", a crash in native code",
        signal.SIGABRT: ", a crash that native code noticed itself",
        signal.SIGILL: ", an instruction that this processor does not have",
        signal.SIGBUS: ", often a full /dev/shm",
    }.get(number, "")
    return f"was killed by {number.name}{meaning}"


def judge_ending(probe: Probe, event: Ended) -> Outcome:
    """Return the outcome of a probe that ended by itself, or what its end means."""
    again = f"drivetrain verify --only {probe.name}"
    if event.timed_out:
        longer = f"{again} --time-limit-seconds {max(60, round(probe.time_limit_seconds * 4))}"
        return failed(
            f"did not end within {probe.time_limit_seconds:g} s and was stopped",
            remedy=f"{longer} tells a slow machine from a hung one",
        )
    if event.outcome is not None:
        return Outcome.from_json(event.outcome)
    sentence = f"its process {describe_returncode(event.returncode)}"
    if event.returncode == -signal.SIGKILL:
        remedy = "free memory (free -h; dmesg | tail shows whom the kernel killed), then " + again
    elif event.returncode == -signal.SIGBUS:
        remedy = "mount -o remount,size=8G /dev/shm (in docker: --shm-size=8g), then " + again
    else:
        remedy = f"{again} --json shows where; pip install --force-reinstall torch if it is in torch"
    return failed(sentence, remedy=remedy)

"""Runs the probes of `drivetrain verify`, each in a process with a time limit, and shows their checklist."""

import difflib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import PROBES, literal_facts
from drivetrain.core.processes import descendants, kill_processes
from drivetrain.hardware import CpuRates, DiskRates, GpuRates, Hardware, MeasuredRates, Precision, save_measured
from drivetrain.verify.child import LONGEST_TMPDIR, Request
from drivetrain.verify.probe import (
    MeasuredRate,
    Outcome,
    Probe,
    ProbeResult,
    ProbeSetup,
    Quantity,
    Report,
    Status,
    failed,
    not_applicable,
)
from drivetrain.verify.zygote import Cleanup, Ended, Ready, StartMethod, ZygoteSettings

# ----------------------------------------------------------------------------------------------------------------------
# Runs probes, each in a separate process with a time limit, and turns any ending of one into a row.

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


# ----------------------------------------------------------------------------------------------------------------------
# The checklist of `drivetrain verify`: its probes in their order, the choice among them, and its rows shown and saved.
#
# GPUs are chosen by numbers and without torch: `DeviceManager` would load it where none is needed. On a terminal a
# progress line is shown while probes run, then the checklist: 80 columns, plain ASCII if necessary. Elsewhere its rows
# appear as probes end. `--save` makes of the rows the rates that Hardware keeps.

STYLES: dict[Status, str] = {"passed": "green", "failed": "bold red", "not applicable": "dim"}
MARKS: dict[Status, str] = {"passed": "✓", "failed": "✗", "not applicable": "–"}
ASCII_MARKS: dict[Status, str] = {"passed": "ok", "failed": "FAILED", "not applicable": "-"}
_ASCII = str.maketrans({"–": "-", "×": "x", "³": "^3", "…": "...", "·": "*"})


def read_checklist() -> tuple[Probe, ...]:
    """Return the rows `PROBES` of every file in `verify/probes`, and of other packages, without importing any."""
    rows: list[Probe] = []
    for name in PROBES.names():
        source = PROBES.source(name)
        attribute = PROBES.target(name).partition(":")[2]
        rows += () if source is None else literal_facts(source, attribute, Probe)
    return tuple(sorted(rows, key=lambda probe: (probe.order, probe.name)))


CHECKLIST: tuple[Probe, ...] = read_checklist()


def choose(names: Sequence[str], probes: Sequence[Probe] = CHECKLIST) -> tuple[Probe, ...]:
    """Return the probes of these names, in the checklist's order; all for no names. `matmul` means every `matmul-…`."""
    problems, chosen = [], set[str]()
    for name in names:
        wanted = name.strip().lower().replace("_", "-")
        found = {probe.name for probe in probes if probe.name == wanted or probe.name.startswith(f"{wanted}-")}
        chosen |= found
        if not found:
            known = [probe.name for probe in probes]
            nearest = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
            problems.append(
                Problem(
                    "--only",
                    f"there is no probe `{name}`",
                    name,
                    allowed=", ".join(known),
                    remedy=f"did you mean `--only {nearest[0]}`?" if nearest else "choose from those allowed",
                )
            )
    if problems:
        raise ConfigError(problems)
    return tuple(probe for probe in probes if probe.name in chosen) if names else tuple(probes)


def chosen_gpus(hardware: Hardware, config: Config) -> tuple[int, ...]:
    """Return indices as torch counts; none for the CPU. Contradictions were refused when the configuration was read."""
    wanted = config.device
    if wanted.mode == "cpu" or wanted.device == "cpu" or hardware.accelerator not in ("cuda", "rocm"):
        return ()
    if wanted.ids is not None:
        return wanted.ids
    if wanted.device.startswith("cuda:"):
        return (int(wanted.device.removeprefix("cuda:")),)
    available = tuple(gpu.index for gpu in hardware.gpus)
    return available[:1] if wanted.mode == "single_gpu" else available


def console_for(stream: IO[str]) -> Console:
    """Return a console of 80 columns for a pipe, which has no width; of the terminal's width otherwise."""
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 80
    return console


def speaks_unicode(console: Console) -> bool:
    try:
        "✓✗–×³".encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plain(text: str, console: Console) -> str:
    """Return the text in characters that the stream can encode."""
    if speaks_unicode(console):
        return text
    return text.translate(_ASCII).encode(console.encoding, "replace").decode(console.encoding)


def mark(status: Status, console: Console) -> str:
    return (MARKS if speaks_unicode(console) else ASCII_MARKS)[status]


class LiveProgress:
    """Shows which probes run now, and for how long, in one line that redraws itself."""

    def __init__(self, console: Console, num_probes: int) -> None:
        self._num_probes = num_probes
        self._num_ended = 0
        self._running: dict[str, tuple[Probe, float]] = {}
        self._spinner = Spinner("dots" if speaks_unicode(console) else "line")

    def started(self, probe: Probe) -> None:
        self._running = {
            **self._running,
            probe.name: (probe, time.monotonic()),
        }  # replaced: the line is drawn by a thread

    def ended(self, result: ProbeResult) -> None:
        self._running = {name: entry for name, entry in self._running.items() if name != result.name}
        self._num_ended += 1

    def __rich__(self) -> RenderableType:
        now = time.monotonic()
        names = ", ".join(f"{probe.title} {now - since:.0f} s" for probe, since in self._running.values())
        if not names:
            names = "loading torch" if not self._num_ended else "ending" if self._num_ended == self._num_probes else ""
        self._spinner.update(text=Text(f"{self._num_ended}/{self._num_probes}  {names}"))
        return self._spinner


class PlainProgress:
    """Prints the row of each probe when it has ended: the checklist is then printed already."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def started(self, probe: Probe) -> None:
        pass

    def ended(self, result: ProbeResult) -> None:
        show_checklist([result], self._console)
        self._console.file.flush()


class Silence:
    def started(self, probe: Probe) -> None:
        pass

    def ended(self, result: ProbeResult) -> None:
        pass


@contextmanager
def progress(
    console: Console, num_probes: int, rows: Console | None
) -> Iterator[LiveProgress | PlainProgress | Silence]:
    """Show progress: redrawn on a terminal; elsewhere the checklist itself, row by row.

    Args:
        console: Standard error.
        num_probes: How many there are.
        rows: Where the rows go if `console` is no terminal; None: nowhere.
    """
    if not console.is_terminal:
        yield Silence() if rows is None else PlainProgress(rows)
        return
    live = LiveProgress(console, num_probes)
    with Live(live, console=console, refresh_per_second=8, transient=True):
        yield live


def show_checklist(results: Sequence[ProbeResult], console: Console) -> None:
    """Print the table; below a failed row its cause and its remedy, for the others their details."""
    unicode = speaks_unicode(console)
    table = Table.grid(padding=(0, 1), expand=True)  # as wide as any other: rows of a pipe are printed one by one
    table.add_column(no_wrap=True, width=1 if unicode else 6)
    table.add_column(no_wrap=True, width=18)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(justify="right", no_wrap=True, width=6)
    for result in results:
        style = STYLES[result.status]
        table.add_row(
            Text(mark(result.status, console), style),
            Text(result.title, style if result.status != "passed" else ""),
            _findings(result, console),
            Text(f"{result.seconds:.1f} s", "dim"),
        )
    console.print(table)


def _findings(result: ProbeResult, console: Console) -> Text:
    if result.status == "not applicable":
        return Text(plain(f"not applicable: {result.detail}", console), "dim")
    text = Text(plain(result.figure or result.status, console))
    if result.detail:
        text.append(plain(f"\n{result.detail}", console), "red" if result.status == "failed" else "dim")
    if result.remedy:
        text.append(plain(f"\nremedy: {result.remedy}", console), "yellow")
    return text


def show_saving(report: Report, console: Console) -> None:
    if report.saved_to is None:
        line = "nothing to save: no probe that measures rates passed"
    elif report.quick:
        line = f"rates saved to {report.saved_to}; rough ones, as --quick measures them"
    else:
        line = f"rates saved to {report.saved_to}"
    console.print(plain(line, console), soft_wrap=True)


def show_summary(report: Report, console: Console) -> None:
    """Print the final line."""
    count = {status: sum(result.status == status for result in report.results) for status in STYLES}
    failures = [result.name for result in report.results if result.status == "failed"]
    line = Text("verify failed: " if failures else "verify passed: ", "bold red" if failures else "bold green")
    line.append(f"{count['passed']} passed, {count['failed']} failed")
    if failures:
        line.append(f" ({', '.join(failures)})", "red")
    line.append(
        f", {count['not applicable']} not applicable; {report.total_seconds:.1f} s on {', '.join(report.devices)}"
    )
    console.print(line, soft_wrap=True)


def save_rates(hardware: Hardware, results: Sequence[ProbeResult], *, quick: bool) -> Path | None:
    """Save the rates, and return where; None if there is none to save."""
    rates = collect(results)
    if rates == MeasuredRates():
        return None
    if quick:
        rates = rates.model_copy(update={"source": f"drivetrain verify --quick, {datetime.now(UTC):%Y-%m-%d}"})
    return save_measured(hardware, rates)


def collect(results: Sequence[ProbeResult]) -> MeasuredRates:
    """Return the rates of what passed. A failed probe's figures say what is broken, not what the machine can do."""
    found = [rate for result in results if result.status == "passed" for rate in result.rates]
    cpu = [rate for rate in found if rate.of == "cpu"]
    disk = [rate for rate in found if rate.of == "disk"]
    gpus: dict[str, list[MeasuredRate]] = {}
    for rate in found:
        if rate.of not in ("cpu", "disk"):
            gpus.setdefault(rate.of, []).append(rate)
    return MeasuredRates(
        gpus={
            uuid: GpuRates(
                peaks=_peaks(rates),
                memory_bandwidth=_value(rates, "memory"),
                host_to_device=_value(rates, "host to device"),
                device_to_host=_value(rates, "device to host"),
            )
            for uuid, rates in gpus.items()
        },
        cpu=CpuRates(peaks=_peaks(cpu), memory_bandwidth=_value(cpu, "memory")) if cpu else None,
        disk=DiskRates(write=_value(disk, "write"), read=_value(disk, "read")) if disk else None,
    )


def _peaks(rates: Sequence[MeasuredRate]) -> dict[Precision, float]:
    return {rate.precision: rate.value for rate in rates if rate.quantity == "matmul" and rate.precision is not None}


def _value(rates: Sequence[MeasuredRate], quantity: Quantity) -> float | None:
    return next((rate.value for rate in rates if rate.quantity == quantity), None)

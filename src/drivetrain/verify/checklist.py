"""The checklist of `drivetrain verify`: its probes in their order, the choice among them, and its rows shown and saved.

GPUs are chosen by numbers and without torch: `DeviceManager` would load it where none is needed. On a terminal a
progress line is shown while probes run, then the checklist: 80 columns, plain ASCII if necessary. Elsewhere its rows
appear as probes end. `--save` makes of the rows the rates that Hardware keeps.
"""

import difflib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import PROBES, literal_facts
from drivetrain.hardware import CpuRates, DiskRates, GpuRates, Hardware, MeasuredRates, Precision, save_measured
from drivetrain.verify.probe import MeasuredRate, Probe, ProbeResult, Quantity, Report, Status

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
        self._spinner.update(text=Text(f"{self._num_ended}/{self._num_probes}  {names or 'loading torch'}"))
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
    table = Table.grid(padding=(0, 1))
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

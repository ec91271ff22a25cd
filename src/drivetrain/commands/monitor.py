"""Commands that watch runs: `status` once, `monitor` live with the devices, from run folders alone."""

import getpass
import hashlib
import json
import math
import os
import select
import shlex
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from drivetrain.commands.command import Command
from drivetrain.config import Flag, Positional, Resolved
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.goodput import Account, RunStateName, how_it_stands, is_running, read_account, seconds_left
from drivetrain.core.log import on_one_line, printable
from drivetrain.core.run_folder import as_row, find_run, read_job, read_yaml
from drivetrain.core.value import format_duration
from drivetrain.hardware import detect
from drivetrain.hardware.gpu_drivers import HostReader, NvmlReader, label, load_nvml
from drivetrain.launch.clusters import SlurmJob, jobs_of

# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain status`: shows the state of runs, and of jobs that were submitted to SLURM.
#
# The state of runs is read from the records in their folders. Nothing is written, and no lock is taken.

State = RunStateName | Literal["unreadable"]
LAST_BYTES = 64 * 1024  # of a file of lines: enough for the last few hundred steps
MANIFEST_START_BYTES = 2**20
_SHARED = '"shared":'
COMMAND_STATUS = Command(
    summary="How runs stand: running, finished, stopped, refused or crashed and why; and jobs submitted to SLURM.",
    obeys=("run.output_dir",),
)
EXAMPLES_STATUS = (
    "drivetrain status                      every run below runs/, the latest last",
    "drivetrain status runs/digits          one of them",
    "drivetrain status --output-dir other   those below another folder",
    "drivetrain status --slurm              jobs of `drivetrain launch --slurm --submit`, too",
    "drivetrain status --json               for a script: every field, null where it is not known",
)


@dataclass(frozen=True)
class RunState:
    """The state of one run. What is not known is None."""

    name: str
    folder: str
    state: State
    cause: str  # of a stop or a crash, in words
    step: int
    num_steps: int | None
    epoch: int | None
    loss: float | None
    samples_per_second: float | None
    checkpoint: int | None  # the step of the newest
    seconds_left: float | None  # while it is running
    goodput: float | None = None  # the share of the time since it was submitted that went into steps which still count
    failures: str = ""  # how often it was interrupted, by what, and what that cost


def runs_in(output_dir: Path) -> list[RunState]:
    """Return all runs below a folder, the latest last. One that cannot be read is shown, and hides no other."""
    folders = [path.parent for path in output_dir.glob("*/job.yaml")]
    return [*_closed(output_dir), *(state_of(folder) for folder in sorted(folders, key=last_change))]


def _closed(output_dir: Path) -> list[RunState]:
    """Return the folders that another user keeps closed: what is in them is not known."""
    try:
        found = sorted(
            path for path in output_dir.iterdir() if path.is_dir() and not os.access(path, os.R_OK | os.X_OK)
        )
        return [_unreadable(path, f"it is closed to others by {path.owner()}") for path in found]
    except (OSError, KeyError):
        return []


def _unreadable(folder: Path, why: str) -> RunState:
    return RunState(folder.name, str(folder), "unreadable", why, 0, None, None, None, None, None, None)


def state_of(folder: Path) -> RunState:
    """Return the state of the run in a folder, whatever is in its files."""
    try:
        return _state_of(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return _unreadable(folder, f"its records are damaged: {type(error).__name__}: {error}")


def _state_of(folder: Path) -> RunState:
    job, unreadable = _job(folder)
    steps = list(last_rows(folder / "steps.jsonl"))
    events = list(last_rows(folder / "events.jsonl"))
    last = steps[-1] if steps else {}
    state, cause = _how_it_stands(folder, events)
    checkpoint, incomplete = _newest_checkpoint(folder)
    cause = "; ".join(filter(None, [cause, unreadable, incomplete]))
    num_steps, step = job.get("num_steps"), int(last.get("step", 0))
    timed = [row for row in steps if row.get("seconds")]
    seconds = sum(row["seconds"] for row in timed)
    account = _account(folder, is_running=state == "running")
    left = seconds_left(job, steps, list(last_rows(folder / "metrics.jsonl"))) if state == "running" else None
    return RunState(
        name=str(job.get("name", folder.name)),
        folder=str(folder),
        state=state,
        cause=cause,
        step=step,
        num_steps=num_steps,
        epoch=last.get("epoch"),
        loss=last.get("loss"),
        samples_per_second=sum(row["samples"] for row in timed) / seconds if seconds else None,
        checkpoint=checkpoint,
        seconds_left=left,
        goodput=None if account is None else account.goodput,
        failures="" if account is None else account.failures_in_words(),
    )


def _account(folder: Path, *, is_running: bool) -> Account | None:
    try:
        return read_account(folder, is_running=is_running)
    except (OSError, ValueError, LookupError, TypeError):  # damaged: it does not hide how the run stands
        return None


def _job(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the job of a run, and what is wrong with its file: one damaged run does not hide the others."""
    try:
        return read_job(folder), ""
    except DrivetrainError as error:
        return {}, error.message


def _how_it_stands(folder: Path, events: list[dict[str, Any]]) -> tuple[State, str]:
    stands = how_it_stands(folder, events, goes_on=is_running(folder, events))
    missing = _missing_report(folder) if stands.state == "finished" else ""
    return stands.state, "; ".join(filter(None, [stands.why, stands.then, missing]))


def _missing_report(folder: Path) -> str:
    """Return a hint if the report is missing. It is written last: a killed process leaves a finished run without it."""
    if (folder / "report.html").exists():
        return ""
    try:
        config = read_yaml(folder / "config.yaml")
        is_wanted = bool(config["watch"]["report"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return ""
    return f"its report is missing: `drivetrain report {shlex.quote(str(folder))}` writes it" if is_wanted else ""


def last_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last rows. Half a line at either end is dropped."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LAST_BYTES)
            file.seek(start)
            data = file.read()
    except OSError:
        return
    lines = data.split(b"\n")[1 if start else 0 : -1]
    yield from filter(None, map(as_row, lines))


def _newest_checkpoint(folder: Path) -> tuple[int | None, str]:
    """Return its step, and in words why a newer one cannot be used. Only checks that files exist, not their hashes."""
    problem = ""
    for step, manifest in sorted(_checkpoints(folder), reverse=True):
        missing = next((file for file in _shared_files(manifest) if not (folder / "checkpoints" / file).is_file()), "")
        if not missing:
            return step, problem
        problem = problem or f"checkpoint {step} cannot be used: {missing} is missing, which holds its frozen weights"
    return None, problem


def _shared_files(manifest: Path) -> Iterator[str]:
    """Yield the files that a checkpoint shares with others. They are named at the beginning of its manifest."""
    try:
        with manifest.open("rb") as file:
            start = file.read(MANIFEST_START_BYTES).decode(errors="replace").partition('"meta":')[0]
        shared, _ = json.JSONDecoder().raw_decode(start, start.index(_SHARED) + len(_SHARED))
    except (OSError, ValueError):
        return  # of an earlier format, or damaged, which only reading all of it would tell
    for name, files in shared.items() if isinstance(shared, dict) else ():
        yield from (f"{name}/{file}" for file in files)


def _checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in (folder / "checkpoints").glob("step-*/manifest.json"):
        number = path.parent.name.removeprefix("step-")
        if number.isdecimal():
            yield int(number), path


def last_change(folder: Path) -> float:
    changes = [path.stat().st_mtime for name in ("job.yaml", "steps.jsonl") if (path := folder / name).exists()]
    return max(changes, default=0.0)


class StatusOptions(BaseModel):
    run: Annotated[Path | None, Positional()] = Field(
        None, description="the folder of a run (default: all runs below --output-dir)"
    )
    slurm: bool = Field(False, description="also the jobs submitted from here, and what squeue and sacct say of them")
    as_json: Annotated[bool, Flag("json")] = Field(False, description="one line of JSON")


def run_status(options: StatusOptions, resolved: Resolved) -> int:
    output_dir = resolved.config.run.output_dir
    runs = runs_in(output_dir) if options.run is None else [state_of(find_run(options.run, output_dir))]
    jobs, why_not = jobs_of(output_dir) if options.slurm else ([], "")
    if options.as_json:
        slurm = {"jobs": [asdict(job) for job in jobs], "note": why_not} if options.slurm else None
        print(json.dumps({"runs": [asdict(one) for one in runs], "slurm": slurm}))
        return 0
    print(printable("\n".join(in_words(one) for one in runs)) or f"no runs below {output_dir}")
    if options.slurm:
        print(printable("\n".join(["", *_jobs_in_words(jobs, output_dir), *([why_not] if why_not else [])])))
    return 0


def _rate_of_run(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"


def in_words(one: RunState) -> str:
    """Return a line of facts, and one of the cause where there is one."""
    of = "" if one.num_steps is None else f" of {one.num_steps}"
    facts = [f"step {one.step}{of}"]
    facts += [] if one.epoch is None else [f"epoch {one.epoch + 1}"]
    facts += [] if one.loss is None else [f"loss {one.loss:.4g}"]
    facts += [] if one.samples_per_second is None else [f"{_rate_of_run(one.samples_per_second)} samples/s"]
    facts.append("no checkpoint" if one.checkpoint is None else f"checkpoint {one.checkpoint}")
    facts += [] if one.seconds_left is None else [f"{timedelta(seconds=round(one.seconds_left))} left"]
    facts += [] if one.goodput is None else [f"goodput {one.goodput:.1%}"]
    line = f"{one.state:<9} {on_one_line(one.folder)}: {', '.join(facts)}"
    more = [one.cause, f"interruptions {one.failures}" if one.failures else ""]
    return "\n          ".join([line, *filter(None, more)])


def _jobs_in_words(jobs: Sequence[SlurmJob], output_dir: Path) -> list[str]:
    if not jobs:
        return [f"no SLURM jobs were submitted into {output_dir}"]
    return [
        f"{job.state or 'unknown':<9} job {job.job} ({job.name}), submitted {job.submitted}"
        + (f", {job.elapsed} so far" if job.elapsed else "")
        + (f", {job.reason}" if job.reason else "")
        + f"; its output: {job.output}"
        for job in jobs
    ]


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain monitor`: shows the runs and devices of this machine, live, from run folders alone.
#
# Nothing is written, no lock is taken, torch is not loaded. Everything that a run wrote is text, whatever it looks
# like.

COMMAND_MONITOR = Command(
    summary="Shows the runs and GPUs of this machine, live: in the terminal, or with --web in a browser.",
    obeys=("run.output_dir",),
    here="drivetrain.commands.monitor_server:run",
)
EXAMPLES_MONITOR = (
    "drivetrain monitor                     runs below runs/, and others that are going on",
    "drivetrain monitor runs/digits         one of them",
    "drivetrain monitor --json              once, for a script",
    "drivetrain monitor --web               in a browser on this machine, with every run's report",
    "drivetrain monitor --web --port 8123   the same over SSH: ssh -L 8123:127.0.0.1:8123 HOST",
)
PIPE_COLUMNS = 10_000  # lines of a pipe are searched, not read on a screen: they are not continued below
RESIZE_SECONDS = 0.2  # between looks at the size of the terminal
STALE_SECONDS = 60.0  # of a run that goes on: no step was recorded for so long
MOST_LOSSES = 120  # of a small curve
STYLES = {
    "running": "green", "finished": "blue", "stopped": "yellow", "refused": "yellow", "crashed": "red",
    "not begun": "dim",
}  # fmt: skip
_FULL, _EMPTY = ("█", "░")


class MonitorOptions(BaseModel):
    run: Annotated[Path | None, Positional()] = Field(
        None, description="the folder of a run (default: all runs below --output-dir, and those going on elsewhere)"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="print one JSON document, and exit")
    web: bool = Field(False, description="serve a page on this machine's loopback address instead")
    port: int = Field(0, ge=0, le=65535, description="of the page (default: any that is free)")
    every: float = Field(2.0, gt=0, le=3600, allow_inf_nan=False, description="seconds between looks (default: 2)")


def run_monitor(options: MonitorOptions, resolved: Resolved) -> int | None:
    """Show what there is, in the terminal or as JSON; None: in a browser, which `monitor_server` does."""
    if options.web and not options.as_json:
        return None
    watch = MachineWatch(resolved.config.run.output_dir, options.run)
    if options.as_json:
        print(json.dumps(watch.look(), allow_nan=False))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(screen(watch.look(), PIPE_COLUMNS, None), soft_wrap=True)
        return 0
    return _watch_live(watch, console, options.every)


def _watch_live(watch: "MachineWatch", console: Console, every: float) -> int:
    """Show what there is until q or Ctrl-C. The terminal is left as it was, with what was seen last."""
    seen = dict[str, Any]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with (
            suppress(KeyboardInterrupt),
            _keys() as keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            is_over = False
            while not is_over:
                seen, size = watch.look(), None
                until = time.monotonic() + every
                while not is_over and (size is None or time.monotonic() < until):
                    if console.size != size:
                        size = console.size
                        live.update(screen(seen, size.width, size.height), refresh=True)
                    is_over = b"q" in keys.read(max(0.0, min(RESIZE_SECONDS, until - time.monotonic())))
    finally:
        signal.signal(signal.SIGTERM, before)
    if seen:
        console.print(screen(seen, console.width, console.height))
    return 0


class _Keys:
    """Reads the keys that are typed; none where standard input is not a terminal."""

    def __init__(self, file: int | None) -> None:
        self._file = file

    def read(self, seconds: float) -> bytes:
        """Wait for a key, at most so long, and return what was typed."""
        if self._file is None:
            time.sleep(seconds)
            return b""
        ready = select.select([self._file], [], [], seconds)[0]
        found = os.read(self._file, 1024) if ready else b""
        if ready and not found:
            self._file = None  # the terminal is gone
        return found


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Take keys one by one, without showing them: they would stand in the middle of the screen."""
    try:
        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
        tty.setcbreak(file, termios.TCSANOW)
    except (OSError, ValueError, AttributeError, termios.error):  # no terminal to type into
        yield _Keys(None)
        return
    try:
        yield _Keys(file)
    finally:
        with suppress(OSError, termios.error):
            termios.tcsetattr(file, termios.TCSANOW, before)


class MachineWatch:
    """Looks at the runs and devices of this machine.

    Args:
        output_dir: Where runs are looked for. Runs that are going on are found wherever they are.
        run: The only run to show; None: all.
    """

    def __init__(self, output_dir: Path, run: Path | None = None) -> None:
        self._output_dir, self._run = output_dir, None if run is None else find_run(run, output_dir)
        self._host = HostReader()
        self._host.read()  # the use of the CPU is since the look before
        hardware = detect(output_dir)
        self._gpus = {label(gpu): gpu.name for gpu in hardware.gpus}
        self._nvml = NvmlReader(load_nvml() if hardware.gpus else None, hardware.gpus)

    def look(self) -> dict[str, Any]:
        """Return everything that is shown, as plain values: the runs that go on first, then the latest."""
        runs = [described(asdict(each)) for each in self._states()]
        runs.sort(key=self._place)
        devices = [{"device": name, "name": self._gpus.get(name, ""), **row} for name, row in self._nvml.read().items()]
        host = {"device": "host", "name": os.uname().nodename, **self._host.read()}
        for name in ("process_memory_gib", "process_cpu_percent"):  # of the monitor itself
            host.pop(name, None)
        seen = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "output_dir": str(self._output_dir),
            "runs": runs,
            "devices": [*devices, host],
            "note": self._nvml.missing,
        }
        return dict(_plain(seen))

    def _place(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what orders the runs. Those that go on keep their places: each changes all the time."""
        if row["state"] != "running":
            return (1, -(row["changed"] or 0), row["folder"])
        is_elsewhere = os.path.realpath(Path(row["folder"]).parent) != os.path.realpath(self._output_dir)
        return (0, is_elsewhere, row["folder"])

    def _states(self) -> Iterator[Any]:
        if self._run is not None:
            yield state_of(self._run)
            return
        known = runs_in(self._output_dir)
        yield from known
        folders = {os.path.realpath(each.folder) for each in known}
        elsewhere = (state_of(folder) for folder in running_folders() if os.path.realpath(folder) not in folders)
        yield from (each for each in elsewhere if each.state == "running")  # it may have ended meanwhile


def running_folders() -> list[Path]:
    """Return the folders of runs that processes of this machine hold open, as far as this user may see them."""
    found = dict[Path, None]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            for entry in os.scandir(process / "fd"):
                with suppress(OSError):
                    target = Path(entry.path).readlink()
                    if target.name == ".lock" and (target.parent / "job.yaml").exists():
                        found[target.parent] = None
    return sorted(found)


def described(row: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a run with what its other records say: devices, the last losses, when it last moved."""
    folder = Path(row["folder"])
    identity = hashlib.sha256(os.path.realpath(folder).encode(errors="surrogateescape")).hexdigest()[:16]
    changed = 0.0
    with suppress(OSError):
        changed = last_change(folder)
    rows = [each for each in last_rows(folder / "steps.jsonl") if isinstance(each.get("loss"), (int, float))]
    losses = rows[:: max(1, len(rows) // MOST_LOSSES)]
    newest = {str(each.get("device")): each for each in last_rows(folder / "gpu.jsonl")}
    metrics = dict[str, float]()
    for each in last_rows(folder / "metrics.jsonl"):
        metrics |= {name: value for name, value in each.items() if name.startswith("valid_")}
    age = time.time() - changed if changed else None
    return {
        **row,
        "id": identity,
        "title": folder.name if row["name"] == folder.name else f"{folder.name} ({row['name']})",
        "changed": changed or None,
        "idle_seconds": age if row["state"] == "running" and age is not None and age > STALE_SECONDS else None,
        "has_diverged": isinstance(row["loss"], float) and not math.isfinite(row["loss"]),
        "losses": [[each.get("step"), each["loss"]] for each in losses],
        "metrics": metrics,
        "devices": list(newest.values()) if row["state"] == "running" else [],
    }


def _plain(value: Any) -> Any:
    """Return what JSON can hold everywhere: no number that is not finite, no half of a character."""
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


# ---- the terminal


def screen(seen: Mapping[str, Any], width: int, height: int | None) -> RenderableType:
    """Return what a terminal shows: devices, then runs, as many as there is room for.

    Args:
        seen: What `MachineWatch.look` returned.
        width: Columns. What is longer is continued below; of a long name the beginning and the end are shown.
        height: Lines; None: all runs are shown.
    """
    heading = f"drivetrain monitor  {seen['time'][11:19]} UTC  {getpass.getuser()}"
    lines = [Text(_shortened(heading, width), "bold"), *(device_line(row, width) for row in seen["devices"])]
    if seen["note"]:
        lines += [Text(line, "yellow") for line in _wrapped(seen["note"].split(" "), " ", width)]
    if not seen["runs"]:
        none = f"no runs below {on_one_line(seen['output_dir'])}; `drivetrain train digits` makes one"
        lines += [Text(line) for line in _wrapped(none.split(" "), " ", width)]
    most = math.inf if height is None else height - 1
    for number, row in enumerate(seen["runs"]):
        block = [Text(""), *run_block(row, width)]
        num_left = len(seen["runs"]) - number
        if len(lines) + len(block) + (num_left > 1) > most:
            room = max(0, int(most) - len(lines) - 1) if number == 0 else 0  # some of one run, rather than none
            more = _wrapped([f"… {num_left} more;", "`drivetrain monitor | less` shows all of them"], " ", width)
            lines += [*block[:room], Text(more[0].rstrip(";") if len(more) > 1 else more[0], "dim")]
            break
        lines += block
    return Text("\n").join(lines if height is None else lines[:height])


def _shortened(words: str, width: int) -> str:
    """Return a text in one line: of a longer one its beginning and its end."""
    if cell_len(words) <= width:
        return words
    room = max(0, width - 1)
    end = words[len(words) - room // 2 :]
    while cell_len(end) > room // 2:
        end = end[1:]
    return f"{set_cell_size(words, room - cell_len(end)).rstrip()}…{end}"


def _wrapped(parts: Sequence[str], gap: str, width: int) -> list[str]:
    """Return parts in lines; none is divided unless it is wider than a line."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{gap}{part}" if lines[-1] else part
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines += chop_cells(part, max(2, width))
    return [line for line in lines if line]


def run_block(row: Mapping[str, Any], width: int) -> list[Text]:
    """Return the lines of a run: its name and state, a bar while it goes on, its figures, and what happened to it."""
    style, room = STYLES.get(row["state"], "magenta"), max(1, width - 2)
    name = _shortened(on_one_line(row["title"]), max(8, width - len(row["state"]) - 2))
    lines = [Text.assemble((name, "bold"), (f"  {row['state']}", style))]
    step, whole = row["step"], row["num_steps"]
    if whole and row["state"] == "running":
        share = min(1.0, step / whole)
        cells = max(4, min(24, width - 24))
        bar = f"  {_FULL * round(share * cells)}{_EMPTY * (cells - round(share * cells))} {share:.0%}"
        left = "" if row["seconds_left"] is None else f"  ETA {format_duration(max(1, round(row['seconds_left'])))}"
        lines.append(Text.assemble((bar, style), left))
    lines += [Text(f"  {line}") for line in _wrapped(_facts(row), "  ", room)]
    for words in (row["cause"], row["failures"] and f"interruptions {row['failures']}", _idle(row)):
        told = " ".join(printable(words).split()) if words else ""
        lines += [Text(f"  {line}", "yellow") for line in _wrapped(told.split(" "), " ", room)]
    lines += [Text(f"  {device_line(device, width).plain}", "dim") for device in row["devices"]]
    return [*lines, Text(f"  {_shortened(on_one_line(row['folder']), room)}", "dim")]


def _facts(row: Mapping[str, Any]) -> list[str]:
    of = "" if row["num_steps"] is None else f" of {row['num_steps']:,}"
    facts = [f"step {row['step']:,}{of}"]
    facts += [] if row["epoch"] is None else [f"epoch {row['epoch'] + 1}"]
    facts += [] if row["loss"] is None else [f"loss {row['loss']:.4g}"]
    facts += ["loss not finite"] if row["has_diverged"] else []
    facts += [
        f"{on_one_line(name.removeprefix('valid_').replace('_', ' '))} {value:.4g}"
        for name, value in row["metrics"].items()
        if name != "valid_loss" and isinstance(value, (int, float))
    ][:2]
    facts += [] if row["samples_per_second"] is None else [f"{_rate(row['samples_per_second'])} samples/s"]
    facts += [] if row["goodput"] is None else [f"goodput {row['goodput']:.0%}"]
    return [*facts, "no checkpoint" if row["checkpoint"] is None else f"checkpoint {row['checkpoint']}"]


def _rate(value: float) -> str:
    """Return four digits, or more where the number has them before the point: 1,268,400 is not 1.268e+06."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _idle(row: Mapping[str, Any]) -> str:
    return "" if row["idle_seconds"] is None else f"no step was recorded for {format_duration(row['idle_seconds'])}"


def device_line(row: Mapping[str, Any], width: int) -> Text:
    """Return what a device does in one line: the less important figures are left out where there is no room."""
    parts: Sequence[str] = [
        printable(str(row.get("device", ""))),
        *([f"{row['utilisation_percent']:.0f}% busy"] if _is_number(row, "utilisation_percent") else []),
        *([f"{row['memory_used_gib']:.1f}{_of_total(row)} GiB"] if _is_number(row, "memory_used_gib") else []),
        *([f"{row['temperature_c']:.0f} °C"] if _is_number(row, "temperature_c") else []),
        *([f"{row['power_watts']:.0f} W"] if _is_number(row, "power_watts") else []),
        *([f"throttled: {', '.join(map(str, row['throttled']))}"] if row.get("throttled") else []),
        *([printable(str(row["name"]))] if row.get("name") else []),
    ]
    while len(parts) > 1 and len("  ".join(parts)) > width - 2:
        parts = parts[:-1]
    return Text("  ".join(parts))


def _is_number(row: Mapping[str, Any], name: str) -> bool:
    return isinstance(row.get(name), (int, float))


def _of_total(row: Mapping[str, Any]) -> str:
    return f" of {row['memory_total_gib']:.1f}" if _is_number(row, "memory_total_gib") else ""

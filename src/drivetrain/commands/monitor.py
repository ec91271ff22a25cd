"""`drivetrain monitor`: shows the runs and devices of this machine, live, from run folders alone.

Nothing is written, no lock is taken, torch is not loaded. Everything that a run wrote is text, whatever it looks like.
"""

import getpass
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from drivetrain.commands.command import Command
from drivetrain.commands.status import last_change, last_rows, runs_in, state_of
from drivetrain.config import Flag, Positional, Resolved
from drivetrain.core.run_folder import find_run
from drivetrain.core.safe_text import on_one_line, printable
from drivetrain.core.value import format_duration
from drivetrain.hardware import detect
from drivetrain.hardware.cuda_driver import load_nvml
from drivetrain.hardware.telemetry import HostReader, NvmlReader, label

COMMAND = Command(
    summary="Shows the runs and GPUs of this machine, live: in the terminal, or with --web in a browser.",
    obeys=("run.output_dir",),
    here="drivetrain.commands.monitor_server:run",
)
EXAMPLES = (
    "drivetrain monitor                     runs below runs/, and others that are going on",
    "drivetrain monitor runs/digits         one of them",
    "drivetrain monitor --json              once, for a script",
    "drivetrain monitor --web               in a browser on this machine, with every run's report",
    "drivetrain monitor --web --port 8123   the same over SSH: ssh -L 8123:127.0.0.1:8123 HOST",
)
STALE_SECONDS = 60.0  # of a run that goes on: no step was recorded for so long
MOST_LOSSES = 120  # of a small curve
STYLES = {"running": "green", "finished": "blue", "stopped": "yellow", "refused": "yellow", "crashed": "red"}
_FULL, _EMPTY = ("█", "░")


class MonitorOptions(BaseModel):
    run: Annotated[Path | None, Positional()] = Field(
        None, description="the folder of a run (default: all runs below --output-dir, and those going on elsewhere)"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="print one JSON document, and exit")
    web: bool = Field(False, description="serve a page on this machine's loopback address instead")
    port: int = Field(0, ge=0, le=65535, description="of the page (default: any that is free)")
    every: float = Field(2.0, gt=0, le=3600, allow_inf_nan=False, description="seconds between looks (default: 2)")


def run(options: MonitorOptions, resolved: Resolved) -> int | None:
    """Show what there is, in the terminal or as JSON; None: in a browser, which `monitor_server` does."""
    if options.web and not options.as_json:
        return None
    watch = MachineWatch(resolved.config.run.output_dir, options.run)
    if options.as_json:
        print(json.dumps(watch.look(), allow_nan=False))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(screen(watch.look(), console.width, None), soft_wrap=True)
        return 0
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(watch.look(), console.width, console.height), refresh=True)
            time.sleep(options.every)
    console.print(screen(watch.look(), console.width, None))  # what is known stays on the screen
    return 0


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
        runs.sort(key=lambda row: (row["state"] != "running", -(row["changed"] or 0)))
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
        width: Columns. A line that is longer is continued below.
        height: Lines; None: all runs are shown.
    """
    heading = Text(f"drivetrain monitor  {seen['time'][11:19]} UTC  {getpass.getuser()}", "bold", overflow="ellipsis")
    parts = [heading, *(device_line(row, width) for row in seen["devices"])]
    if seen["note"]:
        parts.append(Text(seen["note"], "yellow"))
    blocks = [run_block(row, width) for row in seen["runs"]]
    if not blocks:
        parts.append(Text(f"no runs below {printable(seen['output_dir'])}; `drivetrain train digits` makes one"))
    room = math.inf if height is None else height - 2 - sum(_lines(part, width) for part in parts)
    for number, block in enumerate(blocks):
        room -= _lines(block, width) + 1
        if room < 0:
            parts.append(Text(f"… {len(blocks) - number} more; `drivetrain status` lists all of them", "dim"))
            break
        parts += [Text(""), block]
    return Group(*parts)


def _lines(text: Text, width: int) -> int:
    return sum(max(1, math.ceil(len(line) / max(width, 1))) for line in text.plain.split("\n"))


def run_block(row: Mapping[str, Any], width: int) -> Text:
    """Return a run: its name and state, a bar while it goes on, its figures, and what happened to it."""
    style = STYLES.get(row["state"], "magenta")
    text = Text()
    text.append(on_one_line(row["title"]), "bold")
    text.append(f"  {row['state']}", style)
    step, whole = row["step"], row["num_steps"]
    if whole and row["state"] == "running":
        share = min(1.0, step / whole)
        cells = max(4, min(24, width - 24))
        text.append(f"\n  {_FULL * round(share * cells)}{_EMPTY * (cells - round(share * cells))} {share:.0%}", style)
        if row["seconds_left"] is not None:
            text.append(f"  ETA {format_duration(row['seconds_left'])}")
    text.append(f"\n  {'  '.join(_facts(row))}")
    for words in (row["cause"], row["failures"] and f"interruptions {row['failures']}", _idle(row)):
        if words:
            text.append(f"\n  {printable(words)}", "yellow")
    for device in row["devices"]:
        text.append(f"\n  {device_line(device, width).plain}", "dim")
    if row["folder"]:
        text.append(f"\n  {on_one_line(row['folder'])}", "dim")
    return text


def _facts(row: Mapping[str, Any]) -> list[str]:
    of = "" if row["num_steps"] is None else f" of {row['num_steps']:,}"
    facts = [f"step {row['step']:,}{of}"]
    facts += [] if row["epoch"] is None else [f"epoch {row['epoch'] + 1}"]
    facts += [] if row["loss"] is None else [f"loss {row['loss']:.4g}"]
    facts += [
        f"{printable(name.removeprefix('valid_').replace('_', ' '))} {value:.4g}"
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

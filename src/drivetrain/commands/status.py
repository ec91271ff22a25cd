"""`drivetrain status`: shows the state of runs, and of jobs that were submitted to SLURM.

The state of runs is read from the records in their folders. Nothing is written, and no lock is taken.
"""

import fcntl
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field

from drivetrain.commands.command import Command
from drivetrain.config import Flag, Positional, Resolved
from drivetrain.core.batch_sizes import batch_sizes_of, recorded_batch, samples_between
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.goodput import Account, read_account
from drivetrain.core.run_folder import as_row, find_run, is_finished, read_job, read_yaml
from drivetrain.core.safe_text import on_one_line, printable
from drivetrain.launch.slurm import SlurmJob, jobs_of

State = Literal["running", "finished", "stopped", "refused", "crashed", "unreadable"]
LAST_BYTES = 64 * 1024  # of a file of lines: enough for the last few hundred steps
MANIFEST_START_BYTES = 2**20
_SHARED = '"shared":'
_LOCK_LAYOUT = "hhqqi"  # struct flock, as Linux has it on 64 bits: type, whence, start, length, pid
COMMAND = Command(
    summary="How runs stand: running, finished, stopped, refused or crashed and why; and jobs submitted to SLURM.",
    obeys=("run.output_dir",),
)
EXAMPLES = (
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
    left = None
    if state == "running" and num_steps is not None and timed:
        left = (num_steps - step) * seconds / len(timed)
        sizes = batch_sizes_of(recorded_batch(job.get("global_batch")))
        if sizes:  # the steps to come take longer than those done, or less long
            left = samples_between(sizes, step, num_steps) * seconds / sum(row["samples"] for row in timed)
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
    if _is_held(folder / ".lock"):
        return "running", ""
    ends = [row for row in events if row.get("event") in ("finish", "stop")]
    if is_finished(folder):
        because = str(ends[-1].get("because", "")) if ends else ""
        return "finished", "; ".join(filter(None, [because, _missing_report(folder)]))
    told = [row for row in events if row.get("event") not in ("time", "end")]  # these are of the account of its time
    last = told[-1] if told else {}
    if last.get("event") == "refused":
        return "refused", f"{last.get('error', '')}; remedy: {last.get('remedy', '')}"
    if last.get("event") == "stopped by an error" and str(last.get("error", "")).startswith("KeyboardInterrupt"):
        return "stopped", "Ctrl-C, at once; the same command goes on from the last checkpoint"
    crash = _document(folder / "crash.json")
    if crash:
        where = f" on rank {crash['rank']}" if crash.get("rank") is not None else ""
        remedy = f"; remedy: {crash['remedy']}" if crash.get("remedy") else ""
        return "crashed", f"{crash.get('cause', 'unknown')}{where}: {crash.get('headline', 'no more is known')}{remedy}"
    if error := _error_since_start(events):
        return "crashed", f"{error}; once that is fixed, the same command goes on"
    if last.get("event") == "stop":
        return "stopped", str(last.get("because", "asked to stop; the same command goes on"))
    return "crashed", "its process ended without a word: killed, or the machine went down; the same command goes on"


def _missing_report(folder: Path) -> str:
    """Return a hint if the report is missing. It is written last: a killed process leaves a finished run without it."""
    if (folder / "report.html").exists():
        return ""
    try:
        config = read_yaml(folder / "config.yaml")
        is_wanted = bool(config["watch"]["report"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return ""
    return f"its report is missing: `drivetrain report {folder}` writes it" if is_wanted else ""


def _is_held(path: Path) -> bool:
    """Return whether a run holds the folder's lock, without taking it: a run that starts now must not find it taken."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        asked = struct.pack(_LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        held = struct.unpack(_LOCK_LAYOUT, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        return bool(held[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(file)


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


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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


def _error_since_start(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the error of a run in one process, which has no supervisor to record a crash."""
    for row in reversed(events):
        if row.get("event") in ("claim", "start", "resume"):
            break
        if row.get("event") == "stopped by an error":
            return str(row.get("error", ""))
    return ""


class StatusOptions(BaseModel):
    run: Annotated[Path | None, Positional()] = Field(
        None, description="the folder of a run (default: all runs below --output-dir)"
    )
    slurm: bool = Field(False, description="also the jobs submitted from here, and what squeue and sacct say of them")
    as_json: Annotated[bool, Flag("json")] = Field(False, description="one line of JSON")


def run(options: StatusOptions, resolved: Resolved) -> int:
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


def _rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"


def in_words(one: RunState) -> str:
    """Return a line of facts, and one of the cause where there is one."""
    of = "" if one.num_steps is None else f" of {one.num_steps}"
    facts = [f"step {one.step}{of}"]
    facts += [] if one.epoch is None else [f"epoch {one.epoch + 1}"]
    facts += [] if one.loss is None else [f"loss {one.loss:.4g}"]
    facts += [] if one.samples_per_second is None else [f"{_rate(one.samples_per_second)} samples/s"]
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

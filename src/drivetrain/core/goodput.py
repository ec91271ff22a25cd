"""Goodput: where the time of a run went, from its submission to its end, over all of its starts.

Every second is in one bucket. The account is made from the run folder alone: `events.jsonl`, which the main process
appends to, and `attempts.jsonl`, which the supervisor does, who outlives the workers. Rows have the monotonic clock of
their machine; the wall clock only joins machines, and starts of a machine.
"""

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from drivetrain.core.aims import batch_sizes_of, recorded_batch, samples_between
from drivetrain.core.run_folder import has_steps, is_finished, is_held, read_rows
from drivetrain.core.value import format_duration

BUCKETS = (
    "queue", "launch", "init", "restore", "data_wait", "step", "step_lost", "ckpt_block", "eval", "hang", "recovery",
    "shutdown", "other",
)  # fmt: skip
ATTEMPTS = "attempts.jsonl"
HANGS = frozenset(("timeout", "hang"))  # causes of failures during which nothing went on until it was noticed
STARTS, ENDS = ("claim", "start", "resume"), ("finish", "stop", "stopped by an error", "refused")  # events of a run
BEAT_SECONDS = 120.0  # a run of another machine, whose lock may not be seen here, has recorded something since then
_OF_LOOP = ("step", "data_wait", "eval", "ckpt_block", "init", "other")
_OFF = "off"
Row = dict[str, Any]
RunStateName = Literal["running", "finished", "stopped", "refused", "crashed", "not begun"]


@cache
def _boot() -> str:
    """Return what tells apart the monotonic clocks of machines, and of starts of a machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def stamp() -> Row:
    """Return the moment, for a row of the account."""
    return {"time": datetime.now(UTC).isoformat(), "mono": time.monotonic(), "boot": _boot()}


class StartMarks:
    """Remembers what this process did before its run was recorded, and since when."""

    def __init__(self) -> None:
        self._since: float | None = None  # None: the process has had no run yet
        self._restore_seconds = 0.0

    @contextmanager
    def restoring(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._restore_seconds += time.monotonic() - began

    def run_over(self) -> None:
        """Have the next run of this process begin here."""
        self._since, self._restore_seconds = time.monotonic(), 0.0

    def take(self, joined_at: float) -> dict[str, float]:
        """Return how long ago this start began, how much of that was before the ranks had met, and restoring."""
        now = time.monotonic()
        since = now - _process_seconds() if self._since is None else self._since
        found = {
            "seconds": max(0.0, now - since),
            "launch": max(0.0, joined_at - since),
            "restore": self._restore_seconds,
        }
        self.run_over()
        return found


start_marks = StartMarks()


def _process_seconds() -> float:
    """Return how old this process is; 0 for one that a user types into, who may have thought before."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return 0.0
    with suppress(OSError, ValueError, IndexError):
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


@dataclass
class _Life:
    """The steps of one start."""

    began: float
    resumed_from: int
    rows: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)
    ended: str = ""  # the event that ended it; empty: none was written
    step: int = 0  # the last that is known to have been done
    seconds: float = 0.0  # in the loop

    def spent_at(self, step: int) -> dict[str, float]:
        """Return the time spent up to a step; between two rows in proportion to their steps."""
        before = (self.began, self.resumed_from, dict.fromkeys(_OF_LOOP, 0.0))
        for row in self.rows:
            if row[1] > step:
                share = max(0.0, (step - before[1]) / (row[1] - before[1]))
                return {name: _between(before[2], row[2], name, share) for name in _OF_LOOP}
            before = row
        return {name: before[2].get(name, 0.0) for name in _OF_LOOP}


def _between(before: Mapping[str, float], after: Mapping[str, float], name: str, share: float) -> float:
    first = before.get(name, 0.0)
    return first + share * (after.get(name, 0.0) - first)


@dataclass(frozen=True)
class Account:
    """Divides the time of a run by what it went into."""

    seconds: dict[str, float]  # by bucket
    interruptions: dict[str, int]  # by cause
    lost_steps: tuple[int, ...]  # of each interruption that the run went on after
    repair_seconds: tuple[float, ...]  # of each: from the failure to the loop
    detection_seconds: tuple[float, ...] = ()  # of failures that a supervisor saw: at most, until it did

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps which still count."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds else 0.0

    def in_words(self) -> str:
        """Return the account in one line: the goodput, and what took most of the rest."""
        wall = self.wall_seconds
        rest = sorted(((value, name) for name, value in self.seconds.items() if name != "step"), reverse=True)
        parts = [f"{NAMES[name]} {value / wall:.1%}" for value, name in rest[:3] if wall and value >= 0.001 * wall]
        words = f"{self.goodput:.1%} of {format_duration(wall)}"
        return words + (f" ({', '.join(parts)})" if parts else "")

    def failures_in_words(self) -> str:
        """Return what failures cost, in one line; empty if there were none."""
        if not self.interruptions:
            return ""
        causes = ", ".join(f"{cause} ({count})" for cause, count in self.interruptions.items())
        words = f"{sum(self.interruptions.values())}: {causes}"
        if self.detection_seconds:
            words += f"; {format_duration(statistics.fmean(self.detection_seconds))} to notice"
        if self.repair_seconds:
            words += ", " if self.detection_seconds else "; "
            words += f"{format_duration(statistics.fmean(self.repair_seconds))} to go on"
            words += f" and {statistics.fmean(self.lost_steps):.3g} steps lost (means)"
        return words


NAMES = {
    "queue": "queue", "launch": "launch", "init": "init and compile", "restore": "restore", "data_wait": "data wait",
    "step": "steps kept", "step_lost": "steps lost", "ckpt_block": "checkpoints", "eval": "validation", "hang": "hang",
    "recovery": "recovery", "shutdown": "shutdown", "other": "other",
}  # fmt: skip


def read_account(folder: Path, *, is_running: bool = False) -> Account | None:
    """Return where the time of the run in a folder went so far; None if its records do not say.

    Args:
        folder: The run's.
        is_running: Whether the time up to now counts: steps that no checkpoint holds yet are not lost.
    """
    book = _Book(read_rows(folder / "events.jsonl")[0], read_rows(folder / ATTEMPTS)[0])
    if not book.lives:
        return None
    return book.account(_last_write(folder), is_running=is_running)


def _last_write(folder: Path) -> float | None:
    with suppress(OSError):
        return (folder / "steps.jsonl").stat().st_mtime
    return None


def is_running(folder: Path, events: Sequence[Row]) -> bool:
    """Return whether a process works on a run: by its lock; on another machine, by what it recorded lately.

    Args:
        folder: The run's.
        events: The last rows of its `events.jsonl`.
    """
    if is_held(folder):
        return True
    last = next((row for row in reversed(events) if row.get("event") in (*STARTS, *ENDS)), {})
    boot = next((row["boot"] for row in reversed(events) if "boot" in row), _boot())
    if last.get("event") in ENDS or boot == _boot():
        return False
    return time.time() - last_record(folder) < BEAT_SECONDS


def read_crash(folder: Path, events: Sequence[Row]) -> Row:
    """Return what `crash.json` says of the end of a run; nothing where the run was started again since then.

    Args:
        folder: The run's.
        events: The last rows of its `events.jsonl`.
    """
    path = folder / "crash.json"
    try:
        found, written = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime
        starts = [datetime.fromisoformat(row["time"]) for row in events if row.get("event") in STARTS and "time" in row]
    except (OSError, ValueError, TypeError):
        return {}
    is_old = bool(starts) and starts[-1].timestamp() > written
    return found if isinstance(found, dict) and not is_old else {}


class Standing(NamedTuple):
    """Says how a run stands, in the words of `status`, `monitor` and its page."""

    state: RunStateName
    why: str = ""
    then: str = ""  # what to do about it


def how_it_stands(folder: Path, events: Sequence[Row], *, goes_on: bool) -> Standing:
    """Return how a run stands, by what happened to it last.

    Args:
        folder: The run's.
        events: The last rows of its `events.jsonl`.
        goes_on: Whether a process works on it.
    """
    if goes_on:
        return Standing("running")
    last = next((row for row in reversed(events) if row.get("event") in (*STARTS, *ENDS)), {})
    kind, error, because = last.get("event"), str(last.get("error") or ""), str(last.get("because") or "")
    if is_finished(folder) or kind == "finish":
        return Standing("finished", because)
    if kind == "refused":
        return Standing("refused", error, f"remedy: {last['remedy']}" if last.get("remedy") else "")
    if error.startswith("KeyboardInterrupt"):
        return Standing("stopped", "Ctrl-C, at once", "the same command goes on from the last checkpoint")
    crash = read_crash(folder, events)
    if crash:
        where = f" on rank {crash['rank']}" if crash.get("rank") is not None else ""
        why = f"{crash.get('cause', 'unknown')}{where}: {crash.get('headline', 'no more is known')}"
        return Standing("crashed", why, f"remedy: {crash['remedy']}" if crash.get("remedy") else "")
    if kind == "stopped by an error":
        return Standing("crashed", error, "once that is fixed, the same command goes on")
    if kind == "stop":
        return Standing("stopped", because or "asked to stop; the same command goes on")
    if kind is None and not has_steps(folder):
        return Standing("not begun")
    why = "its process ended without a word: killed, or the machine went down"
    return Standing("crashed", why, "the same command goes on")


def last_record(folder: Path) -> float:
    """Return when the run in a folder last recorded something; 0 if it never did."""
    found = 0.0
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):
            found = max(found, path.stat().st_mtime)
    return found


def seconds_left(job: Row, steps: Sequence[Row], metrics: Sequence[Row]) -> float | None:
    """Return how long a run takes to its last step if it goes on as in its last steps; None where that is not known.

    Args:
        job: Its job.
        steps: The last rows of `steps.jsonl`.
        metrics: Those of `metrics.jsonl`: validations take time as well.
    """
    timed = [row for row in steps if row.get("seconds")]
    num_steps = job.get("num_steps")
    if num_steps is None or not timed:
        return None
    first, last = timed[0]["step"], timed[-1]["step"]
    seconds = sum(row["seconds"] for row in timed)
    seconds += sum(row.get("seconds") or 0.0 for row in metrics if first <= row.get("step", -1) <= last)
    sizes = batch_sizes_of(recorded_batch(job.get("global_batch")))
    if sizes:  # the steps to come take longer than those done, or less long
        return float(samples_between(sizes, last, num_steps) * seconds / sum(row["samples"] for row in timed))
    return float(max(0, num_steps - last) * seconds / len(timed))


class _Book:
    """The rows of a run in the order of their time, as states and lives."""

    def __init__(self, events: list[Row], attempts: list[Row]) -> None:
        self._offsets: dict[str, float] = {}  # of each monotonic clock to the wall clock, as it was first seen
        self.lives: list[_Life] = []
        self._marks: list[tuple[float, str, _Life | None]] = []  # from then on, it was in this state
        self._failures: list[tuple[float, str, int]] = []
        self._detections: list[float] = []
        for row in sorted((row for row in (*events, *attempts) if "mono" in row), key=self._at):
            self._take(row)

    def _at(self, row: Row, name: str = "mono") -> float:
        boot, mono = str(row["boot"]), float(row["mono"])
        if boot not in self._offsets:
            self._offsets[boot] = datetime.fromisoformat(row["time"]).timestamp() - mono
        return self._offsets[boot] + float(row.get(name, mono))

    def _mark(self, at: float, state: str, life: _Life | None = None) -> None:
        self._marks.append((at, state, life))

    def _take(self, row: Row) -> None:
        at, kind, life = self._at(row), row.get("event"), self.lives[-1] if self.lives else None
        if kind in ("start", "resume"):
            self._begin(row, at, life)
        elif kind == "time" and life is not None:
            life.rows.append((at, int(row["step"]), row["spent"]))
            life.step = max(life.step, int(row["step"]))
        elif kind in ("finish", "stop") and life is not None:
            life.ended = str(kind)
            self._mark(at, "shutdown")
        elif kind == "stopped by an error" and life is not None:
            is_stop = str(row.get("error", "")).startswith("KeyboardInterrupt")
            life.ended = "stop" if is_stop else str(row.get("error", "error")).partition(":")[0]
            self._mark(at, "queue" if is_stop else "recovery")
        elif kind == "launch":
            if row.get("submitted"):
                self._mark(float(row["submitted"]), "queue")
            self._mark(at - float(row.get("seconds", 0.0)), "launch")
        elif kind == "attempt":
            self._mark(at, "launch")
        elif kind == "failure":
            self._fail(row, life)
        elif kind == "end":
            self._mark(at, _OFF)

    def _begin(self, row: Row, at: float, before: _Life | None) -> None:
        since = row.get("since") or {}
        seconds, launch = float(since.get("seconds", 0.0)), float(since.get("launch", 0.0))
        if before is not None and not before.ended and row.get("last_write"):
            self._mark(min(float(row["last_write"]), at - seconds), "recovery")
        if before is not None:
            before.step = max(before.step, int(row.get("last_step", 0)))
        life = _Life(at, int(row["step"]), step=int(row["step"]))
        self._mark(at - seconds, "launch")
        self._mark(at - max(0.0, seconds - launch), "init")
        restore = float(since.get("restore", 0.0))
        self._mark(at - restore, "restore")
        self._mark(at, "loop", life)
        self.lives.append(life)

    def _fail(self, row: Row, life: _Life | None) -> None:
        failed_at = self._at(row, "failed_at")
        if row.get("cause") in HANGS and row.get("progress_at"):
            self._mark(self._at(row, "progress_at"), "hang")
        self._mark(failed_at, "recovery")
        if row.get("noticed_after") is not None:
            self._detections.append(float(row["noticed_after"]))
        if life is not None and life.began <= failed_at:
            life.ended = str(row["cause"])
            life.step = max(life.step, int(row.get("step", 0)))
        self._failures.append((failed_at, str(row["cause"]), int(row.get("step", 0))))

    def account(self, last_write: float | None, *, is_running: bool) -> Account:
        if is_running:
            self._mark(time.time(), _OFF)
        elif not self.lives[-1].ended and last_write is not None:
            self._mark(max(last_write, self.lives[-1].began), _OFF)
        seconds = dict.fromkeys(BUCKETS, 0.0)
        self._sweep(seconds)
        kept_to: float = float("inf")
        for number in range(len(self.lives) - 1, -1, -1):
            life = self.lives[number]
            is_open = number == len(self.lives) - 1 and (is_running or life.ended in ("finish", "stop"))
            self._divide(life, seconds, kept_to, is_open=is_open)
            kept_to = min(kept_to, life.resumed_from)
        return Account(seconds, *self._interruptions(), tuple(self._detections))

    def _sweep(self, seconds: dict[str, float]) -> None:
        """Add the time between two marks to the state of the first; that of the loop to its life."""
        marks = sorted(self._marks, key=lambda mark: mark[0])
        was_stopped = False
        for (begin, state, life), (end, following, _) in pairwise(marks):
            if state == "loop" and life is not None:
                life.seconds += end - begin
            elif state == following == _OFF:  # of the main process, and then of its supervisor
                seconds["shutdown"] += end - begin
            elif state == _OFF:  # it waited to be started again: after a stop in a queue, otherwise for help
                seconds["queue" if was_stopped else "recovery"] += end - begin
            else:
                seconds[state] += end - begin
            was_stopped = state == "shutdown" or (state == _OFF and was_stopped)

    def _divide(self, life: _Life, seconds: dict[str, float], kept_to: float, *, is_open: bool) -> None:
        """Divide the time of a loop: what was measured; steps that were done again later are lost."""
        last_at, last_step, last = life.rows[-1] if life.rows else (life.began, life.resumed_from, {})
        kept = dict(last) if is_open or last_step <= kept_to else life.spent_at(int(max(kept_to, life.resumed_from)))
        for name in ("eval", "ckpt_block", "init", "other"):
            seconds[name] += last.get(name, 0.0)
        for name in ("step", "data_wait"):
            seconds[name] += kept.get(name, 0.0)
            seconds["step_lost"] += last.get(name, 0.0) - kept.get(name, 0.0)
        # Behind the last row nothing is known but that steps were being done.
        tail = max(0.0, life.seconds - (last_at - life.began))
        seconds["step" if is_open else "step_lost"] += tail
        rest = life.seconds - tail - sum(last.get(name, 0.0) for name in _OF_LOOP)
        seconds["other"] += max(0.0, rest)
        # Another rank had died: the main process waited for it in its last step, which recovery's time holds already.
        overlap = max(0.0, -rest)
        of_lost = min(overlap, last.get("step", 0.0) - kept.get("step", 0.0))
        seconds["step_lost"] -= of_lost
        seconds["step"] -= min(overlap - of_lost, kept.get("step", 0.0))

    def _interruptions(self) -> tuple[dict[str, int], tuple[int, ...], tuple[float, ...]]:
        causes = Counter(cause for _, cause, _ in self._failures)
        lost, repairs = [], []
        for life, following in pairwise(self.lives):
            if life.ended in ("finish", "stop"):
                continue
            failed = [at for at, _, _ in self._failures if life.began <= at < following.began]
            if not failed:
                causes[life.ended or "killed"] += 1
                failed = [at for at, state, _ in self._marks if state == "recovery" and life.began <= at]
            if failed:
                repairs.append(following.began - min(failed))
            lost.append(max(0, life.step - following.resumed_from))
        return dict(causes), tuple(lost), tuple(repairs)

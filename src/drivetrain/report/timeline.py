"""The time line of a run: its starts on the clock, what their time went into, and every fault and recovery on it.

Made of `events.jsonl`, which the main process writes, and of `attempts.jsonl`, which the supervisor does. A process
that was killed writes nothing: its end is the last that is known of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from drivetrain.core.goodput import NAMES
from drivetrain.core.value import format_duration
from drivetrain.report.run_data import Row, RunData

MOST_PIECES = 240  # of all starts together: more than there are pixels to tell them apart
# What the loop's time goes into, from below, in colors that are told apart by all eyes.
PHASES = {
    "step": "#0072b2", "data_wait": "#e69f00", "eval": "#009e73", "ckpt_block": "#cc79a7", "init": "#8c8c8c",
    "other": "#c4c9ce",
}  # fmt: skip
FAULTS = {
    "failure": "failed", "hang": "hung", "out of memory": "out of memory", "bad step": "bad numbers",
    "loss spike": "loss spike", "replicas differ": "replicas differ", "save failed": "save failed",
    "save given up": "save given up", "checkpoint problem": "checkpoint problem",
    "stopped by an error": "stopped by an error",
}  # fmt: skip
RECOVERIES = {"micro-batch capped": "smaller micro-batches"}
_BEGINS, _ENDS = ("start", "resume"), ("finish", "stop", "stopped by an error", "failure")
_WORDS = ("words", "error", "cause", "problem", "because", "text")


@dataclass
class RunStart:
    """One start of a run on the clock, in seconds since 1970."""

    launched: float
    began: float  # its first step
    step: int
    ended: float = 0.0
    is_known_to_end: bool = False
    pieces: list[tuple[float, float, dict[str, float]]] = field(default_factory=list)  # from, to, seconds by phase


@dataclass(frozen=True)
class Mark:
    """Something that happened."""

    at: float
    kind: str  # `fault`, `recovery` or `end`
    words: str


def moment(row: Row) -> float | None:
    """Return when a row was written; None if it does not say."""
    try:
        return datetime.fromisoformat(str(row.get("time"))).timestamp()
    except ValueError:
        return None


def starts_and_marks(data: RunData) -> tuple[list[RunStart], list[Mark]]:
    """Return the starts of a run in their order, and what happened to it."""
    timed = [(at, row) for row in (*data.events, *data.attempts) if (at := moment(row)) is not None]
    starts, marks = list[RunStart](), list[Mark]()
    reached, spent, since = 0, dict[str, float](), 0.0
    for at, row in sorted(timed, key=lambda pair: pair[0]):
        kind = str(row.get("event"))
        if kind in _BEGINS:
            marks += _begun(row, at, starts, reached)
            before = row.get("since") if isinstance(row.get("since"), dict) else {}
            starts.append(RunStart(at - float((before or {}).get("seconds") or 0.0), at, _step(row), at))
            spent, since, reached = {}, at, _step(row)
            continue
        reached = max(reached, _step(row))
        if kind in FAULTS or kind in RECOVERIES:
            marks.append(Mark(at, "fault" if kind in FAULTS else "recovery", _in_words(kind, row)))
        if not starts or starts[-1].is_known_to_end:
            continue
        life = starts[-1]
        life.ended = max(life.ended, at)
        if kind == "time" and isinstance(row.get("spent"), dict):
            now = {name: float(value) for name, value in row["spent"].items() if isinstance(value, (int, float))}
            life.pieces.append((since, at, {name: max(0.0, now.get(name, 0.0) - spent.get(name, 0.0)) for name in now}))
            spent, since = now, at
        if kind in _ENDS:
            life.is_known_to_end = True
            if kind in ("finish", "stop"):
                marks.append(Mark(at, "end", f"{'finished' if kind == 'finish' else 'stopped'} at step {_step(row):,}"))
    return starts, marks


def _begun(row: Row, at: float, starts: Sequence[RunStart], reached: int) -> Iterator[Mark]:
    """Yield what the beginning of a start tells of the one before, and where this one goes on."""
    if starts and not starts[-1].is_known_to_end:
        yield Mark(starts[-1].ended, "fault", "ended without a word: killed, or the machine went down")
    if row.get("event") == "resume":
        lost = max(0, reached - _step(row))
        words = f"went on from step {_step(row):,}" + (f"; {lost:,} steps done again" if lost else "")
        if starts:
            words += f", {format_duration(max(0.0, at - starts[-1].ended))} after the end"
        yield Mark(at, "recovery", words)


def _step(row: Row) -> int:
    step = row.get("step")
    return int(step) if isinstance(step, (int, float)) else 0


def _in_words(kind: str, row: Row) -> str:
    told = next((str(row[name]) for name in _WORDS if row.get(name)), "")
    where = f" on rank {row['rank']}" if isinstance(row.get("rank"), int) else ""
    name = {**FAULTS, **RECOVERIES}[kind]
    return f"{name}{where}, step {_step(row):,}" + (f": {told}" if told else "")


def timeline(data: RunData) -> dict[str, Any] | None:
    """Return the time line for the page: places as shares of the whole; None where the records do not say when."""
    starts, marks = starts_and_marks(data)
    if not starts:
        return None
    begin = min(life.launched for life in starts)
    end = max([life.ended for life in starts] + [mark.at for mark in marks])
    whole = max(end - begin, 1e-9)
    most = max(1, MOST_PIECES // len(starts))

    def place(at: float) -> float:
        return round(min(1.0, max(0.0, (at - begin) / whole)), 5)

    totals = dict.fromkeys(PHASES, 0.0)
    lives = []
    for life in starts:
        pieces = []
        for since, until, spent in _merged(life.pieces, most):
            for name in PHASES:
                totals[name] += spent.get(name, 0.0)
            took = sum(spent.get(name, 0.0) for name in PHASES) or 1.0
            shares = [round(spent.get(name, 0.0) / took, 3) for name in PHASES]
            pieces.append([place(since), place(until), shares])
        lives.append([place(life.launched), place(life.began), place(life.ended), life.step, pieces])
    spent_in_all = sum(totals.values()) or 1.0
    return {
        "seconds": whole,
        "began": datetime.fromtimestamp(begin, UTC).isoformat(" ", "seconds"),
        "phases": [
            [NAMES[name].replace("steps kept", "steps"), color, round(totals[name] / spent_in_all, 4)]
            for name, color in PHASES.items()
        ],
        "starts": lives,
        "marks": [[place(mark.at), mark.kind, format_duration(mark.at - begin), mark.words] for mark in marks],
    }


def _merged(
    pieces: Sequence[tuple[float, float, Mapping[str, float]]], most: int
) -> list[tuple[float, float, dict[str, float]]]:
    """Return at most so many pieces, with the sums of those that were put together."""
    size = -(-len(pieces) // most) if pieces else 1
    found = []
    for begin in range(0, len(pieces), size):
        group = pieces[begin : begin + size]
        names = dict.fromkeys(name for _, _, spent in group for name in spent)
        sums = {name: sum(spent.get(name, 0.0) for _, _, spent in group) for name in names}
        found.append((group[0][0], group[-1][1], sums))
    return found

"""The parts of a run's page: its curves with few enough points to load at once, and its time line."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.core.aims import Aim
from drivetrain.core.goodput import NAMES
from drivetrain.core.value import format_duration
from drivetrain.report.picture import ceiling_in_words, of_first_layer
from drivetrain.report.run_data import Row, RunData, best_index

# ----------------------------------------------------------------------------------------------------------------------
# The curves of a run, as the page draws them: few enough points to load at once, and every extreme among them.
#
#     {"title": "Loss", "lines": [{"name": "training", "x": [1, 2, …], "y": [2.3, 2.2, …], "best": 41}, …], …}
#
# `x` are optimizer steps. `axes` tells what else they are: samples, tokens and seconds.

MOST_POINTS = 1500  # of a curve: more than there are pixels
MOST_EXPERTS = 24  # that have a band of their own
TELEMETRY = {
    "utilisation_percent": "Utilization (%)",
    "memory_used_gib": "Memory used (GiB)",
    "temperature_c": "Temperature (°C)",
    "power_watts": "Power (W)",
}
Chart = dict[str, Any]
Line = dict[str, Any]
Numbers = NDArray[np.float64]


def charts(data: RunData) -> list[Chart]:
    """Return the charts of a run, in the order of the page."""
    parts = (_loss(data), *_metrics(data), *_steps(data), *_logged(data), *_speed(data))
    return [chart for chart in parts if chart["lines"]]


def not_drawn(data: RunData) -> list[str]:
    """Return the names of what was logged or validated and has no value that could be drawn."""
    names = [name for name in data.metric_names if name not in data.repeated_names]
    logged = [name for name in data.logged_names if not _can_draw((*data.steps, *data.metrics), name)]
    return list(dict.fromkeys([*logged, *(name for name in names if not _can_draw(data.metrics, name))]))


def experts(data: RunData) -> Chart | None:
    """Return each expert's share of the tokens over the run; None where there are no experts."""
    layer, loads = of_first_layer(data.told("load"))
    if not loads:
        return None
    totals = [max(sum(row["loads"].values()), 1) for row in loads]
    numbers = sorted({number for row in loads for number in row["loads"]}, key=int)
    most = sorted(numbers, key=lambda number: -sum(row["loads"].get(number, 0) for row in loads))[:MOST_EXPERTS]
    rows = [
        {"step": row["step"], **{number: 100 * row["loads"].get(number, 0) / total for number in most}}
        for row, total in zip(loads, totals, strict=True)
    ]
    lines = [_line(f"expert {number}", rows, number) for number in sorted(most, key=int)]
    if len(most) < len(numbers):
        rest = [{"step": row["step"], "rest": 100 - sum(row[number] for number in most)} for row in rows]
        lines.append(_line(f"the {len(numbers) - len(most)} others", rest, "rest"))
    return {
        "title": f"Tokens by expert (%){f', layer {layer}' if layer else ''}",
        "lines": [line for line in lines if line["x"]],
        "stacked": True,
        "from_zero": True,
        "note": ceiling_in_words(loads),
    }


def telemetry(data: RunData) -> list[Chart]:
    """Return what the devices did, a chart for each figure."""
    devices = list(dict.fromkeys(row["device"] for row in data.devices))
    found = []
    for key, title in TELEMETRY.items():
        lines = [
            _line(device, [row for row in data.devices if row["device"] == device and "step" in row], key)
            for device in devices
        ]
        found.append({"title": title, "lines": [line for line in lines if line["x"]], "from_zero": True})
    return [chart for chart in found if chart["lines"]]


def axes(data: RunData) -> dict[str, list[float]]:
    """Return what steps are in samples, items and seconds of training, for some steps; between them is a line."""
    rows = data.steps
    items = str(data.plan.get("items", "items"))
    totals = {
        "steps": [row["step"] for row in rows],
        "samples": list(accumulate(row["samples"] for row in rows)),
        "seconds": list(accumulate(row["seconds"] for row in rows)),
    }
    if items not in ("items", "samples"):
        totals[items] = list(accumulate(row["num_items"] for row in rows))
    places = range(MOST_POINTS) if rows else ()
    chosen = sorted({round(place * (len(rows) - 1) / (MOST_POINTS - 1)) for place in places})
    return {name: [_short(values[index]) for index in chosen] for name, values in totals.items()}


def thinned(x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS) -> tuple[list[float], list[Any]]:
    """Return at most so many points: of each stretch the lowest and the highest, and what is not finite as a gap.

    A stretch in which some value is not finite keeps the first of these, so that the gap is seen.
    """
    chosen = _chosen(np.array(y, dtype=np.float64), most)  # None is nan
    return [x[index] for index in chosen], [_finite(y[index]) for index in chosen]


def _chosen(values: Numbers, most: int) -> Sequence[int]:
    if len(values) <= most:
        return range(len(values))
    is_finite = np.isfinite(values)
    low, high = np.where(is_finite, values, np.inf), np.where(is_finite, values, -np.inf)
    num_stretches = most // 3
    kept = {0, len(values) - 1}
    for number in range(num_stretches):
        begin, end = number * len(values) // num_stretches, (number + 1) * len(values) // num_stretches
        if is_finite[begin:end].any():
            kept |= {begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())}
        if not is_finite[begin:end].all():
            kept.add(begin + int(is_finite[begin:end].argmin()))
    return sorted(kept)


def _finite(value: Any) -> float | None:
    return _short(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


_OF_JSON = frozenset({int, float, bool, type(None)})
_ROWS_AT_ONCE, _KEYS_AT_ONCE = 256, 64  # what stays in a processor's cache; 50 MB for 100,000 rows


def _line(name: str, rows: Sequence[Row], key: str, **more: Any) -> Line:
    return {"name": name, **_curves(rows, [key])[key], **more}


def _curves(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, Line]:
    """Return `x` and `y` of each key, over the rows in which it has a value of JSON; empty where none is finite."""
    found: dict[str, Line] = {}
    for first in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[first : first + _KEYS_AT_ONCE]
        for key, values, is_there in zip(some, *_table(rows, some), strict=True):
            there = np.flatnonzero(is_there)
            chosen = there[_chosen(values[there], MOST_POINTS)] if np.isfinite(values).any() else ()
            points = [rows[index] for index in chosen]
            found[key] = {"x": [row["step"] for row in points], "y": [_finite(row[key]) for row in points]}
    return found


def _table(rows: Sequence[Row], keys: Sequence[str]) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the values of each key in each row, nan where it is no number, and whether it is a value of JSON.

    Rows lie scattered in memory. Each is read once for all keys: once for each key would take several times as long.
    """
    values, is_there = np.empty((len(keys), len(rows))), np.ones((len(keys), len(rows)), dtype=np.bool_)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        block = rows[begin : begin + _ROWS_AT_ONCE]
        found = [row.get(key, "") for row in block for key in keys]
        if not _OF_JSON.issuperset(map(type, found)):
            for index, value in enumerate(found):
                if type(value) not in _OF_JSON:
                    found[index] = None
                    is_there[index % len(keys), begin + index // len(keys)] = False
        values[:, begin : begin + len(block)] = np.array(found, dtype=np.float64).reshape(len(block), len(keys)).T
    return values, is_there


def _can_draw(rows: Sequence[Row], key: str) -> bool:
    return any(isinstance(value := row.get(key), (int, float)) and math.isfinite(value) for row in rows)


def _validated(name: str, label: str, data: RunData) -> Line:
    """Return the curve of a validation metric. The best point is marked where it is known which one that is."""
    line = _line(label, data.metrics, name, metric=name)
    if line["x"] and Aim(name).is_clear:
        line["best"] = best_index(name, line["y"])
    return line


def _loss(data: RunData) -> Chart:
    sets = [name for name in data.metric_names if name == "valid_loss" or name in data.set_losses]
    lines = [
        _line("training", data.steps, "loss", smooth=True),
        *(_line(f"training {name.removeprefix('loss_')}", data.steps, name, smooth=True) for name in data.part_names),
        *(_validated(name, _words(name), data) for name in sets if name not in data.repeated_names),
    ]
    return {"title": "Loss", "lines": [line for line in lines if line["x"]], "log": True}


def _metrics(data: RunData) -> Iterator[Chart]:
    """Yield a chart for each metric, with a curve for each validation set."""
    for base, found in _by_metric(data).items():
        if base not in data.logged_names:
            words = base.replace("_", " ")
            lines = [_validated(name, label if len(found) > 1 else words, data) for label, name in found.items()]
            yield {"title": words[:1].upper() + words[1:], "lines": [line for line in lines if line["x"]]}


def _logged(data: RunData) -> Iterator[Chart]:
    """Yield a chart for each value that was logged: in training, and over each validation set."""
    by_metric = _by_metric(data)
    names = [name for name in data.logged_names if not _is_rate(name) and name != "grad_norm"]
    for name, curve in _curves((*data.steps, *data.metrics), names).items():
        found = by_metric.get(name, {})
        training = {"name": "training" if found else name, **curve, "smooth": True}
        lines = [training, *(_validated(each, label, data) for label, each in found.items())]
        yield {"title": name, "lines": [line for line in lines if line["x"]]}


def _by_metric(data: RunData) -> dict[str, dict[str, str]]:
    """Return the names of validation metrics besides losses, by what they measure and by their validation set."""
    losses = {"valid_loss", *data.set_losses, *data.repeated_names}
    found: dict[str, dict[str, str]] = {}
    for name in data.metric_names:
        if name.startswith("valid_") and name not in losses:
            base = name.removeprefix("valid_")
            inside = next((each for each in data.set_names if base.startswith(f"{each}_")), "")
            label = inside.replace("_", " ") or "validation"
            found.setdefault(base.removeprefix(f"{inside}_") if inside else base, {})[label] = name
    return found


def _is_rate(name: str) -> bool:
    return name == "lr" or name.startswith("lr_")


def _steps(data: RunData) -> Iterator[Chart]:
    rates = [name for name in dict.fromkeys(name for row in data.steps[:1] for name in row) if _is_rate(name)]
    lines = [_line(name.replace("lr", "learning rate", 1), data.steps, name) for name in rates]
    yield {"title": "Learning rate", "lines": [line for line in lines if line["x"]]}
    measured = [row for row in data.steps if row.get("grad_norm") is not None]  # not in every step, where it takes long
    norm = _line("gradient norm", measured, "grad_norm", smooth=True)
    yield {"title": "Gradient norm", "lines": [norm] if norm["x"] else [], "log": True}


def _speed(data: RunData) -> Iterator[Chart]:
    rate = _line("samples per second", data.speed, "samples_per_second")
    yield {"title": "Samples per second", "lines": [rate] if rate["x"] else [], "from_zero": True}
    names = dict.fromkeys(name for row in data.speed for name in row["phases"])
    rows = [{"step": row["step"], **{name: 1e3 * row["phases"].get(name, 0.0) for name in names}} for row in data.speed]
    if len(rows) == 1:  # an area takes two places: the row holds for all of its steps
        rows.insert(0, {**rows[0], "step": max(1, rows[0]["step"] - data.speed[0]["steps"] + 1)})
    yield {
        "title": "Where a step's time goes (ms)",
        "lines": [line for line in (_line(name, rows, name) for name in names) if line["x"]],
        "stacked": True,
        "from_zero": True,
    }


def _words(name: str) -> str:
    return name.removeprefix("valid_").replace("_", " ") if name != "valid_loss" else "validation"


# ----------------------------------------------------------------------------------------------------------------------
# The time line of a run: its starts on the clock, what their time went into, and every fault and recovery on it.
#
# Made of `events.jsonl`, which the main process writes, and of `attempts.jsonl`, which the supervisor does. A process
# that was killed writes nothing: its end is the last that is known of it.

MOST_PIECES = 240  # of all starts together: more than there are pixels to tell them apart
# What the loop's time goes into, from below, in colors that are told apart by all eyes.
PHASES = {
    "step": "#0072b2", "data_wait": "#e69f00", "eval": "#009e73", "ckpt_block": "#cc79a7", "init": "#8c8c8c",
    "other": "#c4c9ce",
}  # fmt: skip
_ERROR = "stopped by an error"
FAULTS = {
    "failure": "failed", "hang": "hung", "out of memory": "out of memory", "bad step": "bad numbers",
    "loss spike": "loss spike", "replicas differ": "replicas differ", "save failed": "save failed",
    "save given up": "save given up", "checkpoint problem": "checkpoint problem",
    _ERROR: _ERROR,
}  # fmt: skip
RECOVERIES = {"micro-batch capped": "smaller micro-batches"}
KILLED = ("ended without a word", "killed, or the machine went down")
_BEGINS, _ENDS = ("start", "resume"), ("finish", "stop", "stopped by an error", "failure")
_WORDS = ("words", "error", "cause", "problem", "because", "text")


@dataclass
class RunStart:
    """One start of a run on the clock, in seconds since 1970."""

    launched: float
    began: float  # its first step
    step: int
    reached: int  # the last step that is known to have been done
    ended: float = 0.0
    is_known_to_end: bool = False
    pieces: list[tuple[float, float, dict[str, float]]] = field(default_factory=list)  # from, to, seconds by phase


@dataclass(frozen=True)
class Mark:
    """Something that happened."""

    at: float
    kind: str  # `fault`, `recovery` or `end`
    words: str
    step: int


def moment(row: Row) -> float | None:
    """Return when a row was written; None if it does not say."""
    try:
        return datetime.fromisoformat(str(row.get("time"))).timestamp()
    except ValueError:
        return None


def starts_and_marks(data: RunData) -> tuple[list[RunStart], list[Mark]]:
    """Return the starts of a run in their order, and what happened to it."""
    timed = [(at, row) for row in (*data.events, *data.attempts) if (at := moment(row)) is not None]
    starts, marks, is_claimed = list[RunStart](), list[Mark](), False
    spent, since = dict[str, float](), 0.0
    for at, row in sorted(timed, key=lambda pair: pair[0]):
        kind = str(row.get("event"))
        if kind in _BEGINS:
            marks += _begun(row, at, starts)
            before = row.get("since") if isinstance(row.get("since"), dict) else {}
            starts.append(RunStart(at - float((before or {}).get("seconds") or 0.0), at, _step(row), _step(row), at))
            spent, since, is_claimed = {}, at, False
            continue
        is_claimed = is_claimed or kind == "claim"  # the next start has begun
        if kind == "failure" and row.get("rank"):  # the main process stopped since that rank did
            began = starts[-1].began if starts else 0.0
            marks = [mark for mark in marks if mark.at < began or not mark.words.startswith(_ERROR)]
        if kind in FAULTS or kind in RECOVERIES:
            marks.append(Mark(at, "fault" if kind in FAULTS else "recovery", _in_words(kind, row), _step(row)))
        if starts:
            starts[-1].reached = max(starts[-1].reached, _step(row))
        if not starts or starts[-1].is_known_to_end or is_claimed:
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
                words = f"{'finished' if kind == 'finish' else 'stopped'} at step {_step(row):,}"
                marks.append(Mark(at, "end", words, _step(row)))
    if starts and (is_claimed or data.standing.state == "crashed"):
        behind = [row for row in data.steps if row["step"] > starts[-1].reached]
        marks += _ended_without_a_word(starts[-1], sum(row["seconds"] for row in behind), len(behind))
    return starts, sorted(marks, key=lambda mark: mark.at)


def _begun(row: Row, at: float, starts: Sequence[RunStart]) -> Iterator[Mark]:
    """Yield what the beginning of a start tells of the one before, and where this one goes on."""
    if not starts:
        return
    life, last_write, last_step = starts[-1], row.get("last_write"), row.get("last_step")
    if isinstance(last_step, int):  # of steps.jsonl, before its rows were cut
        life.reached = max(life.reached, last_step)
    behind = min(float(last_write), at) - life.ended if isinstance(last_write, (int, float)) else 0.0
    yield from _ended_without_a_word(life, max(0.0, behind), 0)
    lost = max(0, life.reached - _step(row))
    words = f"went on from step {_step(row):,}" if row.get("event") == "resume" else "began anew"
    words += f"; {lost:,} steps done again" if lost else ""
    yield Mark(at, "recovery", f"{words}, {format_duration(max(0.0, at - life.ended))} after the end", _step(row))


def _ended_without_a_word(life: RunStart, seconds: float, num_steps: int) -> Iterator[Mark]:
    """Yield that a start ended so many seconds and steps behind its last event, where nothing has told so."""
    if not life.is_known_to_end:
        life.ended, life.reached, life.is_known_to_end = life.ended + seconds, life.reached + num_steps, True
        yield Mark(life.ended, "fault", f"{KILLED[0]}: {KILLED[1]}", life.reached)


def _step(row: Row) -> int:
    step = row.get("step")
    return int(step) if isinstance(step, (int, float)) else 0


def _in_words(kind: str, row: Row) -> str:
    told = next((str(row[name]) for name in _WORDS if row.get(name)), "")
    where = f" on rank {row['rank']}" if isinstance(row.get("rank"), int) else ""
    step = f", step {_step(row):,}" if "step" in row else ""
    name = {**FAULTS, **RECOVERIES}[kind]
    return f"{name}{where}{step}" + (f": {told}" if told else "")


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

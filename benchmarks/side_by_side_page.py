"""docs/benchmarks/side-by-side.md, as far as it is figures: a column for each trainer, and where ours is behind."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.lines import lines_of_code
from benchmarks.side_by_side import PEERS, TRAINERS

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks" / "side-by-side.md"
TITLES = {
    "ours": "**Drivetrain, no flags**",
    "plain": "plain loop",
    "tuned": "tuned loop",
    "accelerate": "Accelerate",
    "fabric": "Fabric",
    "lightning": "Lightning",
    "hf": "HF Trainer",
}
Entry = Mapping[str, Any]


class Metric(NamedTuple):
    """A row: what is read from which kind of run, and which way is better."""

    title: str
    kind: str  # the part of a competitor's name after the trainer's
    values: Callable[[Entry], list[float]]  # of all runs; of lists that are lists in each run, all of these
    sign: int = -1  # 1: more is better
    topic: str = ""  # of REASONS: why ours is behind, where it is


def of_runs(entry: Entry, key: str, which: slice = slice(None)) -> list[float]:
    found: list[float] = []
    for run in entry["runs"][which]:
        value = run.get(key)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return found


def _scaled(key: str, factor: float = 1.0, which: slice = slice(None)) -> Callable[[Entry], list[float]]:
    return lambda entry: [factor * value for value in of_runs(entry, key, which)]


def metrics(document: Mapping[str, Any]) -> list[Metric]:
    """Return the rows of a document; times over the tuned loop are differences, so they depend on its entry."""
    lean = statistics.median(of_runs(document["competitors"].get("tuned-tiny", {"runs": []}), "step_us") or [0.0])
    unit, on_gpu = document["unit"], bool(document["machine"]["gpus"])
    memory = "GB of the GPU" if on_gpu else "MB of the process"
    first, later = slice(0, 1), slice(1, None)

    def over_lean(entry: Entry) -> list[float]:
        return [round(value - lean, 3) for value in of_runs(entry, "step_us")]

    return [
        Metric(f"{unit}, best flags", "", _scaled("rates"), 1, "speed"),
        Metric(f"{unit}, defaults", "-default", _scaled("rates"), 1, "speed"),
        Metric("CPU time per step (ms)", "", _scaled("cpu_ms_per_step"), -1, "speed"),
        Metric("first step done after, first start (s)", "", _scaled("first_step_seconds", 1, first), -1, "start"),
        Metric("... later starts (s)", "", _scaled("first_step_seconds", 1, later), -1, "start"),
        Metric("... in CPU time (s)", "", _scaled("first_step_cpu_seconds"), -1, "start"),
        Metric(f"loss {document['workload']['target_loss']} after (s)", "", _scaled("target_seconds"), -1, "loss"),
        Metric(f"peak memory ({memory})", "", _scaled("peak_bytes", 1e-9 if on_gpu else 1e-6), -1, "memory"),
        Metric("a save stops training for (ms)", "", _scaled("save_stall_ms"), -1, "save"),
        Metric(
            f"a tiny step over the tuned loop's ({'µs' if on_gpu else 'µs of CPU'})", "-tiny", over_lean, -1, "step"
        ),
        Metric("search for a plan, first start (s)", "", _scaled("planning_seconds", 1, first), -1, "search"),
        Metric("killed: steps lost", "-killed", _scaled("steps_lost"), -1, "lost"),
        Metric("killed: until back at that step (s)", "-killed", _scaled("seconds_lost"), -1, "kill"),
    ]


REASONS = {
    "speed": "the same operations of torch, and about 500 more lines of Python: every step is written down and what "
    "is watched by default is watched; loops by hand, and trainers with their logger off, write nothing",
    "start": "more to import, the machine is detected, and before the first step the loss is tried, disk and memory "
    "are checked, and a plan is made",
    "loss": "the start is part of it, see above; order and dropout differ between trainers, so the loss is reached "
    "some steps earlier or later",
    "memory": "more modules (pydantic, rich, the report at the end), and the copy of the state that is written beside "
    "training",
    "save": "the state is copied in one step, and a thread that hashes and syncs files takes its share of the next; "
    "others write without syncing",
    "step": "a line of JSON per step, phases, checks for bad numbers and hangs, and generators keyed by step, so that "
    "dropout does not depend on what ran before",
    "search": "the others do not search: their flags were set by hand",
    "lost": "a save counts only once it is on the disk, which it reaches beside training; the kill came before",
    "kill": "the start is part of it, see above, and so are the steps that were lost",
}
ON_A_GPU = {
    "speed": "the tuned loop compiles all at once; for a job of 4,000 steps the plan compiles the blocks and what is "
    "around them, which is done sooner, and launches more kernels: 470 to 479 thousand tokens/s once it runs. In the "
    "first 30 steps after a start it has 362 to 432, as host memory is pinned for the saves. Its steps were not "
    "captured in this run: what was left was held to be too little for a trial of 3 s (since then it is tried)",
    "start": "a plan is searched, with six trials and the model compiled in two ways, which pays in the steps that "
    "follow; the plain loop does not compile",
    "memory": "a second copy of weights and moments stays on the GPU, so that a save does not stop training, and "
    "captured steps have memory of their own",
}


def shown(document: Mapping[str, Any]) -> str:
    """Return the tables of one document."""
    entries, rows = document["competitors"], metrics(document)
    lines = [
        "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in document["workload"].items()) + ".",
        "",
        *_busy(document),
        f"| | {' | '.join(TITLES.values())} |",
        f"|---|{'---:|' * len(TITLES)}",
    ]
    for metric in rows:
        cells = [_cell(entries, trainer, metric) for trainer in TRAINERS]
        if any(cell not in ("", "not run") for cell in cells):
            lines.append(f"| {metric.title} | {' | '.join(cells)} |")
    lines.append(f"| killed and resumed: same bits | {' | '.join(_bits(entries, name) for name in TRAINERS)} |")
    lines.append(f"| lines of code | {' | '.join(str(_lines(name)) for name in TRAINERS)} |")
    reasons = REASONS | (ON_A_GPU if document["machine"]["gpus"] else {})
    lines += ["", *_behind(entries, rows, reasons)]
    lines += [f"- {TITLES[name].strip('*')}: {entries[name]['what']}." for name in TRAINERS if name in entries]
    never = [name for name in dict.fromkeys(document.get("left_out", ())) if name not in entries]
    if never:
        lines += ["", f"Left out for want of time: {', '.join(never)}."]
    return "\n".join([*lines, ""])


def _busy(document: Mapping[str, Any]) -> list[str]:
    """Return a warning where other processes wanted the cores, too."""
    load, cores = document.get("load", 0.0), document["machine"].get("usable_cores", 1)
    if load <= cores:
        return []
    words = "seconds, rates and what a save costs say little beyond their spread, and CPU times are to be compared"
    if document["machine"]["gpus"]:
        words = "what the CPU does, above all starting, may take longer than on an idle one"
    return [f"The machine was busy (a load of {load} on {cores} cores): {words}.", ""]


def _cell(entries: Mapping[str, Entry], trainer: str, metric: Metric) -> str:
    if metric.kind == "-default" and f"{trainer}-tiny" in entries and f"{trainer}-default" not in entries:
        return ""  # it has no flags to leave out
    entry = entries.get(f"{trainer}{metric.kind}")
    if entry is None:
        return "not run"
    if not entry["runs"]:
        return str(entry.get("problem", "no result")).replace("|", "/")[:120]
    values = metric.values(entry)
    if values:
        return _figure(values)
    if metric.title.startswith("search"):
        return "none"
    if metric.title.startswith("loss"):
        return "not reached"
    return ""


def _figure(values: Sequence[float]) -> str:
    from benchmarks.table import number

    def brief(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else number(value)

    if len(values) == 1 or min(values) == max(values):
        return brief(statistics.median(values))
    return f"{brief(statistics.median(values))} ({brief(min(values))} to {brief(max(values))})"


def _bits(entries: Mapping[str, Entry], trainer: str) -> str:
    entry = entries.get(f"{trainer}-killed")
    if entry is None:
        return "not run"
    if not entry["runs"]:
        return str(entry.get("problem", "no result")).replace("|", "/")[:120]
    run = entry["runs"][-1]
    if not run.get("repeats", True):
        return "cannot be told: it does not repeat undisturbed"
    return "yes" if run["same_bits"] else f"no, from step {run['differs_from_step']} on"


def _lines(trainer: str) -> int:
    return lines_of_code((PEERS / f"text_{TRAINERS[trainer][0]}.py").read_text(encoding="utf-8"))


def _behind(entries: Mapping[str, Entry], rows: Sequence[Metric], reasons: Mapping[str, str]) -> list[str]:
    """Return every row in which another trainer is better than ours, and why."""
    found = []
    for metric in rows:
        mine = metric.values(entries[f"ours{metric.kind}"]) if f"ours{metric.kind}" in entries else []
        others = {
            name: metric.values(entries[f"{name}{metric.kind}"])
            for name in TRAINERS
            if name != "ours" and entries.get(f"{name}{metric.kind}", {"runs": []})["runs"]
        }
        others = {name: values for name, values in others.items() if values}
        if not mine or (not others and not metric.title.startswith("search")):
            continue
        if not others:
            found.append(f"| {metric.title} | {_figure(mine)} | none (all others) | {reasons[metric.topic]} |")
            continue
        best = max(others, key=lambda name: metric.sign * statistics.median(others[name]))
        if metric.sign * statistics.median(mine) < metric.sign * statistics.median(others[best]):
            ahead = [
                name for name in others if metric.sign * (statistics.median(others[name]) - statistics.median(mine)) > 0
            ]
            names = ", ".join(TITLES[name] for name in ahead)
            within = len(mine) > 1 and min(others[best]) <= max(mine) and min(mine) <= max(others[best])
            reason = f"{'within the spread of both; ' if within else ''}{reasons[metric.topic]}"
            found.append(f"| {metric.title} | {_figure(mine)} | {_figure(others[best])} ({names}) | {reason} |")
    if not found:
        return []
    return ["Where ours is behind:", "", "| | ours | best (who is ahead) | why |", "|---|---:|---:|---|", *found, ""]

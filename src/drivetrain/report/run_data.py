"""A run folder as plain rows, and in words."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.aims import Aim
from drivetrain.core.goodput import (
    ATTEMPTS,
    ENDS,
    NAMES,
    STARTS,
    Account,
    Standing,
    how_it_stands,
    is_running,
    read_account,
    seconds_left,
)
from drivetrain.core.log import printable
from drivetrain.core.run_folder import RESERVED_NAMES, read_rows, read_yaml, steps_finished
from drivetrain.core.value import format_metric

# ----------------------------------------------------------------------------------------------------------------------
# Reads a run folder into plain rows. Files that are missing are empty; an incomplete last line is left out.

Row = dict[str, Any]
_OF_NUMBERS = frozenset({int, float, bool})
NUMBERS_OF_A_STEP = ("step", "epoch", "samples", "num_items", "loss", "seconds")
LAST_STEPS = 500  # by which the time left is judged
TESTED = "weights_of_step"  # in rows of metrics.jsonl that are of the test after the last step


@dataclass(frozen=True)
class Epoch:
    """The steps of one epoch together."""

    number: int  # from 1
    loss: float
    seconds: float  # of its steps: checkpoints and validation aside
    samples: int
    aside_seconds: float = 0.0  # of validations and sleep in it

    @property
    def whole_seconds(self) -> float:
        """The seconds of the epoch, with validation and sleep."""
        return self.seconds + self.aside_seconds


@dataclass(frozen=True)
class RunData:
    """The records of one run."""

    folder: Path
    job: Row
    plan: Row
    hardware: Row
    steps: list[Row]
    metrics: list[Row]  # of validations
    speed: list[Row]
    devices: list[Row]
    events: list[Row]
    tests: list[Row] = field(default_factory=list)  # after the last step; the newest one counts
    attempts: list[Row] = field(default_factory=list)  # of the supervisor
    source: Row = field(default_factory=dict)  # where its job comes from
    damage: tuple[str, ...] = ()  # what could not be read and is left out
    account: Account | None = None  # of its time
    standing: Standing = field(default_factory=lambda: Standing("not begun"))

    @classmethod
    def read(cls, folder: Path) -> "RunData":
        damage = list[str]()
        metrics = _lines(folder / "metrics.jsonl", damage, ("step",))
        events, steps = _lines(folder / "events.jsonl", damage), _steps(folder, damage)
        last = next((row["event"] for row in reversed(events) if row.get("event") in (*STARTS, *ENDS)), "")
        goes_on = last not in ENDS and is_running(folder, events)  # the run itself writes its report after its end
        try:
            account = read_account(folder, is_running=goes_on)
        except (ValueError, LookupError, TypeError):
            account = None
            damage.append("the account of the time cannot be read and is left out")
        return cls(
            folder=folder,
            job=_yaml(folder / "job.yaml", damage),
            plan=_yaml(folder / "plan.yaml", damage),
            hardware=_yaml(folder / "hardware.json", damage),
            steps=steps,
            metrics=[row for row in metrics if TESTED not in row],
            tests=[row for row in metrics if TESTED in row],
            speed=_lines(folder / "speed.jsonl", damage, ("step", "phase_steps")),
            devices=_lines(folder / "gpu.jsonl", damage),
            events=events,
            attempts=_lines(folder / ATTEMPTS, damage),
            source=_yaml(folder / "source.json", damage),
            damage=tuple(damage),
            account=account,
            standing=how_it_stands(folder, events, goes_on=goes_on),
        )

    @property
    def is_running(self) -> bool:
        """Whether a process works on it."""
        return self.standing.state == "running"

    @property
    def at_last(self) -> str:
        """When its last values were measured, in words."""
        return "now" if self.is_running else "at the end"

    @property
    def name(self) -> str:
        """The name of the run's folder, which `--name` gives."""
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        """The name of the run, and that of its job where it is another."""
        job = str(self.job.get("name") or self.name)
        return self.name if job == self.name else f"{self.name} ({job})"

    @property
    def lost(self) -> str:
        """Where the records of a finished run end, if those of its last steps are lost; else empty."""
        return _lost(self.folder, self.steps)

    @property
    def seconds_left(self) -> float | None:
        """The time that a run which goes on will take; None where it is not known."""
        return seconds_left(self.job, self.steps[-LAST_STEPS:], self.metrics) if self.is_running else None

    @cached_property
    def epochs(self) -> list[Epoch]:
        found, place = [], 0
        aside = [row for row in (*self.metrics, *self.told("sleep")) if isinstance(row.get("seconds"), (int, float))]
        aside.sort(key=lambda row: row["step"])
        for number, rows in groupby(self.steps, key=lambda row: row["epoch"]):
            steps, begin = list(rows), place
            while place < len(aside) and aside[place]["step"] <= steps[-1]["step"]:
                place += 1
            found.append(_epoch(number, steps, sum(row["seconds"] for row in aside[begin:place])))
        return found

    @property
    def aside_in_words(self) -> str:
        """What an epoch has besides its steps: few jobs have experts that sleep."""
        return "validation and sleep" if self.told("sleep") else "validation"

    @cached_property
    def metric_names(self) -> list[str]:
        """The names of validation metrics, in the order in which they first appear."""
        names = {name: None for row in self.metrics for name in row if name not in ("step", "epoch", "seconds")}
        return [name for name in names if any(isinstance(row.get(name), (int, float)) for row in self.metrics)]

    @cached_property
    def repeated_names(self) -> dict[str, str]:
        """The metrics of the first of several validation sets that are there again without its name, with that name."""
        found = dict[str, str]()
        for name in self.metric_names:
            for each in self.set_names:
                own = f"valid_{each}_{name.removeprefix('valid_')}"
                if own in self.metric_names and all(_is_same(row.get(name), row.get(own)) for row in self.metrics):
                    found.setdefault(name, own)
        return found

    @property
    def set_names(self) -> list[str]:
        """The names of validation sets, where there are several: those that have a loss of their own."""
        return [name.removeprefix("valid_").removesuffix("_loss") for name in self.set_losses]

    def metric(self, name: str) -> tuple[list[float], list[float]]:
        """Return steps and values."""
        rows = [row for row in self.metrics if isinstance(row.get(name), (int, float))]
        return [row["step"] for row in rows], [row[name] for row in rows]

    @property
    def peak_memory_gib(self) -> float | None:
        """The most that was allocated on a device; None where that was not measured."""
        return max((row["memory_peak_gib"] for row in self.devices if "memory_peak_gib" in row), default=None)

    @property
    def process_memory_gib(self) -> float | None:
        """The most that the main process was seen to hold, now and then; None where nothing was measured."""
        return max((row["process_memory_gib"] for row in self.devices if "process_memory_gib" in row), default=None)

    @property
    def set_losses(self) -> list[str]:
        """The losses over validation sets that have names, and other metrics called a loss: `valid_NAME_loss`."""
        found = [name for name in self.metric_names if name.startswith("valid_") and name.endswith("_loss")]
        return [name for name in found if name != "valid_loss" and not name.startswith("valid_loss_")]

    @cached_property
    def _step_names(self) -> list[str]:
        """What `steps.jsonl` has, in the order in which it first appears. Few rows have other names than the first."""
        return list(dict.fromkeys(name for names in dict.fromkeys(map(tuple, self.steps)) for name in names))

    @property
    def part_names(self) -> list[str]:
        """The named parts of the loss, as `steps.jsonl` has them: `loss_NAME`."""
        return [name for name in self._step_names if name.startswith("loss_")]

    @cached_property
    def logged_names(self) -> list[str]:
        """The names that a loss logged, as `steps.jsonl` has them, and those that hooks logged."""
        of_steps = (name for name in self._step_names if not name.startswith(("loss_", "num_items_")))
        of_hooks = (name for name in self.metric_names if not name.startswith("valid_"))
        return [name for name in dict.fromkeys((*of_steps, *of_hooks)) if name not in RESERVED_NAMES]

    def logged(self, name: str) -> tuple[list[float], list[float]]:
        """Return steps and values of something that was logged."""
        rows = (*self.steps, *self.metrics)
        found = [(row["step"], value) for row in rows if isinstance(value := row.get(name), (int, float))]
        return [step for step, _ in found], [value for _, value in found]

    def part_loss(self, name: str) -> float | None:
        """Return the mean of a part over the last epoch, by its own count; None if that had no item of it."""
        last = self.steps[-1]["epoch"]
        items = f"num_items_{name.removeprefix('loss_')}"
        rows = [row for row in self.steps if row["epoch"] == last and row.get(name) is not None]
        counts = [float(row.get(items) or row["num_items"]) for row in rows]
        total = sum(row[name] * count for row, count in zip(rows, counts, strict=True))
        return total / sum(counts) if sum(counts) else None

    @property
    def phases(self) -> dict[str, float]:
        """The mean seconds of a step, by phase, over all steps that were measured."""
        totals: dict[str, float] = {}
        for row in self.speed:
            for name, seconds in row["phases"].items():
                totals[name] = totals.get(name, 0.0) + seconds * row["phase_steps"]
        return {name: total / self.num_timed_steps for name, total in totals.items()} if totals else {}

    @property
    def num_timed_steps(self) -> int:
        return sum(row["phase_steps"] for row in self.speed)

    def told(self, kind: str) -> list[Row]:
        """Return events of a kind, in order; without those of steps that were done again after a resume."""
        found: list[Row] = []
        for row in self.events:
            if row.get("event") == "resume":
                found = [earlier for earlier in found if earlier["step"] <= row["step"]]
            elif row.get("event") == kind:
                found.append(row)
        return found

    def event(self, *kinds: str) -> Row:
        """Return the last event of these kinds."""
        return next((row for row in reversed(self.events) if row.get("event") in kinds), {})


def best_index(metric: str, values: Sequence[float | None]) -> int:
    """Return the place of the best value of a metric; any number is better than none."""
    aim, best = Aim(metric), 0
    numbers = [math.nan if value is None else value for value in values]
    for index, value in enumerate(numbers):
        if aim.is_better(value, than=numbers[best]):
            best = index
    return best


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _epoch(number: int, rows: list[Row], aside_seconds: float) -> Epoch:
    loss, items, seconds, samples = 0.0, 0.0, 0.0, 0
    for row in rows:  # one pass: a run may have very many epochs of a few steps
        if row["num_items"]:
            loss += row["loss"] * row["num_items"]
            items += row["num_items"]
        seconds += row["seconds"]
        samples += row["samples"]
    return Epoch(number + 1, loss / (items or 1.0), seconds, samples, aside_seconds)


def _yaml(path: Path, damage: list[str]) -> Row:
    try:
        found = read_yaml(path)
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError) as error:
        why = getattr(error, "problem", None) or str(error).splitlines()[0]  # YAML's first line says only where
        damage.append(f"{path.name} cannot be read and is left out: {why}")
        return {}
    return found if isinstance(found, dict) else {}


def _steps(folder: Path, damage: list[str]) -> list[Row]:
    steps = _lines(folder / "steps.jsonl", damage, NUMBERS_OF_A_STEP)
    if lost := _lost(folder, steps):
        damage.append(f"steps.jsonl ends {lost}: the rest is lost")
    return steps


def _lost(folder: Path, steps: Sequence[Row]) -> str:
    done = steps_finished(folder)
    if done is None or not steps or steps[-1]["step"] >= done:
        return ""
    return f"at step {steps[-1]['step']:,}, and {done:,} were done"


def _lines(path: Path, damage: list[str], numbers: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a file; those in which one of `numbers` is no number are damaged as well."""
    found, num_damaged = read_rows(path)
    rows = [row for row in found if _OF_NUMBERS.issuperset(map(type, map(row.get, numbers)))]
    num_damaged += len(found) - len(rows)
    if num_damaged:
        damage.append(f"{num_damaged} damaged lines of {path.name} are left out")
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Summarizes a run in words.

_FIGURES = {
    "utilisation_percent": "busy (%)",
    "memory_utilisation_percent": "memory busy (%)",
    "memory_used_gib": "memory used (GiB)",
    "memory_allocated_gib": "  allocated (GiB)",
    "memory_reserved_gib": "  reserved (GiB)",
    "temperature_c": "temperature (°C)",
    "power_watts": "power (W)",
    "clock_sm_mhz": "SM clock (MHz)",
    "clock_memory_mhz": "memory clock (MHz)",
    "process_cpu_percent": "this process (%)",
    "process_memory_gib": "this process (GiB)",
}


def summary(data: RunData) -> str:
    parts = [[*part(data)] for part in (_how, _result, _speed, _goodput, _phases, _verdict, _devices)]
    return printable("\n\n".join("\n".join(lines) for lines in parts if lines)) + "\n"


def _line(label: str, words: object) -> str:
    return f"{label:<21} {words}"


def _how(data: RunData) -> Iterator[str]:
    end, plan = data.event("finish", "stop"), data.plan
    how, why, _ = data.standing
    at = f", at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC" if how == "running" else ""
    yield f"{data.title}: {how}{at}" + (f" ({why})" if why else "")
    yield ""
    if plan:
        yield _line("processes", f"{plan['world_size']} ({plan['strategy']})")
        yield _line("device", device_in_words(data))
        yield _line("precision", plan["precision"])
        count = int(plan.get("num_devices") or plan["world_size"])
        each = -(-plan["micro_batch"] * plan["world_size"] // count)
        batch = f"{each} × {plan['accumulation']} accumulated × {count} device{'s' if count > 1 else ''}"
        over_steps = plan.get("batch_over_steps")
        yield _line("global batch", f"{plan['global_batch']} ({batch})" + (f": {over_steps}" if over_steps else ""))
    yield _line("compilation", end.get("compilation", "unknown"))
    if end.get("capture"):
        yield _line("step capture", end["capture"])


def device_in_words(data: RunData) -> str:
    device, cpu = data.plan["device"], data.hardware.get("cpu", {})
    if device == "cpu":
        return f"cpu ({cpu.get('model', 'unknown')}, {cpu.get('num_usable', '?')} cores)"
    gpus = data.hardware.get("gpus", [])
    name = next((gpu["name"] for gpu in gpus if f"cuda:{gpu['index']}" == device), "")
    return f"{device} ({name})" if name else device


def _result(data: RunData) -> Iterator[str]:
    yield _line("optimizer steps", data.steps[-1]["step"] if data.steps else 0)
    skipped = sum(bool(row.get("skipped")) for row in data.steps)
    if skipped:
        yield _line(
            "skipped steps", f"{skipped} (a loss or a gradient was not finite; the weights stayed as they were)"
        )
    if data.epochs:
        yield _line("loss of this epoch" if data.is_running else "final loss", format_metric(data.epochs[-1].loss))
        for name in data.part_names:
            loss = data.part_loss(name)
            if loss is not None:
                yield _line(f"  {name.removeprefix('loss_').replace('_', ' ')}", format_metric(loss))
    for name in data.metric_names:
        _, values = data.metric(name)
        words = f"{format_metric(values[-1])} {data.at_last}"
        if Aim(name).is_clear:
            words += f", {format_metric(values[best_index(name, values)])} at best"
        yield _line(name.replace("_", " "), words)
    for name, value in data.tests[-1].items() if data.tests else ():
        if name.startswith("test_") and value is not None:
            yield _line(
                name.replace("_", " "), f"{format_metric(value)}, with the weights of step {data.tests[-1][TESTED]}"
            )


def _speed(data: RunData) -> Iterator[str]:
    seconds = sum(row["seconds"] for row in data.steps)
    if not seconds:
        return
    yield _line("training time", f"{seconds:.2f} s, checkpoints and validation aside")
    aside = sum(epoch.aside_seconds for epoch in data.epochs)
    if aside:
        whole = [epoch.whole_seconds for epoch in data.epochs]
        words = f"{statistics.mean(whole):.2f} s (mean), {max(whole):.2f} s at most, with {data.aside_in_words}"
        yield _line("time per epoch", words)
    interval = data.event("checkpoint interval")
    if interval:
        yield _line("checkpoints", interval["words"])
    yield _line("time per step", f"{1e3 * statistics.median(row['seconds'] for row in data.steps):.3f} ms (median)")
    fastest = max(epoch.samples / max(epoch.seconds, 1e-9) for epoch in data.epochs)
    over_all = sum(row["samples"] for row in data.steps) / seconds
    rate = median(row["samples_per_second"] for row in data.speed if "samples_per_second" in row)
    words = f"{over_all if rate is None else rate:,.0f} (median), {over_all:,.0f} over all, {fastest:,.0f} at best"
    yield _line("samples per second", words)
    rate = median(row["items_per_second"] for row in data.speed if "items_per_second" in row)
    if rate is not None:
        yield _line(f"{data.plan.get('items', 'items')} per second", f"{rate:,.0f} (median)")
    yield from _flops(data)


def _flops(data: RunData) -> Iterator[str]:
    flops = data.event("flops")
    if not flops:
        return
    yield _line("FLOPs per sample", f"{flops['flops_per_sample']:.4g} (forward and backward, as torch counts them)")
    peak, rate = flops["peak_flops_per_second"], median(row["mfu"] for row in data.speed if "mfu" in row)
    if peak is None:
        yield _line("MFU", "unknown: this device's peak rate is not in the table; drivetrain verify --save measures it")
    elif rate is not None:
        source = f"{flops['peak_origin']}: {flops['peak_source']}"
        yield _line("MFU", f"{rate:.1%} of {peak / 1e12:,.1f} TFLOP/s ({source})")


def _goodput(data: RunData) -> Iterator[str]:
    account = data.account
    if account is None or not account.wall_seconds:
        return
    yield f"Where the time of the run went, from its submission (goodput {account.in_words()})"
    for name, seconds in account.seconds.items():
        if seconds:
            yield f"  {NAMES[name]:<18} {seconds:>12.2f} s {seconds / account.wall_seconds:>7.1%}"
    if account.interruptions:
        yield f"  {'interruptions':<18} {account.failures_in_words()}"


def _phases(data: RunData) -> Iterator[str]:
    phases = data.phases
    if not phases:
        return
    clock = "the device's clock" if data.plan.get("device", "cpu") != "cpu" else "the host's clock"
    yield f"Where a step's time goes (mean of {data.num_timed_steps} steps, by {clock}, main process)"
    whole = sum(phases.values())
    for name, seconds in phases.items():
        yield f"  {name:<18} {1e3 * seconds:>10.3f} ms {seconds / whole:>7.1%}"
    yield f"  {'together':<18} {1e3 * whole:>10.3f} ms"


def _verdict(data: RunData) -> Iterator[str]:
    """Yield what the doctor found at the end; what it found last, if there was no end."""
    verdict = data.event("verdict")
    if not verdict:
        return
    yield f"What holds it up, the gravest first (judged on {verdict['steps']} steps)"
    for finding in verdict["findings"]:
        yield f"  {finding['kind']}: {finding['words']}"
        if finding["next_step"]:
            yield f"    next: {finding['next_step']}"


def _devices(data: RunData) -> Iterator[str]:
    for device in dict.fromkeys(row["device"] for row in data.devices):
        rows = [row for row in data.devices if row["device"] == device]
        yield f"{device:<22} {'mean':>10} {'max':>10} {'min':>10}   ({len(rows)} samples)"
        for key, label in _FIGURES.items():
            values = [row[key] for row in rows if key in row]
            if values:
                yield f"  {label:<20} {statistics.fmean(values):>10.1f} {max(values):>10.1f} {min(values):>10.1f}"
        yield from _memory_efficiency(rows)
        throttled = [reason for row in rows for reason in row.get("throttled", [])]
        if throttled:
            counts = ", ".join(f"{reason} ({throttled.count(reason)})" for reason in dict.fromkeys(throttled))
            yield f"  throttled in {sum(bool(row.get('throttled')) for row in rows)} samples: {counts}"
    for row in data.events:
        if row.get("event") == "note":
            yield f"note: {row['text']}"


def _memory_efficiency(rows: list[Row]) -> Iterator[str]:
    """Yield how much of the card the model needed, and how much of torch's reserved memory it used."""
    peak = max((row["memory_peak_gib"] for row in rows if "memory_peak_gib" in row), default=0.0)
    reserved = max((row["memory_peak_reserved_gib"] for row in rows if "memory_peak_reserved_gib" in row), default=0.0)
    total = next((row["memory_total_gib"] for row in rows if "memory_total_gib" in row), 0.0)
    if peak and reserved:
        of_total = f" = {peak / total:.0%} of the card" if total else ""
        yield f"  peak allocated {peak:.2f} GiB{of_total}, {peak / reserved:.0%} of what torch had reserved"


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None

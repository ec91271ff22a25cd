"""The same work done by several competitors, measured one after the other, each beside the others in one file.

A competitor is a name, what it is in words, and a function that measures it. It runs in a child process, so that one
that crashes or hangs does not end the others: they go on in a new child. A result goes to the file as soon as it is
there. Competitors marked `alone` get a fresh process each (what is planned there depends on free memory); the others
share one, with torch's switches set back and memory given back in between.

Nothing here knows torch: the children do the work.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.hardware import Hardware


@dataclass(frozen=True)
class Measured:
    """The result of one run of a competitor."""

    seconds: Sequence[float]  # per step, one entry per window of steps; warm-up is not in it
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Competitor:
    name: str
    what: str  # in words, with every flag, so that a reader can judge it
    measure: Callable[["Circumstances"], Measured]
    cap_seconds: float = 60.0  # start-up of the process included
    alone: bool = False
    may_be_warmed: bool = False  # compiles: its cache can be filled beforehand, beside others
    needs: tuple[str, ...] = ()  # packages; where one is missing the competitor is left out, and that is reported
    why_not: str = ""  # it is hopeless on this machine: left out too, for this reason


@dataclass(frozen=True)
class Circumstances:
    """The facts that a competitor is told."""

    smoke: bool  # tiny sizes that run on any CPU
    is_warming: bool  # only fill the compiler's cache
    known: Mapping[str, float]  # rates of competitors that were measured before

    def best_of(self, prefix: str, default: str) -> str:
        """Return the fastest known competitor whose name begins so."""
        found = {name: rate for name, rate in self.known.items() if name.startswith(prefix)}
        return max(found, key=lambda name: found[name]) if found else default


@dataclass(frozen=True)
class Aim:
    """A promise: the rate of `ours` is at least so many times that of the fastest of `against`."""

    words: str
    against: tuple[str, ...]
    at_least: float
    ours: str = "ours"


@dataclass(frozen=True)
class Limit:
    """A promise about a fact of `ours`, in its first run."""

    words: str
    fact: str
    at_most: float
    ours: str = "ours"


@dataclass(frozen=True)
class Contest:
    name: str
    module: str  # where `contest(name, smoke)` makes it, for the children
    workload: Mapping[str, Any]  # in words and numbers, for the file
    unit: str  # of the rate
    units_per_step: float
    competitors: tuple[Competitor, ...]
    order: tuple[str, ...]  # a name may stand there twice; `best:PREFIX` is the fastest of those so far
    aims: tuple[Aim, ...] = ()
    limits: tuple[Limit, ...] = ()
    shown_as: str = ""  # the kind of table, where it is not that of rates

    def competitor(self, name: str) -> Competitor:
        return next(each for each in self.competitors if each.name == name)


class Book:
    """The file of a contest. Each result is there as soon as it was measured."""

    def __init__(self, path: Path, contest: Contest, machine: Mapping[str, Any], *, keep: bool) -> None:
        self._path, self._contest = path, contest
        self.revision = ""  # of this repository: kept with each run, since a later one may keep the results of others
        self.document: dict[str, Any] = {
            "benchmark": contest.name,
            "command": f"python -m benchmarks {contest.name}",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": dict(machine),
            "workload": dict(contest.workload),
            "unit": contest.unit,
            "competitors": {},
            **({"shown_as": contest.shown_as} if contest.shown_as else {}),
        }
        if keep and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if _kind(before["machine"]) == _kind(machine) and before["workload"] == self.document["workload"]:
                self.document["competitors"] = before["competitors"]
                cores = before["machine"].get("usable_cores")
                if cores != machine.get("usable_cores"):
                    for entry in self.document["competitors"].values():
                        for run in entry["runs"]:
                            run.setdefault("usable_cores", cores)

    def forget(self, name: str) -> None:
        self.document["competitors"].pop(name, None)

    def add(self, name: str, seconds: Sequence[float], facts: Mapping[str, Any]) -> None:
        entry = self._entry(name)
        entry.pop("problem", None)
        rates = [self._contest.units_per_step / each for each in seconds]
        when = {"at": _now()}
        if self.revision:
            when |= {"revision": self.revision}
        entry["runs"].append({**when, "rates": [_short(rate) for rate in rates], **facts})
        every = [rate for run in entry["runs"] for rate in run["rates"]]
        entry["rate"] = summary(every) if every else None
        self.write()

    def add_problem(self, name: str, problem: str) -> None:
        entry = self._entry(name)
        if not entry["runs"]:
            entry["problem"] = problem
        else:
            entry["runs"].append({"at": _now(), "rates": [], "problem": problem})
        self.write()

    def rates(self) -> dict[str, float]:
        entries = self.document["competitors"]
        return {name: entry["rate"]["median"] for name, entry in entries.items() if entry.get("rate")}

    def write(self) -> None:
        hopeless = {each.name for each in self._contest.competitors if each.why_not}
        self.document["ratios"] = ratios(self._contest.aims, self.rates(), hopeless)
        self.document["limits"] = limits(self._contest.limits, self.document["competitors"])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(self._path)

    def _entry(self, name: str) -> dict[str, Any]:
        what = self._contest.competitor(name).what
        entry: dict[str, Any] = self.document["competitors"].setdefault(name, {"what": what, "rate": None, "runs": []})
        return entry


def _kind(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has to be equal for figures to stand side by side: beside a GPU, the number of cores need not be."""
    return {key: value for key, value in machine.items() if key != "usable_cores" or not machine.get("gpus")}


def ratios(aims: Sequence[Aim], rates: Mapping[str, float], hopeless: Collection[str] = ()) -> dict[str, Any]:
    """Return the ratios whose two sides were measured.

    While some of the others were not, none is called met: they may be faster. Those that are hopeless on this machine
    are not.
    """
    found: dict[str, Any] = {}
    for aim in aims:
        others = {name: rates[name] for name in aim.against if name in rates}
        if aim.ours not in rates or not others:
            continue
        fastest = max(others, key=lambda name: others[name])
        value = rates[aim.ours] / others[fastest]
        missing = [name for name in aim.against if name not in rates and name not in hopeless]
        found[aim.words] = {
            "value": _short(value),
            "at_least": aim.at_least,
            "met": value >= aim.at_least and not missing,
            "against": fastest,
            **({"missing": missing} if missing else {}),
        }
    return found


def limits(wanted: Sequence[Limit], entries: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for limit in wanted:
        runs = [run for run in entries.get(limit.ours, {}).get("runs", []) if run.get(limit.fact) is not None]
        if runs:
            value = float(runs[0][limit.fact])
            found[limit.words] = {"value": _short(value), "at_most": limit.at_most, "met": value <= limit.at_most}
    return found


def run_contest(
    contest: Contest,
    book: Book,
    *,
    smoke: bool = False,
    only: Sequence[str] = (),
    budget_seconds: float = 1e9,
    once: bool = False,
    cache: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Run all competitors in the contest's order, or those of `only`. What would begin after the budget is left out.

    With `once`, a competitor that stands in the order several times has its first turn only.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runner = _Runner(contest, book, smoke, cache or Path(folder) / "cache", Path(folder), say)
        order = [name for name in contest.order if not only or name in only]
        order = list(dict.fromkeys(order)) if once else order
        for name in dict.fromkeys(only):
            book.forget(name)
        left = [*order, *(each.name for each in contest.competitors if each.name in only and each.name not in order)]
        runner.total = len(left)
        warmed = False
        while left:
            spent = time.monotonic() - began
            if spent > budget_seconds:
                say(f"{contest.name}: {spent:.0f} s are spent; left out: {', '.join(left)}")
                book.document["left_out"] = left
                book.write()
                return
            left[0] = runner.name_of(left[0])
            group = [left[0]]
            if not contest.competitor(left[0]).alone:
                if not warmed:
                    warmed = True
                    runner.warm(left)
                while len(group) < len(left) and runner.may_join(left[len(group)]):
                    group.append(left[len(group)])
            done = runner.run(group, budget_seconds - spent)
            left = left[done:]


class _Runner:
    def __init__(
        self, contest: Contest, book: Book, smoke: bool, cache: Path, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._contest, self._book, self._smoke, self._say = contest, book, smoke, say
        self._folder = folder
        self._number = 0
        self.total, self._told, self._began = 0, 0, time.monotonic()
        # What a first start finds: nothing compiled, nothing planned. Later starts find what the first one left.
        self._environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "DRIVETRAIN_CACHE": str(cache / "drivetrain"),
        }

    def name_of(self, name: str) -> str:
        """Return the competitor that is meant: `best:raw` is the fastest so far whose name begins with `raw`."""
        if not name.startswith("best:"):
            return name
        prefix = name.removeprefix("best:")
        known = Circumstances(False, False, self._book.rates())
        default = next(each.name for each in self._contest.competitors if each.name.startswith(prefix))
        return known.best_of(prefix, default)

    def may_join(self, name: str) -> bool:
        return not name.startswith("best:") and not self._contest.competitor(name).alone

    def warm(self, names: Sequence[str]) -> None:
        """Compile for all that compile, at once, each in a process; then none waits for another's compiler."""
        some = [
            name
            for name in dict.fromkeys(names)
            if not name.startswith("best:") and self._contest.competitor(name).may_be_warmed
        ]
        if len(some) < 2 or self._smoke:
            return
        began = time.monotonic()
        children = [(name, self._start([name], warming=True)) for name in some]
        for name, (child, _) in children:
            self._until_done(child, began + self._contest.competitor(name).cap_seconds)
        self._say(f"{self._contest.name}: compilers warmed in {time.monotonic() - began:.0f} s")

    def run(self, names: Sequence[str], budget_seconds: float) -> int:
        """Run those competitors in one child, until one fails or the time is over. Return how many are dealt with."""
        deadline = time.monotonic() + budget_seconds
        child, report = self._start(names)
        current, since, done, seen = names[0], time.monotonic(), 0, 0
        try:
            while done < len(names):
                over = child.poll() is not None  # asked before reading: what it wrote last is not missed
                lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
                for line in lines[seen:]:
                    seen += 1
                    row = json.loads(line)
                    if "result" in row:
                        self._book.add(current, row["result"]["seconds"], row["result"]["facts"])
                        self._tell(current)
                    else:
                        self._book.add_problem(current, row["problem"])
                        self._tell(current, row["problem"])
                    done += 1
                    since = time.monotonic()
                    if done < len(names):
                        current = names[done]
                        if since > deadline:
                            return done
                if done == len(names):
                    break
                cap = self._contest.competitor(current).cap_seconds
                if over:
                    raise _FailedError(f"its process ended with {child.returncode}: {self._last_words(report)}")
                if time.monotonic() - since > cap:
                    raise _FailedError(f"took longer than {cap:g} s")
                time.sleep(0.05)
        except _FailedError as error:
            self._book.add_problem(current, str(error))
            self._tell(current, str(error))
            self._end(child)
            done += 1
        finally:
            self._end(child, patience_seconds=5.0 if done == len(names) else 0.0)
        return done

    def _start(self, names: Sequence[str], *, warming: bool = False) -> tuple[subprocess.Popen[bytes], Path]:
        self._number += 1
        report = self._folder / f"report-{self._number}.jsonl"
        task = {
            "module": self._contest.module,
            "contest": self._contest.name,
            "names": list(names),
            "smoke": self._smoke,
            "warming": warming,
            "known": self._book.rates(),
            "report": str(report),
        }
        log = report.with_suffix(".log").open("wb")
        with log:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.child", json.dumps(task)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # its loader processes and compilers end with it
            )
        return child, report

    def _until_done(self, child: subprocess.Popen[bytes], deadline: float) -> None:
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._end(child)

    def _end(self, child: subprocess.Popen[bytes], *, patience_seconds: float = 0.0) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_seconds)  # one that is done may still be closing its files
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def _last_words(self, report: Path) -> str:
        text = report.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip()
        return " | ".join(text.splitlines()[-3:])[-600:]

    def _tell(self, name: str, problem: str = "") -> None:
        """Say how a run ended, and how many of all there are: a long contest is never silent for longer than a run."""
        entry = self._book.document["competitors"][name]
        if problem:
            told = problem
        elif entry["rate"] is None:  # what it measured is no rate
            facts = {key: value for key, value in entry["runs"][-1].items() if key not in ("at", "rates", "revision")}
            told = ", ".join(f"{key} {value}" for key, value in facts.items())
        else:
            rate = entry["rate"]
            told = f"{rate['median']:,.5g} ({rate['least']:,.5g} to {rate['most']:,.5g}) {self._contest.unit}"
        self._told += 1
        seconds = time.monotonic() - self._began
        self._say(f"  {self._told} of {self.total}, {seconds:.0f} s: {name}: {told}")


class _FailedError(Exception):
    pass


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": _short(statistics.median(values)),
        "least": _short(min(values)),
        "most": _short(max(values)),
        "samples": len(values),
    }


def as_json(measured: Measured) -> dict[str, Any]:
    return asdict(measured)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def label(hardware: Hardware) -> str:
    """Return a short name for the kind of machine, for the file."""
    device = hardware.gpus[0].name if hardware.gpus else hardware.cpu.model
    words = "".join(letter.lower() if letter.isalnum() else "-" for letter in device)
    return "-".join(part for part in words.split("-") if part and part != "nvidia")

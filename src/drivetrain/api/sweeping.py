"""`dt.sweep`: trains variants of a job, each with the same seeds, and compares them.

Runs are done one after the other in this process, or in several. They are ordinary runs in ordinary folders: one that
was interrupted goes on exactly where it was. What has been done is in `sweep.json`, written after every run. With
successive halving, runs stop at a validation, and the better ones go on from there, to the bit.
"""

import itertools
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context, get_start_method, set_start_method
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIG_UNBLOCK, SIGINT, SIGTERM, pthread_sigmask, signal
from statistics import mean
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch

from drivetrain.api.training import train
from drivetrain.config import Config
from drivetrain.core.aims import Aim, Mode
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.processes import die_with_parent, pausing, restore_handler
from drivetrain.core.run_folder import is_finished, read_rows, write_atomically
from drivetrain.core.value import format_count, format_duration
from drivetrain.job import Job
from drivetrain.report.compare import RunComparison, compare
from drivetrain.report.page import comparison_page
from drivetrain.run.claiming import fork_run
from drivetrain.run.job_settings import of_asked_length

LEDGER, PAGE = "sweep.json", "sweep.html"
INTERRUPTED = "interrupted by Ctrl-C or another signal"
LONGEST_NAME = 60
T = TypeVar("T")
Settings = Mapping[str, Any]
Row = dict[str, Any]


class Maker(Protocol):
    """Makes the job of a variant, and does something with it. It is sent to other processes by pickle."""

    def __call__(self, settings: Settings, seed: int, action: Callable[[Job, Config], T]) -> T: ...


@dataclass(frozen=True)
class FunctionMaker:
    """Makes jobs by a function of the settings and the seed."""

    make: Callable[..., Job | tuple[Job, Config]]

    def __call__(self, settings: Settings, seed: int, action: Callable[[Job, Config], T]) -> T:
        made = self.make(**settings, seed=seed)
        job, config = made if isinstance(made, tuple) else (made, Config())
        return action(job, config)


@dataclass(frozen=True)
class SweepSpec:
    """What is tried. A sweep that goes on must have the same; budgets and the number of processes may change.

    Args:
        name: The name of the sweep, and of its folder.
        variants: The settings of each variant; the first is the baseline.
        seeds: The seeds that each variant is trained with.
        metric: The validation metric that decides.
        mode: Whether less or more of it is better; `auto` goes by its name.
        halving: After each rung, one of so many variants goes on; None: all are trained to their end.
        first_steps: The steps of the first rung.
        fork: The folder of a run whose newest checkpoint all begin with, or `FOLDER@STEP`.
        search: What Optuna chooses from, by name: `[low, high]`, `[low, high, "log"]`, a list of choices, or
            `{"choices": [1, 2]}` where those are two numbers.
        trials: How many variants Optuna tries.
    """

    name: str
    variants: tuple[Settings, ...] = ()
    seeds: tuple[int, ...] = (0,)
    metric: str = "valid_loss"
    mode: Mode = "auto"
    halving: int | None = None
    first_steps: int | None = None
    fork: str = ""
    search: Mapping[str, Any] = field(default_factory=dict)
    trials: int = 20

    def as_plain(self) -> Row:
        plain: Row = json.loads(json.dumps({**vars(self), "variants": list(self.variants)}, default=str))
        return plain


@dataclass(frozen=True)
class SweepTask:
    """One run, to its end or to a rung."""

    maker: Maker
    settings: Settings
    seed: int
    folder: Path
    metric: str
    until: int | None  # the step after which it pauses at a validation
    deadline: float | None  # by the clock of the machine
    fork: str = ""


@dataclass(frozen=True)
class SweepResult:
    """How a sweep stands.

    Args:
        folder: Where its runs, its ledger and its page are.
        rows: A row for each variant: settings, state, mean value and runs.
        best: The settings of the best variant; None as long as none was measured.
        is_done: Whether nothing is left to do.
        why_stopped: Why it is not done.
        comparison: The variants that were trained to their end, compared; None where fewer than two were.
    """

    folder: Path
    rows: tuple[Row, ...]
    best: Settings | None
    is_done: bool
    why_stopped: str = ""
    comparison: RunComparison | None = None


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of values, the last name's changing fastest.

    Args:
        axes: The values of each setting.
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def sweep(
    make: Callable[..., Job | tuple[Job, Config]],
    variants: Mapping[str, Sequence[Any]] | Iterable[Settings],
    *,
    name: str = "sweep",
    seeds: Sequence[int] = (0,),
    metric: str = "valid_loss",
    mode: Mode = "auto",
    halving: int | None = None,
    first_steps: int | None = None,
    budget_seconds: float | None = None,
    budget_steps: int | None = None,
    fork: Path | str = "",
    parallel: int = 1,
    output_dir: Path | str = "runs",
    quiet: bool = False,
) -> SweepResult:
    """Train variants of a job with the same seeds, and compare them. Called again, it goes on where it was.

    Args:
        make: A function of a variant's settings and `seed`, by keyword, that returns the job; or the job and its
            configuration. With several processes, it must be defined at the top of a module.
        variants: A dictionary of lists, of which every combination is a variant; or the settings of each. The first
            variant is the baseline.
        name: The name of the sweep, and of its folder.
        seeds: The seeds of each variant. A verdict takes six, and more for more than two variants.
        metric: The validation metric that decides.
        mode: Whether less (`min`) or more (`max`) of it is better; `auto` goes by the name.
        halving: Successive halving: after each rung, the best one of so many variants goes on, for as many times the
            steps.
        first_steps: The steps of the first rung. Default: such that the last one is the whole job.
        budget_seconds: Begin nothing more after so long, and pause what runs at its next validation.
        budget_steps: Begin nothing more after so many steps of all runs together.
        fork: The folder of a run whose newest checkpoint all variants begin with, or `FOLDER@STEP`.
        parallel: How many runs to do at once, each in a process, on a GPU of its own where there are some.
        output_dir: The folder of all runs.
        quiet: Whether to print nothing.

    Returns:
        The variants with their values, the best one, and the comparison with the first.

    Example:
        >>> from dataclasses import replace
        >>> inputs = torch.rand(8, 1)
        >>> valid = torch.utils.data.TensorDataset(inputs, 2 * inputs + 1)
        >>> def make(lr, seed):
        ...     optimizer = lambda params: torch.optim.SGD(params, lr=lr)
        ...     return replace(job, valid=valid, optimizer=optimizer, seed=seed)
        >>> dt.sweep(make, {"lr": [0.1, 1e-6]}, quiet=True).best
        {'lr': 0.1}
    """
    chosen = grid(variants) if isinstance(variants, Mapping) else [dict(each) for each in variants]
    spec = SweepSpec(name, tuple(chosen), tuple(seeds), metric, mode, halving, first_steps, str(fork))
    limits = SweepLimits(budget_seconds, budget_steps, parallel)
    return run_sweep(FunctionMaker(make), spec, limits, Path(output_dir), (lambda text: None) if quiet else print)


@dataclass(frozen=True)
class SweepLimits:
    """Holds the budget of a sweep, which can change from start to start."""

    seconds: float | None = None
    steps: int | None = None
    parallel: int = 1


def run_sweep(
    maker: Maker, spec: SweepSpec, limits: SweepLimits, output_dir: Path, say: Callable[[str], None]
) -> SweepResult:
    """Do what is left of a sweep, and write its page."""
    _check(spec, limits)
    return _Sweep(maker, spec, limits, output_dir / spec.name, say).run()


def _check(spec: SweepSpec, limits: SweepLimits) -> None:
    aim = Aim(spec.metric, spec.mode)
    problems = {
        "there are no variants": not spec.variants and not spec.search,
        "a variant is there twice": len({_key(each) for each in spec.variants}) < len(spec.variants),
        "a seed is at least 0": any(seed < 0 for seed in spec.seeds),
        "a seed is there twice, or there is none": not spec.seeds or len(set(spec.seeds)) < len(spec.seeds),
        f"whether less or more of {spec.metric} is better is not known; give mode min or max": not aim.is_clear,
        "halving keeps one of two variants or more": spec.halving is not None and spec.halving < 2,
        "halving and a search do not go together": spec.halving is not None and bool(spec.search),
        "a number of processes is at least 1": limits.parallel < 1,
    }
    wrong = next((words for words, is_wrong in problems.items() if is_wrong), "")
    if wrong:
        raise DrivetrainError(f"the sweep {spec.name} cannot be done: {wrong}", remedy="drivetrain sweep --help")


class _Sweep:
    """Decides which run comes next, and keeps the ledger."""

    def __init__(
        self, maker: Maker, spec: SweepSpec, limits: SweepLimits, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._maker, self._spec, self._limits, self._folder, self._say = maker, spec, limits, folder, say
        self._began = time.time()
        self._aim = Aim(spec.metric, spec.mode)
        self._why_stopped = ""
        self._num_done, self._num_wanted = 0, 0
        self._timed = (self._began, 0)  # when the first of the runs that are told of began, and how many were done
        self._ledger = self._open()

    def _open(self) -> Row:
        """Read the ledger of a sweep that was begun, or begin one."""
        path, wanted = self._folder / LEDGER, self._spec.as_plain()
        try:
            found: Row = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            rows = [_new_row(settings) for settings in self._spec.variants]
            return {"spec": wanted, "seconds": 0.0, "variants": rows}
        except ValueError as error:
            raise DrivetrainError(f"{path} cannot be read: {error}", remedy="choose another name") from None
        changed = [name for name in wanted if wanted[name] != found["spec"].get(name)]
        if changed:
            raise DrivetrainError(
                f"{self._folder} holds another sweep: {', '.join(changed)} changed",
                remedy="choose another --name, or the same variants, seeds and rungs to go on with that one",
            )
        return found

    def _keep(self) -> None:
        write_atomically(self._folder / LEDGER, json.dumps(self._ledger, indent=1) + "\n")

    # What to do

    def run(self) -> SweepResult:
        self._keep()
        runner = _Runner(self._limits.parallel)
        before = float(self._ledger["seconds"])
        try:
            with _ended_as_by_ctrl_c():
                if self._spec.search:
                    self._search(runner)
                else:
                    self._halve(runner)
        except KeyboardInterrupt:
            self._why_stopped = INTERRUPTED
        finally:
            runner.close()
            self._ledger["seconds"] = before + time.time() - self._began
            self._keep()
        return self._result()

    def _halve(self, runner: "_Runner") -> None:
        """Train all variants, or in rungs, after each of which the better ones go on."""
        alive = list(range(len(self._spec.variants)))
        for until in self._rungs():
            self._train([(index, seed) for seed in self._spec.seeds for index in alive], until, runner)
            if self._why_stopped:
                return
            alive = [index for index in alive if self._ledger["variants"][index]["value"] is not None]
            if until is not None and self._spec.halving:
                ranked = sorted(alive, key=self._rank)
                alive = sorted(ranked[: max(1, math.ceil(len(ranked) / self._spec.halving))])
                for index in set(ranked) - set(alive):
                    self._ledger["variants"][index]["state"] = "dropped"
                self._keep()
                self._say(f"  after {until:,} steps: {len(alive)} of {format_count(len(ranked), 'variant')} go on")

    def _rungs(self) -> list[int | None]:
        """Return the steps after which variants are dropped, and None for the end."""
        spec = self._spec
        if not spec.halving:
            return [None]
        number, factor = len(spec.variants), spec.halving
        num_rungs = max(0, math.ceil(math.log(number, factor) - 1e-9))
        first = spec.first_steps
        total = self._maker(spec.variants[0], spec.seeds[0], lambda job, config: of_asked_length(job, config).num_steps)
        if first is None and total is None:
            raise DrivetrainError(
                "the number of steps of the job is not known, so rungs cannot be chosen", remedy="give --first-steps"
            )
        first = first or max(1, (total or 0) // factor**num_rungs)
        rungs = [first * factor**place for place in range(num_rungs)]
        return [*(rung for rung in rungs if total is None or rung < total), None]

    def _search(self, runner: "_Runner") -> None:
        """Train the variants that Optuna asks for, as many at once as there are processes."""
        from_ledger = [row for row in self._ledger["variants"] if row["value"] is not None]
        study = _Study(self._spec, self._aim, from_ledger)
        rows = self._ledger["variants"]
        waiting = [index for index, row in enumerate(rows) if row["value"] is None and row["state"] != "failed"]
        while not self._why_stopped and (waiting or len(rows) < self._spec.trials):
            # Only once all before are measured: the next ones are then the same, wherever the sweep was interrupted.
            for _ in range(0 if waiting else min(self._limits.parallel, self._spec.trials - len(rows))):
                rows.append(_new_row(study.ask(len(rows))))
                waiting.append(len(rows) - 1)
            self._keep()
            self._train([(index, seed) for seed in self._spec.seeds for index in waiting], None, runner)
            for index in waiting:
                study.tell(rows[index])
            waiting = []

    def _rank(self, index: int) -> float:
        value = float(self._ledger["variants"][index]["value"])
        if not math.isfinite(value):
            return math.inf
        return -value if self._aim.wants_more else value

    # Runs

    def _train(self, pairs: Sequence[tuple[int, int]], until: int | None, runner: "_Runner") -> None:
        """Do the runs that are left, to their end or to a rung, and put their values into the ledger."""
        left = [(index, seed) for index, seed in pairs if self._is_left(index, seed, until)]
        self._num_done, self._num_wanted = len(pairs) - len(left), len(pairs)
        self._timed = (time.time(), self._num_done)
        tasks = ((pair, self._task(*pair, until)) for pair in left)
        for (index, seed), outcome in runner.each(tasks, self._why_not_more):
            if outcome["state"] == "refused":
                raise DrivetrainError(outcome["error"], remedy=outcome["remedy"])
            row = self._ledger["variants"][index]
            row["runs"][str(seed)] = outcome
            self._settle(row, until)
            self._num_done += 1
            self._keep()
            self._tell(row, seed, outcome)
            if outcome["state"] == "interrupted":
                self._why_stopped = self._why_stopped or INTERRUPTED
        if runner.is_interrupted:
            self._why_stopped = INTERRUPTED
        for index in dict.fromkeys(index for index, _ in pairs):
            self._settle(self._ledger["variants"][index], until)
        if self._num_done < self._num_wanted and not self._why_stopped:
            self._why_stopped = self._why_not_more()
        self._keep()

    def _is_left(self, index: int, seed: int, until: int | None) -> bool:
        outcome = self._ledger["variants"][index]["runs"].get(str(seed))
        if outcome is None or outcome["state"] == "interrupted":
            return True
        return outcome["state"] == "paused" and (until is None or (outcome["rung"] or 0) < until)

    def _task(self, index: int, seed: int, until: int | None) -> SweepTask:
        row, spec = self._ledger["variants"][index], self._spec
        settings = row["settings"] if index >= len(spec.variants) else spec.variants[index]
        deadline = None if self._limits.seconds is None else self._began + self._limits.seconds
        folder = self._folder / f"{self._name(index)}-seed-{seed}"
        return SweepTask(self._maker, settings, seed, folder, spec.metric, until, deadline, spec.fork)

    def _name(self, index: int) -> str:
        """Return the beginning of the names of a variant's runs."""
        settings = self._ledger["variants"][index]["settings"]
        words = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in settings.items())
        words = "".join(letter if letter.isalnum() or letter in "._-+" else "-" for letter in words)
        is_plain = words and len(words) <= LONGEST_NAME
        return f"{index:03}_{words}" if is_plain else f"{index:03}"

    def _settle(self, row: Row, until: int | None) -> None:
        """Give a variant its mean value over seeds, once all of them are there."""
        outcomes = [row["runs"].get(str(seed)) for seed in self._spec.seeds]
        there = [each for each in outcomes if each is not None]
        if any(each["state"] == "failed" for each in there):
            row["state"] = "failed"
        elif len(there) == len(outcomes) and all(each["value"] is not None for each in there):
            if all(each["state"] == "done" for each in there) or (until is not None and row["state"] != "dropped"):
                row["value"], row["rung"] = mean(each["value"] for each in there), until
            row["state"] = "done" if all(each["state"] == "done" for each in there) else row["state"]

    def _why_not_more(self) -> str:
        """Return why no other run may begin; empty if one may."""
        if self._why_stopped:
            return self._why_stopped
        limits = self._limits
        if limits.seconds is not None and time.time() - self._began > limits.seconds:
            return f"the budget of {format_duration(limits.seconds)} is used up"
        steps = sum(each["step"] for row in self._ledger["variants"] for each in row["runs"].values())
        if limits.steps is not None and steps >= limits.steps:
            return f"the budget of {limits.steps:,} steps is used up"
        return ""

    def _tell(self, row: Row, seed: int, outcome: Row) -> None:
        value = "no value" if outcome["value"] is None else f"{self._spec.metric} {outcome['value']:.6g}"
        told = f"{value} at step {outcome['step']:,}" + {"paused": ", paused"}.get(outcome["state"], "")
        if outcome["state"] == "failed":
            told = f"failed: {outcome['error']}"
        began, before = self._timed
        left = (self._num_wanted - self._num_done) * (time.time() - began) / max(1, self._num_done - before)
        rest = f"; about {format_duration(left)} left" if self._num_done < self._num_wanted else ""
        self._say(
            f"  {self._num_done}/{self._num_wanted}  {in_words(row['settings'])}, seed {seed}: {told}"
            f" ({format_duration(outcome['seconds'])}{rest})"
        )

    # The end

    def _result(self) -> SweepResult:
        rows = self._ledger["variants"]
        known = [index for index, row in enumerate(rows) if row["value"] is not None and row["state"] != "failed"]
        finished = [index for index in known if rows[index]["state"] == "done"]
        best = min(finished or known, key=self._rank, default=None)
        comparison = self._compared(finished, known)
        if comparison is not None:
            write_atomically(self._folder / PAGE, comparison_page(comparison, self._title(len(finished))))
        settings = None if best is None else dict(rows[best]["settings"])
        return SweepResult(self._folder, tuple(rows), settings, not self._why_stopped, self._why_stopped, comparison)

    def _title(self, num_finished: int) -> str:
        """Return the title of the page: how much was tried, and how much of it to the end."""
        name, rows, seeds = self._spec.name, self._ledger["variants"], self._spec.seeds
        each = f" of {format_count(len(seeds), 'seed')} each" if len(seeds) > 1 else ""
        ended = "" if num_finished == len(rows) else f", {num_finished} trained to the end"
        return f"{'Sweep' if name == 'sweep' else f'Sweep {name}'}: {format_count(len(rows), 'variant')}{each}{ended}"

    def _compared(self, finished: Sequence[int], known: Sequence[int]) -> RunComparison | None:
        """Compare the variants that were trained to their end; if fewer than two, all at the last common point."""
        chosen = finished if len(finished) > 1 else known
        rows = self._ledger["variants"]
        arms = {
            in_words(rows[index]["settings"]): [Path(each["folder"]) for each in rows[index]["runs"].values()]
            for index in chosen
        }
        if sum(map(len, arms.values())) < 2:
            return None
        try:
            return compare(arms, metric=self._spec.metric, mode=self._spec.mode, common=chosen is not finished)
        except DrivetrainError as error:
            self._say(f"  the runs cannot be compared: {error}")
            return None


def in_words(settings: Settings) -> str:
    """Return a variant as text."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "as it is"


def _new_row(settings: Settings) -> Row:
    plain = json.loads(json.dumps(dict(settings), default=str))
    return {"settings": plain, "state": "waiting", "value": None, "rung": None, "runs": {}}


def _key(settings: Settings) -> str:
    return json.dumps(dict(settings), sort_keys=True, default=str)


class _Runner:
    """Does tasks: here, one after the other, or in processes that are started once and do many."""

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._pool: ProcessPoolExecutor | None = None
        self.is_interrupted = False  # by Ctrl-C

    def each(
        self, tasks: Iterable[tuple[Any, SweepTask]], why_not_more: Callable[[], str]
    ) -> Iterator[tuple[Any, Row]]:
        """Yield what became of each task, as it is done. No other begins once there is a reason not to."""
        if self._parallel == 1:
            for name, task in tasks:
                if why_not_more():
                    return
                yield name, run_task(task)
            return
        yield from self._in_processes(iter(tasks), why_not_more)

    def _in_processes(
        self, tasks: Iterator[tuple[Any, SweepTask]], why_not_more: Callable[[], str]
    ) -> Iterator[tuple[Any, Row]]:
        if self._pool is None:
            context = get_context("spawn")  # a fork would have the locks of our threads, and no working CUDA
            numbers = context.Value("i", 0)
            told = (numbers, self._parallel, os.getpid(), get_start_method())
            self._pool = ProcessPoolExecutor(self._parallel, context, _start_worker, told)
        running: dict[Future[Row], Any] = {}
        while True:
            while len(running) < self._parallel and not self.is_interrupted and not why_not_more():
                name, task = next(tasks, (None, None))
                if task is None:
                    break
                with _sigint_held():  # a process that has just been started does not know yet what to do with it
                    running[self._pool.submit(run_task, task)] = name
            if not running:
                return
            try:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:  # the processes got it, too: they save and come back
                self.is_interrupted = True
                done, _ = wait(running)
            for future in done:
                try:
                    yield running.pop(future), future.result()
                except BrokenProcessPool:
                    raise DrivetrainError(
                        "a process of the sweep was killed, perhaps since the memory was full",
                        remedy="the same command goes on; with fewer at once: --parallel",
                    ) from None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


_worker: list[int] = []
_interrupts: list[int] = []  # those that came to this process between its runs


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Take SIGTERM, which a scheduler sends to the first process alone, as Ctrl-C, which all processes get.

    Processes that a script had before its sweep are its own, and not signaled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        for child in active_children():
            if child.pid is not None and child.pid not in others:
                os.kill(child.pid, SIGINT)
        raise KeyboardInterrupt

    others = {child.pid for child in active_children()}
    before = signal(SIGTERM, end)
    try:
        yield
    finally:
        restore_handler(SIGTERM, before)


@contextmanager
def _sigint_held() -> Iterator[None]:
    """Keep Ctrl-C waiting, in this thread and in processes that are started meanwhile, which have to let it in."""
    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def _start_worker(numbers: Any, parallel: int, parent: int, start_method: str) -> None:
    """Prepare a process: its share of the cores, its GPU, and no traceback when Ctrl-C comes between runs.

    It ends with the sweep, even one that is killed: an orphan would go on with a run that the same command begins anew,
    and then wait forever for another.
    """
    die_with_parent(parent)
    set_start_method(start_method, force=True)  # of a loader's workers: ours would have them import the user's script
    with numbers.get_lock():
        _worker[:] = [numbers.value]
        numbers.value += 1
    signal(SIGINT, lambda number, frame: _interrupts.append(number))  # a run has its own, and stops with a checkpoint
    pthread_sigmask(SIG_UNBLOCK, {SIGINT})
    if torch.cuda.is_available():
        torch.cuda.set_device(_worker[0] % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // parallel))


def _on_a_line(error: Exception) -> str:
    """Return an error on one line: its first one, or all of a list of problems."""
    words = error.message if isinstance(error, DrivetrainError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in words.splitlines()]
    told = " ".join(" ".join(lines).split()) if isinstance(error, ConfigError) else lines[0]
    return f"{told}; remedy: {error.remedy}" if isinstance(error, DrivetrainError) and error.remedy else told


def _fork_point(fork: str) -> tuple[Path, int | None]:
    """Return the folder and the step of `FOLDER@STEP`, or of `FOLDER`."""
    folder, _, step = fork.rpartition("@")
    return (Path(folder), int(step)) if folder and step.isdecimal() else (Path(fork), None)


def _fork(task: SweepTask) -> list[tuple[str, str]]:
    """Begin a run with the checkpoint that the sweep is forked from; return why it cannot, and the remedy, if so."""
    source, step = _fork_point(task.fork)
    try:
        fork_run(source, task.folder, step)
    except DrivetrainError as problem:
        return [(problem.message, problem.remedy)]
    return []


_NO_METRIC = "give a validation set, Job(valid=…), or another --metric"


def run_task(task: SweepTask) -> Row:
    """Do one run, or what is left of it, and return what became of it."""
    began = time.monotonic()
    asked: list[int] = []
    refused: list[tuple[str, str]] = []  # why no variant can be compared, and the remedy

    def when(step: int) -> bool:
        is_late = task.deadline is not None and time.time() > task.deadline
        if is_late or (task.until is not None and step >= task.until):
            asked.append(step)
        return bool(asked)

    def go(job: Job, config: Config) -> None:
        if job.valid is None and not job.hooks and task.metric == "valid_loss":  # a hook may log any name
            refused.append(("the job has no validation set, so it has no valid_loss to be compared by", _NO_METRIC))
            return
        with pausing(when):
            result = train(job, _for_run(config, task.folder), quiet=True)
        if forked and result.steps == result.resumed_from and result.finished:
            why = f"{task.fork} is at the end of the job: nothing is left to train"
            earlier = f"{_fork_point(task.fork)[0]}@STEP"
            refused.append((why, f"begin with an earlier checkpoint, --fork {earlier}, or train longer, --epochs"))
            shutil.rmtree(task.folder)  # a copy; it would count as trained

    error, forked = "", False
    if not _interrupts and not is_finished(task.folder) and not _has_reached(task):
        try:
            if task.fork and not task.folder.exists():
                refused += _fork(task)
                forked = not refused
            if not refused:
                task.maker(task.settings, task.seed, go)
        except Exception as problem:  # noqa: BLE001 - a variant that fails does not end the others
            error = _on_a_line(problem)
    value, step = _value(task)
    if value is None and not error and is_finished(task.folder):
        rows, _ = read_rows(task.folder / "metrics.jsonl")
        known = [*dict.fromkeys(name for row in rows for name in row if name not in ("step", "epoch", "seconds"))]
        if task.metric in known:
            error = f"{task.metric} is not a number"
        else:
            why = f"no {task.metric} was measured: there is {', '.join(known) or 'no metric at all'}"
            refused.append((why, _NO_METRIC))
    if value is not None and not math.isfinite(value):
        value, error = None, error or f"{task.metric} is {value} at step {step}"
    state = "failed" if error else "done" if is_finished(task.folder) else "paused" if asked else "interrupted"
    if state == "interrupted" and _has_reached(task):
        state = "paused"
    if refused:
        state, error = "refused", refused[0][0]
    return {
        "state": state,
        "folder": str(task.folder),
        "value": value,
        "step": step,
        "rung": task.until,
        "seconds": time.monotonic() - began,
        "error": error,
        **({"remedy": refused[0][1]} if refused else {}),
    }


def _for_run(config: Config, folder: Path) -> Config:
    """Return the configuration of a run in a folder of the sweep, on this process's device."""
    sections: dict[str, Any] = {
        "run": config.run.model_copy(update={"name": folder.name, "output_dir": folder.parent}),
        "watch": config.watch.model_copy(update={"report": False}),
    }
    if _worker and torch.cuda.is_available() and config.device.device == "auto":
        number = _worker[0] % torch.cuda.device_count()
        sections["device"] = config.device.model_copy(update={"device": f"cuda:{number}"})
    return config.model_copy(update=sections)


def _validations(task: SweepTask) -> list[Row]:
    rows, _ = read_rows(task.folder / "metrics.jsonl")
    return [row for row in rows if isinstance(row.get(task.metric), (int, float)) and "weights_of_step" not in row]


def _has_reached(task: SweepTask) -> bool:
    return task.until is not None and any(row["step"] >= task.until for row in _validations(task))


def _value(task: SweepTask) -> tuple[float | None, int]:
    """Return the value at the rung, or the last one, and its step."""
    rows = _validations(task)
    at = next((row for row in rows if task.until is not None and row["step"] >= task.until), rows[-1] if rows else None)
    return (None, 0) if at is None else (float(at[task.metric]), int(at["step"]))


class _Study:
    """Optuna's search. What the ledger has is given to it again, so that it goes on after a kill."""

    def __init__(self, spec: SweepSpec, aim: Aim, known: Sequence[Row]) -> None:
        try:
            import optuna
        except ImportError:
            raise DrivetrainError(
                "a search needs Optuna, which is not installed", remedy="pip install 'drivetrain[sweep]'"
            ) from None
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = {name: self._distribution(name, values) for name, values in spec.search.items()}
        self._study = optuna.create_study(direction="maximize" if aim.wants_more else "minimize")
        self._asked: dict[str, Any] = {}
        for row in known:
            self._add(row)

    def _add(self, row: Row) -> None:
        """Tell it of a variant that it was asked for at an earlier start."""
        trial = self._optuna.trial.create_trial
        self._study.add_trial(trial(params=row["settings"], distributions=self._space, value=row["value"]))

    def _distribution(self, name: str, values: Any) -> Any:
        kinds = self._optuna.distributions
        if isinstance(values, Mapping):
            return kinds.CategoricalDistribution(list(values["choices"]))
        bounds = [each for each in values if isinstance(each, (int, float)) and not isinstance(each, bool)]
        is_range = len(bounds) == 2 and list(values[:2]) == bounds and list(values[2:]) in ([], ["log"])
        if not is_range:
            return kinds.CategoricalDistribution(list(values))
        kind = kinds.IntDistribution if all(isinstance(each, int) for each in bounds) else kinds.FloatDistribution
        return kind(bounds[0], bounds[1], log=len(values) == 3)

    def ask(self, number: int) -> Settings:
        """Return the settings of variant `number`, which depend on that and on what is known, not on earlier starts."""
        self._study.sampler = self._optuna.samplers.TPESampler(seed=number)
        trial = self._study.ask(self._space)
        self._asked[_key(trial.params)] = trial
        return dict(trial.params)

    def tell(self, row: Row) -> None:
        trial = self._asked.pop(_key(row["settings"]), None)
        if trial is not None and row["value"] is not None:
            self._study.tell(trial, row["value"])
        elif trial is not None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        elif row["value"] is not None:
            self._add(row)

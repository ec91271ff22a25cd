"""Makes the plan of a run: from its checkpoint, from a file, measured on its own model, or by rule; with reasons.

Everything is measured on throw-away copies (`StepProbe`). Nothing here can change the global batch, the order of
samples, the weighting of the loss or the learning rate: a way only divides the same work differently.
"""

import inspect
import math
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from tokenize import TokenError
from typing import Any, Protocol, Self

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from torch import Tensor, nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.core.code_fingerprint import function_fingerprint
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice
from drivetrain.core.precision import RECIPES, fits_fp8
from drivetrain.core.processes import SetAside
from drivetrain.core.run_folder import read_switch
from drivetrain.core.value import FP8_CAPABILITY, Fp8Recipe
from drivetrain.data.batch import leaves
from drivetrain.data.division import Division
from drivetrain.hardware import cache_folder
from drivetrain.job import Job
from drivetrain.plan import Choice
from drivetrain.plan.knobs import BY_FIELD, CompileScope, Others, StepWay, others_of
from drivetrain.plan.plan import PlanCache, PlannedRun, Repeated, key_of_facts
from drivetrain.plan.rules import DataPath
from drivetrain.plan.tune import (
    MOST_SECONDS,
    STEPS_TO_COMPARE,
    DoesNotFitError,
    Measurement,
    Repeatability,
    Scope,
    Tried,
    Tuned,
    UnusableError,
    find_repeatable,
    tune,
)
from drivetrain.planning.description import described, facts_of
from drivetrain.planning.fresh_process import CONTEXT_BYTES, RepeatProbe
from drivetrain.planning.probe import Journal, StepProbe, measured_data_path
from drivetrain.planning.trials import TRIED, ShardedProbe, why_not_read, why_not_tried, with_micro_batch
from drivetrain.run.assemble import make_loader, takes_any_number
from drivetrain.run.memory import explained
from drivetrain.run.model_factory import has_convolutions
from drivetrain.run.session import Session
from drivetrain.strategies.compiling import why_not_compiled
from drivetrain.strategies.layers import one_of_each_kind, repeated_blocks


class OnProbe(Protocol):
    """Hears what planning tries, and what was found."""

    def begins(self, what: str, seconds_in_all: float | None) -> None:
        """Hear what is tried next, and how long planning takes from its beginning to its end; None: not known."""

    def __call__(self, way: StepWay, found: Measurement) -> None: ...


LEAST_STEPS = 40  # of a job that is measured: the first look takes two steps
LEAST_JOB_SECONDS = 5.0
BUDGET_SHARE = 0.05
# What compiling took on models of ordinary size, by the number of their smallest modules.
COMPILE_SECONDS, COMPILE_SECONDS_PER_MODULE = 5.0, 0.25
LEAST_REPEATED = 0.5  # of a model's smallest modules, that have to be in blocks for compiling these alone
COMPILE_SHARE = {"cuda": 0.12, "cpu": 0.05}  # on a CPU it gains less, and less often
# Trying whether steps repeat: what starting a process takes, how many steps are run, and the share of the job that it
# may take; looking for a way that repeats may take as much again. The first step of a job of hours waits no longer than
# a minute for it, or a smaller share.
REPEAT_START_SECONDS = {"cuda": 15.0, "cpu": 5.0}
REPEAT_STEPS, REPEAT_SHARE, REPEAT_SECONDS, LONG_SHARE = 16, 0.05, 60.0, 0.005
# What FP8 has to gain to be offered, the steps over which losses are compared, and the share of the job for both.
LEAST_OFFER, OFFER_STEPS, OFFER_SHARE = 1.05, 20, 0.005
READING_SECONDS = 0.5  # that measuring what reading takes may take
MUCH_SLOWER, SURE_SECONDS = 1.5, 0.2  # than at an earlier start; for how long it is looked at again


class NotMeasuredError(DrivetrainError):
    """Raised if no way of running a step could be tried, for a reason other than memory."""


class _ByTime(Progress):
    """A bar that time moves, and beside it the seconds that are left."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            passed = task.elapsed or 0.0
            if task.total is not None:
                task.completed = min(passed, task.total)
                left = task.total - passed
                task.fields["left"] = f"at most {left:.0f} s left" if left > 0.5 else "takes longer than expected"
        yield from super().get_renderables()


class PlanningProgress:
    """Reports what is being tried: a bar with the time left on a terminal, and a line for each way that was measured.

    Args:
        quiet: Whether to show nothing.
        after_seconds: The lines appear once planning takes so long that one wonders.
        heading: The first line.
        console: Where it is shown, if not on standard output.
    """

    def __init__(
        self,
        *,
        quiet: bool,
        after_seconds: float = 1.5,
        heading: str = "planning: measuring ways of running a step (--no-auto-optimize goes by rule)",
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(highlight=False, quiet=quiet)
        self._began, self._after_seconds = time.monotonic(), after_seconds
        self._waiting = [heading] if heading else []
        self._bar = _ByTime(
            TextColumn("planning"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[what]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=self._console,
            transient=True,
            expand=True,
            refresh_per_second=2,  # drawing takes a millisecond or two, which must not show in what is measured
            disable=quiet or not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begins(self, what: str, seconds_in_all: float | None) -> None:
        if not self._bar.tasks:
            self._bar.start()
            self._bar.add_task("", total=None, what=what, left="")
        task = self._bar.tasks[0]
        task.total = seconds_in_all
        task.fields |= {"what": what, "left": ""}

    def __call__(self, way: StepWay, found: Measurement) -> None:
        if found.problem or not found.is_brief:
            rate = "" if found.problem else f"{1 / found.sample_seconds:,.0f} samples/s"
            self._waiting.append(f"  {way}: {found.problem or rate}")
        if time.monotonic() - self._began > self._after_seconds:
            for line in self._waiting:
                self._console.print(line, markup=False)
            self._waiting = []


def make_plan(
    run: Session, model: nn.Module, checkpoint: Checkpoint | None, on_probe: OnProbe | None = None
) -> PlannedRun:
    """Decide how steps are run and samples are fetched. Called by all ranks, with the model as it was built.

    Nothing of the run or the model is changed: what is tried is tried on copies.
    """
    return _compilable(run, _planned(run, model, checkpoint, on_probe))


def _planned(run: Session, model: nn.Module, checkpoint: Checkpoint | None, on_probe: OnProbe | None) -> PlannedRun:
    planned = run.planned
    if checkpoint is not None:
        recorded = run.recorded_way(checkpoint)
        if recorded is not None:
            return _resumed(run, model, checkpoint, recorded)
        planned = _with_division_kept(run, checkpoint, planned)
    if planned.way.compiled_from != 0:  # compiling is for another process: here, nothing waits for it
        planned = planned.but(compile_mode=None)
    if not planned.keeps_micro_batch and "micro_batch" not in run.pinned():
        planned = with_micro_batch(run, model, planned)
    steps_done = 0 if checkpoint is None else checkpoint.step
    why_not = _why_not_measured(run, model, steps_done)
    if why_not:
        planned = replace(planned, repeatability=Repeatability(reason=f"not measured: {why_not}"))
        is_closed = run.config.plan.file is not None or _has_few_steps(run, steps_done)
        return _compiled_later(run, model, planned, None, why=why_not, is_closed=is_closed)
    try:
        return measured(run, model, planned, steps_done, on_probe, is_short_of_time=True)
    except NotMeasuredError as error:  # if the job itself is at fault, its first step shows where
        return _compiled_later(run, model, planned, None, why=f"by rule: {error.message}")


def _resumed(run: Session, model: nn.Module, checkpoint: Checkpoint, way: StepWay) -> PlannedRun:
    """Return what was followed before a checkpoint, with the way that it becomes by what is pinned now."""
    recorded = checkpoint.meta["plan"]
    data = recorded.get("data")
    planned = replace(run.planned, way=way, data_path=None if data is None else DataPath.model_validate(data))
    if "repeatable" in recorded and StepWay.model_validate(recorded["way"]) == way:
        planned = replace(planned, repeatability=Repeatability.model_validate(recorded["repeatable"]))
    why = _why_resumed(run, checkpoint, planned)
    return replace(planned, plan=described(run, model, planned, None, why=why, is_closed=True))


def _compiled_later(
    run: Session, model: nn.Module, planned: PlannedRun, tuned: Tuned | None, **shown: Any
) -> PlannedRun:
    """Return what was planned with its plan, and with what is asked for once steps are compiled in the background.

    Planning ran eager steps then.
    """
    asked = run.planned.way
    if asked.compiled_from != 0:
        later = {name: getattr(asked, name) for name in ("compile_mode", "compile_scope", "compiled_from")}
        path = getattr(run, "path", None)  # without one, nothing is trained
        if asked.compiled_from is None and path is not None:
            later["compiled_from"] = read_switch(path)  # by an earlier start that left no checkpoint
        planned = planned.but(capture=False, **later)
    return replace(planned, plan=described(run, model, planned, tuned, **shown))


def _with_division_kept(run: Session, checkpoint: Checkpoint, planned: PlannedRun) -> PlannedRun:
    """Keep the checkpoint's micro-batch in another world or on another machine if it affects what is learned."""
    held = run.weighting.holds_division
    if not held or "micro_batch" in run.pinned():
        return planned
    before = int(checkpoint.meta["plan"]["way"]["micro_batch"])
    now = min(before, run.rank_samples)
    if now != before and not run.quiet:
        notice(
            f"{run.num_devices} devices divide a step into micro-batches of {now} "
            f"samples, and it was {before} before: {held}, so results will differ. "
            f"Use at most {max(1, (run.job.largest_batch or 0) // before)} devices to go on as before",
        )
    return replace(planned.but(micro_batch=now), keeps_micro_batch=True)


def _compilable(run: Session, planned: PlannedRun) -> PlannedRun:
    """Return the same run eagerly where `--compile` is asked for and no rank can compile.

    A plan that was measured compiles only what was seen to compile.
    """
    if planned.way.compile_mode is None or not run.config.compile.enabled:
        return planned
    why = next(filter(None, run.world.gather(why_not_compiled(run.world.device))), "")
    if not why:
        return planned
    if not run.quiet:
        notice(f"--compile is not obeyed, steps run eagerly: {why}")
    return planned.not_compiled(why)


def _why_resumed(run: Session, checkpoint: Checkpoint, planned: PlannedRun) -> str:
    """Return what was kept of the checkpoint's plan, and what this start changed."""
    kept = f"as in the checkpoint of step {checkpoint.step}"
    before = StepWay.model_validate(checkpoint.meta["plan"]["way"])
    changed = {name for name in run.pinned() if getattr(before, name) != getattr(planned.way, name)}
    if planned.why_capped:
        changed.discard("micro_batch")
        kept = f"{planned.why_capped}; else {kept}"
    if not changed:
        return kept
    file, lines = run.config.plan.file, run.config.plan_pins.lines
    knobs = [BY_FIELD[name] for name in StepWay.model_fields if name in changed]
    by_plan = [knob.words for knob in knobs if not lines.keys().isdisjoint(knob.settings)]
    asked = [knob.words for knob in knobs if lines.keys().isdisjoint(knob.settings)]
    told = [f"{', '.join(by_plan)} pinned by {file.name}"] if file is not None and by_plan else []
    told += [f"{', '.join(asked)} as asked for"] if asked else []
    return f"{'; '.join(told)}; else {kept}"


def _why_not_measured(run: Session, model: nn.Module, steps_done: int) -> str:
    config, job = run.config, run.job
    if config.plan.file is not None:
        return f"pinned by {config.plan.file.name}"
    if not config.plan.auto_optimize:
        return "by rule: measuring is switched off"
    if unread := why_not_read(run):
        return f"by rule: {unread}"
    if len(run.devices) > 1:
        return "by rule: several GPUs of one process are not measured"
    if job.num_steps is None or _has_few_steps(run, steps_done):
        return f"by rule: fewer than {LEAST_STEPS} steps are not worth measuring for"
    why_not = "" if run.is_whole else why_not_tried(run, model)
    return f"by rule: {why_not}" if why_not else ""


def _has_few_steps(run: Session, steps_done: int) -> bool:
    return run.job.num_steps is not None and run.job.num_steps - steps_done < LEAST_STEPS


def measured(
    run: Session,
    model: nn.Module,
    planned: PlannedRun,
    steps_done: int = 0,
    on_probe: OnProbe | None = None,
    *,
    is_short_of_time: bool = False,
) -> PlannedRun:
    """Try ways of running a step, and return the best. With `is_short_of_time` only what the job can pay back."""
    job = run.job
    why_not = "" if run.is_whole else why_not_tried(run, model)
    if why_not:
        raise DrivetrainError(why_not, remedy="leave --measure out, or plan with --parallel-strategy ddp")
    if job.num_samples is None:
        raise DrivetrainError(
            "data that can only be iterated cannot be measured: its items would be used up",
            remedy="leave --measure out",
        )
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports torch's compiler: the run's time, not ours
    search = _Search(run, model, planned, _scope(run, model, planned, steps_done, is_short_of_time), on_probe)
    tuned, notes = search.run()
    if job.hooks:
        notes.append(f"the forecast of the job's time does not count its hooks ({len(job.hooks)})")
    if on_probe is not None:
        on_probe.begins("looking whether steps repeat", None)
    way, repeatability = _repeatable(run, model, tuned, steps_done, search.cache, is_short_of_time=is_short_of_time)
    if way != tuned.way:
        tuned = _followed_instead(tuned, way, repeatability.cost or 0.0)
    notes += search.offers(tuned, way, steps_done, is_short_of_time=is_short_of_time)
    data = _data_path(run, tuned, steps_done, search.read_sample_seconds, is_short_of_time=is_short_of_time)
    planned = replace(
        planned, way=way, repeatability=repeatability, data_path=planned.data_path if data is None else data.value
    )
    return _compiled_later(run, model, planned, tuned, data=data, notes=tuple(notes), seconds=search.clock())


class _Search:
    """The search for the fastest way of running a step, with what earlier starts measured."""

    def __init__(
        self, run: Session, model: nn.Module, planned: PlannedRun, scope: Scope, on_probe: OnProbe | None
    ) -> None:
        job = run.job
        self._run, self._model, self._first, self._scope, self._on_probe = run, model, planned.way, scope, on_probe
        self._began = time.monotonic()
        self.cache = PlanCache(cache_folder() / "plans", run.world.agree(_key(run, model)))
        self._known = _known(run, self.cache)
        make: Callable[..., StepProbe] = partial(ShardedProbe, run) if run.shards else StepProbe
        self._probe = make(
            job,
            model,
            run.world,
            lambda division: make_loader(run, division, job.source, shuffle=job.shuffle),
            Journal(self.cache.journal),
            cudnn_benchmark=run.config.kernels.cudnn_benchmark,
            takes_any_number=takes_any_number(run),
        )
        self._num_measured, self._aside = 0, SetAside()
        self._budget: float | None = None  # seconds, once the first measurement told how long the job is
        self._compiled = dict[StepWay, float]()  # what compiling is expected to take

    def run(self) -> tuple[Tuned, list[str]]:
        """Return the best way, and notes for the plan. What is remembered is tried with a step, else measured anew."""
        run, tuned, notes = self._run, self._tuned(), list[str]()
        self._probe.leave_to(tuned.way)
        if self._known and not self._num_measured:
            why_not = _why_outdated(self._probe, tuned, self._scope)
            if why_not:
                notes.append(f"what was measured before does not hold any more ({why_not})")
                if not run.quiet:
                    notice(f"{notes[0]}: measuring anew")
                self.cache.forget()
                self._known = {}
                tuned = self._tuned()
            else:
                notes.append("measured at an earlier start, and tried again with one step")
        if run.world.is_main and self._num_measured and run.config.plan.cache:
            self.cache.write(tuned.tried)
        notes += [
            f"left out: {tried.way}: {tried.measurement.problem}" for tried in tuned.tried if tried.measurement.problem
        ]
        return tuned, notes

    def offers(self, tuned: Tuned, way: StepWay, steps_done: int, *, is_short_of_time: bool) -> list[str]:
        """Measure what FP8 would gain, and how far it moves the loss. It is told, and never taken: it rounds more."""
        run, chosen = self._run, tuned.measurement_of(way)
        found = list[str]()
        if chosen is None or chosen.problem or chosen.is_brief or _why_no_fp8(run, self._model, way):
            return found
        step_seconds = chosen.sample_seconds * run.rank_samples
        seconds = (OFFER_STEPS * 2 + STEPS_TO_COMPARE) * step_seconds
        if is_short_of_time:  # the budget of `drivetrain plan` leaves compiling aside
            seconds += len(_fp8_recipes(run)) * tuned.setup_seconds_of(way)
        left = step_seconds * max(0, (run.job.num_steps or 0) - steps_done)
        if seconds > (OFFER_SHARE * left if is_short_of_time else self._scope.budget_seconds):
            remedy = "`drivetrain plan --measure` tries it" if is_short_of_time else "--plan-budget allows more"
            why = f"some {seconds:.0f} s are too long for this job; {remedy}"
            return [f"fp8 was not measured: {why}"] if _fp8_recipes(run) else []
        for recipe in _fp8_recipes(run):
            other = way.but(precision=recipe)
            if self._on_probe is not None:
                self._on_probe.begins(f"trying {other}", None)
            measured = self._probe(other, MOST_SECONDS)
            if measured.problem:
                found.append(f"{recipe} is not offered: {measured.problem}")
                continue
            gain = chosen.sample_seconds / measured.sample_seconds
            if gain < LEAST_OFFER:
                found.append(f"{recipe} is not offered: {gain:.2f} × as fast here (measured)")
                continue
            words = (
                f"{recipe} would be {gain:.2f} × as fast here (measured), and its loss differs by "
                f"{self._loss_moved(way, other):.2%} after {OFFER_STEPS} steps; say --precision {recipe} to have it"
            )
            found.append(words)
            if not run.quiet:
                notice(words)
        return found

    def _loss_moved(self, way: StepWay, other: StepWay) -> float:
        """Return how far apart the losses of two ways are after a few steps, relative to the first."""
        first, second = (self._probe.losses(each, OFFER_STEPS)[-5:] for each in (way, other))
        return float(max(self._run.world.gather(abs(sum(second) / sum(first) - 1))))

    @property
    def read_sample_seconds(self) -> float:
        return self._probe.read_sample_seconds

    def clock(self) -> float:
        """Return the seconds since the search began: ranks decide together, by one clock."""
        return float(self._run.world.agree(time.monotonic() - self._began))

    def _tuned(self) -> Tuned:
        try:
            return tune(self._first, self._scope, self._measure, self.clock)
        except DoesNotFitError as error:
            raise _does_not_fit(self._run, self._model, self._first, error.tried) from error
        except UnusableError as error:
            raise NotMeasuredError(
                f"a step of this job cannot be run: {error}",
                remedy="`drivetrain train` shows where, with the traceback",
            ) from None
        finally:
            self._aside.end()

    def _measure(self, way: StepWay, seconds: float) -> Measurement:
        found = self._known.get(way)
        if found is not None and (not seconds or not found.is_brief):
            return found
        if self._run.world.device.type == "cuda":
            self._aside.begin()  # each probe ends with a look for garbage, so that its memory is free for the next
        self._num_measured += 1
        if self._on_probe is not None:
            self._on_probe.begins(f"trying {way}", self._expected_seconds(way))
        began = time.monotonic()
        found = self._probe(way, seconds, of_part=not seconds)
        spent = self._run.world.agree(round(time.monotonic() - began, 3))  # decides what else is tried, on all ranks
        found = found.model_copy(update={"trial_seconds": spent})
        if self._on_probe is not None:
            self._on_probe(way, found)
        if not found.problem:
            left = found.sample_seconds * self._scope.remaining_samples
            self._budget = min(self._scope.budget_seconds, left * self._scope.budget_share)
        return found

    def _expected_seconds(self, way: StepWay) -> float | None:
        """Return how long the search takes in all; None before the first measurement."""
        if way.compile_mode is not None and way not in self._compiled:
            self._compiled[way] = max(self._scope.compile_costs.values(), default=0.0)
        return None if self._budget is None else self._budget + sum(self._compiled.values())


def _fp8_recipes(run: Session) -> list[Fp8Recipe]:
    """Return the kinds of FP8 that every GPU in use has."""
    if run.world.device.type != "cuda":
        return []
    oldest = min((gpu.capability or (0, 0) for gpu in run.hardware.gpus), default=(0, 0))
    return [recipe for recipe in RECIPES if oldest >= FP8_CAPABILITY[recipe]]


def _why_no_fp8(run: Session, model: nn.Module, way: StepWay) -> str:
    """Return why FP8 is no matter here; empty where it may be offered."""
    if way.precision != "bf16" or "precision" in run.pinned():
        return "another precision is used"
    if run.job.turns or way.repeat == "strict" or run.shards:
        return "the loss of such steps is not compared"
    layers = (layer for block in repeated_blocks(model).values() for layer in block.modules())
    return "" if any(map(fits_fp8, layers)) else "no layer is large enough"


def _repeatable(
    run: Session, model: nn.Module, tuned: Tuned, steps_done: int, cache: PlanCache, *, is_short_of_time: bool
) -> tuple[StepWay, Repeatability]:
    """Return the way to follow, and whether it repeats bit by bit: tried, or as an earlier start found."""
    way, chosen, began = tuned.way, tuned.chosen, time.monotonic()
    why_not = _why_not_repeated(run, way)
    if why_not or chosen is None or chosen.problem:
        return way, Repeatability(reason=why_not or "not measured: no step was")
    remembered = cache.repeated(way) if run.config.plan.cache else None
    if remembered is not None:
        return remembered.followed, remembered.found
    step_seconds = chosen.sample_seconds * run.rank_samples
    seconds_left = step_seconds * max(0, (run.job.num_steps or 0) - steps_done)
    one_way = tuned.setup_seconds_of(way) + REPEAT_STEPS * step_seconds
    most = repeat_seconds(seconds_left) if is_short_of_time else math.inf
    if REPEAT_START_SECONDS[run.world.device.type] + one_way > most:
        return way, Repeatability(
            reason=f"not measured: about {seconds_left:.0f} s of work are left, too little to spend some "
            f"{REPEAT_START_SECONDS[run.world.device.type] + one_way:.0f} s on it"
        )
    micro_batch, holds_both = _micro_batch_of_copies(run, way, chosen)
    if not micro_batch:
        return way, Repeatability(reason="not measured: the memory does not hold the model and its optimizer twice")
    if not run.quiet:
        notice("planning: running the first steps again, to see whether they repeat to the bit")

    def why_stop() -> str:
        spent = time.monotonic() - began
        if spent + one_way > 2 * most or spent > run.config.plan.budget_seconds + 4 * one_way:
            return f"{spent:.0f} s were spent on it, and the job is too short for more"
        return ""

    eager = tuned.measurement_of(way.but(compile_mode=None)) if way.compile_mode else None
    eager_cost = None if eager is None or eager.problem else eager.sample_seconds / chosen.sample_seconds - 1
    probe = RepeatProbe(run, model, micro_batch, holds_both=holds_both)
    try:
        followed, found = find_repeatable(
            way,
            probe.here,
            probe.elsewhere,
            probe.cost_of,
            why_stop,
            pinned=run.pinned(),
            is_cudnn=has_convolutions(model) or any(isinstance(module, nn.RNNBase) for module in model.modules()),
            eager_cost=eager_cost,
        )
    finally:
        probe.close()
    if probe.note:
        found = found.model_copy(update={"reason": f"{found.reason} ({probe.note})"})
    if found.value is not None and run.config.plan.cache:
        cache.write_repeated(Repeated(chosen=way, followed=followed, found=found))
    return followed, found


def repeat_seconds(seconds_left: float) -> float:
    """Return how long a job that takes so long may be kept waiting to see whether its steps repeat."""
    return min(REPEAT_SHARE * seconds_left, max(REPEAT_SECONDS, LONG_SHARE * seconds_left))


def _why_not_repeated(run: Session, way: StepWay) -> str:
    """Return why it is not measured whether steps repeat; empty if it is."""
    if "repeat" in run.pinned() and way.repeat == "off":
        return "not measured: --repeatable off asks for the fastest kernels"
    if run.world.device.type == "cpu" and way.repeat == "off":
        return "not measured: on a CPU kernels are not chosen by timing, and sum in a fixed order"
    if run.world.size > 1:
        return f"not measured: {run.world.size} processes share a step"
    if run.shards:
        return "not measured: the model is sharded"
    return ""


def _micro_batch_of_copies(run: Session, way: StepWay, chosen: Measurement) -> tuple[int, bool]:
    """Return the largest micro-batch, halved as often as it takes, that fits beside a copy held here; 0: none does.

    Also whether steps of it fit while such steps run here.
    """
    if run.world.device.type != "cuda":
        return way.micro_batch, False
    held = chosen.parameter_bytes + chosen.gradient_bytes + chosen.optimizer_bytes
    limit = run.free_bytes() * run.config.memory.gpu_fraction
    size = way.micro_batch
    while size:
        beyond = max(0, chosen.peak_bytes - held) * size / way.micro_batch
        peak = held + beyond
        if held + peak + CONTEXT_BYTES <= limit:
            kept = peak if way.capture else held  # by the way that was tried before: a graph keeps its activations
            return size, kept + peak + peak + CONTEXT_BYTES <= limit
        size //= 2
    return 0, False


def _followed_instead(tuned: Tuned, way: StepWay, cost: float) -> Tuned:
    """Return the same with the way that repeats; its figures are those of the fastest, with what it costs."""
    chosen = tuned.chosen
    assert chosen is not None
    measured = chosen.model_copy(update={"sample_seconds": chosen.sample_seconds * (1 + cost)})
    return tuned.model_copy(update={"way": way, "tried": (*tuned.tried, Tried(way=way, measurement=measured))})


def _data_path(
    run: Session, tuned: Tuned, steps_done: int, read_sample_seconds: float, *, is_short_of_time: bool
) -> Choice[DataPath] | None:
    """Measure the data path where reading matters; None leaves it as it is: in memory already, or by rule."""
    chosen = tuned.chosen
    if chosen is None or chosen.problem or run.residency.num_bytes or run.job.num_steps is None:
        return None
    steps_left = run.job.num_steps - steps_done
    step_seconds = chosen.sample_seconds * run.rank_samples
    with_reading = step_seconds + run.rank_samples * float(run.world.agree(read_sample_seconds))
    if is_short_of_time and with_reading * steps_left * BUDGET_SHARE < READING_SECONDS:
        return None
    return measured_data_path(run, tuned.way.micro_batch, step_seconds, steps_left, chosen.peak_bytes)


def _why_outdated(probe: StepProbe, tuned: Tuned, scope: Scope) -> str:
    """Return why the remembered best way no longer is what it was, judged by one step; empty if it is.

    One slow step says little: it is the first, and other processes use the machine, too. Then more of them are
    measured, and the faster figure counts. What was only looked at briefly before, with a part of a micro-batch, is
    again: a whole one would take several times as long as planning without a memory.
    """
    found = probe(tuned.way, 0.0, of_part=tuned.chosen is not None and tuned.chosen.is_brief)
    if found.problem or found.peak_bytes > scope.memory_limit_bytes:
        return found.problem or "it takes more memory"
    remembered = tuned.chosen.sample_seconds if tuned.chosen is not None else math.inf
    if found.sample_seconds <= MUCH_SLOWER * remembered:
        return ""
    again = probe(tuned.way, SURE_SECONDS)
    if again.problem:
        return again.problem
    seconds = min(found.sample_seconds, again.sample_seconds)
    if seconds <= MUCH_SLOWER * remembered:
        return ""
    rate, remembered_rate = 1 / seconds, 1 / remembered
    return f"a step takes {remembered_rate / rate:.1f} times as long: {rate:,.0f} samples/s, not {remembered_rate:,.0f}"


def _known(run: Session, cache: PlanCache) -> dict[StepWay, Measurement]:
    """Return rank 0's cached measurements on all ranks: they measure the same ways or none."""
    found = [tried.model_dump(mode="json") for tried in cache.read()] if run.config.plan.cache else []
    return {tried.way: tried.measurement for tried in (Tried.model_validate(each) for each in run.world.agree(found))}


def _scope(run: Session, model: nn.Module, planned: PlannedRun, steps_done: int, is_short_of_time: bool) -> Scope:
    config, device = run.config, run.world.device
    num_steps = max(0, (run.job.num_steps or 0) - steps_done)
    return Scope(
        rank_samples=run.rank_samples,
        remaining_samples=-(-run.job.samples_between(steps_done, steps_done + num_steps) // run.world.size),
        counts_memory=device.type == "cuda",
        # Of the rank that has the least: all have to try the same ways.
        memory_limit_bytes=min(run.world.gather(run.free_bytes())) * config.memory.gpu_fraction,
        fixed_micro_batch=_why_fixed(run, planned),
        largest_micro_batch=run.weighting.holds_division,
        others=_tried_here(run, others_of(facts_of(run, model, planned))),
        compile_costs=_compile_costs(run, model),
        compile_share=COMPILE_SHARE[device.type],
        budget_seconds=config.plan.budget_seconds,
        **({"budget_share": BUDGET_SHARE, "least_job_seconds": LEAST_JOB_SECONDS} if is_short_of_time else {}),
    )


def _tried_here(run: Session, others: dict[str, Others]) -> dict[str, Others]:
    """Return what is measured: of a sharded model, what its probe can try."""
    left = Others(why_none="not tried with a sharded model")
    return {field: each if not run.shards or field in TRIED else left for field, each in others.items()}


def _compile_costs(run: Session, model: nn.Module) -> dict[CompileScope, float]:
    """Return what compiling may take, by what is compiled as one, in the order in which that is tried."""
    asked, blocks = run.config.compile.scope, repeated_blocks(model)
    kinds = one_of_each_kind(blocks.values())
    num_repeated, num_modules = sum(map(_num_leaves, blocks.values())), _num_leaves(model)
    num_modules_of: dict[CompileScope, int] = {}
    # Of a class, the compiler keeps a few kinds, and leaves the others eager: such blocks do not pay.
    pays = num_repeated >= LEAST_REPEATED * num_modules and 2 * len(kinds) <= len(blocks)
    if blocks and not run.shards:
        of_kinds = sum(map(_num_leaves, kinds))
        if asked == "blocks" or (asked == "auto" and pays):
            num_modules_of["blocks"] = of_kinds
        if asked == "both" or (asked == "auto" and pays):
            num_modules_of["both"] = of_kinds + num_modules - num_repeated
    if asked in ("auto", "loss") or run.shards:  # of a sharded model blocks are compiled, whatever the scope
        num_modules_of["loss"] = sum(map(_num_leaves, kinds)) if run.shards and blocks else num_modules
    return {scope: COMPILE_SECONDS + COMPILE_SECONDS_PER_MODULE * number for scope, number in num_modules_of.items()}


def _num_leaves(module: nn.Module) -> int:
    return sum(1 for each in module.modules() if not any(True for _ in each.children()))


def _why_fixed(run: Session, planned: PlannedRun) -> str:
    """Return why the micro-batch is not tuned; empty if it is free to be."""
    if planned.why_capped:
        return planned.why_capped
    if "micro_batch" in run.pinned():
        return "asked for"
    if planned.batch_size_found:
        return planned.batch_size_found
    if planned.keeps_micro_batch:
        return f"as it was before: {run.weighting.holds_division}"
    if run.world.device.type == "cuda":
        return ""
    whole = "a rank's whole share: on a CPU smaller parts gain nothing"
    return f"{whole}; kept: {run.weighting.holds_division}" if run.weighting.holds_division else whole


# What figures depend on


def _key(run: Session, model: nn.Module) -> str:
    job, config = run.job, run.config
    division = Division(job.num_samples or 1, job.largest_batch or 1, 1, run.world.size)
    first = make_loader(run, division, job.source, shuffle=job.shuffle).first(job.max_steps, job.epochs)
    sections = ("precision", "kernels", "memory", "batch", "data", "compile", "distributed")
    return key_of_facts({
        "modules": [(name, type(module).__qualname__) for name, module in model.named_modules()],
        "tensors": [
            (name, tuple(value.shape), str(value.dtype), value.requires_grad)
            for name, value in [*model.named_parameters(), *model.named_buffers()]
        ],
        "batch": [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves(first.batch) if isinstance(leaf, Tensor)],
        "source": _sources([*_functions(job), *{type(module) for module in model.modules()}]),
        "step": [
            job.largest_batch,
            run.world.size,
            job.clip_norm,
            job.ema,
            *_more(job),
            *(["sharded"] if run.shards else []),
        ],
        "machine": [run.machine(), torch.get_num_threads()],
        "versions": [torch.__version__, torch.version.cuda, torch.version.hip, platform.python_version()],
        "settings": {name: getattr(config, name).model_dump(mode="json") for name in sections},
    })  # fmt: skip


def _more(job: Job) -> list[Any]:
    """Return what else a step depends on, for jobs that have it."""
    return [*(turn.every for turn in job.turns), *(["swa"] if job.swa is not None else [])]


def _functions(job: Job) -> list[Any]:
    """Return the functions that a step consists of."""
    losses: list[Any] = [turn.loss for turn in job.turns] or [job.loss]
    makers: list[Any] = [optim.make for optim in job.optims.values()] or [job.optimizer]
    return losses + makers


def _sources(things: Iterable[Any]) -> list[str]:
    """Return the source of functions and classes. torch's own go with its version."""
    own = [thing for thing in things if not str(getattr(thing, "__module__", "")).startswith("torch.")]
    return sorted(map(_source, own))


def _source(thing: Any) -> str:
    """Return the source of a function or class, else a fingerprint of its code: its file may be no Python."""
    with suppress(OSError, TypeError, SyntaxError, TokenError):
        if (inspect.getsourcefile(thing) or "").endswith((".py", ">")):  # cells of a notebook are `<…>`
            return inspect.getsource(thing)
    return function_fingerprint(thing)


def _does_not_fit(run: Session, model: nn.Module, way: StepWay, tried: list[Tried]) -> DrivetrainError:
    """Return the error for a model that does not fit: what takes how much memory, and the remedies."""
    failed = [one.way for one in tried if one.measurement.out_of_memory]
    return explained(
        run.job,
        model,
        way.precision,
        str(run.world.device),
        run.free_bytes(),
        run.config.memory.gpu_fraction,
        num_devices=run.num_devices,
        micro_batch=min((each.micro_batch for each in failed), default=1),
        recomputes=any(each.recompute for each in failed),
    )

"""The search for a better plan: which ways of running a step to try, which to keep, and which repeat bit by bit."""

import math
from collections.abc import Callable, Iterator
from typing import Protocol

from pydantic import Field

from drivetrain.core.value import Value, format_bytes
from drivetrain.plan.forecast import (
    MOST_SIZES,
    MemoryModel,
    Peak,
    bound_to_fit,
    largest_that_fits,
    next_size_to_measure,
)
from drivetrain.plan.knobs import (
    BY_FIELD,
    LEAST_GAIN,
    CompileMode,
    CompileScope,
    Knob,
    Others,
    Repeat,
    StepWay,
    knobs_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# Decides whether a way of running a step repeats bit by bit, and finds the cheapest one that does.
#
# It only decides. The caller runs the first steps of the job in two processes and passes the results; nothing here
# knows devices or models, so every decision can be tested with made-up trials.

MOST_COST = 0.03  # of a step's time, for which a way that repeats is taken by itself
IN_WORDS: dict[Repeat, str] = {
    "off": "the fastest kernels",
    "fixed": "kernels that are not chosen by timing",
    "strict": "deterministic kernels",
}


class Bits(Value):
    """The results of a way's first steps in one process: a digest for each thing that is compared."""

    losses: tuple[str, ...] = ()  # by step
    tensors: dict[str, str] = Field(
        default_factory=dict
    )  # weights, buffers and optimizer state after the last of them, by name
    repeats_here: bool = True  # whether the same process got the same once more
    problem: str = ""  # why there are none

    def difference(self, other: "Bits") -> str:
        """Return the first thing that differs, in words; empty if nothing does."""
        for step, (one, two) in enumerate(zip(self.losses, other.losses, strict=False), start=1):
            if one != two:
                return f"the loss of step {step}"
        for name in [*self.tensors, *(name for name in other.tensors if name not in self.tensors)]:
            if self.tensors.get(name) != other.tensors.get(name):
                return f"{name} after step {len(self.losses)}"
        return "" if len(self.losses) == len(other.losses) else "the number of steps"


class RepeatTrial(Value):
    """A way, and whether its first steps gave the same results in two processes."""

    way: StepWay
    repeats: bool = False
    difference: str = ""  # the first thing that differed
    repeats_here: bool = True  # inside each of the two
    processes: int = 2  # 1: one after the other in this process, as the job cannot be made elsewhere
    problem: str = ""  # why it could not be tried
    cost: float | None = None  # relative to a step of the fastest way; None: not measured


class Repeatability(Value):
    """The row `repeatable` of a plan."""

    value: bool | None = None  # None: not measured
    reason: str = ""
    cost: float | None = None  # of the way that is followed, relative to the fastest
    trials: tuple[RepeatTrial, ...] = ()

    def as_plain(self) -> dict[str, object]:
        value = {True: "yes", False: "no", None: "not measured"}[self.value]
        cost = {} if self.cost is None else {"cost": f"{100 * self.cost:+.1f} %"}
        tried = [
            {
                "way": str(trial.way),
                "repeats": "not tried: " + trial.problem if trial.problem else "yes" if trial.repeats else "no",
                **({"differs": trial.difference} if trial.difference else {}),
                **({} if trial.cost is None else {"cost": f"{100 * trial.cost:+.1f} %"}),
            }
            for trial in self.trials
        ]
        return {"value": value, "why": self.reason, **cost, **({"tried": tried} if tried else {})}


Attempt = Callable[[StepWay], RepeatTrial]  # runs its first steps: twice in this process, or here and in a fresh one
CostOf = Callable[[StepWay], float | None]  # relative to the chosen way, measured side by side; None: it could not be
WhyNot = Callable[[], str]  # why nothing more is to be tried; empty while there is time


def find_repeatable(
    chosen: StepWay,
    here: Attempt,
    elsewhere: Attempt,
    cost_of: CostOf,
    why_stop: WhyNot,
    *,
    pinned: set[str],
    is_cudnn: bool,
    eager_cost: float | None,
) -> tuple[StepWay, Repeatability]:
    """Try the chosen way, and if it does not repeat, others until one does that costs little.

    A fresh process has to compile anew, which takes longer than all the rest. So a way gets there only if its steps
    repeat in this process, and if it costs so little that it would be taken.

    Args:
        chosen: The fastest way, or what the user pinned.
        here: Runs a way's first steps twice in this process.
        elsewhere: Runs them in a fresh process, and compares them with those that were run here.
        cost_of: Measures how much longer a step of a way takes.
        why_stop: Says why no more may be tried.
        pinned: Which fields of a way the user fixed: these are never changed.
        is_cudnn: Whether the model has modules that cuDNN computes, so that its deterministic kernels may be enough.
        eager_cost: What leaving the compiler out costs, as far as it was measured before; None: not known.
    """
    first = here(chosen)
    if first.repeats and not first.problem:
        first = elsewhere(chosen)
    trials = [first]
    if first.problem:
        return chosen, Repeatability(reason=f"could not be tried: {first.problem}", trials=tuple(trials))
    if first.repeats:
        return chosen, Repeatability(value=True, reason=_repeats(first), cost=0.0, trials=tuple(trials))
    found: list[RepeatTrial] = []
    stopped = ""
    for way in _variants(chosen, first, pinned, is_cudnn=is_cudnn, eager_cost=eager_cost):
        if found and way.compile_mode is None and (eager_cost is None or eager_cost >= (found[0].cost or 0.0)):
            continue  # dearer than what repeats already
        stopped = why_stop()
        if stopped:
            break
        trial = here(way)
        if trial.repeats:
            cost = cost_of(way)
            would_be_taken = "repeat" in pinned or (cost is not None and cost <= MOST_COST)
            trial = (elsewhere(way) if would_be_taken else trial).model_copy(update={"cost": cost})
        trials.append(trial)
        if not trial.repeats:
            continue
        found.append(trial)
        if would_be_taken:
            return way, Repeatability(value=True, reason=_taken(first, trial), cost=trial.cost, trials=tuple(trials))
    cheapest = min(found, key=lambda trial: float("inf") if trial.cost is None else trial.cost, default=None)
    reason = _not_taken(first, cheapest, trials[1:], stopped)
    return chosen, Repeatability(value=False, reason=reason, cost=0.0, trials=tuple(trials))


def _variants(
    chosen: StepWay, first: RepeatTrial, pinned: set[str], *, is_cudnn: bool, eager_cost: float | None
) -> Iterator[StepWay]:
    """Yield the variants, cheapest first. A difference inside one process is not due to kernels chosen by timing."""
    levels: tuple[Repeat, ...] = (chosen.repeat,)
    if "repeat" not in pinned:
        levels = ("fixed", "strict") if first.repeats_here or is_cudnn else ("strict",)
    may_be_eager = chosen.compile_mode is not None and "compile_mode" not in pinned
    eager = [chosen.but(compile_mode=None, repeat=level) for level in levels] if may_be_eager else []
    if eager_cost is not None and eager_cost <= MOST_COST:
        yield from eager
        eager = []
    if "repeat" not in pinned:
        yield from (chosen.but(repeat=level) for level in levels)
    yield from eager


def _repeats(trial: RepeatTrial) -> str:
    if trial.processes > 1:
        return "the same bits here and in a fresh process with compile caches of its own"
    return "the same bits twice in this process; a restart was not tried, as no other process can make this job"


def _taken(first: RepeatTrial, taken: RepeatTrial) -> str:
    cost = "its cost is not known" if taken.cost is None else f"it costs {100 * taken.cost:+.1f} % of a step's time"
    compiled = ", not compiled" if first.way.compile_mode and not taken.way.compile_mode else ""
    return (
        f"{IN_WORDS[taken.way.repeat]}{compiled}: {_repeats(taken)}; {cost}. "
        f"Without, {first.difference} differs between two runs"
    )


def _not_taken(first: RepeatTrial, cheapest: RepeatTrial | None, others: list[RepeatTrial], stopped: str) -> str:
    differs = f"{first.difference} differs between two runs of the same job"
    if cheapest is not None:
        cost = "an unknown cost" if cheapest.cost is None else f"{100 * cheapest.cost:+.1f} % of a step's time"
        way = cheapest.way
        flags = [] if way.compile_mode == first.way.compile_mode else ["--no-compile"]
        flags.append("--deterministic" if way.repeat == "strict" else f"--repeatable {way.repeat}")
        where = "" if cheapest.processes > 1 else " in one process"
        return f"{differs}; {IN_WORDS[way.repeat]} repeat{where}, at {cost}: {' '.join(flags)} takes them"
    if stopped:
        return f"{differs}; what would repeat was not looked for: {stopped}"
    failed = next((trial.problem for trial in others if trial.problem), "")
    return f"{differs}; nothing that was tried repeats" + (f" ({failed})" if failed else "")


# ----------------------------------------------------------------------------------------------------------------------
# Improves a plan by rule to the fastest that was measured: which ways of running a step to try, and which to keep.
#
# It only decides. `measure` runs a way on the user's own model and returns what it took; nothing here knows devices or
# models, so every decision can be tested with made-up measurements. Throughput is maximized, at the job's exact global
# batch: a way divides the same work differently, and nothing else.

SMALLER_GAIN = 0.015  # for which a smaller micro-batch is taken
MUCH_SLOWER = SMALLER_GAIN  # than the best: then no smaller one is tried, where steps are long
SMALLER_GAIN_OF_SHORT = 0.1  # where a step is short: more launches gain nothing there, and noise is larger
MOST_OUT_OF_MEMORY = 2
# A measurement takes a fraction of the time that may be spent on all of them, but not less than noise asks for.
LEAST_SECONDS, MOST_SECONDS, NUM_MEASUREMENTS = 0.05, 0.4, 15
# Longer steps keep most devices busy: wider numbers gain nothing there, and a recorded step only where it is measured
# that launching takes most of the time. (Where many kernels are in flight, a launch waits, too: the trial decides.)
SHORT_STEP_SECONDS, LAUNCH_BOUND = 0.02, 0.75
# A compiled step is recorded to close the gaps between its kernels, and to be as fast where other work slows the host
# down, which no trial shows: it need not gain, only not lose more than noise. On an H200, a GPT of 99 million weights
# trained as fast as in its trial with its steps recorded (479 of 481 thousand tokens/s), and 4 % slower where they were
# not (455 of 473), since that had gained 0.4 % only. Where launching takes all of a step, the gain is larger, and worth
# trying in a shorter job: the same GPT, compiled in blocks, took 40 ms instead of 33.
LAUNCH_BOUND_COMPILED, RECORD_GAIN, RECORD_SECONDS = 0.3, -0.005, 3.0
SCOPE_GAIN = 0.005  # of another compile scope, once steps are recorded
RECORD_SHARE, RECORD_SHARE_LAUNCH_BOUND = 0.01, 0.05  # of the time that is left
# A run's host has more to do than a trial's. On an H200, launching took 72 % of a step of that GPT in its trial, and
# the device idled for 5 % of the run: 461 samples/s, of 488 that its kernels alone would allow.
NEARLY_LAUNCH_BOUND = 0.6
# One graph of everything has fewer kernels than its parts: on an H200, a GPT of 1.4 billion weights was 0.8 % faster.
AT_ONCE_GAIN = 0.005
# As short as this a step is launches, hardly anything else: recording it gains several times over, and is worth more of
# a short job's time than other ways, which gain a few percent.
LAUNCHES_SECONDS, CAPTURE_SHARE = 0.004, 0.2
ODD_LOSS = 0.05  # more compiled is rarely slower than less: then both are measured once more
STEPS_TO_COMPARE = 14  # two ways, each warmed up and timed
STEPS_TO_TIME = 25  # in the time for measuring, where there is nothing to compare with: a fifth of them times a way


_AS_ONE: dict[CompileScope, str] = {
    "blocks": "each block by itself",
    "both": "the loss around the blocks, too",
    "loss": "the whole loss at once",
}


class Measurement(Value):
    """The cost of a way. `problem` says why it cannot be used; then the rest may be missing."""

    sample_seconds: float = float("inf")  # per sample of this rank
    peak_bytes: int = 0
    setup_seconds: float = 0.0  # compiling, mostly: what a run pays once
    problem: str = ""
    out_of_memory: bool = False
    parameter_bytes: int = 0  # and buffers
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    launch_share: float = 0.0  # of a step's time, until the host has launched all of it; 0: not measured
    is_brief: bool = False  # its time is of one step alone: good for an estimate, not to compare
    trial_seconds: float = 0.0  # that the search spent on it, with everything that trying it takes


class Tried(Value):
    way: StepWay
    measurement: Measurement


class Scope(Value):
    """The choices to decide, and the limits for deciding them."""

    rank_samples: int  # of each step, on the rank that has the most
    remaining_samples: int  # of the whole job, on this rank
    memory_limit_bytes: float
    counts_memory: bool = True  # false on a CPU
    fixed_micro_batch: str = ""  # why it may not be changed: it is pinned, or recorded
    largest_micro_batch: str = ""  # why the largest that fits is taken, however fast: it is part of what is learned
    others: dict[str, Others] = Field(default_factory=dict)  # what to try, by field of a way
    # What compiling is expected to take, before it was measured, by what is compiled as one: tried in this order.
    compile_costs: dict[CompileScope, float] = Field({"loss": 15.0})
    compile_share: float = 0.12  # of the remaining time, that compiling may cost without being sure to gain
    budget_seconds: float = 60.0  # for measuring; a way that is begun is finished
    budget_share: float = math.inf  # of the remaining time, that measuring may take
    least_job_seconds: float = 0.0  # shorter jobs are left as they are

    def others_of(self, field: str) -> Others:
        return self.others.get(field, Others())


class Tuned(Value):
    """The way to follow, and how it was found."""

    way: StepWay
    tried: tuple[Tried, ...]
    reasons: dict[str, str]  # by field of a way
    memory: MemoryModel | None = None
    # Of the peak of the chosen way, uncompiled: from smaller steps, before it was measured. 0: no forecast was made.
    forecast_bytes: int = 0

    @property
    def chosen(self) -> Measurement | None:
        return self.measurement_of(self.way)

    def measurement_of(self, way: StepWay) -> Measurement | None:
        return next((tried.measurement for tried in reversed(self.tried) if tried.way == way), None)

    def setup_seconds_of(self, way: StepWay) -> float:
        """Return what setting a way up takes where nothing is compiled yet.

        A trial that came later found what earlier ones had compiled: blocks, or the same code before it was captured.
        """
        parts = {way, way.but(capture=False)}
        if way.compiles_blocks:
            parts |= {part.but(compile_scope="blocks") for part in parts}
        return sum(tried.measurement.setup_seconds for tried in self.tried if tried.way in parts)


class DoesNotFitError(Exception):
    """Raised if not even one sample at a time fits."""

    def __init__(self, tried: list[Tried]) -> None:
        super().__init__("not even a micro-batch of one sample fits")
        self.tried = tried


class UnusableError(Exception):
    """Raised if the way to start from cannot be measured at all."""


class Clock(Protocol):
    def __call__(self) -> float: ...


class Measure(Protocol):
    def __call__(self, way: StepWay, seconds: float) -> Measurement:
        """Run a way for about this long, after warm-up; 0: one step, for its memory and an estimate of its time."""


def tune(start: StepWay, scope: Scope, measure: Measure, clock: Clock) -> Tuned:
    """Measure ways in the order of what they may gain, and stop when the rest cannot pay for its own measuring."""
    return _Search(start, scope, measure, clock).run()


class _Search:
    def __init__(self, start: StepWay, scope: Scope, measure: Measure, clock: Clock) -> None:
        self._start, self._scope, self._measure, self._clock = start, scope, measure, clock
        self._began = clock()
        self._tried: list[Tried] = []
        self._reasons: dict[str, str] = {}
        self._forecasts: dict[StepWay, int] = {}
        self._budget = scope.budget_seconds

    def run(self) -> Tuned:
        try:
            best = self._micro_batch(self._start)
        except DoesNotFitError:
            if not self._scope.others_of("recompute").values or self._start.recompute:
                raise
            failed, self._tried = self._tried, []
            best = self._micro_batch(self._start.but(recompute=True))
            self._tried = failed + self._tried
            self._reasons["recompute"] = "recomputed: the model does not fit with all of them kept"
        too_short = self._why_too_short(best)
        if too_short:
            for knob in knobs_of("compare", "compare_short", "capture", "compile"):
                self._reasons.setdefault(knob.field, too_short)
        else:
            best = self._quick_ones(best)
            for mode in self._scope.others_of("compile_mode").values:
                for compile_scope in self._scope.compile_costs:
                    best = self._compiled(best, mode, compile_scope)
            best = self._compiled_and_captured(best)
        return Tuned(
            way=best,
            tried=tuple(self._tried),
            reasons=self._reasons,
            memory=self._line(best),
            forecast_bytes=self._forecasts.get(plainest(best), 0),
        )

    def _why_too_short(self, way: StepWay) -> str:
        scope, left = self._scope, self._seconds_left(way)
        if left < scope.least_job_seconds:
            return f"not tried: about {left:.1f} s of work are left, too little to measure for"
        if self._has_few_steps:
            return f"not tried: {self._num_steps:,.0f} steps are left, and to compare two ways takes {STEPS_TO_COMPARE}"
        return ""

    @property
    def _num_steps(self) -> float:
        return self._scope.remaining_samples / self._scope.rank_samples

    @property
    def _has_few_steps(self) -> bool:
        """Whether there are too few steps to compare two ways: the largest micro-batch is tried, and taken."""
        return self._num_steps * self._scope.budget_share < STEPS_TO_COMPARE

    def _quick_ones(self, best: StepWay) -> StepWay:
        """Compare the choices that take no longer to try than a few steps."""
        scope = self._scope
        for knob in knobs_of("compare"):
            best = self._best_of(best, knob)
        has_more = any(scope.others_of(knob.field).values for knob in knobs_of("compare_short", "capture"))
        measured = self._try(best, brief=not has_more and self._num_steps * scope.budget_share < STEPS_TO_TIME)
        step_seconds = measured.sample_seconds * scope.rank_samples
        is_short = step_seconds < SHORT_STEP_SECONDS
        for knob in knobs_of("compare_short") if is_short else ():
            best = self._best_of(best, knob)
        capture = scope.others_of("capture")
        if not capture.values:
            self._reasons["capture"] = capture.why_none
        elif not is_short and measured.launch_share < LAUNCH_BOUND:
            share = f": the host launches them in {measured.launch_share:.0%} of their time"
            busy = "not tried: steps are long enough to keep the device busy"
            self._reasons["capture"] = busy + (share if measured.launch_share else "")
        else:
            worth = CAPTURE_SHARE * self._seconds_left(best) if step_seconds < LAUNCHES_SECONDS else 0.0
            best = self._compared(best, best.but(capture=True), "capture", worth_seconds=worth)
            if not best.capture and self._start.precision != best.precision:
                best = self._compared(best, best.but(precision=self._start.precision, capture=True), "capture")
        return best

    def _compiled_and_captured(self, way: StepWay) -> StepWay:
        """Return a compiled way with its steps recorded where that is faster, though it was not tried uncompiled.

        Compiled, the same launches have less work to hide behind. Its code is there already, so trying takes seconds.
        """
        if way.compile_mode is None or way.capture or not self._scope.others_of("capture").values:
            return way
        measured, left = self._try(way), self._seconds_left(way)
        is_launch_bound = measured.launch_share >= LAUNCH_BOUND
        share = RECORD_SHARE_LAUNCH_BOUND if measured.launch_share >= NEARLY_LAUNCH_BOUND else RECORD_SHARE
        if measured.launch_share < LAUNCH_BOUND_COMPILED:
            return way
        cost = max(RECORD_SECONDS, measured.trial_seconds - measured.setup_seconds)
        if left * share < cost:
            why = f"not tried: the job takes {left:.0f} s more, too little to spend some {cost:.0f} s on it"
            self._reasons["capture"] = why
            return way
        best = self._compared(way, way.but(capture=True), "capture", RECORD_GAIN, worth_seconds=math.inf)
        if best.capture:
            self._reasons["capture"] += "; replayed steps do not wait for a busy host"
        return self._other_scopes_captured(best) if best.capture and is_launch_bound else best

    def _other_scopes_captured(self, way: StepWay) -> StepWay:
        """Return the faster of a captured way and those of other compile scopes that were tried before capturing.

        As long as all of them were launch-bound, it was not seen which one has the faster kernels.
        """
        tried = {other.way: other.measurement for other in self._tried}
        for scope in self._scope.compile_costs:
            found = tried.get(way.but(compile_scope=scope, capture=False))
            if scope == way.compile_scope or found is None or found.problem or found.launch_share < LAUNCH_BOUND:
                continue
            # Its code is there, or in the compiler's cache: to load it takes a fraction of compiling it.
            cost = max(RECORD_SECONDS, found.setup_seconds / 3)
            if cost <= self._seconds_left(way) * RECORD_SHARE_LAUNCH_BOUND:
                other = way.but(compile_scope=scope)
                way = self._compared(way, other, "compile_scope", SCOPE_GAIN, worth_seconds=math.inf)
        return way

    def _best_of(self, way: StepWay, knob: Knob) -> StepWay:
        """Return the fastest of a way and those that differ from it in this choice alone."""
        others = self._scope.others_of(knob.field)
        for value in others.values:
            way = self._compared(way, way.but(**{knob.field: value}), knob.field, others.least_gain)
        return way

    # Micro-batch

    def _micro_batch(self, way: StepWay) -> StepWay:
        scope = self._scope
        if scope.fixed_micro_batch:
            self._foresee(way, way.micro_batch)
            first = self._try(way, brief=True)
            if first.problem:
                raise DoesNotFitError(self._tried) if first.out_of_memory else UnusableError(first.problem)
            self._limit_budget(first)
            self._reasons["micro_batch"] = scope.fixed_micro_batch
            return way
        largest = self._largest(way)
        best = self._fastest(way, largest)
        if best is None and any(tried.measurement.out_of_memory for tried in self._tried):
            raise DoesNotFitError(self._tried)
        if best is None:
            raise UnusableError(self._tried[-1].measurement.problem)
        return best

    def _largest(self, way: StepWay) -> int:
        """Return the largest micro-batch, by a few small steps and then a forecast, not by running out of memory."""
        share, limit = self._scope.rank_samples, self._scope.memory_limit_bytes
        if not self._foresee(way, share):
            return max((peak.micro_batch for peak in self._peaks(way)), default=0)
        if self._line(way) is None:
            return share
        return max(1, largest_that_fits(self._peaks(way), limit, share, self._held(way)))

    def _foresee(self, way: StepWay, at_most: int) -> bool:
        """Run brief steps of a few sizes, until memory can be forecast up to `at_most`. False: one did not fit."""
        if not self._scope.counts_memory:
            return True  # one step of the whole size says as much
        while True:
            peaks, limit = self._peaks(way), self._scope.memory_limit_bytes
            size = next_size_to_measure(peaks, limit, at_most, self._held(way))
            if size is None:
                break
            self._forecast(way.but(micro_batch=size))
            measured = self._try(way.but(micro_batch=size), brief=True)
            if measured.out_of_memory:
                return False
            if measured.problem:
                return True  # batch normalization, for one, cannot take one sample: then nothing is forecast
            self._limit_budget(measured)
            if not measured.peak_bytes:
                return True  # memory is not counted here
            held = self._held(way)
            if self._has_few_steps and held and bound_to_fit(self._peaks(way), limit, at_most, held) == at_most:
                break  # good enough for a short job, however far from what it will take
            if len(peaks) >= MOST_SIZES and not self._has_few_steps and self._is_out_of_time():
                break  # still on a floor: then the bound has to do
        self._forecast(way.but(micro_batch=at_most))
        return True

    def _forecast(self, way: StepWay) -> None:
        """Record the expected memory of a way that is not measured yet, from two sizes: one gives only a bound."""
        line, sizes = self._line(way), {peak.micro_batch for peak in self._peaks(way)}
        if line is not None and len(sizes) > 1 and way.micro_batch not in sizes:
            self._forecasts.setdefault(way, line.peak_bytes(way.micro_batch))

    def _fastest(self, way: StepWay, largest: int) -> StepWay | None:
        """Measure from the largest that is forecast to fit downwards, as long as smaller ones are faster."""
        best: tuple[float, int] | None = None
        num_slower = 0
        for size in _sizes(self._scope.rank_samples, largest):
            if best is not None and (self._has_few_steps or self._is_out_of_time() or num_slower >= 2):
                break  # past the best: one slower size may be an odd one
            other = way.but(micro_batch=size)
            self._forecast(other)
            measured = self._try(other, brief=self._has_few_steps)
            if measured.problem or (measured.peak_bytes > self._scope.memory_limit_bytes and size > 1):
                continue
            self._limit_budget(measured)
            seconds = measured.sample_seconds
            is_short = seconds * self._scope.rank_samples < SHORT_STEP_SECONDS
            if best is not None and seconds > best[0] * (1 - (SMALLER_GAIN_OF_SHORT if is_short else SMALLER_GAIN)):
                num_slower += 2 if not is_short and seconds > best[0] * (1 + MUCH_SLOWER) else 1
            else:
                best, num_slower = (seconds, size), 0
            if self._scope.largest_micro_batch:
                break
        if best is None:
            return None
        if self._scope.largest_micro_batch:
            self._reasons["micro_batch"] = f"the largest that fits, and kept: {self._scope.largest_micro_batch}"
            return way.but(micro_batch=best[1])
        by = " in one step" if self._has_few_steps else ""
        self._reasons["micro_batch"] = (
            f"{_rate(best[0])} samples/s measured{by}; forecast to fit: up to {largest} of {self._scope.rank_samples}"
        )
        return way.but(micro_batch=best[1])

    # The rest

    def _compared(
        self,
        way: StepWay,
        other: StepWay,
        field: str,
        least_gain: float = LEAST_GAIN,
        *,
        worth_seconds: float = 0.0,
    ) -> StepWay:
        """Return the faster of two ways. The other is tried while time is left, or `worth_seconds` are not spent."""
        label = BY_FIELD[field].in_words(getattr(other, field))
        before = self._try(way)
        if self._is_out_of_time(worth_seconds):
            self._reasons[field] = f"{label} was not tried: the time for measuring was over"
            return way
        after = self._try(other)
        if after.problem:
            self._reasons[field] = f"{label} cannot be used: {after.problem}"
            return way
        if before.peak_bytes <= self._scope.memory_limit_bytes < after.peak_bytes:
            self._reasons[field] = f"{label} takes {format_bytes(after.peak_bytes)}, more than may be used"
            return way
        gain = before.sample_seconds / after.sample_seconds - 1
        taken = gain > least_gain
        self._reasons[field] = (
            f"{label} {'is' if taken else 'would be'} {gain:+.0%}: {_rate(after.sample_seconds)} against "
            f"{_rate(before.sample_seconds)} samples/s"
        )
        return other if taken else way

    def _compiled(self, way: StepWay, mode: CompileMode, scope: CompileScope) -> StepWay:
        """Return the way that takes less time until the job's end: as it is, or with this compiled as one."""
        remaining = self._seconds_left(way)
        cost = self._scope.compile_costs[scope]
        if (
            scope == "loss"
            and cost > remaining * AT_ONCE_GAIN
            and _gains_little_at_once(self._tried, way.but(compile_mode=mode, compile_scope="both"))
        ):
            told = self._reasons.get("compile_scope", "")
            self._reasons["compile_scope"] = f"{told}; the whole loss at once was not tried: launching is quick enough"
            return way
        field = "compile_mode" if way.compile_mode is None else "compile_scope"
        what = "" if field == "compile_mode" else f"{_AS_ONE[scope]}: "
        if cost > remaining * self._scope.compile_share:
            self._reasons[field] = (
                f"{what}not tried: the job takes {remaining:.0f} s more, too little to spend some {cost:.0f} s on "
                "compiling"
            )
            return way
        other = way.but(compile_mode=mode, compile_scope=scope)
        before, after = self._try(way), self._try(other)
        if after.problem:
            self._reasons[field] = f"{what}not used: {after.problem}"
            return way
        if field == "compile_scope" and after.sample_seconds > before.sample_seconds * (1 + ODD_LOSS):
            before, after = self._try_again(way), self._try_again(other)
        saved = (before.sample_seconds - after.sample_seconds) * self._scope.remaining_samples
        words = (
            f"{_rate(after.sample_seconds)} against {_rate(before.sample_seconds)} samples/s saves {saved:.0f} s "
            f"of the {remaining:.0f} s that are left, and costs {after.setup_seconds:.0f} s"
        )
        if saved <= after.setup_seconds:
            self._reasons[field] = f"{what}not used: {words}"
            return way
        self._reasons[field] = words
        return other

    # Measuring

    def _try(self, way: StepWay, *, brief: bool = False) -> Measurement:
        """Measure a way once; a known measurement is reused."""
        known = next((tried.measurement for tried in self._tried if tried.way == way), None)
        if known is not None and (brief or not known.is_brief):
            return known
        if sum(tried.measurement.out_of_memory for tried in self._tried) >= MOST_OUT_OF_MEMORY:
            return Measurement(problem="not tried: out of memory twice already", out_of_memory=True)
        seconds = min(MOST_SECONDS, max(LEAST_SECONDS, self._budget / NUM_MEASUREMENTS))
        measured = self._measure(way, 0.0 if brief else seconds)
        self._tried = [tried for tried in self._tried if tried.way != way] + [Tried(way=way, measurement=measured)]
        return measured

    def _try_again(self, way: StepWay) -> Measurement:
        """Measure a way once more, and keep the faster: other work on the machine can slow a trial, not speed it up."""
        known = self._try(way)
        self._tried = [tried for tried in self._tried if tried.way != way]
        again = self._try(way)
        if again.problem or again.sample_seconds > known.sample_seconds:
            self._tried[-1] = Tried(way=way, measurement=known)
            return known
        # What it compiled the first time is there by now.
        first = {"setup_seconds": known.setup_seconds, "trial_seconds": known.trial_seconds}
        self._tried[-1] = Tried(way=way, measurement=again.model_copy(update=first))
        return self._tried[-1].measurement

    def _seconds_left(self, way: StepWay) -> float:
        return self._try(way, brief=True).sample_seconds * self._scope.remaining_samples

    def _limit_budget(self, measured: Measurement) -> None:
        """Limit measuring to a share of what the job itself takes."""
        left = measured.sample_seconds * self._scope.remaining_samples
        self._budget = min(self._scope.budget_seconds, left * self._scope.budget_share)

    def _peaks(self, way: StepWay) -> list[Peak]:
        """Return the measured peaks of all sizes of this way, which the memory line is fitted through."""
        return [
            Peak(tried.way.micro_batch, tried.measurement.peak_bytes)
            for tried in self._tried
            if tried.way.but(micro_batch=0) == way.but(micro_batch=0) and tried.measurement.peak_bytes
        ]

    def _held(self, way: StepWay) -> int:
        """Return what a step of this way holds at all times, counted where one was run.

        It is without gradients: those of a step's first micro-batch come while its activations go. Counting what is not
        held would make the bound on larger steps too low.
        """
        for tried in self._tried:
            found = tried.measurement
            if tried.way.but(micro_batch=0) == way.but(micro_batch=0) and found.peak_bytes:
                return found.parameter_bytes + found.optimizer_bytes
        return 0

    def _line(self, way: StepWay) -> MemoryModel | None:
        peaks, held = self._peaks(way), self._held(way)
        enough = len({peak.micro_batch for peak in peaks}) > 1 or (peaks and held)
        return MemoryModel.fitted(peaks, held) if enough else None

    def _is_out_of_time(self, worth_seconds: float = 0.0) -> bool:
        return self._clock() - self._began > max(self._budget, worth_seconds)


def _gains_little_at_once(tried: list[Tried], parts: StepWay) -> bool:
    """Return whether compiling everything at once gains little after `parts`: all of it, in parts.

    One graph of everything is launched with less work, which gains where the host takes most of a step to launch
    it. Otherwise it saves some kernels: on an H200, transformers of 0.2 and 1.4 billion weights were as fast within
    1 %.
    """
    found = next((each.measurement for each in tried if each.way == parts), None)
    if found is None or found.problem:
        return False
    return parts.capture or 0 < found.launch_share < LAUNCH_BOUND


def plainest(way: StepWay) -> StepWay:
    """Return the way without the choices that are made after its micro-batch: memory is forecast for this one."""
    later = [knob.field for knob in knobs_of("compare", "capture", "compile") if knob.changes_memory]
    return way.but(**{field: StepWay.model_fields[field].default for field in later})


def _rate(sample_seconds: float) -> str:
    return f"{1 / sample_seconds:,.0f}" if sample_seconds else "inf"


def _sizes(share: int, largest: int) -> Iterator[int]:
    """Yield sizes from large to small: a rank's samples in as few parts as fit, then in twice as many, and so on."""
    if largest < 1:
        return
    count, size = -(-share // largest), 0
    while size != 1:
        size = -(-share // count)
        yield size
        count = min(share, 2 * count)

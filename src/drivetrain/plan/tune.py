"""From a plan by rule to the fastest that was measured: which ways of running a step to try, and which to keep.

It only decides. `measure` runs a way on the user's own model and says what it took; here is nothing of devices or
models, so every decision can be tested with made-up measurements. What is maximised is throughput, at the job's exact
global batch: a way divides the same work differently, and nothing else.
"""

from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from drivetrain.core.value import Value
from drivetrain.plan.memory import MemoryModel, Peak

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]

LEAST_GAIN = 0.03  # below this a difference is noise, or not worth a larger micro-batch
MOST_OUT_OF_MEMORY = 2
# What compiling has saved at best on models of ordinary size; if even that would not pay, it is not tried.
BEST_COMPILE_GAIN = 0.5


class Way(Value):
    """How the work of a step is done. None of it changes what is learnt, rounding aside."""

    micro_batch: int
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    compile_mode: CompileMode | None = None
    channels_last: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        words = [self.precision, f"micro-batch {self.micro_batch}"]
        words += [f"compiled ({self.compile_mode})"] if self.compile_mode else ["eager"]
        words += ["channels-last"] if self.channels_last else []
        words += ["activations recomputed"] if self.recompute else []
        return ", ".join(words)


class Measurement(Value):
    """What a way took. `problem` says why it cannot be used; then the rest may be missing."""

    sample_seconds: float = float("inf")  # per sample of this rank
    peak_bytes: int = 0
    setup_seconds: float = 0.0  # compiling, mostly: what a run pays once
    problem: str = ""
    out_of_memory: bool = False


class Tried(Value):
    way: Way
    measurement: Measurement


class Scope(Value):
    """What there is to decide, and with what."""

    rank_samples: int  # of each step, on the rank that has the most
    remaining_samples: int  # of the whole job, on this rank
    memory_limit_bytes: float
    fixed_micro_batch: str = ""  # why it may not be changed: it is pinned, or samples of a batch influence each other
    compile_modes: tuple[CompileMode, ...] = ()
    may_use_channels_last: bool = False
    compile_cost_seconds: float = 15.0  # expected, before it was measured
    budget_seconds: float = 60.0  # for measuring; a way that is begun is finished


class Tuned(Value):
    """The way to go, and how it was found."""

    way: Way
    tried: tuple[Tried, ...]
    reasons: dict[str, str]  # by the name of what was decided
    memory: MemoryModel | None = None

    @property
    def chosen(self) -> Measurement | None:
        return next((tried.measurement for tried in reversed(self.tried) if tried.way == self.way), None)


class DoesNotFitError(Exception):
    """Not even one sample at a time."""

    def __init__(self, tried: list[Tried]) -> None:
        super().__init__("not even a micro-batch of one sample fits")
        self.tried = tried


class UnusableError(Exception):
    """The way to start from cannot be measured at all."""


class Clock(Protocol):
    def __call__(self) -> float: ...


def tune(start: Way, scope: Scope, measure: Callable[[Way], Measurement], clock: Clock) -> Tuned:
    """Measures ways in the order of what they may gain, and stops when the rest cannot pay for its own measuring."""
    return _Search(start, scope, measure, clock).run()


class _Search:
    def __init__(self, start: Way, scope: Scope, measure: Callable[[Way], Measurement], clock: Clock) -> None:
        self._start, self._scope, self._measure, self._clock = start, scope, measure, clock
        self._began = clock()
        self._tried: list[Tried] = []
        self._peaks: dict[Way, list[Peak]] = {}
        self._reasons: dict[str, str] = {}

    def run(self) -> Tuned:
        best = self._micro_batch(self._start)
        if self._scope.may_use_channels_last:
            best = self._channels_last(best)
        for mode in self._scope.compile_modes:
            best = self._compiled(best, mode)
        return Tuned(way=best, tried=tuple(self._tried), reasons=self._reasons, memory=self._model(best))

    # Micro-batch

    def _micro_batch(self, way: Way) -> Way:
        scope = self._scope
        if scope.fixed_micro_batch:
            first = self._try(way)
            if first.problem:
                raise DoesNotFitError(self._tried) if first.out_of_memory else UnusableError(first.problem)
            self._reasons["micro_batch"] = scope.fixed_micro_batch
            return way
        largest = self._largest(way)
        best = self._fastest(way, largest)
        if best is None:
            raise DoesNotFitError(self._tried)
        return best

    def _largest(self, way: Way) -> int:
        """From two or three small steps; then a forecast, not a search by failing."""
        share = self._scope.rank_samples
        for size in sorted({min(size, share) for size in (1, 2, 4)}):
            measured = self._try(way.model_copy(update={"micro_batch": size}))
            if measured.out_of_memory:
                return max((peak.micro_batch for peak in self._peaks.get(_kind(way), [])), default=0)
            if measured.problem:
                raise UnusableError(measured.problem)
        model = self._model(way)
        return share if model is None else max(1, model.largest(self._scope.memory_limit_bytes, share))

    def _fastest(self, way: Way, largest: int) -> Way | None:
        """Larger and larger, as long as it helps. All sizes are forecast to fit before they are tried."""
        best: tuple[float, int] | None = None
        for size in _sizes(self._scope.rank_samples, largest):
            if best is not None and self._is_out_of_time():
                break
            measured = self._try(way.model_copy(update={"micro_batch": size}))
            if measured.out_of_memory:
                break
            if measured.problem:
                continue
            seconds = measured.sample_seconds
            if best is None or seconds < best[0] * (1 - LEAST_GAIN):
                best = (seconds, size)
            elif seconds > best[0] * (1 + LEAST_GAIN):
                break  # past the best
        if best is None:
            return None
        self._reasons["micro_batch"] = (
            f"{1 / best[0]:,.0f} samples/s measured; forecast to fit: up to {largest} of {self._scope.rank_samples}"
        )
        return way.model_copy(update={"micro_batch": best[1]})

    # The rest

    def _channels_last(self, way: Way) -> Way:
        other = way.model_copy(update={"channels_last": True})
        if self._is_out_of_time():
            self._reasons["memory_format"] = "channels-last was not tried: the time for measuring was over"
            return way
        before, after = self._try(way), self._try(other)
        if after.problem:
            self._reasons["memory_format"] = f"channels-last cannot be used: {after.problem}"
            return way
        gain = before.sample_seconds / after.sample_seconds - 1
        taken = gain > LEAST_GAIN
        self._reasons["memory_format"] = (
            f"channels-last is {gain:+.0%}: {1 / after.sample_seconds:,.0f} against {1 / before.sample_seconds:,.0f} "
            f"samples/s"
        )
        return other if taken else way

    def _compiled(self, way: Way, mode: CompileMode) -> Way:
        before = self._try(way)
        remaining = before.sample_seconds * self._scope.remaining_samples
        hoped = remaining * BEST_COMPILE_GAIN
        cost = self._scope.compile_cost_seconds
        if hoped < cost:
            self._reasons["compile"] = (
                f"not tried: the job takes {remaining:.0f} s more, and even saving half of it would not pay for some "
                f"{cost:.0f} s of compiling"
            )
            return way
        if self._is_out_of_time():
            self._reasons["compile"] = "not tried: the time for measuring was over"
            return way
        other = way.model_copy(update={"compile_mode": mode})
        after = self._try(other)
        if after.problem:
            self._reasons["compile"] = f"not used: {after.problem}"
            return way
        saved = (before.sample_seconds - after.sample_seconds) * self._scope.remaining_samples
        words = (
            f"{1 / after.sample_seconds:,.0f} against {1 / before.sample_seconds:,.0f} samples/s saves {saved:.0f} s "
            f"of the {remaining:.0f} s that are left, and costs {after.setup_seconds:.0f} s"
        )
        if saved <= after.setup_seconds:
            self._reasons["compile"] = f"not used: {words}"
            return way
        self._reasons["compile"] = words
        return other

    # Measuring

    def _try(self, way: Way) -> Measurement:
        """Each way once; what was measured already is known."""
        known = next((tried.measurement for tried in self._tried if tried.way == way), None)
        if known is not None:
            return known
        if sum(tried.measurement.out_of_memory for tried in self._tried) >= MOST_OUT_OF_MEMORY:
            return Measurement(problem="not tried: out of memory twice already", out_of_memory=True)
        measured = self._measure(way)
        self._tried.append(Tried(way=way, measurement=measured))
        if not measured.problem and measured.peak_bytes:
            self._peaks.setdefault(_kind(way), []).append(Peak(way.micro_batch, measured.peak_bytes))
        return measured

    def _model(self, way: Way) -> MemoryModel | None:
        peaks = self._peaks.get(_kind(way), [])
        return MemoryModel.fitted(peaks) if len({peak.micro_batch for peak in peaks}) > 1 else None

    def _is_out_of_time(self) -> bool:
        return self._clock() - self._began > self._scope.budget_seconds


def _kind(way: Way) -> Way:
    """All of a way but its micro-batch: what a line of memory belongs to."""
    return way.model_copy(update={"micro_batch": 0})


def _sizes(share: int, largest: int) -> Iterator[int]:
    """From small to large: a rank's samples in 1, 2, 4, … parts as equal as can be, and the most that fits."""
    if largest < 1:
        return
    counts = {-(-share // largest)}
    while max(counts) < share:
        counts.add(min(share, 2 * max(counts)))
    yield from sorted({-(-share // count) for count in counts})

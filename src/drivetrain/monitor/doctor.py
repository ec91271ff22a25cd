"""Diagnoses what slows a run down, by figures that were measured, and what to do about it.

The diagnosis is a pure function: from what was observed to findings, the gravest first. A gain is an estimate from a
model that is written here in a line or two; the message says what it assumes, and it is left out where there is nothing
to estimate it from. `Checkups` decides when the doctor looks, and at what: the last half minute during a run, all of it
at the end.

What the planner could do by itself is not advised: it does it, or has settled why not (`plan.knobs.REMEDIES` is the
table of both). The reason is told instead.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from typing import Any

from drivetrain.core.value import format_count, format_duration
from drivetrain.monitor.phases import PHASES, Laps
from drivetrain.plan.knobs import REMEDIES
from drivetrain.plan.rules import NEARLY_BEST, WORTH_IT, forecast_step

NOTABLE = 0.10  # of the time: less is not worth a line
LEADS = 0.20  # of the time: a run is called after what takes this much and should not
LOUD = 0.30  # of the time: said while the run goes on
# Short of these a share says more of how a run starts than of how it goes.
LEAST_STEPS, LEAST_SECONDS = 20, 0.2
FEW_STEPS, MANY_SECONDS = 5, 10.0  # long steps: fewer do

# Phases in which the device works for the model. `step` is a whole step that was captured, and cannot be told apart.
COMPUTE = frozenset({"forward", "backward", "optimizer", "step"})

WAITS_LITTLE = 0.05  # of the time the host waits for the device: then it is the host that sets the pace
LOW_RATE, BUSY_MEMORY = 0.2, 0.6  # of the peak; of the time in which memory was read or written
NEARLY_FULL = 0.95  # of the device's memory
TOLERABLE = 0.05  # of the time, for saves and validations
_TOLD_APART = frozenset({"data", "copy", "communication", "checkpoint", "validation"})
_NO_PROBLEM = frozenset({"compute-bound", "bandwidth-bound", "balanced", "too short"})
_SMALLER = "a smaller --batch-size (the global batch stays), or --activations recompute"
_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if sizes vary"


@dataclass(frozen=True)
class Observed:
    """The observations of some steps of a run, on its main process."""

    steps: int
    phases: Mapping[str, float]  # mean seconds of a step
    device: str = "cpu"  # or "cuda"
    precision: str = "fp32"
    world_size: int = 1
    num_workers: int = 0
    num_cores: int = 1  # that this process may use
    may_add_workers: bool = True
    is_resident: bool = False  # whether the data set is held on the device
    pins_memory: bool = False
    accumulation: int = 1
    micro_batch: int = 1
    compiled: bool = False
    captured: bool = False  # whether steps are run as CUDA graphs, where they can be
    settled: Mapping[str, str] = field(default_factory=dict)  # why the plan leaves a remedy, by its setting: no advice
    mfu: float | None = None
    peak_flops: float | None = None  # FLOP/s, of all devices
    peak_origin: str = ""
    waited_seconds: float | None = None  # mean of a step: the host, for the device. None: not known
    busy: float | None = None  # share of the time in which a kernel ran
    memory_busy: float | None = None  # share of the time in which device memory was read or written
    memory_held: float | None = None  # share of the device's memory at the peak
    allocation_retries: int = 0  # in these steps
    num_saves: int = 0
    save_seconds: float = 0.0  # mean of a save, from its beginning until it is on the disk
    save_waits: float = 0.0  # seconds in these steps that a save waited for the one before
    saves_beside: bool = True
    num_validations: int = 0

    @property
    def step_seconds(self) -> float:
        return sum(self.phases.values())

    def share(self, *names: str) -> float:
        whole = self.step_seconds
        return sum(self.phases.get(name, 0.0) for name in names) / whole if whole else 0.0


@dataclass(frozen=True)
class Symptom:
    kind: str  # `input-bound`, …, `compute-bound`, `balanced`, `too short`
    share: float  # of the time
    words: str  # what was measured
    next_step: str = ""  # what to do about it; empty if there is nothing to do
    expected_gain: float | None = None  # how many times as fast, by estimate

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def brief(self) -> str:
        return f"{self.kind} {self.share:.0%}"

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


@dataclass(frozen=True)
class Diagnosis:
    """The findings of one look; there is always at least one."""

    findings: tuple[Symptom, ...]
    steps: int  # that were looked at

    @property
    def leading(self) -> Symptom:
        return self.findings[0]

    @property
    def warning(self) -> str:
        """The text for the progress line: empty unless something takes far more time than it should."""
        leading = self.leading
        return leading.brief if leading.kind not in _NO_PROBLEM and leading.share > LOUD else ""


def is_enough(steps: int, seconds: float) -> bool:
    return (steps >= LEAST_STEPS and seconds >= LEAST_SECONDS) or (steps >= FEW_STEPS and seconds >= MANY_SECONDS)


def diagnose(seen: Observed) -> Diagnosis:
    """Diagnose some steps. Avoidable waits lead if they take much; otherwise how the device is used does."""
    seconds = seen.steps * seen.step_seconds
    if not is_enough(seen.steps, seconds):
        words = f"{format_count(seen.steps, 'step')} in {format_duration(seconds)}: too short to judge"
        return Diagnosis((Symptom("too short", 0.0, words),), seen.steps)
    held_up = sorted(
        (finding for finding in _hold_ups(seen) if finding.share >= NOTABLE), key=lambda finding: -finding.share
    )
    leading = [finding for finding in held_up if finding.share >= LEADS]
    lesser = [finding for finding in held_up if finding.share < LEADS]
    return Diagnosis((*leading, *_use(seen, is_led=bool(leading)), *lesser, *_memory_limit(seen)), seen.steps)


def _hold_ups(seen: Observed) -> Iterator[Symptom]:
    yield _input(seen)
    yield _copy(seen)
    yield _communication(seen)
    yield _checkpoint(seen)
    yield _validation(seen)
    yield from _launch(seen)
    yield from _retries(seen)
    for name, seconds in seen.phases.items():
        if name not in COMPUTE and name not in _TOLD_APART:
            words = f"{_of_time(seen, name)} goes to {name}"
            next_step = "let hooks run less often (`every`), or do less" if name == "hooks" else ""
            yield Symptom(f"{name}-bound", seen.share(name), words, next_step, _gain(seen, seconds / 2) or None)


def _input(seen: Observed) -> Symptom:
    """Judge loading by the model that the planner uses, too: `plan.rules.forecast_step`."""
    if seen.is_resident:
        words = f"waits {_of_time(seen, 'data')} for batches that the device gathers from data it holds"
        return Symptom(
            "input-bound", seen.share("data"), words, "see with nvidia-smi whether others use the device, too"
        )
    whole, waited = seen.step_seconds, seen.phases.get("data", 0.0)
    rest = whole - waited
    now = seen.num_workers
    loading = whole * now if now else waited
    where = f"with {now} loader process{'es' if now > 1 else ''}" if now else "which the training process loads itself"
    words = f"waits {_of_time(seen, 'data')} for data, {where}"

    def forecast(workers: int) -> float:
        return forecast_step(loading, rest, workers, seen.num_cores)

    cheaper = "make items cheaper: decode beforehand, keep tensors in memory, do less per item or do it on the device"
    if not seen.may_add_workers:
        return Symptom("input-bound", seen.share("data"), words, f"this data is read in one pass; {cheaper}")
    if "data.num_workers" in seen.settled:
        return Symptom("input-bound", seen.share("data"), words, cheaper + _settled(seen, "input-bound"))
    candidates = range(now + 1, max(seen.num_cores, now) + 1)
    best = min((forecast(workers) for workers in candidates), default=whole)
    gain = whole / best if best else 1.0
    if gain < WORTH_IT:
        limit = f"{seen.num_cores} core{'s' if seen.num_cores > 1 else ''}"
        return Symptom("input-bound", seen.share("data"), words, f"more workers would not help on {limit}; {cheaper}")
    workers = next(workers for workers in candidates if forecast(workers) <= NEARLY_BEST * best)
    left = max(0.0, best - rest) / best
    still = f", and still waits {left:.0%}" if left >= NOTABLE else ""
    next_step = (
        f"--num-workers {workers} (now {now}) gains about {gain:.1f} ×{still}, "
        f"if loading scales with processes on {seen.num_cores} cores"
    )
    return Symptom("input-bound", seen.share("data"), words, next_step, gain)


def _copy(seen: Observed) -> Symptom:
    """Judge copying: half the bytes take half the time.

    Pinned by a separate process, a batch is copied in parallel with the step before it. The pinning is a copy, too, at
    about the same rate; so a step takes max(rest, copying) at least.
    """
    whole, copying = seen.step_seconds, seen.phases.get("copy", 0.0)
    words = f"waits {_of_time(seen, 'copy')} for batches on their way to the device"
    gain = _gain(seen, copying / 2)
    next_step = (
        f"send fewer bytes: half as many (uint8 images, bf16, int32; converted on the device) gain about {gain:.1f} ×"
    )
    if not seen.pins_memory:
        words += ", from memory that is not pinned"
        pinned = whole / max(whole - copying, copying, 1e-12)
        flags = "--pin-memory" if seen.num_workers else "--num-workers 1 --pin-memory"
        if pinned >= WORTH_IT and (seen.num_workers or "data.num_workers" not in seen.settled):
            next_step = f"{flags} gains about {pinned:.1f} ×, if copies hide behind the step before; or {next_step}"
            gain = max(gain, pinned)
    return Symptom("copy-bound", seen.share("copy"), words, next_step, gain)


def _communication(seen: Observed) -> Symptom:
    """Judge communication: the part that is not overlapped takes as long for a global batch of twice the size."""
    words = (
        f"waits {_of_time(seen, 'communication')} for gradients of {seen.world_size} processes, or for the slowest of "
        "them"
    )
    whole, waited = seen.step_seconds, seen.phases.get("communication", 0.0)
    gain = 2 * whole / (2 * whole - waited) if whole else 1.0
    next_step = (
        "a faster link, fewer processes, or more work between reductions: a global batch of twice the size gains about "
        f"{gain:.1f} × per sample, if the job may have it; --bucket-cap-mb decides how early reductions start"
    )
    return Symptom("communication-bound", seen.share("communication"), words, next_step, gain)


def _checkpoint(seen: Observed) -> Symptom:
    """Judge saves: in the background only the copy is left, unless a save is due before the previous one is done."""
    waited, every = seen.phases.get("checkpoint", 0.0), seen.steps / max(seen.num_saves, 1)
    share = seen.share("checkpoint")
    rest = seen.step_seconds - waited
    saves = f"{seen.num_saves} save{'' if seen.num_saves == 1 else 's'} of {seen.save_seconds:.2f} s"
    words = f"waits {_of_time(seen, 'checkpoint')} for checkpoints, {saves}"
    if not seen.num_saves:
        return Symptom("checkpoint-bound", share, words)
    if not seen.saves_beside:
        gain = seen.step_seconds / max(rest, seen.save_seconds / every, 1e-12)
        next_step = f"leave --no-async-save out: saves beside training gain {gain:.1f} × at most"
        if gain >= WORTH_IT:
            return Symptom("checkpoint-bound", share, words, next_step, gain)
    # As rare as brings the wait down to what is tolerable; and no save is due before the last one is done.
    rarer = ceil(max(share / (1 - share) / TOLERABLE if share < 1 else 2.0, 2.0))
    if seen.save_waits and rest:
        rarer = max(2, ceil(seen.save_seconds / (every * rest)))
        words += ", each due before the last one was done"
    gain = _gain(seen, waited * (1 - 1 / rarer))
    next_step = f"--checkpoint-every {round(every) * rarer} (now about {round(every)}) gains about {gain:.1f} ×"
    return Symptom("checkpoint-bound", share, words, next_step, gain)


def _validation(seen: Observed) -> Symptom:
    """Judge validation: half as often takes half of the time."""
    share, spent = seen.share("validation"), seen.phases.get("validation", 0.0)
    times = f"{seen.num_validations} time{'' if seen.num_validations == 1 else 's'}"
    words = f"spends {_of_time(seen, 'validation')} on validation, {times} in {seen.steps} steps"
    if not seen.num_validations or share >= 1:
        return Symptom("validation-bound", share, words)
    rarer = max(2, ceil(share / (1 - share) / TOLERABLE))
    gain = _gain(seen, spent * (1 - 1 / rarer))
    every = round(seen.steps / seen.num_validations)
    next_step = f"--valid-every {every * rarer} (now about {every}) gains about {gain:.1f} ×; or fewer held-out samples"
    return Symptom("validation-bound", share, words, next_step, gain)


def _launch(seen: Observed) -> Iterator[Symptom]:
    """Detect launch overhead: the host never waited for the device, though it reads each step's outcome.

    So the device waits for the host. How long, the driver's count of busy time says: what is missing of the phases that
    compute was spent idle. Without that count, a device far from idle is one that computes at a good rate: the host is
    held up while it launches, since more does not fit into the device's queue.
    """
    if seen.device != "cuda" or seen.waited_seconds is None:
        return
    if seen.busy is None and (seen.mfu or 0.0) >= LOW_RATE:
        return
    if seen.waited_seconds > WAITS_LITTLE * seen.step_seconds:
        return
    idle = seen.share(*COMPUTE) - (seen.busy or 0.0)
    if idle < NOTABLE:
        return
    busy = "" if seen.busy is None else f", which ran kernels {seen.busy:.0%} of the time"
    words = (
        f"the host needs all of the {1e3 * seen.step_seconds:.2f} ms of a step to give the device its work and never "
        f"waits for it{busy}"
    )
    ways = [*_advised(seen, "launch-bound"), "a larger global batch, if the job may have it"]
    gain = None if seen.busy is None or idle >= 1 else 1 / (1 - idle)
    at_most = "" if gain is None else f": {gain:.1f} × at most, which leaves no gap between kernels"
    yield Symptom("launch-bound", idle, words, "; ".join(ways) + at_most + _settled(seen, "launch-bound"), gain)


def _retries(seen: Observed) -> Iterator[Symptom]:
    if not seen.allocation_retries or not seen.steps:
        return
    words = (
        f"device memory ran out {seen.allocation_retries} times in {seen.steps} steps: each time the allocator waited "
        "for the device, gave its cache back and tried again"
    )
    yield Symptom(
        "memory-bound", min(1.0, seen.allocation_retries / seen.steps), words, f"{_SMALLER}; {_SEGMENTS}", None
    )


def _memory_limit(seen: Observed) -> Iterator[Symptom]:
    if seen.memory_held is not None and seen.memory_held >= NEARLY_FULL and not seen.allocation_retries:
        words = f"{seen.memory_held:.0%} of the device's memory is held: close to the limit, not slower for it"
        yield Symptom("memory-bound", 0.0, words, f"before it runs out: {_SMALLER}", None)


def _use(seen: Observed, *, is_led: bool) -> Iterator[Symptom]:
    """Yield how the device is used while it computes."""
    share = seen.share(*COMPUTE)
    if share < 0.5:
        if not is_led:
            yield Symptom("balanced", share, f"computes {share:.0%} of the time, and nothing else stands out")
        return
    if is_led and any(finding.kind == "launch-bound" for finding in _launch(seen)):
        return  # most of this time the device was idle
    words = f"computes {share:.0%} of the time"
    if seen.mfu is None or seen.peak_flops is None:
        unknown = "" if seen.peak_flops else "; `drivetrain verify --save` measures this device's peak to compare with"
        yield Symptom("compute-bound", share, words + unknown, _faster(seen))
        return
    words += f", at {seen.mfu:.0%} of the {seen.peak_origin} peak of {seen.peak_flops / 1e12:,.1f} TFLOP/s"
    reads = seen.memory_busy
    if seen.device == "cuda" and seen.mfu < LOW_RATE and reads is not None and reads >= BUSY_MEMORY:
        words += f", while its memory is busy {reads:.0%}: few operations per byte"
        yield Symptom(
            "bandwidth-bound", share, words, _faster(seen) or "larger matrix products, fewer passes over data"
        )
        return
    yield Symptom("compute-bound", share, words, _faster(seen))


def _faster(seen: Observed) -> str:
    tries = " and ".join(_advised(seen, "compute-bound"))
    return f"what is left is the model: {tries} may make it faster; drivetrain plan --measure tries it" if tries else ""


def _may_help(seen: Observed, setting: str) -> bool:
    """Return whether a remedy would change anything in this run."""
    return {
        "batch.size": seen.accumulation > 1,
        "kernels.capture": not seen.captured,
        "precision.dtype": seen.device == "cuda" and seen.precision in ("fp32", "tf32"),
        "compile.enabled": not seen.compiled,
    }.get(setting, True)


def _advised(seen: Observed, kind: str) -> Iterator[str]:
    """Yield the flags of the remedies that are left to the user."""
    details = {"batch.size": f" {2 * seen.micro_batch} (half as many launches, the same global batch)"}
    for remedy in REMEDIES:
        is_open = remedy.setting not in seen.settled and _may_help(seen, remedy.setting)
        if kind in remedy.relieves and is_open:
            yield remedy.flag + details.get(remedy.setting, "")


def _settled(seen: Observed, kind: str) -> str:
    """Return why the plan leaves what else might help, after a semicolon; empty if there is nothing of the kind."""
    told = [
        f"{remedy.words} ({seen.settled[remedy.setting]})"
        for remedy in REMEDIES
        if kind in remedy.relieves and remedy.setting in seen.settled and _may_help(seen, remedy.setting)
    ]
    return f"; settled by the plan: {', '.join(told)}" if told else ""


def _of_time(seen: Observed, name: str) -> str:
    """Return `43 % of the time (6.1 of 14.2 ms a step)`."""
    part, whole = 1e3 * seen.phases.get(name, 0.0), 1e3 * seen.step_seconds
    return f"{seen.share(name):.0%} of the time ({part:.3g} of {whole:.3g} ms a step)"


def _gain(seen: Observed, saved: float) -> float:
    """Return the speed-up of a step that takes `saved` seconds less."""
    whole = seen.step_seconds
    return whole / (whole - saved) if whole > saved else 1.0


@dataclass
class _Figures:
    """The figures of some steps: sums and counts, so that two of them add up to one."""

    seconds: Sequence[float]  # by phase
    steps: int = 0
    waited: float = 0.0
    mfu: float = 0.0  # the sum over steps
    mfu_steps: int = 0
    saves: int = 0
    save_seconds: float = 0.0
    save_waits: float = 0.0
    validations: int = 0
    samples: int = 0  # of the card
    busy: float = 0.0
    memory_busy: float = 0.0
    retries: int = 0

    def __add__(self, other: "_Figures") -> "_Figures":
        seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]
        names = [each.name for each in fields(self) if each.name != "seconds"]
        return _Figures(seconds, **{name: getattr(self, name) + getattr(other, name) for name in names})


class Checkups:
    """Gets the figures of the run as they are recorded. A look costs some 50 µs, and is due once a second."""

    EVERY_SECONDS = 1.0
    RECENT_SECONDS = 30.0

    def __init__(self, run: Observed) -> None:
        self._run = run  # what stays the same; the rest of it is not looked at
        self._next = _Figures([0.0] * len(PHASES))  # of what was seen since the last steps
        self._first: _Figures | None = None  # holds the warm-up, and stays apart
        self._others = _Figures([0.0] * len(PHASES))
        self._recent: deque[tuple[float, _Figures]] = deque()  # with when it ended
        self._looked = time.monotonic()
        self._tells_waits = False
        self._card: Mapping[str, Any] | None = None
        self._held: float | None = None
        self._retries = 0
        self._kind = self._kind_before = ""  # that was told last; that led at the last look

    def saw_save(self, seconds: float, waited: float) -> None:
        self._next.saves += 1
        self._next.save_seconds += seconds
        self._next.save_waits += waited

    def saw_validation(self) -> None:
        self._next.validations += 1

    def saw_card(self, row: Mapping[str, Any] | None) -> None:
        """Take the sampler's last row for this process's GPU. Its first row is from before the first step."""
        if not row or row is self._card:
            return
        is_first, self._card = self._card is None, row
        retries, before = int(row.get("allocation_retries", 0)), self._retries
        self._retries = retries
        if is_first:
            return
        self._next.retries += retries - before
        if "utilisation_percent" in row:
            self._next.samples += 1
            self._next.busy += row["utilisation_percent"] / 100
            self._next.memory_busy += row.get("memory_utilisation_percent", 0.0) / 100
        if row.get("memory_total_gib") and "memory_peak_reserved_gib" in row:
            self._held = max(self._held or 0.0, row["memory_peak_reserved_gib"] / row["memory_total_gib"])

    def saw_steps(self, laps: Laps, mfu: float | None) -> None:
        figures, self._next = self._next, _Figures([0.0] * len(PHASES))
        figures.steps, figures.seconds = laps.steps, laps.seconds
        if laps.waited is not None:
            self._tells_waits, figures.waited = True, laps.waited
        if mfu is not None:
            figures.mfu, figures.mfu_steps = mfu * laps.steps, laps.steps
        if self._first is None:
            self._first = figures
        else:
            self._others += figures
        self._recent.append((time.monotonic(), figures))

    def look(self) -> tuple[Diagnosis | None, bool]:
        """Return the diagnosis of the last half minute, if a look is due; and whether its leading kind is new."""
        now = time.monotonic()
        if now - self._looked < self.EVERY_SECONDS or not self._recent:
            return None, False
        self._looked = now
        while len(self._recent) > 1 and self._recent[0][0] < now - self.RECENT_SECONDS:
            self._recent.popleft()
        found = self._diagnosed(sum((figures for _, figures in self._recent), _Figures([0.0] * len(PHASES))))
        kind, before = found.leading.kind, self._kind_before
        self._kind_before = kind
        # Twice the same, so that a single odd second is no news.
        is_news = kind not in (self._kind, "too short") and kind == before
        if is_news:
            self._kind = kind
        return found, is_news

    def final(self) -> Diagnosis | None:
        """Return the diagnosis of the whole run, without its first figures if there are enough others.

        None: nothing was measured.
        """
        first, others = self._first, self._others
        if first is None or not first.steps + others.steps:
            return None
        return self._diagnosed(others if is_enough(others.steps, sum(others.seconds)) else first + others)

    def _diagnosed(self, figures: _Figures) -> Diagnosis:
        steps, samples = max(figures.steps, 1), figures.samples
        phases = zip(PHASES, figures.seconds, strict=True)
        return diagnose(
            replace(
                self._run,
                steps=figures.steps,
                phases={name: seconds / steps for name, seconds in phases if seconds},
                waited_seconds=figures.waited / steps if self._tells_waits else None,
                mfu=figures.mfu / figures.mfu_steps if figures.mfu_steps else None,
                busy=figures.busy / samples if samples else None,
                memory_busy=figures.memory_busy / samples if samples else None,
                memory_held=self._held,
                allocation_retries=figures.retries,
                num_saves=figures.saves,
                save_seconds=figures.save_seconds / max(figures.saves, 1),
                save_waits=figures.save_waits,
                num_validations=figures.validations,
            )
        )

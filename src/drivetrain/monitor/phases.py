"""Where the time of a step goes: laps by phase in every step, and a look into single ones by torch's profiler."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import add, sub
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drivetrain.core.isolation import EagerDispatchMode, buffers_kept
from drivetrain.core.metrics import Logged
from drivetrain.hardware import Hardware, Rate
from drivetrain.plan.fitting import flops_of

# ----------------------------------------------------------------------------------------------------------------------
# Measures where the time of a step goes: laps, each of which assigns the time since the one before to a phase.
#
# Laps leave no gap, so the phases of a step add up to its time. On a CPU the clock is the host's. On a GPU it is the
# device's: a lap is an event in its stream, read steps later, when it is long past, so that the host does not wait for
# it. There a phase is what the device spent on it, and what it spent idle before the next was enqueued. Events take
# microseconds of the device's time, and of the host's: of steps that take less than some milliseconds only some are
# measured, and each stands for those before it; of those that were enqueued in one go, only the steps themselves. What
# does not happen in every step is measured whenever it does.

PHASES = (
    "data", "copy", "forward", "backward", "communication", "optimizer", "step", "logging", "hooks", "validation",
    "checkpoint",
)  # fmt: skip
# A captured step is one piece, from forward to optimizer: `step`.
DATA, COPY, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, STEP, LOGGING, HOOKS, VALIDATION, CHECKPOINT = range(
    len(PHASES)
)
RARE = frozenset((HOOKS, VALIDATION, CHECKPOINT))  # not part of every step


class Laps(NamedTuple):
    """The measurements since the last look."""

    steps: int
    seconds: Sequence[float]  # by phase, of all these steps together
    waited: float | None = None  # seconds that the host waited for the device meanwhile; None: not known

    def and_then(self, later: "Laps") -> "Laps":
        """Return these measurements and later ones together."""
        waited = [found for found in (self.waited, later.waited) if found is not None]
        return Laps(
            self.steps + later.steps, list(map(add, self.seconds, later.seconds)), sum(waited) if waited else None
        )

    def per_step(self) -> dict[str, float]:
        """Return the seconds of a step, by the name of each phase that occurred."""
        pairs = zip(PHASES, self.seconds, strict=True)
        return {name: total / self.steps for name, total in pairs if total} if self.steps else {}


class PhaseClock(Protocol):
    """Takes the loop's reports of what it does."""

    started_at: float | None  # by the monotonic clock; None: not yet

    def start(self) -> None:
        """Start the clock: the loop begins now."""

    def lap(self, phase: int) -> None:
        """Assign the time since the lap before to this phase."""

    def watch_backward(self, objective: Tensor) -> None:
        """Prepare for a backward that communicates: the phase `backward` ends when the gradients are done."""

    def end_backward(self) -> None:
        """End that backward: the rest was communication that was not overlapped."""

    def look(self) -> None:
        """Measure what comes now, even if the rest of the step is not measured: it is not part of every step."""

    def waited(self, seconds: float) -> None:
        """Add the seconds that the host has waited for the device, to read how a step went."""

    def next_step(self) -> None:
        """End the step."""

    def next_steps(self, count: int) -> None:
        """End `count` steps that were enqueued in one go. Not used where the first of them is to be measured."""

    @property
    def measures_next(self) -> bool:
        """Whether the step that comes next is to be measured, and others are not."""

    def take(self) -> Laps: ...

    def finish(self) -> None:
        """Read what has not been read yet, after the loop. The host may wait for the device here."""


class NoClock:
    """Measures nothing but when the loop began."""

    started_at: float | None = None

    def start(self) -> None:
        self.started_at = time.monotonic()

    def lap(self, phase: int) -> None:
        pass

    def watch_backward(self, objective: Tensor) -> None:
        pass

    def end_backward(self) -> None:
        pass

    def look(self) -> None:
        pass

    def waited(self, seconds: float) -> None:
        pass

    def next_step(self) -> None:
        self.next_steps(1)

    def next_steps(self, count: int) -> None:
        pass

    @property
    def measures_next(self) -> bool:
        return False

    def take(self) -> Laps:
        return Laps(0, [0.0] * len(PHASES))

    def finish(self) -> None:
        pass


class _Clock(NoClock):
    """The base of clocks: keeps the sums, and separates communication from backward."""

    def __init__(self) -> None:
        self._sums, self._steps = [0.0] * len(PHASES), 0  # of steps that are over
        self._gradients_done = False

    def take(self) -> Laps:
        laps = Laps(self._steps, self._sums)
        self._sums, self._steps = [0.0] * len(PHASES), 0
        return laps

    def watch_backward(self, objective: Tensor) -> None:
        # Callbacks of a backward run in the order in which they were queued, behind its last gradient. What waits for
        # the reductions (DDP, FSDP) queues its own while backward runs; this one is there before.
        objective.register_hook(self._queue_lap)  # type: ignore[no-untyped-call]

    def _queue_lap(self, _: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_gradients)

    def _end_gradients(self) -> None:
        self.lap(BACKWARD)
        self._gradients_done = True

    def end_backward(self) -> None:
        self.lap(COMMUNICATION if self._gradients_done else BACKWARD)
        self._gradients_done = False


class HostClock(_Clock):
    """The clock for a CPU, where the host does the work."""

    def __init__(self) -> None:
        super().__init__()
        self._last = perf_counter()
        self._all = [0.0] * len(PHASES)  # since the beginning, the step that is not over included
        self._over = self._taken = self._all.copy()  # of steps that are over; of steps that were handed out

    def start(self) -> None:
        super().start()
        self._last = perf_counter()

    def lap(self, phase: int) -> None:
        now = perf_counter()
        self._all[phase] += now - self._last
        self._last = now

    def next_steps(self, count: int) -> None:
        self._over = self._all.copy()
        self._steps += count

    def take(self) -> Laps:
        laps = Laps(self._steps, list(map(sub, self._over, self._taken)))
        self._taken, self._steps = self._over, 0
        return laps

    def finish(self) -> None:
        if self._all != self._over:  # a step that ended the loop from within
            self.next_step()


class _StepLaps:
    """The events of one step. They are reused: making one costs more than recording it."""

    __slots__ = ("before", "begin", "events", "num_seams", "phases", "stands_for", "used")

    def __init__(self) -> None:
        self.begin: torch.cuda.Event | None = None  # a separate event, where the step before was not measured
        self.before: torch.cuda.Event | None = None  # what the first lap counts from
        self.events: list[torch.cuda.Event] = []
        self.phases: list[int] = []
        self.used = 0
        self.stands_for = 1  # steps; 0: only a part of one was measured
        self.num_seams = 1  # how often the host came back between these steps: not behind each, where it gives several


class EventClock(_Clock):
    """The clock for a GPU: laps are events in its stream.

    A step is read once its last event is past, which is asked whenever another has been measured. Its first lap counts
    from the last event of the step before where that was measured, too: so events are used again one reading later.
    """

    SHORT_SECONDS = 5e-3  # one step in so much time is measured
    MOST_STRIDE = 64
    MOST_PENDING = 256  # steps whose events are not past yet; more are left out (`lost`)

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.lost = 0
        self._waited = 0.0
        # This device's, always: an event without a stream would be recorded on whichever device is current.
        self._stream = torch.cuda.current_stream(device)
        self._stride, self._until_next = 1, 1
        self._num_passed = self._num_seams = 0  # steps, and returns of the host, since one was begun that is measured
        self._current: _StepLaps | None = None  # None: this step is not measured
        self._pending: deque[_StepLaps] = deque()
        self._free: list[_StepLaps] = []
        self._read_last: _StepLaps | None = None  # the step behind it may count from its last event

    def start(self) -> None:
        super().start()
        self._begin(self._stride)

    def look(self) -> None:
        if self._current is None:
            self._begin(0)

    def _begin(self, stands_for: int, before: torch.cuda.Event | None = None) -> None:
        step = self._current = self._free.pop() if self._free else _StepLaps()
        step.used, step.stands_for, step.num_seams = 0, stands_for, max(1, self._num_seams)
        if before is None:
            if step.begin is None:
                step.begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before = step.begin
            before.record(self._stream)
        step.before = before

    def lap(self, phase: int) -> None:
        current = self._current
        if current is None:
            return
        if current.used == len(current.events):
            current.events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            current.phases.append(phase)
        current.events[current.used].record(self._stream)
        current.phases[current.used] = phase
        current.used += 1

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def take(self) -> Laps:
        waited, self._waited = self._waited, 0.0
        return super().take()._replace(waited=waited)

    def next_steps(self, count: int) -> None:
        last = self._put_by()
        self._num_passed += count
        self._num_seams += 1
        if self._num_passed >= self._until_next:
            self._begin(self._num_passed, last)
            self._until_next, self._num_passed, self._num_seams = self._stride, 0, 0

    @property
    def measures_next(self) -> bool:
        return self._current is not None

    def _put_by(self) -> torch.cuda.Event | None:
        """Keep the step that is over, to be read when it is past. Returns its last event."""
        step, self._current = self._current, None
        if step is None:
            return None
        if not step.used:
            self._free.append(step)
            return None
        self._pending.append(step)
        while self._pending and self._pending[0].events[self._pending[0].used - 1].query():  # type: ignore[no-untyped-call]
            self._read(self._pending.popleft())
        if len(self._pending) > self.MOST_PENDING:
            self._pending.popleft()
            self.lost += 1
        return step.events[step.used - 1]

    def _read(self, step: _StepLaps) -> None:
        before, seconds = step.before, 0.0
        for event, phase in zip(step.events[: step.used], step.phases[: step.used], strict=True):
            assert before is not None
            elapsed = before.elapsed_time(event) / 1e3
            before = event
            if phase in RARE or not step.stands_for:
                self._sums[phase] += elapsed
            else:
                self._sums[phase] += elapsed * (step.stands_for if phase == STEP else step.num_seams)
                seconds += elapsed
        self._steps += step.stands_for
        if step.stands_for:
            self._stride = max(1, min(self.MOST_STRIDE, int(self.SHORT_SECONDS / seconds))) if seconds else 1
        if self._read_last is not None:
            self._free.append(self._read_last)
        self._read_last = step

    def finish(self) -> None:
        last = self._put_by()  # of a step that ended the loop from within
        if self._pending:
            last = last or self._pending[-1].events[self._pending[-1].used - 1]
            last.synchronize()  # the host waits for the device here: the loop is over
        while self._pending:
            self._read(self._pending.popleft())


def make_clock(device: torch.device) -> PhaseClock:
    return EventClock(device) if device.type == "cuda" else HostClock()


# ----------------------------------------------------------------------------------------------------------------------
# Looks into single steps: a torch.profiler trace for `--profile 10:15`, and how much a model computes per sample.
#
# Trace and table are written into the run folder. FLOPs are counted while the model is tried before the first step.

TRACE, TABLE = "profile/trace.json", "profile/table.txt"
Result = TypeVar("Result")


class StepProfiler:
    """Profiles the steps from `first` to `last`, both included, counted from 1. A failing profile never fails a run.

    `before_step` is called with each step's number before its work is enqueued. The host waits for the device where the
    window begins and where it ends: that is the cost of profiling.
    """

    def __init__(
        self, first: int, last: int, folder: Path, device: torch.device, report: Callable[[str], None]
    ) -> None:
        self._first, self._last, self._folder, self._device, self._report = first, last, folder, device, report
        self._profile: Any = None
        self._num_steps = 0

    @classmethod
    def of_window(
        cls,
        window: str,
        folder: Path,
        device: torch.device,
        done: int,
        num_steps: int | None,
        report: Callable[[str], None],
    ) -> "StepProfiler | None":
        """Return the profiler of a window like `10:15`, in a run from `done` to `num_steps`. Reports steps outside."""
        first, last = map(int, window.split(":"))
        here_first, here_last = max(first, done + 1), last if num_steps is None else min(last, num_steps)
        here = f"this run does steps {done + 1} to {num_steps or 'the end of the data'}"
        if here_first > here_last:
            report(f"--profile {window}: {here}, so nothing is profiled")
            return None
        if (here_first, here_last) != (first, last):
            report(f"--profile {window}: {here}, so only steps {here_first} to {here_last} are profiled")
        return cls(here_first, here_last, folder, device, report)

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._begin()
        elif step == self._last + 1:
            self.close()
        if self._profile is not None:
            self._num_steps += 1

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            self._wait()
            self._profile = profile(activities=activities)
            self._profile.start()
        except Exception as error:  # noqa: BLE001
            self._profile = None
            self._report(f"--profile: the profiler does not start: {error}")

    def close(self) -> None:
        """End the profile, also before the window's end, where the run ended first."""
        watched, self._profile = self._profile, None
        if watched is None:
            return
        try:
            self._wait()
            watched.stop()
            (self._folder / TRACE).parent.mkdir(exist_ok=True)
            watched.export_chrome_trace(str(self._folder / TRACE))
            order = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            table = watched.key_averages().table(sort_by=order, row_limit=40)
            heading = f"steps {self._first} to {self._first + self._num_steps - 1}, sorted by {order}\n"
            (self._folder / TABLE).write_text(heading + table, encoding="utf-8")
            self._report(f"profile of {self._num_steps} steps: {self._folder / TRACE} (open in ui.perfetto.dev)")
        except Exception as error:  # noqa: BLE001
            self._report(f"--profile: the trace could not be written: {error}")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class FlopCount(EagerDispatchMode):
    """Counts matrix products, convolutions and attention by torch's own formulas. It never fails; it may miss some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs, result)
        return result


class _FlopCountOfTrial(FlopCount):  # type: ignore[no-untyped-call]
    """Counts while work is done that is not to be changed: what the user compiled is compiled, and not counted."""

    is_eager = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch that the mode only looks on, and does not keep it from compiling."""
        return True


def counted(trial: Callable[[], Result], counts: bool = True) -> tuple[int, Result]:
    """Return the FLOPs of work that is done anyhow, and its result. 0: it was not to be counted."""
    if not counts:
        return 0, trial()
    with _FlopCountOfTrial() as count:
        result = trial()
    return count.total, result


def count_apart(
    loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, around: AbstractContextManager[Any] | None
) -> int:
    """Count the FLOPs of a separate forward and backward, for a model that is going to be compiled. 0: it did not work.

    Everything runs eagerly here: the operations inside of compiled code cannot be counted.
    Gradients are not kept, buffers are restored. Every rank must take part: the model may communicate.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = FlopCount()
    try:
        with buffers_kept(model), count:
            with around or nullcontext():
                result = loss(model, batch)
            if isinstance(result, Logged):
                result = result.result
            total: Any = getattr(result, "total", result)
            if isinstance(total, Mapping):
                total = sum(getattr(part, "total", part) for part in total.values())
            torch.autograd.grad(total, trained, allow_unused=True)
    except Exception:  # noqa: BLE001 - the trial that follows says what is wrong, if anything is
        return 0
    return count.total


def peak_rate(hardware: Hardware, device: torch.device, precision: str) -> Rate | None:
    """Return the peak rate of one device in this precision; None where it is not known."""
    peaks: dict[Any, Rate] = hardware.cpu.peaks
    if device.type == "cuda":
        peaks = next((gpu.peaks for gpu in hardware.gpus if gpu.index == device.index), {})
    return peaks.get(precision)

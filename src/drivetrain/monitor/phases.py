"""Measures where the time of a step goes: laps, each of which assigns the time since the one before to a phase.

Laps leave no gap, so the phases of a step add up to its time. On a CPU the clock is the host's. On a GPU it is the
device's: a lap is an event in its stream, read steps later, when it is long past, so that the host does not wait for
it. There a phase is what the device spent on it, and what it spent idle before the next was enqueued. Events take
microseconds of the device's time, and of the host's: of steps that take less than some milliseconds only some are
measured, and each stands for those before it; of those that were enqueued in one go, only the steps themselves. What
does not happen in every step is measured whenever it does.
"""

import time
from collections import deque
from collections.abc import Sequence
from operator import add, sub
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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

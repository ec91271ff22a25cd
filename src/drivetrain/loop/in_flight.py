"""The steps in flight: enqueued on the device, with results that the host has not read yet.

Where CUDA-graph replays write their results into a table on the device, the records of some milliseconds are read at
once, while steps for some more are in flight. Each record then has their mean as its seconds.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from drivetrain.core.records import StepOutcome
from drivetrain.data.division import Place
from drivetrain.loop.read_back import PinnedSlots, Reading, Values
from drivetrain.monitor.phases import PhaseClock

# The read-back batch and the in-flight window of steps with a result table, in seconds and in steps at most. The host
# may be busy with something else, such as a line for the terminal, or held up, for as long without idling the device.
READ_BACK_SECONDS, MOST_READ_BACK = 8e-3, 64
IN_FLIGHT_SECONDS, MOST_IN_FLIGHT = 32e-3, 256


class Enqueued:
    """A step, or a stretch of them, in flight on the device; its outcome may not be on the host yet."""

    __slots__ = ("began", "ended", "num_steps", "place", "rates", "reading")

    def __init__(self, first: Place, rates: Sequence[float], began: float, reading: Reading) -> None:
        self.place, self.rates, self.num_steps, self.began = first, rates, len(rates), began
        self.reading = reading
        self.ended = math.nan  # when the host began to enqueue the next one, if it did

    def travels_with(self, other: "Enqueued") -> bool:
        """Return whether both results reach the host in one copy: reading one then waits for the other, too."""
        rows, beside = self.reading.rows, other.reading.rows
        return rows is not None and beside is not None and rows.sent is not None and rows.sent is beside.sent


class ReadStep(NamedTuple):
    """The values of one step, read back from the device."""

    enqueued: Enqueued
    number: int  # of the step in its entry, from 0
    values: Values
    seconds: float


class InFlight:
    """The entries in flight, oldest first: decides when to read them, and attributes the time to their steps."""

    def __init__(self, device: torch.device, clock: PhaseClock) -> None:
        self._device, self._clock = device, clock
        self._entries: deque[Enqueued] = deque()
        self._slots = PinnedSlots()
        self._num_steps = 0
        self._read_until = -math.inf  # the time up to which seconds were attributed to steps
        self._seconds = math.inf  # per step, at the last read-back
        self._num_done = 0  # in-flight steps that were done at that time

    def __len__(self) -> int:
        return len(self._entries)

    def enqueue_step(self, place: Place, rate: float, began: float, outcome: StepOutcome) -> None:
        self._enqueue(Enqueued(place, (rate,), began, Reading(outcome, self._device, self._slots)))

    def enqueue_stretch(self, first: Place, rates: Sequence[float], began: float, outcome: StepOutcome) -> None:
        self._enqueue(Enqueued(first, rates, began, Reading(outcome, self._device)))

    def _enqueue(self, enqueued: Enqueued) -> None:
        if self._entries:
            self._entries[-1].ended = enqueued.began
        self._entries.append(enqueued)
        self._num_steps += enqueued.num_steps

    @property
    def num_read_back(self) -> int:
        """The number of steps whose table rows are read back at once."""
        return _num_within(READ_BACK_SECONDS, self._seconds, MOST_READ_BACK)

    def num_due(self) -> int:
        """Return how many entries to read now where no result is needed: all but the last.

        Of results in a device table only some are read, so that the device keeps work. One step among them without a
        row there, or in another table, such as an epoch's last, changes nothing.
        """
        entries = self._entries
        rows, before = entries[-1].reading.rows, entries[-2].reading.rows if len(entries) > 1 else None
        if before is not None and rows is not None and before.table is not rows.table:
            before.table.send()  # now, right after that step: later, reading it would wait for all steps after it, too
        rows = rows or before
        if rows is None:
            return len(entries) - 1
        together, window = self.num_read_back, _num_within(IN_FLIGHT_SECONDS, self._seconds, MOST_IN_FLIGHT)
        if rows.table.num_unsent >= together:
            rows.table.send()
        num_due, left = 0, self._num_steps
        if left < window + together:
            return 0
        for enqueued in entries:
            left -= enqueued.num_steps
            # Results in the same copy as the last one arrive together with it.
            if left < window or (enqueued.reading.rows is not None and enqueued.reading.rows.sent is rows.sent):
                break
            num_due += 1
        while 0 < num_due < len(entries) - 1 and entries[num_due].travels_with(entries[num_due - 1]):
            num_due += 1
        return num_due

    def read(self, count: int) -> Iterator[ReadStep]:
        """Yield the steps of the oldest `count` entries; blocks until the device has finished them."""
        # Plain loops: this runs in every step, and each call costs a microsecond, as the step evicts it from cache.
        entries, taken, found, num_steps, are_replays = self._entries, [], [], 0, False
        asked = time.perf_counter()
        for _ in range(count):
            enqueued = entries.popleft()
            taken.append(enqueued)
            found.append(enqueued.reading.all_values())  # the host waits until the device has done them
            num_steps += enqueued.num_steps
            are_replays |= enqueued.reading.rows is not None
        now = time.perf_counter()
        self._clock.waited(now - asked)
        self._num_steps -= num_steps
        # Where the host is far ahead, the time when it enqueued a step says nothing about how long the step took.
        began, ended = max(taken[0].began, self._read_until), taken[-1].ended
        if are_replays or not ended > began:
            ended = now
        # Some remaining entries are done, too; their share of the time is attributed now, not when they are read.
        num_done = sum(left.num_steps for left in entries if left.travels_with(taken[-1])) if are_replays else 0
        num_timed = num_steps + num_done - self._num_done
        self._num_done = num_done
        if num_timed > 0:
            self._seconds, self._read_until = (ended - began) / num_timed, ended
        seconds = self._seconds
        for enqueued, values in zip(taken, found, strict=True):
            for number, step_values in enumerate(values):
                yield ReadStep(enqueued, number, step_values, seconds)

    def drop(self) -> list[Enqueued]:
        """Give up all entries, after an error, and return them."""
        entries = [*self._entries]
        self._entries.clear()
        return entries


def _num_within(span: float, seconds: float, most: int) -> int:
    """Return how many steps of `seconds` each fit into a span of time: at least one, at most `most`."""
    return max(1, min(most, int(span / seconds))) if seconds > 0 else most

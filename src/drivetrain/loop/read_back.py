"""Reads the results of steps back from the device, while later steps are in flight.

They are copied right behind a step: the host waits for it alone. `InFlight` is the queue of steps that are enqueued on
the device, with results that the host has not read yet. Where CUDA-graph replays write their results into a table on
the device, the records of some milliseconds are read at once, while steps for some more are in flight. Each record then
has their mean as its seconds.
"""

import math
import operator
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from drivetrain.core.metrics import SKIPPED_IF_BAD, LoggedTotals, PartLoss, PartReader, StepOutcome
from drivetrain.data.division import Place
from drivetrain.monitor.phases import PhaseClock

# The read-back batch and the in-flight window of steps with a result table, in seconds and in steps at most. The host
# may be busy with something else, such as a line for the terminal, or held up, for as long without idling the device.
READ_BACK_SECONDS, MOST_READ_BACK = 8e-3, 64
IN_FLIGHT_SECONDS, MOST_IN_FLIGHT = 32e-3, 256


class DeviceResultTable:
    """A table on the device with the results of CUDA-graph replays of a step: each replay writes its row.

    The host copies many rows at once. A copy after every step would keep the device from starting the next replay at
    once, and takes the host as long as the replay itself.
    """

    OWN_VALUES = 5  # count, stop, norm, skipped, loss

    def __init__(self, length: int, device: torch.device, num_other_values: int = 0) -> None:
        # Allocated before any capture: inside one, each replay would fill them with zeros again.
        self._tables = [
            torch.zeros((length, width), dtype=dtype, device=device)
            for dtype, width in ((torch.float32, 1), (torch.float64, self.OWN_VALUES + num_other_values))
        ]
        self._chosen: Tensor | None = None
        self._unsent: list[TableRow] = []
        self.num_unsent = 0  # replays
        self._free: list[_Slot] = []

    def keep(self, place: Tensor, outcome: StepOutcome) -> None:
        """Write the outcome into row `place`. This is captured in the graph."""
        parts = [part for part in outcome.parts() if isinstance(part, Tensor)]
        is_single = (
            len(parts) == 1 and parts[0].dtype is torch.float32 and outcome.named is None and outcome.logged is None
        )  # the usual case: just a loss
        packed = parts[0].reshape(1) if is_single else outcome.pack()
        if self._chosen is None:
            self._chosen = self._tables[0 if is_single else 1][:, : len(packed)]
            self._tables = []
        self._chosen.index_copy_(0, place, packed.unsqueeze(0))

    @property
    def _table(self) -> Tensor:
        assert self._chosen is not None
        return self._chosen

    def expect(self, place: int, count: int = 1, stride: int = 1) -> "TableRow":
        """Announce the next replay, or `count` replays `stride` rows apart. Call this before the first one starts."""
        if self._unsent and place <= self._unsent[-1].last:
            self.send()  # the rows are reused: copy the old ones before they are overwritten
        note = TableRow(self, place, count, stride)
        self._unsent.append(note)
        self.num_unsent += count
        return note

    def cut(self, note: "TableRow", count: int) -> None:
        """Shorten the note that was expected last to `count` replays: the others were never started."""
        fewer = note.count - count
        note.count, note.last = count, note.last - fewer * note.stride
        self.num_unsent -= fewer
        if not count:
            self._unsent.pop()

    def send(self) -> None:
        """Start copying the rows that were not sent yet, ordered after their replays."""
        if not self._unsent:
            return
        notes, self._unsent, self.num_unsent = self._unsent, [], 0
        first, last = notes[0].place, notes[-1].last + 1
        rows = self._table[first:last]
        slot = None
        if rows.is_cuda:
            slot = self._slot(len(rows))
            host = slot.host[: len(rows)]
            host.copy_(rows, non_blocking=True)
            slot.event.record(torch.cuda.current_stream(rows.device))
        else:
            host = rows.clone()
        sent = _Sent(self, slot, host.numpy(), first, len(notes))
        for note in notes:
            note.sent = sent

    def _slot(self, length: int) -> "_Slot":
        for number, slot in enumerate(self._free):
            if len(slot.host) >= length:
                return self._free.pop(number)
        shape = (length, self._table.shape[1])
        return _Slot(torch.empty(shape, dtype=self._table.dtype, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]

    def give_back(self, slot: "_Slot") -> None:
        self._free.append(slot)


class _Sent:
    """Rows of the table that are in flight to the host or have arrived. Its memory is reused once all were read."""

    __slots__ = ("_first", "_rows", "_slot", "_table", "_unread")

    def __init__(self, table: DeviceResultTable, slot: "_Slot | None", rows: Any, first: int, unread: int) -> None:
        self._table, self._slot, self._rows, self._first, self._unread = table, slot, rows, first, unread

    def take(self, note: "TableRow") -> list[list[float]]:
        if self._slot is not None:
            self._slot.event.synchronize()  # the host waits here for those steps
        first = note.place - self._first
        found: list[list[float]] = self._rows[first : note.last - self._first + 1 : note.stride].tolist()
        self._unread -= 1
        if not self._unread and self._slot is not None:
            self._table.give_back(self._slot)
        return found

    def is_there(self) -> bool:
        return self._slot is None or bool(self._slot.event.query())  # type: ignore[no-untyped-call]


class TableRow:
    """The results of one replay or of several consecutive ones. Can be read only once."""

    __slots__ = ("count", "last", "place", "sent", "stride", "table")

    def __init__(self, table: DeviceResultTable, place: int, count: int, stride: int) -> None:
        self.table, self.place, self.count, self.stride = table, place, count, stride
        self.last = place + (count - 1) * stride
        self.sent: _Sent | None = None

    def take(self) -> list[list[float]]:
        """Return one row per replay; blocks until the device has finished them."""
        return self._on_its_way().take(self)

    def is_there(self) -> bool:
        return self._on_its_way().is_there()

    def _on_its_way(self) -> _Sent:
        if self.sent is None:
            self.table.send()
        assert self.sent is not None
        return self.sent


class _Slot(NamedTuple):
    host: Tensor
    event: torch.cuda.Event


class PinnedSlots:
    """Pinned host memory and an event for each in-flight read-back. Reused: making them costs more than the copy."""

    def __init__(self) -> None:
        self._free: dict[int, list[_Slot]] = {}

    def take(self, size: int) -> _Slot:
        free = self._free.get(size)
        if free:
            return free.pop()
        host = torch.empty(size, dtype=torch.float64, pin_memory=True)
        return _Slot(host, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def give_back(self, slot: _Slot) -> None:
        self._free.setdefault(len(slot.host), []).append(slot)


class Values(NamedTuple):
    """The numbers of an outcome, on the host."""

    total: float  # the sum of the losses
    num_items: float
    stop: float
    grad_norm: float | None
    skipped: float
    named: tuple[PartReader, list[float]] | None = None  # of a loss with named parts: `total` is 0 then
    logged: dict[str, float] | None = None  # of a loss that logs values

    def loss(self, step: int) -> tuple[float, Mapping[str, PartLoss] | None]:
        """Return the loss of the step that followed `step` steps, and each part's if it has named parts."""
        if self.named is not None:
            return self.named[0].read(self.named[1], step, self.num_items)
        total, count = self.total, self.num_items
        return total / count if count else total * math.inf if total else 0.0, None  # nothing counted: nothing learned


def _skipped(skipped: float, total: float, norm: float | None) -> float:
    if skipped != SKIPPED_IF_BAD:
        return skipped
    return 0.0 if math.isfinite(total) and (norm is None or math.isfinite(norm)) else 1.0


class Reading:
    """The read-back of an outcome. `values` waits for that step alone, not for work enqueued after it.

    Asking a GPU tensor for its value would wait for everything before it in the stream, the next step too; so the
    numbers are copied to pinned memory right after the step, with an event after the copy.
    """

    __slots__ = ("_outcome", "_slot", "_slots", "_values")

    def __init__(self, outcome: StepOutcome, device: torch.device, slots: PinnedSlots | None = None) -> None:
        self._outcome = outcome
        self._slot: _Slot | None = None
        self._slots = slots
        self._values: list[Values] | None = None
        if device.type == "cuda" and outcome.rows is None:
            packed = outcome.pack() if outcome.packed is None else outcome.packed
            slot = self._slot = (slots or PinnedSlots()).take(len(packed))
            slot.host.copy_(packed, non_blocking=True)
            slot.event.record(torch.cuda.current_stream(device))

    @property
    def rows(self) -> TableRow | None:
        return cast("TableRow | None", self._outcome.rows)

    def values(self) -> Values:
        """Return the values of one step; blocks until they are on the host."""
        (found,) = self.all_values()
        return found

    def all_values(self) -> list[Values]:
        """Return the values of each step that the outcome covers; blocks until they are on the host."""
        if self._values is None:
            self._values = self._read()
        return self._values

    def _read(self) -> list[Values]:
        losses, num_items, stop, norm, skipped, _, rows, named, logged = self._outcome
        if rows is not None:
            return self._from(rows.take())
        if self._slot is not None:
            self._slot.event.synchronize()  # the host waits here for that step
            found = self._from([self._slot.host.tolist()])
            if self._slots is not None:
                self._slots.give_back(self._slot)
            self._slot = None
            return found
        total = sum(value.item() * factor for value, factor in losses)
        parts = None if named is None else (named.reader, named.values.tolist())
        found_norm = None if norm is None else float(norm)
        own = total, float(num_items), float(stop), found_norm, _skipped(float(skipped), total, found_norm)
        if isinstance(logged, LoggedTotals):
            logged = logged.read(logged.values.tolist())
        return [Values(*own, parts, logged)]

    def _from(self, rows: list[list[float]]) -> list[Values]:
        """Unpack rows as `pack` lays them out: the parts that are on the device, in order."""
        parts: list[Any] = self._outcome.parts()
        places = [number for number, part in enumerate(parts) if isinstance(part, Tensor)]
        factors, has_norm = [factor for _, factor in self._outcome.losses], self._outcome.grad_norm is not None
        found, named, of_parts = [], self._outcome.named, None
        logged, values = self._outcome.logged, None
        num_named = 0 if named is None else len(named.values)
        for row in rows:
            if named is not None or logged is not None:
                row, others = row[: len(places)], row[len(places) :]
                of_parts = None if named is None else (named.reader, others[:num_named])
                values = logged.read(others[num_named:]) if isinstance(logged, LoggedTotals) else logged
            for place, value in zip(places, row, strict=True):
                parts[place] = value
            num_items, stop, norm, skipped, *losses = parts
            total = sum(map(operator.mul, losses, factors))
            norm = norm if has_norm else None
            found.append(Values(total, num_items, stop, norm, _skipped(skipped, total, norm), of_parts, values))
        return found

    def is_there(self, within_seconds: float) -> bool:
        """Wait up to `within_seconds` and return whether `values` will not block.

        Used after an error, when a step may never finish.
        """
        deadline = time.monotonic() + within_seconds
        while not self._has_come():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _has_come(self) -> bool:
        if self._values is None and self._outcome.rows is not None:
            return self._outcome.rows.is_there()
        return self._slot is None or bool(self._slot.event.query())  # type: ignore[no-untyped-call]


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

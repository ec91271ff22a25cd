"""Reads the results of steps back from the device. They are copied right behind a step: the host waits for it alone."""

import operator
import time
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from drivetrain.core.records import PartReader, StepOutcome


class DeviceResultTable:
    """A table on the device with the results of CUDA-graph replays of a step: each replay writes its row.

    The host copies many rows at once. A copy after every step would keep the device from starting the next replay at
    once, and takes the host as long as the replay itself.
    """

    OWN_VALUES = 5  # count, stop, norm, skipped, loss

    def __init__(self, length: int, device: torch.device, num_part_values: int = 0) -> None:
        # Allocated before any capture: inside one, each replay would fill them with zeros again.
        self._tables = [
            torch.zeros((length, width), dtype=dtype, device=device)
            for dtype, width in ((torch.float32, 1), (torch.float64, self.OWN_VALUES + num_part_values))
        ]
        self._chosen: Tensor | None = None
        self._unsent: list[TableRow] = []
        self.num_unsent = 0  # replays
        self._free: list[_Slot] = []

    def keep(self, place: Tensor, outcome: StepOutcome) -> None:
        """Write the outcome into row `place`. This is captured in the graph."""
        parts = [part for part in outcome.parts() if isinstance(part, Tensor)]
        is_single = (
            len(parts) == 1 and parts[0].dtype is torch.float32 and outcome.named is None
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
        losses, num_items, stop, norm, skipped, _, rows, named = self._outcome
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
        own = total, float(num_items), float(stop), None if norm is None else float(norm), float(skipped)
        return [Values(*own, parts)]

    def _from(self, rows: list[list[float]]) -> list[Values]:
        """Unpack rows as `pack` lays them out: the parts that are on the device, in order."""
        parts: list[Any] = self._outcome.parts()
        places = [number for number, part in enumerate(parts) if isinstance(part, Tensor)]
        factors, has_norm = [factor for _, factor in self._outcome.losses], self._outcome.grad_norm is not None
        found, named, of_parts = [], self._outcome.named, None
        for row in rows:
            if named is not None:
                row, of_parts = row[: len(places)], (named.reader, row[len(places) :])
            for place, value in zip(places, row, strict=True):
                parts[place] = value
            num_items, stop, norm, skipped, *losses = parts
            total = sum(map(operator.mul, losses, factors))
            found.append(Values(total, num_items, stop, norm if has_norm else None, skipped, of_parts))
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

"""What is known of a step once it is done."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StepOutcome(NamedTuple):
    """What a strategy's `step` hands back. Tensors may still be on their way; reading one waits for the device."""

    losses: Sequence[tuple[Tensor, float]]  # the step's loss sum is the sum of the products
    num_items: Tensor | float
    stop: Tensor | float  # above 0 if any rank asks to stop
    grad_norm: Tensor | None
    skipped: Tensor | float = 0.0  # above 0 if the optimizer left the weights as they were (fp16, infinite gradients)
    packed: Tensor | None = None  # what `pack` gives, where the device has it already; overwritten by the next step
    note: "Note | None" = None  # where the device has noted what `pack` gives, for as long as nobody has read it

    def parts(self) -> list[Tensor | float]:
        norm = 0.0 if self.grad_norm is None else self.grad_norm
        return [self.num_items, self.stop, norm, self.skipped, *(value for value, _ in self.losses)]

    def pack(self) -> Tensor:
        """Its tensors as one of float64, in the order of `parts`."""
        # Only what is on the device: to bring a number there for the way back would make the host wait.
        on_device = [part.double() for part in self.parts() if isinstance(part, Tensor)]
        return torch.stack(on_device) if len(on_device) > 1 else on_device[0].reshape(1)


class Noted:
    """What replays of a recorded step came to: each leaves its numbers at its own place in a table on the device.

    The host fetches many with one copy. A copy behind every step would keep the device from beginning the next replay
    at once, and takes the host as long as the replay itself.
    """

    MOST_PARTS = 5

    def __init__(self, length: int, device: torch.device) -> None:
        # Made before anything is recorded: made in a recording, they would be filled anew by each replay.
        self._tables = [
            torch.zeros((length, width), dtype=dtype, device=device)
            for dtype, width in ((torch.float32, 1), (torch.float64, self.MOST_PARTS))
        ]
        self._chosen: Tensor | None = None
        self._unsent: list[Note] = []
        self._free: list[_Slot] = []

    def keep(self, place: Tensor, outcome: StepOutcome) -> None:
        """Part of what is recorded."""
        parts = [part for part in outcome.parts() if isinstance(part, Tensor)]
        is_single = len(parts) == 1 and parts[0].dtype is torch.float32  # the usual: a loss, as it is
        packed = parts[0].reshape(1) if is_single else outcome.pack()
        if self._chosen is None:
            self._chosen = self._tables[0 if is_single else 1][:, : len(packed)]
            self._tables = []
        self._chosen.index_copy_(0, place, packed.unsqueeze(0))

    @property
    def _table(self) -> Tensor:
        assert self._chosen is not None
        return self._chosen

    def expect(self, place: int) -> "Note":
        """Of the replay that comes next: asked for before it begins."""
        if self._unsent and place <= self._unsent[-1].place:
            self.send()  # the places are used anew: what is there is on its way before it is written over
        note = Note(self, place)
        self._unsent.append(note)
        return note

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    def send(self) -> None:
        """Begin to copy what is not on its way yet, behind the replays before."""
        if not self._unsent:
            return
        notes, self._unsent = self._unsent, []
        first, last = notes[0].place, notes[-1].place + 1
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
    """Rows of a table that are on their way to the host, or there. Its memory is used again once all were read."""

    __slots__ = ("_first", "_noted", "_rows", "_slot", "_unread")

    def __init__(self, noted: Noted, slot: "_Slot | None", rows: Any, first: int, unread: int) -> None:
        self._noted, self._slot, self._rows, self._first, self._unread = noted, slot, rows, first, unread

    def take(self, place: int) -> list[float]:
        if self._slot is not None:
            self._slot.event.synchronize()  # the host waits here for those steps
        found: list[float] = self._rows[place - self._first].tolist()
        self._unread -= 1
        if not self._unread and self._slot is not None:
            self._noted.give_back(self._slot)
        return found

    def is_there(self) -> bool:
        return self._slot is None or bool(self._slot.event.query())  # type: ignore[no-untyped-call]


class Note:
    """One replay's numbers. To be read once."""

    __slots__ = ("noted", "place", "sent")

    def __init__(self, noted: Noted, place: int) -> None:
        self.noted, self.place = noted, place
        self.sent: _Sent | None = None

    def take(self) -> list[float]:
        return self._on_its_way().take(self.place)

    def is_there(self) -> bool:
        return self._on_its_way().is_there()

    def _on_its_way(self) -> _Sent:
        if self.sent is None:
            self.noted.send()
        assert self.sent is not None
        return self.sent


class _Slot(NamedTuple):
    host: Tensor
    event: torch.cuda.Event


class PinnedSlots:
    """Pinned memory and an event for each reading under way. Used again: making them costs more than the copy."""

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


class Reading:
    """An outcome on its way to the host. `values` waits for that step alone, not for what the device was given since.

    Asking a GPU tensor for its value would wait for everything before it in the stream, the next step too; so the
    numbers are copied to pinned memory right behind the step, with an event behind the copy.
    """

    __slots__ = ("_outcome", "_slot", "_slots", "_values")

    def __init__(self, outcome: StepOutcome, device: torch.device, slots: PinnedSlots | None = None) -> None:
        self._outcome = outcome
        self._slot: _Slot | None = None
        self._slots = slots
        self._values: tuple[float, float, float, float | None, float] | None = None
        if device.type == "cuda" and outcome.note is None:
            packed = outcome.pack() if outcome.packed is None else outcome.packed
            slot = self._slot = (slots or PinnedSlots()).take(len(packed))
            slot.host.copy_(packed, non_blocking=True)
            slot.event.record(torch.cuda.current_stream(device))

    @property
    def note(self) -> Note | None:
        return self._outcome.note

    def values(self) -> tuple[float, float, float, float | None, float]:
        """Loss sum, number of items, stop flag, gradient norm, skipped."""
        if self._values is None:
            self._values = self._read()
        return self._values

    def _read(self) -> tuple[float, float, float, float | None, float]:
        losses, num_items, stop, norm, skipped, _, note = self._outcome
        if note is not None:
            copied = iter(note.take())
        elif self._slot is not None:
            self._slot.event.synchronize()  # the host waits here for that step
            copied = iter(self._slot.host.tolist())
        else:
            total = sum(value.item() * factor for value, factor in losses)
            return total, float(num_items), float(stop), None if norm is None else float(norm), float(skipped)
        on_host = [next(copied) if isinstance(part, Tensor) else part for part in self._outcome.parts()]
        if self._slots is not None and self._slot is not None:
            self._slots.give_back(self._slot)
        self._slot = None
        total = sum(value * factor for value, (_, factor) in zip(on_host[4:], losses, strict=True))
        return total, on_host[0], on_host[1], None if norm is None else on_host[2], on_host[3]

    def is_there(self, within_seconds: float) -> bool:
        """Whether `values` does not have to wait. For whoever leaves after an error, when a step may never be done."""
        deadline = time.monotonic() + within_seconds
        while not self._has_come():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _has_come(self) -> bool:
        if self._values is None and self._outcome.note is not None:
            return self._outcome.note.is_there()
        return self._slot is None or bool(self._slot.event.query())  # type: ignore[no-untyped-call]


class StepRecord(NamedTuple):
    """One optimizer step, as it is logged. `loss` is over the whole global batch, all ranks."""

    step: int  # how many optimizer steps are done
    epoch: int  # how many epochs were done when it began
    samples: int
    loss: float
    num_items: float  # what the loss is over: samples, or what `LossSum` counted
    lr: float
    grad_norm: float | None
    seconds: float
    skipped: bool = False  # fp16: gradients were infinite, the weights stayed; batch and schedule went on

    def as_json(self) -> str:
        """As `json.dumps` writes it, in a third of the time: it is part of every step."""
        norm = self.grad_norm
        return (
            f'{{"step": {self.step}, "epoch": {self.epoch}, "samples": {self.samples}, "loss": {_json(self.loss)}, '
            f'"num_items": {_json(self.num_items)}, "lr": {_json(self.lr)}, '
            f'"grad_norm": {"null" if norm is None else _json(norm)}, "seconds": {self.seconds!r}, '
            f'"skipped": {"true" if self.skipped else "false"}}}'
        )


def _json(number: float) -> str:
    return repr(number) if math.isfinite(number) else json.dumps(number)

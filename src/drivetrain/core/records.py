"""What is known of a step once it is done."""

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

    def parts(self) -> list[Tensor | float]:
        norm = 0.0 if self.grad_norm is None else self.grad_norm
        return [self.num_items, self.stop, norm, self.skipped, *(value for value, _ in self.losses)]

    def pack(self) -> Tensor:
        """Its tensors as one of float64, in the order of `parts`."""
        # Only what is on the device: to bring a number there for the way back would make the host wait.
        on_device = [part.double() for part in self.parts() if isinstance(part, Tensor)]
        return torch.stack(on_device) if len(on_device) > 1 else on_device[0].reshape(1)


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
        if device.type == "cuda":
            packed = outcome.pack() if outcome.packed is None else outcome.packed
            slot = self._slot = (slots or PinnedSlots()).take(len(packed))
            slot.host.copy_(packed, non_blocking=True)
            slot.event.record(torch.cuda.current_stream(device))

    def values(self) -> tuple[float, float, float, float | None, float]:
        """Loss sum, number of items, stop flag, gradient norm, skipped."""
        if self._values is None:
            self._values = self._read()
        return self._values

    def _read(self) -> tuple[float, float, float, float | None, float]:
        losses, num_items, stop, norm, skipped, _ = self._outcome
        if self._slot is None:
            total = sum(value.item() * factor for value, factor in losses)
            return total, float(num_items), float(stop), None if norm is None else float(norm), float(skipped)
        self._slot.event.synchronize()  # the host waits here for that step
        copied = iter(self._slot.host.tolist())
        on_host = [next(copied) if isinstance(part, Tensor) else part for part in self._outcome.parts()]
        if self._slots is not None:
            self._slots.give_back(self._slot)
        self._slot = None
        total = sum(value * factor for value, (_, factor) in zip(on_host[4:], losses, strict=True))
        return total, on_host[0], on_host[1], None if norm is None else on_host[2], on_host[3]

    def is_there(self, within_seconds: float) -> bool:
        """Whether `values` does not have to wait. For whoever leaves after an error, when a step may never be done."""
        deadline = time.monotonic() + within_seconds
        while self._slot is not None and not self._slot.event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


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

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()

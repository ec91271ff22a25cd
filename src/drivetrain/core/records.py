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


class Reading:
    """An outcome on its way to the host. `values` waits for that step alone, not for what the device was given since.

    Asking a GPU tensor for its value would wait for everything before it in the stream, the next step too; so the
    numbers are copied to pinned memory right behind the step, with an event behind the copy.
    """

    __slots__ = ("_event", "_host", "_outcome")

    def __init__(self, outcome: StepOutcome, device: torch.device) -> None:
        self._outcome = outcome
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Only what is on the device: to bring a number there for the way back would make the host wait.
            on_device = [part.double() for part in self._parts() if isinstance(part, Tensor)]
            self._host = torch.empty(len(on_device), dtype=torch.float64, pin_memory=True)
            self._host.copy_(torch.stack(on_device), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def values(self) -> tuple[float, float, float, float | None, float]:
        """Loss sum, number of items, stop flag, gradient norm, skipped."""
        losses, num_items, stop, norm, skipped = self._outcome
        if self._event is None:
            total = sum(value.item() * factor for value, factor in losses)
            return total, float(num_items), float(stop), None if norm is None else float(norm), float(skipped)
        self._event.synchronize()  # the host waits here for that step
        copied = iter(self._host.tolist())
        on_host = [next(copied) if isinstance(part, Tensor) else part for part in self._parts()]
        total = sum(value * factor for value, (_, factor) in zip(on_host[4:], losses, strict=True))
        return total, on_host[0], on_host[1], None if norm is None else on_host[2], on_host[3]

    def is_there(self, within_seconds: float) -> bool:
        """Whether `values` does not have to wait. For whoever leaves after an error, when a step may never be done."""
        deadline = time.monotonic() + within_seconds
        while self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _parts(self) -> list[Tensor | float]:
        losses, num_items, stop, norm, skipped = self._outcome
        return [num_items, stop, 0.0 if norm is None else norm, skipped, *(value for value, _ in losses)]


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

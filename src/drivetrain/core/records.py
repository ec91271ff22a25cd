"""What is known of a step once it is done."""

from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StepOutcome(NamedTuple):
    """What a strategy's `step` hands back. Tensors may still be on their way; reading one waits for the device."""

    losses: Sequence[tuple[Tensor, float]]  # the step's loss sum is the sum of the products
    num_items: Tensor | float
    stop: Tensor | float  # above 0 if any rank asks to stop
    grad_norm: Tensor | None


class Reading:
    """An outcome on its way to the host. `values` waits for that step alone, not for what the device was given since.

    Asking a GPU tensor for its value would wait for everything before it in the stream, the next step too; so the
    numbers are copied to pinned memory right behind the step, with an event behind the copy.
    """

    def __init__(self, outcome: StepOutcome, device: torch.device) -> None:
        norm = outcome.grad_norm
        self._has_norm = norm is not None
        self._factors = [factor for _, factor in outcome.losses]
        self._parts = [
            outcome.num_items,
            outcome.stop,
            0.0 if norm is None else norm,
            *(value for value, _ in outcome.losses),
        ]
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            on_device = [torch.as_tensor(part, dtype=torch.float64, device=device) for part in self._parts]
            self._host = torch.empty(len(on_device), dtype=torch.float64, pin_memory=True)
            self._host.copy_(torch.stack(on_device), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def values(self) -> tuple[float, float, float, float | None]:
        """Loss sum, count, stop flag, gradient norm."""
        if self._event is not None:
            self._event.synchronize()  # the host waits here for that step
            count, stop, norm, *losses = self._host.tolist()
        else:
            count, stop, norm, *losses = map(float, self._parts)
        total = sum(map(mul, losses, self._factors))
        return total, count, stop, norm if self._has_norm else None


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

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()

"""What is known of a step once it is done."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepOutcome:
    """What a strategy's `step` hands back. Tensors may still be on their way; reading one waits for the device."""

    loss_sum: Tensor | float
    count: Tensor | float
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
        self._parts = (outcome.loss_sum, outcome.count, outcome.stop, 0.0 if norm is None else norm)
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            on_device = [torch.as_tensor(part, dtype=torch.float64, device=device).detach() for part in self._parts]
            self._host = torch.empty(len(on_device), dtype=torch.float64, pin_memory=True)
            self._host.copy_(torch.stack(on_device), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def values(self) -> tuple[float, float, float, float | None]:
        """Loss sum, count, stop flag, gradient norm."""
        if self._event is not None:
            self._event.synchronize()  # the host waits here for that step
            total, count, stop, norm = self._host.tolist()
        else:
            total, count, stop, norm = (float(part) for part in self._parts)
        return total, count, stop, norm if self._has_norm else None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as it is logged. `loss` is over the whole global batch, all ranks."""

    step: int  # how many optimizer steps are done
    epoch: int  # how many epochs were done when it began
    samples: int
    loss: float
    count: float  # items the loss is over: samples, or what `LossSum` counted
    lr: float
    grad_norm: float | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

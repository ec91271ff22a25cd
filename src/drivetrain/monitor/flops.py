"""Counts how much a model computes per sample, while it is tried before the first step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.hardware import Hardware, Rate
from drivetrain.plan.simulate import flops_of


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products, convolutions and attention by torch's own formulas. It never fails; it may miss some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs, result)
        return result


Result = TypeVar("Result")


def counted(trial: Callable[[], Result], counts: bool = True) -> tuple[int, Result]:
    """Return the FLOPs of work that is done anyhow, and its result. 0: it was not to be counted."""
    if not counts:
        return 0, trial()
    with FlopCount() as count:
        result = trial()
    return count.total, result


def count_apart(
    loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, around: AbstractContextManager[Any] | None
) -> int:
    """Count the FLOPs of a separate forward and backward, for a model that is going to be compiled. 0: it did not work.

    A dispatch mode, even one that only looks on, keeps torch.compile from compiling what is called under it, for good.
    Gradients are not kept, buffers are restored. Every rank must take part: the model may communicate.
    """
    before = [buffer.detach().clone() for buffer in model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = FlopCount()
    try:
        with count:
            with around or nullcontext():
                result = loss(model, batch)
            total: Any = getattr(result, "total", result)
            if isinstance(total, Mapping):
                total = sum(getattr(part, "total", part) for part in total.values())
            torch.autograd.grad(total, trained, allow_unused=True)
    except Exception:  # noqa: BLE001 - the trial that follows says what is wrong, if anything is
        return 0
    finally:
        with torch.no_grad():
            for buffer, saved in zip(model.buffers(), before, strict=True):
                buffer.copy_(saved)
    return count.total


def peak_rate(hardware: Hardware, device: torch.device, precision: str) -> Rate | None:
    """Return the peak rate of one device in this precision; None where it is not known."""
    peaks: dict[Any, Rate] = hardware.cpu.peaks
    if device.type == "cuda":
        peaks = next((gpu.peaks for gpu in hardware.gpus if gpu.index == device.index), {})
    return peaks.get(precision)

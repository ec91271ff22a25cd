"""Looks into single steps: a torch.profiler trace for `--profile 10:15`, and how much a model computes per sample.

Trace and table are written into the run folder. FLOPs are counted while the model is tried before the first step.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from drivetrain.core.isolation import EagerDispatchMode
from drivetrain.core.logged import Logged
from drivetrain.hardware import Hardware, Rate
from drivetrain.plan.simulate import flops_of

TRACE, TABLE = "profile/trace.json", "profile/table.txt"
Result = TypeVar("Result")


class StepProfiler:
    """Profiles the steps from `first` to `last`, both included, counted from 1. A failing profile never fails a run.

    `before_step` is called with each step's number before its work is enqueued. The host waits for the device where the
    window begins and where it ends: that is the cost of profiling.
    """

    def __init__(
        self, first: int, last: int, folder: Path, device: torch.device, report: Callable[[str], None]
    ) -> None:
        self._first, self._last, self._folder, self._device, self._report = first, last, folder, device, report
        self._profile: Any = None
        self._num_steps = 0

    @classmethod
    def of_window(
        cls,
        window: str,
        folder: Path,
        device: torch.device,
        done: int,
        num_steps: int | None,
        report: Callable[[str], None],
    ) -> "StepProfiler | None":
        """Return the profiler of a window like `10:15`, in a run from `done` to `num_steps`. Reports steps outside."""
        first, last = map(int, window.split(":"))
        here_first, here_last = max(first, done + 1), last if num_steps is None else min(last, num_steps)
        here = f"this run does steps {done + 1} to {num_steps or 'the end of the data'}"
        if here_first > here_last:
            report(f"--profile {window}: {here}, so nothing is profiled")
            return None
        if (here_first, here_last) != (first, last):
            report(f"--profile {window}: {here}, so only steps {here_first} to {here_last} are profiled")
        return cls(here_first, here_last, folder, device, report)

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._begin()
        elif step == self._last + 1:
            self.close()
        if self._profile is not None:
            self._num_steps += 1

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            self._wait()
            self._profile = profile(activities=activities)
            self._profile.start()
        except Exception as error:  # noqa: BLE001
            self._profile = None
            self._report(f"--profile: the profiler does not start: {error}")

    def close(self) -> None:
        """End the profile, also before the window's end, where the run ended first."""
        watched, self._profile = self._profile, None
        if watched is None:
            return
        try:
            self._wait()
            watched.stop()
            (self._folder / TRACE).parent.mkdir(exist_ok=True)
            watched.export_chrome_trace(str(self._folder / TRACE))
            order = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            table = watched.key_averages().table(sort_by=order, row_limit=40)
            heading = f"steps {self._first} to {self._first + self._num_steps - 1}, sorted by {order}\n"
            (self._folder / TABLE).write_text(heading + table, encoding="utf-8")
            self._report(f"profile of {self._num_steps} steps: {self._folder / TRACE} (open in ui.perfetto.dev)")
        except Exception as error:  # noqa: BLE001
            self._report(f"--profile: the trace could not be written: {error}")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class FlopCount(EagerDispatchMode):
    """Counts matrix products, convolutions and attention by torch's own formulas. It never fails; it may miss some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs, result)
        return result


class _FlopCountOfTrial(FlopCount):  # type: ignore[no-untyped-call]
    """Counts while work is done that is not to be changed: what the user compiled is compiled, and not counted."""

    is_eager = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch that the mode only looks on, and does not keep it from compiling."""
        return True


def counted(trial: Callable[[], Result], counts: bool = True) -> tuple[int, Result]:
    """Return the FLOPs of work that is done anyhow, and its result. 0: it was not to be counted."""
    if not counts:
        return 0, trial()
    with _FlopCountOfTrial() as count:
        result = trial()
    return count.total, result


def count_apart(
    loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, around: AbstractContextManager[Any] | None
) -> int:
    """Count the FLOPs of a separate forward and backward, for a model that is going to be compiled. 0: it did not work.

    Everything runs eagerly here: the operations inside of compiled code cannot be counted.
    Gradients are not kept, buffers are restored. Every rank must take part: the model may communicate.
    """
    before = [buffer.detach().clone() for buffer in model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = FlopCount()
    try:
        with count:
            with around or nullcontext():
                result = loss(model, batch)
            if isinstance(result, Logged):
                result = result.result
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

"""`--profile 10:15`: writes a torch.profiler trace of these steps and its table into the run folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TRACE, TABLE = "profile/trace.json", "profile/table.txt"


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

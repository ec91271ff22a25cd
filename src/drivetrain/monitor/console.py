"""What a run shows on the terminal: a bar while it runs, a line per epoch. Only the main process has one."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from drivetrain.core.records import StepRecord


class RunConsole:
    """A sober one: where the output is no terminal, only the lines remain."""

    def __init__(self, num_steps: int, steps_per_epoch: int, first_step: int, *, quiet: bool = False) -> None:
        self._console = Console(highlight=False, quiet=quiet)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=num_steps, completed=first_step, epoch=1, loss="")
        self._quiet = quiet
        self._num_steps, self._steps_per_epoch = num_steps, steps_per_epoch
        self._loss_sum, self._count, self._samples, self._began = 0.0, 0.0, 0, time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text)

    def show(self, record: StepRecord) -> None:
        if self._quiet:
            return
        self._loss_sum += record.loss * record.num_items
        self._count += record.num_items
        self._samples += record.samples
        if not self._progress.disable:
            self._progress.update(self._bar, completed=record.step, epoch=record.epoch + 1, loss=f"{record.loss:.4f}")
        if record.step % self._steps_per_epoch == 0 or record.step == self._num_steps:
            seconds = time.perf_counter() - self._began
            self.say(
                f"epoch {record.epoch + 1:>3}   step {record.step:>6}   loss {self._loss_sum / self._count:.4f}   "
                f"{self._samples / seconds:>9,.0f} samples/s"
            )
            self._loss_sum, self._count, self._samples, self._began = 0.0, 0.0, 0, time.perf_counter()

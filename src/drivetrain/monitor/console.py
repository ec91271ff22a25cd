"""The terminal output of a run: how it starts, a bar while it runs, a line per epoch, unless epochs are short.

Only the main process has one.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from drivetrain.core.aims import BatchSizes, samples_between
from drivetrain.core.log import log, printable
from drivetrain.core.metrics import StepRecord
from drivetrain.core.run_folder import RESERVED_NAMES
from drivetrain.core.value import format_count, format_metric

LEAST_BAR = 4  # columns
_DROPPED = ("steps", "warning", "metric", "rate")  # in this order, where a terminal is narrow
MOST_LOGGED, MOST_VALIDATED = 6, 12  # values on a line; all are in the records
LONGEST_NAME = 40


class _Console(Console):
    """A console for which a terminal or pipe that goes away ends the output, never the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class _Pace:
    """Decides which lines of a kind, one per epoch or validation, are shown: thousands are not read.

    The first ones are shown. Then the time between two grows with that of the run, to ten seconds: an epoch that takes
    longer is always shown, and a short run still shows its course.
    """

    SHARE, MOST_SECONDS = 1 / 20, 10.0

    def __init__(self, num_first: int) -> None:
        self._num_first = num_first
        self._began = self._shown_at = time.perf_counter()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def shows(self, *, asked: bool) -> bool:
        """Return whether the next line is shown; `asked`: it is in any case."""
        now = time.perf_counter()
        least = min(self.MOST_SECONDS, self.SHARE * (now - self._began))
        shows = asked or self._num_first > 0 or now - self._shown_at >= least
        self._num_first -= 1
        if shows:
            self._shown_at = now
        return shows


class RunConsole:
    """Shows a run. Where the output is not a terminal, only the lines remain, and a long epoch gets one a minute.

    `line_every` asks for a line after every so many steps. Lines of short epochs are left out, but not the last.
    """

    FIRST, FEW = 20, 100  # lines that are not left out, of many epochs, and of few
    LINE_SECONDS = 60.0
    BAR_SECONDS = 0.1  # moving the bar costs more than making a record

    def __init__(
        self,
        num_steps: int | None,
        steps_per_epoch: int | None,
        first_step: int,
        *,
        quiet: bool = False,
        line_every: int | None = None,
        batch_sizes: BatchSizes = (),
    ) -> None:
        self._console = _Console(highlight=False, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.fields[before]}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[after]}", markup=False),
            console=self._console,
            transient=True,
            expand=True,
            disable=quiet or not self._console.is_terminal,
        )
        # What a step takes depends on its samples: where their number changes, samples are counted.
        self._work = partial(samples_between, batch_sizes or ((0, 1),), 0)
        total = None if num_steps is None else self._work(num_steps)
        done = self._work(first_step)
        self._bar = self._progress.add_task("", total=total, completed=done, before="", after="first step")
        self._quiet = quiet
        self._num_steps, self._steps_per_epoch, self._line_every = num_steps, steps_per_epoch, line_every
        # Since the last line; the seconds are those of the steps, since several records may be read at once.
        self._loss_sum, self._count, self._samples, self._skipped, self._seconds = 0.0, 0.0, 0, 0, 0.0
        self._epoch, self._epoch_sum, self._epoch_count = -1, 0.0, 0.0  # since the epoch began, also before a resume
        # Of named parts of the loss and of logged values: sum and count of each, since the last line and since the
        # epoch began.
        self._parts: dict[str, list[float]] = {}
        self._epoch_parts: dict[str, list[float]] = {}
        self._logged: dict[str, list[float]] = {}
        self._epoch_logged: dict[str, list[float]] = {}
        self._began = time.perf_counter()
        self._bar_moved = 0.0
        self._last: StepRecord | None = None
        self._warning, self._metric, self._rate = "", "", 0.0
        self._is_measuring = False
        num_epochs = _epochs(num_steps, steps_per_epoch)
        self._has_few = num_epochs is not None and num_epochs <= self.FEW
        first = self.FEW if num_epochs is None or self._has_few else self.FIRST
        self._paces = {kind: _Pace(first) for kind in ("epoch", "validation")}
        self._held: dict[str, tuple[int, str]] = {}  # the newest line of each kind that was left out, with its step
        self._digits = max(3, len(str(num_epochs or "")))
        self._first_step, self._said_step = first_step, -1
        self._is_told, self._unseen_best = False, ""

    def __enter__(self) -> Self:
        for pace in self._paces.values():
            pace.begin()
        self._shown(self._progress.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_steps()
        self._shown(self._progress.stop)

    def end_steps(self) -> None:
        """Show the last lines of epochs and validations, if they were left out: no step follows."""
        if self._steps_per_epoch is None and self._last is not None and self._count:
            self._say_line(self._last, of_epoch=True, asked=True)
        for kind in sorted(self._held, key=lambda kind: self._held[kind][0]):
            self._show_held(kind)

    def say(self, text: str, bold: str = "") -> None:
        """Print a line as it is: what looks like markup is a part of somebody's name. `bold` stands before it."""
        head, rest = printable(bold), printable(text)
        if not log(f"{head}{rest}".strip(), logging.DEBUG if self._quiet else logging.INFO) and not self._quiet:
            line = Text.assemble((head, "bold"), rest)
            # Lines are not wrapped unless on a terminal: logs are searched.
            self._shown(lambda: self._console.print(line, soft_wrap=not self._console.is_terminal))

    def warn(self, text: str) -> None:
        """Show a warning beside the progress from now on; empty: show none."""
        self._warning = text

    def measuring(self, words: str, share: float) -> None:
        """Show that a set is measured, and how much of it is done, while no step moves the bar.

        Where the output is not a terminal, a measurement that takes long gets a line a minute.
        """
        now = time.perf_counter()
        if self._quiet or (self._is_measuring and share and now - self._bar_moved <= self.BAR_SECONDS):
            return
        if not self._is_measuring:
            self._began = now
        self._is_measuring, self._bar_moved, told = True, now, f"{_name(words)} {share:.0%}"
        if not self._progress.disable:
            self._shown(lambda: self._show_bar(self._last, told))
        elif now - self._began > self.LINE_SECONDS:
            self.say(f"            {told}")
            self._began = now

    def validated(self, metrics: Mapping[str, float], best: str = "") -> None:
        """Show a validation: a metric beside the progress, the first that is no loss, and a line of all, if few.

        `best` is the value in words by which it is the best so far; empty: it is not.
        """
        shown = next((name for name in metrics if "loss" not in name), next(iter(metrics), ""))
        if shown:
            label = shown.removeprefix("valid_") if shown != "valid_loss" else shown
            self._metric = f"{_name(label.replace('_', ' '))} {metrics[shown]:.4g}"
        if self._is_measuring and not self._progress.disable:
            self._shown(lambda: self._show_bar(self._last))  # the next step may take long
        self._is_measuring = False
        told = list(metrics)
        if len(told) > MOST_VALIDATED:
            told = sorted(told, key=lambda name: not name.endswith("_loss"))[:MOST_VALIDATED]
        rest = "" if len(told) == len(metrics) else f"   and {len(metrics) - len(told)} more in metrics.jsonl"
        words = [f"{_name(name.replace('_', ' '))} {format_metric(metrics[name])}" for name in told]
        self._say_validation(f"{'   '.join(words)}{rest}", best)

    def _say_validation(self, words: str, best: str) -> None:
        """Show the line of a validation, and on the first one that is shown again which was the best before it."""
        step = self._last.step if self._last is not None else self._first_step
        unseen = "" if best else self._unseen_best
        line = f"{words}   {unseen}" if unseen else words
        is_shown = self._offer("validation", step, line)
        self._unseen_best = "" if is_shown else f"best {best} at step {step}" if best else unseen

    def _offer(self, kind: str, step: int, line: str, *, asked: bool = False) -> bool:
        """Show a line, or hold it back until the next one of its kind. Returns whether it is shown.

        The lines of a step, of its epoch and of its validation, are shown together.
        """
        if not self._paces[kind].shows(asked=asked or step == self._said_step):
            self._tell_once(kind)
            self._held[kind] = (step, line)
            return False
        self._held.pop(kind, None)
        for other, (held_step, _) in list(self._held.items()):
            if held_step == step:
                self._show_held(other)
        self._show_line(kind, step, line)
        return True

    def _show_held(self, kind: str) -> None:
        self._show_line(kind, *self._held.pop(kind))

    def _show_line(self, kind: str, step: int, line: str) -> None:
        if kind == "validation":  # under the line of its step, or with a step of its own
            line = f"{'':12}{line}" if step == self._said_step else f"{'':{9 + self._digits}}step {step:>6}   {line}"
        self._said_step = step
        self.say(line)
        if kind == "epoch":
            self._loss_sum, self._count, self._samples, self._skipped, self._seconds = 0.0, 0.0, 0, 0, 0.0
            self._parts, self._logged = {}, {}
            self._began = time.perf_counter()

    def _tell_once(self, kind: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        validations = ", metrics.jsonl every validation" if self._metric else ""
        each = self._steps_per_epoch if kind == "epoch" else None
        asks = f"; --log-every {each} shows a line of each epoch" if each else ""
        self.say(f"            fewer lines from here on: steps.jsonl has every step{validations}{asks}")

    def _shown(self, show: Callable[[], None]) -> None:
        """Show something. A full disk behind a pipe or a closed terminal ends the output, not the run."""
        try:
            show()
        except (OSError, ValueError):
            self._console.quiet = True

    def take_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take up steps done before this run went on, as `steps.jsonl` has them: those of its last epoch count."""
        for row in rows:
            if {"epoch", "loss", "num_items"} <= row.keys():
                self._add_to_epoch(row["epoch"], row["loss"], row["num_items"])
                for key, loss in row.items():
                    if key.startswith("loss_") and loss is not None:
                        name = key.removeprefix("loss_")
                        _add(self._epoch_parts, name, loss, row.get(f"num_items_{name}", row["num_items"]))
                    elif key not in RESERVED_NAMES and not key.startswith("num_items_") and loss is not None:
                        _add(self._epoch_logged, key, loss, row["samples"])

    def _add_to_epoch(self, epoch: int, loss: float, num_items: float) -> None:
        if epoch != self._epoch:
            self._epoch, self._epoch_sum, self._epoch_count = epoch, 0.0, 0.0
            self._epoch_parts, self._epoch_logged = {}, {}
        self._epoch_sum += loss * num_items if num_items else 0.0
        self._epoch_count += num_items

    def show(self, record: StepRecord) -> None:
        if self._quiet:
            return
        if self._steps_per_epoch is None and self._last is not None and self._last.epoch < record.epoch and self._count:
            self._say_line(self._last, of_epoch=True)  # how long it is shows only when the next one begins
        self._last = record
        self._add_to_epoch(record.epoch, record.loss, record.num_items)
        if record.parts is not None:
            for name, part in record.parts.items():
                for sums in (self._parts, self._epoch_parts):
                    _add(sums, name, part.loss, part.num_items)
        if record.logged is not None:
            for name, value in record.logged.items():
                for sums in (self._logged, self._epoch_logged):
                    _add(sums, name, value, 0.0 if math.isnan(value) else record.samples)
        self._loss_sum += record.loss * record.num_items if record.num_items else 0.0
        self._count += record.num_items
        self._samples += record.samples
        self._skipped += record.skipped
        self._seconds += record.seconds
        now = time.perf_counter()
        if not self._progress.disable and now - self._bar_moved > self.BAR_SECONDS:
            self._shown(lambda: self._move_bar(record))
            self._bar_moved = now
        ends_epoch = record.step == self._num_steps or (
            self._steps_per_epoch is not None and record.step % self._steps_per_epoch == 0
        )
        is_due = self._is_line_due(record.step, now)
        if ends_epoch or is_due:
            self._say_line(record, of_epoch=ends_epoch, asked=is_due or record.step == self._num_steps)

    def _move_bar(self, record: StepRecord) -> None:
        self._progress.update(self._bar, completed=self._work(record.step))
        self._rate = self._samples / self._seconds if self._seconds else self._rate
        self._show_bar(record)

    def _show_bar(self, record: StepRecord | None, measuring: str = "") -> None:
        """Write the words of the bar: after a step, and with what is measured while no step is done."""
        if record is None:  # a run that goes on measures before its first step
            self._progress.update(self._bar, after=measuring or "first step")
            return
        epochs = _epochs(self._num_steps, self._steps_per_epoch)
        left = self._progress.tasks[0].time_remaining
        parts = {
            "epoch": f"epoch {record.epoch + 1}" + (f" of {epochs}" if epochs else ""),
            "measuring": measuring,
            "steps": f"step {record.step:,}" + (f" of {self._num_steps:,}" if self._num_steps else ""),
            "loss": f"loss {format_metric(record.loss)}",
            "metric": self._metric,
            "rate": f"{self._rate:,.0f} samples/s" if self._rate and not measuring else "",
            "eta": "" if left is None else f"ETA {_clock(left)}",
            "warning": self._warning,
        }
        before, after = bar_words(parts, self._console.width)
        self._progress.update(self._bar, before=before, after=after)

    def _say_line(self, record: StepRecord, *, of_epoch: bool, asked: bool = False) -> None:
        """Show the mean loss of an epoch that ends, else of the steps since the last line; and their throughput."""
        total, count = (self._epoch_sum, self._epoch_count) if of_epoch else (self._loss_sum, self._count)
        rate = self._samples / self._seconds if self._seconds else 0.0
        sums = self._epoch_parts if of_epoch else self._parts
        parts = ", ".join(f"{_name(name)} {format_metric(part / items)}" for name, (part, items) in sums.items())
        shown = list((self._epoch_logged if of_epoch else self._logged).items())[:MOST_LOGGED]
        line = (
            f"epoch {record.epoch + 1:>{self._digits}}   step {record.step:>6}   "
            + f"loss {format_metric(total / (count or 1.0))}   "
            + (f"({parts})   " if parts else "")
            + "".join(f"{_name(name)} {total / items:.4g}   " for name, (total, items) in shown)
            + f"{rate:>9,.0f} samples/s"
            + (f"   {format_count(self._skipped, 'step')} skipped: not finite" if self._skipped else "")
        )
        told = f"{line}   {self._warning}" if self._warning else line
        if not self._console.is_terminal or cell_len(told) <= self._console.width:  # the bar has it as well
            line = told
        self._offer("epoch", record.step, line, asked=asked or self._has_few)

    def _is_line_due(self, step: int, now: float) -> bool:
        if self._line_every and step % self._line_every == 0:
            return True
        return self._progress.disable and now - self._began > self.LINE_SECONDS


def bar_words(parts: Mapping[str, str], width: int) -> tuple[str, str]:
    """Return what stands before and behind the bar: as much as a terminal of so many columns has room for.

    The epoch, the loss and the time left stay; they are cut where even these do not fit.
    """
    left = {name: text for name, text in parts.items() if text}
    for dropped in ("", *_DROPPED):
        left.pop(dropped, None)
        before, after = left["epoch"], "  ".join(text for name, text in left.items() if name != "epoch")
        if len(before) + LEAST_BAR + len(after) + 2 <= width:
            return before, after
    return left["epoch"].replace(" of ", "/"), after


def _name(name: str) -> str:
    """Return the name of a value as it stands in a line: on one, and not longer than what it names."""
    words = " ".join(name.split())
    return words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 1]}…"


def _epochs(num_steps: int | None, steps_per_epoch: int | None) -> int | None:
    return -(-num_steps // steps_per_epoch) if num_steps and steps_per_epoch else None


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _add(sums: dict[str, list[float]], name: str, loss: float, num_items: float) -> None:
    """Add a step's value of a loss part; nothing where the step had no item of it."""
    if num_items:
        found = sums.setdefault(name, [0.0, 0.0])
        found[0] += loss * num_items
        found[1] += num_items

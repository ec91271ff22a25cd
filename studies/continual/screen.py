"""Shows a comparison on the terminal: progress, a line for each run, a table at the end, and the conclusions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from studies.continual.comparison import Margin, MethodOutcome, margin
from studies.continual.methods import METHODS

# What a reader wants to know: the first against the second, and what the difference is owed to.
QUESTIONS = (
    ("growing", "dense", "growing"),
    ("growing", "fixed", "growing"),
    ("growing", "fixed-near", "growing, where routing is by nearness in both"),
    ("growing", "ewc", "growing"),
    ("growing+sleep", "growing", "sleep"),
    ("growing+sleep", "dense", "growing and sleep"),
    ("growing+sleep", "fixed", "growing and sleep"),
    ("growing+sleep", "dense+replay", "growing, where both replay as much"),
    ("growing+sleep", "fixed+replay", "growing, where both replay as much"),
)


class Screen:
    """Shows a comparison as it goes on. Entered around all of it."""

    def __init__(self, console: Console, num_runs: int, num_tasks: int) -> None:
        self.console, self._num_tasks = console, num_tasks
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tasks"),
            TimeElapsedColumn(),
            TextColumn("of which left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._bar = self._progress.add_task("", total=num_runs * num_tasks)
        self._about = ""

    def __enter__(self) -> "Screen":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def skipped(self, num_runs: int) -> None:
        """Advance over runs whose results existed already."""
        self._progress.advance(self._bar, num_runs * self._num_tasks)

    def begins(self, method: str, seed: int, why: str) -> None:
        self._about = f"{why + ' ' if why else ''}{method}, seed {seed}"
        self._progress.update(self._bar, description=self._about)

    def task_done(self, method: str, accuracies: list[float]) -> None:
        shown = " ".join(f"{100 * value:3.0f}" for value in accuracies)
        self._progress.update(self._bar, advance=1, description=f"{self._about}:  {shown}")

    def ended(self, outcome: MethodOutcome, why: str) -> None:
        scores, experts = outcome.scores, outcome.experts
        settings = f"  learning rate {outcome.settings.learning_rate:g}" if why else ""
        self.console.print(
            f"{why + ' ' if why else ''}{outcome.method:<13} seed {outcome.seed}   {scores.accuracy:6.1%}   "
            f"forgot {scores.forgetting:6.1%}   {f'{experts[-1][1]:2} experts   ' if experts else '':<13}"
            f"{outcome.seconds:5.1f} s{settings}"
        )


_COLUMNS = ("accuracy", "±", "learned", "forgot", "backward", "experts", "weights", "active", "samples", "s")


def table(summary: Mapping[str, Any], title: str) -> Table:
    """Return the table, the best first."""
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("method", no_wrap=True)
    for column in _COLUMNS:
        shown.add_column(column, justify="right", no_wrap=True)
    for method, found in sorted(summary.items(), key=lambda item: -item[1]["accuracy"]["mean"]):
        shown.add_row(method, *row_of(found))
    return shown


def row_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells under `_COLUMNS`, accuracies in %."""
    return (
        f"{100 * found['accuracy']['mean']:.1f}",
        f"{100 * found['accuracy']['spread']:.1f}" if found["seeds"] > 1 else "–",
        f"{100 * found['learned']['mean']:.1f}",
        f"{100 * found['forgetting']['mean']:.1f}",
        f"{100 * found['backward_transfer']['mean']:+.1f}",
        f"{found['experts']:.0f}" if found["experts"] else "–",
        f"{found['parameters']['total'] / 1e3:,.0f}k",
        f"{found['parameters']['active'] / 1e3:,.1f}k",
        f"{found['samples'] / 1e3:,.0f}k",
        f"{found['seconds']:.1f}",
    )


def legend(methods: Sequence[str]) -> Iterator[str]:
    width = max(map(len, methods))
    yield from (f"{method:<{width}}  {METHODS[method].about}" for method in methods)
    yield ""
    yield "accuracy over all tasks after the last, in %; ± the standard deviation over seeds; learned: right after each"
    yield "task; forgot: the best since, less the end; backward: the end less right after; weights when all experts are"
    yield "there, active those that a sample meets; samples that gradients were taken of, replayed ones too"


def verdicts(outcomes: Sequence[MethodOutcome]) -> Iterator[str]:
    """Yield what growing and sleeping gains, or that it does not."""
    for better, than, owed_to in QUESTIONS:
        found = margin(outcomes, better, than)
        if found is not None:
            yield f"{in_words(found)} What differs: {owed_to}."


def in_words(found: Margin) -> str:
    points, spread, least = (100 * value for value in (found.mean, found.spread, found.least))
    if abs(points) <= spread:
        what = f"{found.better} and {found.than} differ by {points:+.1f} points, no more than seeds do ({spread:.1f})"
    else:
        above = "above" if points > 0 else "below"
        what = f"{found.better} is {abs(points):.1f} points {above} {found.than}; seeds differ by {spread:.1f}"
    return f"{what}, in the worst seed {least:+.1f}."

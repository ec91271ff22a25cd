"""Draws training_metrics.png (loss, validation metrics, time), and defines how all pictures of a report look."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from drivetrain.core.aims import Aim
from drivetrain.report.run_data import RunData, best_index

INK, FAINT, GRID = "#22303c", "#8a97a3", "#e4e8ec"
TRAIN, VALID, OTHER, BARS = "#2f6db5", "#d9822b", "#3a9679", "#8fb3d9"
MANY = (
    "#2f6db5", "#d9822b", "#3a9679", "#b5485d", "#7a5fb0", "#c2a23a", "#4aa3c7", "#8c6d46", "#a35a9c", "#5f9e3f",
    "#d06f53", "#6b7f8c",
)  # fmt: skip

_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.edgecolor": GRID, "axes.labelcolor": FAINT, "text.color": INK, "axes.titlecolor": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "legend.frameon": False,
    "xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0, "xtick.minor.size": 0,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11,
}  # fmt: skip


class Canvas:
    """A figure with a heading; `png` returns it as bytes."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def head(self, title: str, subtitle: str, left: float = 0.055) -> None:
        height = self.figure.get_figheight()
        self.figure.text(left, 1 - 0.25 / height, literal(title), fontsize=16, fontweight="bold", va="center")
        self.figure.text(left, 1 - 0.53 / height, subtitle, fontsize=10, color=FAINT, va="center")

    def png(self) -> bytes:
        picture = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a letter that the font does not have is drawn as a box
            self.figure.savefig(picture, format="png", dpi=120)
        return picture.getvalue()


@contextmanager
def canvas(width: float, height: float) -> Iterator[Canvas]:
    """Make a canvas. matplotlib's state and backend stay as they are: the caller may draw too."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        yield Canvas(figure)


def literal(text: str) -> str:
    """Return a name as matplotlib draws it letter by letter: what stands between two `$` is a formula otherwise."""
    return text.replace("$", r"\$")


def say_nothing(axis: Any) -> None:
    axis.text(0.5, 0.5, "nothing was recorded", transform=axis.transAxes, ha="center", color=FAINT)
    axis.grid(visible=False)


def end_at_all(axis: Any) -> None:
    """End an axis of shares just above 1, so that a point there is seen whole: larger shares mean nothing."""
    axis.set_ylim(top=min(axis.get_ylim()[1], 1.005))


_MOST_POINTS = 1500
_MOST_BARS = 200
_MOST_METRICS = 3
_MOST_LOSS_PARTS = 8
_MOST_LOGGED = 6


def draw(data: RunData) -> bytes:
    """Return the picture as PNG."""
    names = [name for name in data.logged_names if np.isfinite(data.logged(name)[1]).any()][:_MOST_LOGGED]
    num_rows = 1 + -(-len(names) // 3)
    height = 0.4 + 4.2 * num_rows
    with canvas(14, height) as drawn:
        axes = drawn.figure.subplots(num_rows, 3, squeeze=False)
        edges = {"left": 0.055, "right": 0.985, "top": 1 - 0.966 / height, "bottom": 0.575 / height}
        drawn.figure.subplots_adjust(**edges, wspace=0.2, hspace=0.3)
        drawn.head(data.name, _subtitle(data))
        _draw_loss(axes[0][0], data)
        _draw_metrics(axes[0][1], data)
        _draw_time(axes[0][2], data)
        for axis in axes[1:].flat[len(names) :]:
            axis.set_visible(False)
        for axis, name in zip(axes[1:].flat, names, strict=False):
            _draw_logged(axis, data, name)
        return drawn.png()


def _subtitle(data: RunData) -> str:
    plan = data.plan
    parts = [f"{data.steps[-1]['step']:,} steps" if data.steps else "no steps"]
    if plan:
        count = int(plan.get("num_devices") or plan["world_size"])
        devices = f"{count} × {plan['device']}" if count > 1 else str(plan["device"])
        parts += [
            f"global batch {'up to ' if plan.get('batch_over_steps') else ''}{plan['global_batch']:,}",
            devices,
            plan["precision"],
        ]
    seconds = sum(row["seconds"] for row in data.steps)
    if seconds:
        parts.append(f"{sum(row['samples'] for row in data.steps) / seconds:,.0f} samples/s")
    return "   ·   ".join(parts)


def _draw_loss(axis: Any, data: RunData) -> None:
    axis.set_title("Loss")
    axis.set_xlabel("step")
    if not data.steps:
        return say_nothing(axis)
    steps = np.array([row["step"] for row in data.steps])
    losses = np.array([row["loss"] for row in data.steps], dtype=np.float64)
    if len(steps) > 20:
        window = max(2, len(steps) // 25)
        axis.plot(*_thinned(steps, losses), color=TRAIN, alpha=0.25, linewidth=0.8)
        axis.plot(*_thinned(steps, _smoothed(losses, window)), color=TRAIN, linewidth=1.8, label="training")
    else:
        axis.plot(steps, losses, color=TRAIN, linewidth=1.8, marker="o", markersize=3.5, label="training")
    if "valid_loss" in data.metric_names and "valid_loss" not in data.repeated_names:
        where, values = data.metric("valid_loss")
        axis.plot(where, values, color=VALID, linewidth=1.8, marker="o", markersize=3.5, label="validation")
        _mark_best(axis, "valid_loss", where, values, VALID)
    for number, name in enumerate(data.set_losses[:_MOST_LOSS_PARTS]):
        label = literal(name.removeprefix("valid_").removesuffix("_loss").replace("_", " "))
        axis.plot(*data.metric(name), color=MANY[3 + number], linewidth=1.3, marker="o", markersize=2.5, label=label)
    _draw_parts(axis, data)
    finite = losses[np.isfinite(losses)]
    if len(finite) and finite.min() > 0 and finite.max() > 8 * finite.min():
        axis.set_yscale("log")
    axis.legend(loc="upper right")
    return None


def _mark_best(axis: Any, name: str, where: list[float], values: list[float], color: str) -> None:
    """Draw a ring around the best point of a metric, with its value."""
    best = best_index(name, values)
    axis.scatter([where[best]], [values[best]], s=90, facecolor="none", edgecolor=color, linewidth=1.8, zorder=5)
    is_right = where[best] - where[0] > 0.7 * (where[-1] - where[0])
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
    style = {"textcoords": "offset points", "ha": "right" if is_right else "left", "fontsize": 9, "bbox": box}
    axis.annotate(f"best {values[best]:.4g} at {where[best]:,.0f}", (where[best], values[best]), (0, 9), **style)


def _draw_parts(axis: Any, data: RunData) -> None:
    """Draw each named part of the training loss, without its weight."""
    for number, name in enumerate(data.part_names[:_MOST_LOSS_PARTS]):
        rows = [row for row in data.steps if row.get(name) is not None]
        steps, values = np.array([row["step"] for row in rows]), np.array([row[name] for row in rows])
        window = max(1, len(steps) // 25)
        color = MANY[3 + number]  # behind those of the other curves
        label = literal(name.removeprefix("loss_").replace("_", " "))
        axis.plot(*_thinned(steps, _smoothed(values, window)), color=color, linewidth=1.1, linestyle="--", label=label)


def _draw_metrics(axis: Any, data: RunData) -> None:
    """Draw the validation metrics besides the loss; the throughput where there are none."""
    axis.set_xlabel("step")
    losses = {"valid_loss", *data.set_losses, *(f"valid_{name}" for name in data.part_names)}
    losses |= set(data.repeated_names)
    shown_beside = {*data.logged_names, *(f"valid_{name}" for name in data.logged_names)}
    names = [name for name in data.metric_names if name not in losses | shown_beside][:_MOST_METRICS]
    if not names:
        rows = [row for row in data.speed if "samples_per_second" in row]
        axis.set_title("Samples per second")
        if not rows:
            return say_nothing(axis)
        found = [row["step"] for row in rows], [row["samples_per_second"] for row in rows]
        axis.plot(*_thinned(*map(np.array, found)), color=OTHER, linewidth=1.8)
        axis.set_ylim(bottom=0)
        return None
    one = names[0].removeprefix("valid_").replace("_", " ")
    axis.set_title(literal(f"Validation {one}") if len(names) == 1 else "Validation")
    is_share = True
    for name, color in zip(names, (OTHER, VALID, TRAIN), strict=False):
        where, values = data.metric(name)
        is_share = is_share and all(0 <= value <= 1 for value in values)
        axis.plot(
            where, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=literal(name.replace("_", " "))
        )
        if Aim(name).is_clear:
            _mark_best(axis, name, where, values, color)
    if len(names) > 1:
        axis.legend(loc="best")
    axis.margins(y=0.15)
    if is_share:
        end_at_all(axis)
    return None


def _draw_logged(axis: Any, data: RunData, name: str) -> None:
    """Draw something that was logged: in training, and in validation where it was logged there, too."""
    axis.set_title(literal(name.replace("_", " ")))
    axis.set_xlabel("step")
    steps, values = map(np.array, data.logged(name))
    if len(steps) > 20:
        axis.plot(*_thinned(steps, values), color=TRAIN, alpha=0.25, linewidth=0.8)
        axis.plot(*_thinned(steps, _smoothed(values, max(2, len(steps) // 25))), color=TRAIN, label="training")
    else:
        axis.plot(steps, values, color=TRAIN, linewidth=1.8, marker="o", markersize=3.5, label="training")
    where, validated = data.metric(f"valid_{name}")
    if where:
        axis.plot(where, validated, color=VALID, linewidth=1.8, marker="o", markersize=3.5, label="validation")
        axis.legend(loc="best")


def _draw_time(axis: Any, data: RunData) -> None:
    """Draw the seconds of each epoch; of each step where there is only one epoch."""
    epochs = data.epochs
    if len(epochs) < 2:
        axis.set_title("Time per step (ms)")
        axis.set_xlabel("step")
        if not data.steps:
            return say_nothing(axis)
        steps = np.array([row["step"] for row in data.steps])
        axis.plot(*_thinned(steps, np.array([1e3 * row["seconds"] for row in data.steps])), color=TRAIN, linewidth=1.2)
        axis.set_ylim(bottom=0)
        return None
    axis.set_title("Time per epoch (s)")
    axis.set_xlabel("epoch")
    numbers, training = [epoch.number for epoch in epochs], [epoch.seconds for epoch in epochs]
    aside = [epoch.aside_seconds for epoch in epochs]
    if len(epochs) > _MOST_BARS:  # each takes a millisecond to draw, and none could be told from its neighbors
        numbers, training, aside = (list(each) for each in _few_bars(numbers, training, aside))
        axis.set_title(f"Time per epoch (s), means of {numbers[1] - numbers[0]:,.0f}")
    width = 0.75 * (numbers[1] - numbers[0])
    axis.bar(numbers, training, color=BARS, width=width, label="training")
    if any(aside):
        axis.bar(numbers, aside, bottom=training, color=VALID, width=width, label="validation and sleep")
        highest = max(one + other for one, other in zip(training, aside, strict=True))
        axis.set_ylim(top=1.2 * highest)  # room for the legend
        axis.legend(ncols=2, fontsize=9, loc="upper left")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(visible=False, axis="x")
    return None


def _few_bars(numbers: list[int], *series: list[float]) -> Iterator[Any]:
    """Yield the middles of groups of neighbors, and the mean of each series in every group. The last may be smaller."""
    size = -(-len(numbers) // _MOST_BARS)
    begins = np.arange(0, len(numbers), size)
    yield [numbers[begin] + (size - 1) / 2 for begin in begins]
    counts = np.diff(np.append(begins, len(numbers)))
    yield from (np.add.reduceat(np.array(values), begins) / counts for values in series)


def _smoothed(values: Any, window: int) -> Any:
    """Return the mean of the last `window` values that are finite, of fewer at the beginning; nan where none is."""
    is_finite = np.isfinite(values)
    sums, counts = (np.cumsum(np.insert(each, 0, 0.0)) for each in (np.where(is_finite, values, 0.0), is_finite))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    num_finite = counts[ends] - counts[begins]
    return np.where(num_finite > 0, (sums[ends] - sums[begins]) / np.maximum(num_finite, 1), np.nan)


def _thinned(steps: Any, values: Any) -> tuple[Any, Any]:
    """Return few enough points to draw: means of neighbors."""
    size = -(-len(steps) // _MOST_POINTS)
    if size < 2:
        return steps, values
    begins = np.arange(0, len(steps), size)
    counts = np.diff(np.append(begins, len(steps)))
    return steps[np.append(begins[1:], len(steps)) - 1], np.add.reduceat(values, begins) / counts

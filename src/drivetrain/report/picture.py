"""Pictures of a run: its curves, its mixtures of experts, and a range test; and how all pictures look."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import numpy as np

from drivetrain.core.aims import Aim
from drivetrain.report.run_data import Row, RunData, best_index

# ----------------------------------------------------------------------------------------------------------------------
# Draws training_metrics.png (loss, validation metrics, time), and defines how all pictures of a report look.

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
    "axes.titley": 1.0,  # where it is anyway, but matplotlib would look at each label whether that is in its way
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
        drawn.head(data.title, _subtitle(data))
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
        axis.bar(numbers, aside, bottom=training, color=VALID, width=width, label=data.aside_in_words)
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


# ----------------------------------------------------------------------------------------------------------------------
# Draws a range test of the learning rate: the loss by the rate, with what was found.


def draw_range_test(
    title: str,
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    marks: Sequence[tuple[str, float | None]],
) -> bytes:
    """Return the picture as PNG. `marks` are rates to point out, with their names; None: there is no such rate."""
    with canvas(9, 5) as drawn:
        axis = drawn.figure.add_axes((0.09, 0.12, 0.87, 0.68))
        axis.plot(rates, losses, color=TRAIN, alpha=0.3, linewidth=1, label="loss")
        axis.plot(rates, smoothed, color=TRAIN, linewidth=2, label="smoothed")
        for (name, rate), color in zip(marks, (OTHER, VALID), strict=False):
            if rate is not None:
                axis.axvline(rate, color=color, linewidth=1.5, linestyle="--", label=f"{name}: {rate:.2g}")
        axis.set_xscale("log")
        lowest, first = min(smoothed), smoothed[0]
        span = max(first - lowest, abs(lowest) * 0.1) or 1.0
        axis.set_ylim(lowest - 0.2 * span, first + span)
        axis.set_xlabel("learning rate")
        axis.set_ylabel("loss")
        axis.legend(loc="upper left")
        drawn.head(title, f"{len(rates)} steps with a rising learning rate", left=0.09)
        return drawn.png()


# ----------------------------------------------------------------------------------------------------------------------
# Draws a mixture of experts: which expert works on what, which were added and removed and why, where they are.

# In inches: what a line of labels needs, how high a picture may be for it, and how wide is the right one of two.
_LINE, _LEAST_HEIGHT, _MOST_HEIGHT, _HALF_WIDTH = 0.15, 3.2, 12.0, 5.2
_GONE = "#b5485d"
# What happened to an expert: marker, color, and what it does to their number.
_MARKS: Mapping[str, tuple[str, str, int]] = {
    "grown": ("^", OTHER, 1),
    "split": ("D", TRAIN, 1),
    "merged": ("o", VALID, -1),
    "pruned": ("v", _GONE, -1),
}


def draw_activations(data: RunData) -> bytes | None:
    """Draw expert_activations.png: each expert's share of the tokens over the run, and of each class at the end."""
    layer, loads = of_first_layer(data.told("load"))
    if not loads:
        return None
    nights = [night for night in data.told("sleep") if night.get("serves", {}).get(layer)]
    serves = nights[-1]["serves"][layer] if nights else {}
    most = max(len({number for row in loads for number in row["loads"]}), len(serves))
    above, below = 1.08, 0.6 + (_under(_classes(serves)) if serves else 0.0)
    inside = max(_LEAST_HEIGHT, min(_LINE * most, _MOST_HEIGHT))
    height = above + inside + below
    with canvas(14, height) as drawn:
        axes = drawn.figure.subplots(1, 2, width_ratios=(1.25, 1))
        edges = {"top": 1 - above / height, "bottom": below / height}
        drawn.figure.subplots_adjust(left=0.055, right=0.975, wspace=0.21, **edges)
        count = sum(1 for tokens in loads[-1]["loads"].values() if tokens)
        parts = [f"{count} experts at work {data.at_last}", _layer_in_words(layer), ceiling_in_words(loads)]
        drawn.head(f"{data.title}: who works", "   ·   ".join(filter(None, parts)))
        _draw_shares(axes[0], loads, [night["step"] for night in data.told("sleep")], least_gap=_LINE / inside)
        if nights:
            _draw_classes(axes[1], serves, nights[-1]["step"], inside)
        else:
            _draw_last(axes[1], loads[-1])
        return drawn.png()


def draw_lifecycle(data: RunData) -> bytes | None:
    """Draw expert_lifecycle.png: how many experts there were and what became of them; what each sleep did."""
    layer, loads = of_first_layer(data.told("load"))
    nights = data.told("sleep")
    events = [row for row in data.told("expert") if row.get("what") in _MARKS and row.get("layer") == layer]
    if not (loads and (events or nights)):
        return None
    with canvas(14, 4.9) as drawn:
        axes = drawn.figure.subplots(1, 2, width_ratios=(1.25, 1)) if nights else [drawn.figure.subplots()]
        drawn.figure.subplots_adjust(left=0.055, right=0.975, top=0.78, bottom=0.12, wspace=0.21)
        words = ", ".join(f"{many} {what}" for what in _MARKS if (many := sum(row["what"] == what for row in events)))
        asleep = sum(night["seconds"] for night in nights)
        parts = [words or "no expert came or went"]
        if nights:
            parts.append(f"{len(nights)} sleeps, {asleep:.1f} s in all")
        drawn.head(f"{data.title}: who came and went", "   ·   ".join(parts))
        _draw_number(axes[0], data, loads, events, nights)
        if nights:
            _draw_nights(axes[1], nights)
        return drawn.png()


def draw_devices(data: RunData) -> bytes | None:
    """Draw expert_device_distribution.png: which expert is on which device, and the load of each.

    None where there is one device, or every device has all experts: there is nothing to see then.
    """
    loads = of_first_layer(data.told("load"))[1]
    if not loads or "ranks" not in loads[-1]:
        return None
    last = loads[-1]
    ranks = sorted({int(rank) for rank in last["ranks"].values()} | set(range(int(data.plan.get("world_size", 1)))))
    if data.plan.get("strategy") != "expert_parallel" or len(ranks) < 2:
        return None
    with canvas(11, 1.75 + 0.62 * len(ranks)) as drawn:
        axis = drawn.figure.subplots()
        height = drawn.figure.get_figheight()
        drawn.figure.subplots_adjust(left=0.13, right=0.97, top=1 - 0.85 / height, bottom=0.55 / height)
        subtitle = f"{len(ranks)} devices   ·   step {last['step']:,}"
        drawn.head(f"{data.title}: where experts live", subtitle, left=0.03)
        _draw_places(axis, data, last, ranks)
        return drawn.png()


# ---- parts of pictures


def _draw_shares(axis: Any, loads: Sequence[Row], nights: Sequence[int], least_gap: float) -> None:
    """Draw stacked shares, oldest expert below. Of numbers closer than `least_gap`, the larger share's is written."""
    steps = np.array([row["step"] for row in loads])
    numbers = sorted({int(number) for row in loads for number in row["loads"]})
    totals = np.array([max(sum(row["loads"].values()), 1) for row in loads])
    shares = np.array([[row["loads"].get(str(number), 0) for row in loads] for number in numbers]) / totals
    axis.set_title("Share of tokens")
    axis.set_xlabel("step")
    if len(steps) == 1:
        steps, shares = np.array([steps[0] - 1, steps[0]]), np.repeat(shares, 2, axis=1)
    axis.stackplot(steps, shares, colors=[_color(n) for n in numbers], edgecolor="white", linewidth=0.7, alpha=0.92)
    axis.set_xlim(steps[0], steps[-1])
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.grid(visible=False)
    tops = np.cumsum(shares, axis=0)
    written: list[float] = []
    for place in np.argsort(-shares[:, -1], kind="stable"):
        number, style = numbers[place], {"fontweight": "bold", "va": "center"}
        if shares[place][-1] > 0.01:  # beside its last share; who went before is named where it had the most
            middle = tops[place][-1] - shares[place][-1] / 2
            if any(abs(middle - other) < least_gap for other in written):
                continue
            written.append(middle)
            edge = {"xytext": (6, 0), "textcoords": "offset points", "color": _color(number), "annotation_clip": False}
            axis.annotate(f"{number}", (steps[-1], middle), **edge, **style)
        elif shares[place].max() > 0.06:
            where = int(shares[place].argmax())
            middle = tops[place][where] - shares[place][where] / 2
            axis.text(steps[where], middle, f"{number}", color="white", ha="center", **style)
    _mark_nights(axis, nights)


def _draw_classes(axis: Any, serves: Mapping[str, Mapping[str, float]], step: int, height: float) -> None:
    experts = sorted(serves, key=int)
    classes = _classes(serves)
    table = np.array([[serves[expert][name] for name in classes] for expert in experts])
    axis.set_title(f"Share of each class's tokens, at step {step}")
    from matplotlib.colors import LinearSegmentedColormap

    tint = LinearSegmentedColormap.from_list("tint", ["#f6f8fa", "#8fb3d9", "#1f4e86"])
    top = max(float(table.max()), 1e-9)
    axis.imshow(table, aspect="auto", cmap=tint, vmin=0, vmax=top)
    rows = range(0, len(experts), _each(len(experts), height, _LINE))
    axis.set_yticks(rows, [f"expert {experts[row]}" for row in rows], fontsize=10 if len(experts) <= 16 else 8)
    columns = range(0, len(classes), _each(len(classes), _HALF_WIDTH, 0.22))
    slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if _under(classes) else {}
    axis.set_xticks(columns, [classes[column] for column in columns], **slanted)
    axis.set_xlabel("class")
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    if table.size <= 200:
        for row, column in np.argwhere(table >= 0.005):
            color = "white" if table[row, column] > 0.55 * top else INK
            axis.text(column, row, f"{table[row, column]:.0%}", ha="center", va="center", color=color, fontsize=8.5)


def _draw_last(axis: Any, last: Row) -> None:
    numbers = sorted(last["loads"], key=int)
    values = [last["loads"][number] for number in numbers]
    axis.set_title(f"Tokens of step {last['step']:,}")
    axis.bar(range(len(numbers)), values, color=[_color(int(number)) for number in numbers], width=0.72)
    axis.axhline(sum(values) / max(len(values), 1), color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    if len(numbers) <= 8:
        axis.set_xticks(range(len(numbers)), [f"expert {number}" for number in numbers])
    else:
        places = range(0, len(numbers), _each(len(numbers), _HALF_WIDTH, 0.05 + 0.1 * len(numbers[-1])))
        axis.set_xticks(places, [numbers[place] for place in places])
        axis.set_xlabel("expert")
    axis.grid(visible=False, axis="x")


def _draw_number(axis: Any, data: RunData, loads: Sequence[Row], events: Sequence[Row], nights: Sequence[Row]) -> None:
    last_step = data.steps[-1]["step"] if data.steps else loads[-1]["step"]
    # Backwards from what is known at the end; an expert counts from when it was made.
    count = len(loads[-1]["loads"]) - sum(_MARKS[row["what"]][2] for row in events if row["step"] > loads[-1]["step"])
    start = count - sum(_MARKS[row["what"]][2] for row in events if row["step"] <= loads[-1]["step"])
    steps, counts = [0], [start]
    placed: dict[str, list[tuple[int, int]]] = {}
    for row in events:
        counts.append(counts[-1] + _MARKS[row["what"]][2])
        steps.append(row["step"])
        placed.setdefault(row["what"], []).append((row["step"], counts[-1]))
    axis.step([*steps, last_step], [*counts, counts[-1]], where="post", color=INK, linewidth=1.8, zorder=2)
    axis.fill_between([*steps, last_step], [*counts, counts[-1]], step="post", color=TRAIN, alpha=0.08, linewidth=0)
    for what, points in placed.items():
        marker, color, _ = _MARKS[what]
        style = {"s": 64, "edgecolor": "white", "linewidth": 1.0, "zorder": 3}
        axis.scatter(*zip(*points, strict=True), marker=marker, color=color, label=what, **style)
    for row, count in zip(events, counts[1:], strict=True):
        beside = {"xytext": (-6, 7), "textcoords": "offset points", "ha": "right", "fontsize": 9, "color": INK}
        axis.annotate(f"{row['expert']}", (row["step"], count), **beside)
    axis.set_title("Number of experts")
    axis.set_xlabel("step")
    axis.set_xlim(0, last_step)
    axis.set_ylim(0, max(counts) + 1.2)
    axis.yaxis.get_major_locator().set_params(integer=True)
    _mark_nights(axis, [night["step"] for night in nights])
    if placed:
        axis.legend(loc="lower right", ncols=len(placed))


def _draw_nights(axis: Any, nights: Sequence[Row]) -> None:
    """Draw each sleep from before to after: accuracy where that was measured, else the first metric that was."""
    names = [name for name in nights[0]["before"] if name != "valid_loss"] or list(nights[0]["before"])
    shown = [night for night in nights if names and names[0] in night["before"]]
    if not shown:
        axis.set_title("Specialization after each sleep")
        axis.plot([n["step"] for n in nights], [n["specialisation"] for n in nights], color=OTHER, marker="o")
        axis.set_xlabel("step")
        return
    name = names[0]
    is_share = all(0 <= night[when][name] <= 1 for night in shown for when in ("before", "after"))
    axis.set_title(f"Held-out {name.removeprefix('valid_').replace('_', ' ')} before and after each sleep")
    for place, night in enumerate(shown):
        before, after = night["before"][name], night["after"][name]
        is_up = after >= before if name != "valid_loss" else after <= before
        color = FAINT if after == before else OTHER if is_up else _GONE
        axis.plot([place, place], [before, after], color=color, linewidth=3, solid_capstyle="round", zorder=2)
        axis.scatter([place], [before], s=46, color="white", edgecolor=color, linewidth=1.8, zorder=3)
        axis.scatter([place], [after], s=56, color=color, zorder=4)
        if after == before:
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 8.5, "color": INK}
            axis.annotate("no change", (place, after), (0, 9), **style)
    if is_share:
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    labels = [f"step {night['step']:,}\n{night['seconds']:.1f} s" for night in shown]
    axis.set_xticks(range(len(shown)), labels, rotation=0 if len(shown) <= 8 else 60)
    axis.grid(visible=False, axis="x")
    axis.margins(x=max(0.08, 0.5 / len(shown)), y=0.18)
    if is_share:
        end_at_all(axis)
    axis.scatter([], [], s=46, color="white", edgecolor=FAINT, linewidth=1.8, label="before")
    axis.scatter([], [], s=56, color=FAINT, label="after")
    axis.legend(loc="lower right", ncols=2)


def _draw_places(axis: Any, data: RunData, last: Row, ranks: Sequence[int]) -> None:
    total = max(sum(last["loads"].values()), 1)
    for place, rank in enumerate(ranks):
        left = 0.0
        for number in sorted(last["loads"], key=int):
            if int(last["ranks"][number]) != rank:
                continue
            width = last["loads"][number] / total
            axis.barh(place, width, left=left, height=0.66, color=_color(int(number)), edgecolor="white", linewidth=1)
            if width > 0.025:
                style = {"color": "white", "fontweight": "bold", "ha": "center", "va": "center"}
                axis.text(left + width / 2, place, number, **style)
            left += width
    axis.set_yticks(range(len(ranks)), [_device_of(data, rank) for rank in ranks])
    axis.set_ylim(len(ranks) - 0.4, -0.6)
    axis.set_xlabel("share of the last step's tokens, by expert")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.grid(visible=False, axis="y")
    axis.margins(x=0)


# ---- what they need


def _classes(serves: Mapping[str, Mapping[str, float]]) -> list[str]:
    return list(serves[min(serves, key=int)])


def _under(classes: Sequence[str]) -> float:
    """Return the inches that slanted names need below the picture; 0: they are short, and stay upright."""
    longest = max(map(len, classes))
    return 0.0 if longest < 4 else 0.055 * min(longest, 24)


def _each(count: int, room: float, needed: float) -> int:
    """Return n such that every n-th of so many labels has the inches it needs."""
    return max(1, ceil(count * needed / room))


def _mark_nights(axis: Any, steps: Sequence[int]) -> None:
    for place, step in enumerate(steps):
        axis.axvline(step, color=INK, linewidth=0.9, linestyle=(0, (2, 3)), alpha=0.7, zorder=1)
        if place == 0:
            style = {"color": INK, "fontsize": 8.5, "ha": "left", "va": "top", "rotation": 90}
            box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.2}
            axis.text(step, 0.985, " sleep", transform=axis.get_xaxis_transform(), bbox=box, **style)


def of_first_layer(loads: Sequence[Row]) -> tuple[str, list[Row]]:
    """Return the rows of the first mixture that have the experts' own loads."""
    rows = [row for row in loads if row.get("loads")]
    if not rows:
        return "", []
    layer = str(rows[0]["layer"])
    return layer, [row for row in rows if row["layer"] == layer]


def _layer_in_words(layer: str) -> str:
    return f"layer {layer}" if layer else "the whole model"


def ceiling_in_words(loads: Sequence[Row]) -> str:
    """Return why no share can be 100 %: each token goes to several experts, and never twice to one."""
    chosen = int(loads[-1].get("top_k", 1)) if loads else 1
    return "" if chosen < 2 else f"each token goes to {chosen} experts: a share is {1 / chosen:.0%} at most"


def _device_of(data: RunData, rank: int) -> str:
    return f"rank {rank} ({str(data.plan.get('device', 'cpu')).split(':')[0]})"


def _color(number: int) -> str:
    return MANY[number % len(MANY)]

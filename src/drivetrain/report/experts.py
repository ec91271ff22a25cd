"""Draws a mixture of experts: which expert works on what, which were added and removed and why, where they are."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np

from drivetrain.report.picture import FAINT, INK, MANY, OTHER, TRAIN, VALID, canvas, end_at_all
from drivetrain.report.run_data import Row, RunData

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
        parts = [f"{count} experts at work at the end", _layer_in_words(layer), ceiling_in_words(loads)]
        drawn.head(f"{data.name}: who works", "   ·   ".join(filter(None, parts)))
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
        drawn.head(f"{data.name}: who came and went", "   ·   ".join(parts))
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
        drawn.head(f"{data.name}: where experts live", subtitle, left=0.03)
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

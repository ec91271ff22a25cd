"""Draws a comparison: the accuracy matrix of each method, accuracy as tasks come, experts over time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.report.picture import FAINT, INK, canvas
from studies.continual.comparison import MethodOutcome, Study
from studies.continual.methods import METHODS

# What grows is warm, fixed mixtures green, dense networks blue; replay is the darker of two.
COLOURS = {
    "joint": "#8a97a3",
    "dense": "#6aa5de",
    "dense-small": "#a9c9e8",
    "ewc": "#8a6fc0",
    "dense+replay": "#1f5591",
    "fixed": "#67bb9c",
    "fixed-near": "#a8d08d",
    "fixed+replay": "#1f7a5c",
    "growing": "#f0a04b",
    "growing+sleep": "#c8452f",
}
DASHED = ("joint", "dense-small", "fixed-near")
MATRICES, OVER_TASKS, EXPERTS = "accuracy_matrices.png", "accuracy_over_tasks.png", "experts_over_time.png"
_MOST_COLUMNS = 5


def draw_all(folder: Path, study: Study, outcomes: Sequence[MethodOutcome], task_names: Sequence[str]) -> list[Path]:
    """Draw the pictures for which there is data."""
    by_method = {
        method: [outcome for outcome in outcomes if outcome.method == method]
        for method in METHODS
        if any(outcome.method == method for outcome in outcomes)
    }
    makers: dict[str, Callable[[], bytes | None]] = {
        MATRICES: lambda: draw_matrices(study, by_method, task_names),
        OVER_TASKS: lambda: draw_over_tasks(study, by_method, task_names),
        EXPERTS: lambda: draw_experts(study, by_method, task_names),
    }
    written = []
    for name, make in makers.items():
        picture = make()
        if picture is not None:
            (folder / name).write_bytes(picture)
            written.append(folder / name)
    return written


def draw_matrices(study: Study, by_method: Mapping[str, Sequence[MethodOutcome]], task_names: Sequence[str]) -> bytes:
    rows = -(-len(by_method) // _MOST_COLUMNS)
    columns = -(-len(by_method) // rows)
    width, height = 0.5 + 2.75 * columns, 1.2 + 2.95 * rows
    with canvas(width, height) as page:
        head = 1 - 0.8 / height
        axes = page.figure.subplots(rows, columns, squeeze=False)
        page.figure.subplots_adjust(
            left=0.75 / width, right=1 - 0.2 / width, top=head - 0.25 / height,
            bottom=0.6 / height, wspace=0.14, hspace=0.36,
        )  # fmt: skip
        page.head("Accuracy on every task, after each task", _subtitle(study, by_method), left=0.75 / width)
        for axis in axes.flat[len(by_method) :]:
            axis.set_visible(False)
        for place, (axis, (method, own)) in enumerate(zip(axes.flat, by_method.items(), strict=False)):
            mean = np.mean([outcome.matrix for outcome in own], axis=0)
            axis.imshow(mean, cmap=_map(), vmin=0, vmax=1)
            final = mean[-1].mean()
            axis.set_title(f"{method}", color=INK, pad=6)
            axis.set_title(f"{100 * final:.1f}", loc="right", color=COLOURS[method], pad=6)
            axis.grid(visible=False)
            axis.set_xticks(range(len(task_names)), task_names if _are_short(task_names) else _numbers(task_names))
            axis.set_yticks(range(len(task_names)), _numbers(task_names))
            is_lowest = place + columns >= len(by_method)
            axis.tick_params(labelbottom=is_lowest, labelleft=place % columns == 0, length=0)
            if is_lowest:
                axis.set_xlabel("tested on")
            if place % columns == 0:
                axis.set_ylabel("after task")
            for (row, column), value in np.ndenumerate(mean):
                strength = "bold" if row == column else "normal"
                shade = "white" if value > 0.55 else INK if row >= column else FAINT
                axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=shade, fontsize=8.5,
                          fontweight=strength)  # fmt: skip
        return page.png()


def draw_over_tasks(study: Study, by_method: Mapping[str, Sequence[MethodOutcome]], task_names: Sequence[str]) -> bytes:
    with canvas(13, 5.4) as page:
        axis, bars = page.figure.subplots(1, 2, width_ratios=(1.25, 1))
        page.figure.subplots_adjust(left=0.045, right=0.985, top=0.80, bottom=0.115, wspace=0.27)
        page.head("What is kept as tasks come", _subtitle(study, by_method), left=0.045)
        where = np.arange(1, len(task_names) + 1)
        for method, own in by_method.items():
            if METHODS[method].mixed:
                continue  # it has no tasks that come one by one
            values = 100 * np.array([outcome.scores.over_time for outcome in own])
            mean = values.mean(0)
            style = "--" if method in DASHED else "-"
            axis.plot(where, mean, style, color=COLOURS[method], linewidth=2, marker="o", markersize=4, label=method)
            if len(own) > 1:
                spread = values.std(0, ddof=1)
                axis.fill_between(where, mean - spread, mean + spread, color=COLOURS[method], alpha=0.10, linewidth=0)
        axis.set_title("Mean accuracy on the tasks so far (%)")
        axis.set_xlabel("tasks learned")
        axis.set_xticks(where)
        axis.set_ylim(0, 102)
        axis.legend(loc="lower left", fontsize=8.5, ncols=3)
        _draw_finals(bars, by_method)
        return page.png()


def _draw_finals(axis: Any, by_method: Mapping[str, Sequence[MethodOutcome]]) -> None:
    finals = {method: [100 * outcome.scores.accuracy for outcome in own] for method, own in by_method.items()}
    ranked = sorted(finals, key=lambda method: float(np.mean(finals[method])))
    for place, method in enumerate(ranked):
        mean = float(np.mean(finals[method]))
        axis.barh(place, mean, color=COLOURS[method], height=0.62, alpha=0.9)
        axis.plot(finals[method], [place] * len(finals[method]), "o", color=INK, markersize=3, alpha=0.55)
        axis.annotate(
            f"{mean:.1f}", (max(*finals[method], mean), place), (7, 0), textcoords="offset points", va="center"
        )
    axis.set_yticks(range(len(ranked)), ranked)
    axis.tick_params(axis="y", labelcolor=INK)
    axis.set_xlim(0, 112)
    axis.set_xticks(range(0, 101, 25))
    axis.grid(visible=False, axis="y")
    axis.set_title("After the last task (%); dots are seeds")


def draw_experts(
    study: Study, by_method: Mapping[str, Sequence[MethodOutcome]], task_names: Sequence[str]
) -> bytes | None:
    shown = {
        method: own
        for method, own in by_method.items()
        if METHODS[method].network == "growing" and any(outcome.experts for outcome in own)
    }
    if not shown:
        return None
    with canvas(11, 4.6) as page:
        axis = page.figure.subplots()
        page.figure.subplots_adjust(left=0.06, right=0.975, top=0.77, bottom=0.13)
        page.head("Experts over time", _subtitle(study, shown), left=0.06)
        most, length = study.scale.max_experts, study.scale.steps_per_task
        steps = np.arange(0, study.num_steps + 1)
        for number, name in enumerate(task_names):
            if number % 2:
                axis.axvspan(number * length, (number + 1) * length, color="#f4f6f8", linewidth=0, zorder=0)
            axis.text((number + 0.5) * length, most + 1.55, name, ha="center", color=FAINT)
        for method, own in shown.items():
            counts = np.array([_counts(outcome, steps, study.scale.first_experts) for outcome in own])
            for row in counts if len(counts) > 1 else ():
                axis.plot(steps, row, color=COLOURS[method], linewidth=0.8, alpha=0.35, drawstyle="steps-post")
            axis.plot(steps, counts.mean(0), color=COLOURS[method], linewidth=2.4, label=method)
        axis.axhline(most, color=FAINT, linewidth=1, linestyle=":")
        axis.text(study.num_steps, most + 0.2, "cap", ha="right", color=FAINT, fontsize=9)
        axis.set_xlim(0, study.num_steps)
        axis.set_ylim(0, most + 2.6)
        axis.set_yticks(range(0, most + 1, max(1, most // 4)))
        axis.set_xlabel("step; bands are tasks")
        axis.grid(visible=False, axis="x")
        axis.legend(loc="lower right")
        return page.png()


def _counts(outcome: MethodOutcome, steps: Any, first: int) -> Any:
    changes = [[0, first], *outcome.experts]
    places = np.searchsorted([step for step, _ in changes], steps, side="right") - 1
    return np.array([count for _, count in changes])[places]


def _subtitle(study: Study, by_method: Mapping[str, Sequence[MethodOutcome]]) -> str:
    seeds = max(len(own) for own in by_method.values())
    mean = "   ·   mean of " + f"{seeds} seeds" if seeds > 1 else ""
    return (
        f"{study.data}, {study.num_tasks} {study.tasks} tasks   ·   {study.scale.steps_per_task} steps of "
        f"{study.scale.batch} samples each{mean}"
    )


def _are_short(names: Sequence[str]) -> bool:
    return max(map(len, names)) <= 4


def _numbers(names: Sequence[str]) -> list[str]:
    return [str(number) for number in range(1, len(names) + 1)]


def _map() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("accuracy", ["#ffffff", "#cfe0f1", "#5b93cb", "#1d4f87"])

"""The page of several runs: their curves over each other, what differs, and the verdict. One file, like report.html."""

import math
from collections.abc import Iterator
from typing import Any

from drivetrain.core.value import format_count, format_duration, format_list
from drivetrain.report.charts import Chart, Line, axes, charts, thinned
from drivetrain.report.compare import ArmVerdict, RunComparison, RunOfArm
from drivetrain.report.page import cards, document, section, table, text
from drivetrain.report.paired_test import METHOD

MOST_RUNS = 64  # that are drawn: a page with more would be slow, and no one could tell them apart
MOST_POINTS = 40_000  # of all lines of a chart together
METHOD_IN_WORDS = (
    f"Method: {METHOD}. If a change did nothing, the runs of a pair could be swapped, and the sign of their difference "
    "would be a fair coin. The e-value is what betting 1 on those coins has come to; it reaches 20 with a chance of at "
    "most 1 in 20, at all looks together. This assumes that pairs are independent, and that none was left out for its "
    "outcome; the interval assumes in addition that differences are symmetric about their center. Validation data is "
    "compared by its length and by a few samples."
)


def comparison_page(comparison: RunComparison) -> str:
    """Return the page of a comparison."""
    runs = comparison.runs[:MOST_RUNS]
    title = f"{format_count(len(comparison.runs), 'run')} compared"
    return document(title, _figures(comparison, runs), _above(comparison, title), "".join(_below(comparison)))


def _figures(comparison: RunComparison, runs: list[RunOfArm]) -> dict[str, Any]:
    own = [axes(run.data) for run in runs]
    shared = [name for name in own[0] if all(name in each for each in own)]
    return {
        "charts": [*_charts(comparison, runs)],
        "telemetry": [],
        "axes": {name: [] for name in shared},
        "runs": [{"axes": {name: _few(each[name], len(runs)) for name in shared}} for each in own],
        "resumed": [],
    }


def _few(values: list[float], num_runs: int) -> list[float]:
    """Return some of the places of an axis, the first and last among them."""
    most = max(50, MOST_POINTS // (num_runs * 4))
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _charts(comparison: RunComparison, runs: list[RunOfArm]) -> Iterator[Chart]:
    """Yield the charts that any of the runs has, with a line for each run: that of the metric first."""
    colors = {run.name: place for place, arm in enumerate(comparison.arms) for run in arm.runs}
    found: dict[tuple[str, str], Chart] = {}
    for number, run in enumerate(runs):
        decides = run.data.repeated_names.get(comparison.metric, comparison.metric)
        for chart in charts(run.data):
            for line in () if chart.get("stacked") else chart["lines"]:
                many = chart["title"] == "Loss" or line["name"].lower() != chart["title"].lower()
                title = f"{chart['title']}: {line['name']}" if many else chart["title"]
                drawn = found.setdefault((chart["title"], line["name"]), {**chart, "title": title, "lines": []})
                drawn["tall"] = drawn.get("tall", False) or line.get("metric") == decides
                drawn["lines"].append(_of_run(line, run, number, colors[run.name], len(runs)))
    yield from (chart for chart in found.values() if chart["tall"])
    yield from _difference_charts(comparison, {run.name: number for number, run in enumerate(runs)})
    yield from (chart for chart in found.values() if not chart["tall"])


def _of_run(line: Line, run: RunOfArm, number: int, color: int, num_runs: int) -> Line:
    x, y = thinned(line["x"], line["y"], max(60, MOST_POINTS // num_runs))
    drawn: Line = {"name": run.name, "x": x, "y": y, "run": number, "color": color, "smooth": line.get("smooth", False)}
    if "best" in line and len(x) == len(line["x"]):
        drawn["best"] = line["best"]
    return drawn


def _difference_charts(comparison: RunComparison, numbers: dict[str, int]) -> Iterator[Chart]:
    """Yield the differences of pairs, from validation to validation, where both runs were validated."""
    by_name = {run.name: run for run in comparison.runs}
    for place, verdict in enumerate(comparison.verdicts, start=1):
        lines = []
        for one, other, _ in verdict.pairs:
            before, after = (
                dict(zip(*by_name[name].data.metric(comparison.metric), strict=True)) for name in (one, other)
            )
            steps = [step for step in before if step in after]
            if steps and other in numbers:
                x, y = thinned(steps, [after[step] - before[step] for step in steps], MOST_POINTS // len(numbers))
                lines.append({"name": f"{other} − {one}", "x": x, "y": y, "run": numbers[other], "color": place})
        if lines:
            yield {"title": f"Difference of {comparison.metric}: {verdict.arm} − {verdict.baseline}", "lines": lines}


def _above(comparison: RunComparison, title: str) -> str:
    about = (
        f"by {comparison.metric} ({'more' if comparison.wants_more else 'less'} is better), {comparison.which} value"
    )
    told = "".join(
        f'<p class="verdict {verdict.kind.replace(" ", "-")}">{text(verdict.words)}</p>'
        for verdict in comparison.verdicts
    )
    return f'<header><h1>{text(title)}</h1><p class="about">{text(about)}</p>{told}{cards(_cards(comparison))}</header>'


def _cards(comparison: RunComparison) -> Iterator[tuple[str, str, str]]:
    for arm in comparison.arms:
        values = [value for value in map(comparison.value, arm.runs) if value is not None]
        seeds = f"mean of {format_count(len(values), 'run')}, seeds {format_list([*map(str, arm.seeds[:8])])}"
        if values:
            yield arm.label, f"{sum(values) / len(values):.5g}", seeds
    for verdict in comparison.verdicts:
        if verdict.test is not None:
            share = "" if verdict.relative is None else f"{verdict.relative:+.2%} of the first; "
            inside = f"{verdict.test.low:+.3g} to {verdict.test.high:+.3g}"
            inside = "too few pairs for an interval" if math.isinf(verdict.test.low) else inside
            yield (
                f"difference, {verdict.arm}",
                f"{verdict.test.mean:+.3g}",
                f"{share}{inside}; e-value {verdict.test.e_value:.3g}",
            )


def _below(comparison: RunComparison) -> Iterator[str]:
    left_out = len(comparison.runs) - MOST_RUNS
    if left_out > 0:
        yield f"<p>{text(f'The curves of {left_out} more runs are not drawn.')}</p>"
    names = [name for name, _ in comparison.differences]
    rows = [(name, *values) for name, values in comparison.differences]
    labels = ["", *(arm.label for arm in comparison.arms)]
    yield from section("What differs", table(labels, rows) if names else "<p>Nothing but the seed.</p>")
    yield from section("Runs", _runs(comparison))
    for verdict in comparison.verdicts:
        yield from section(f"Pairs: {verdict.arm} and {verdict.baseline}", _pairs(verdict))
    notes = "".join(f"<li>{text(note)}</li>" for note in comparison.notes)
    yield from section("Notes", f"<ul>{notes}</ul>" if notes else "")
    yield from section("How this was found", f"<p>{text(METHOD_IN_WORDS)}</p>")


def _runs(comparison: RunComparison) -> str:
    rows = [
        (row["run"], row["arm"], row["seed"], f"{row['steps']:,}", f"{row['samples']:,}",
         format_duration(row["seconds"]), "none" if row[comparison.metric] is None else f"{row[comparison.metric]:.6g}",
         row["at step"])
        for row in comparison.rows()
    ]  # fmt: skip
    return table(("run", "arm", "seed", "steps", "samples", "time", comparison.metric, "at step"), rows)


def _pairs(verdict: ArmVerdict) -> str:
    rows = [(one, other, f"{value:+.6g}") for one, other, value in verdict.pairs]
    return table((f"run of {verdict.baseline}", f"run of {verdict.arm}", "difference"), rows)

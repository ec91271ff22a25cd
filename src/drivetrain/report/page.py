"""The pages of a report, each one file that needs no network: of one run, and of several over each other."""

import base64
import hashlib
import html
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from drivetrain.core.aims import Aim
from drivetrain.core.run_folder import as_row
from drivetrain.core.value import format_count, format_duration, format_list
from drivetrain.report.charts import (
    FAULTS,
    KILLED,
    Chart,
    Line,
    axes,
    charts,
    experts,
    not_drawn,
    starts_and_marks,
    telemetry,
    thinned,
    timeline,
)
from drivetrain.report.compare import ArmVerdict, RunComparison, RunOfArm
from drivetrain.report.graph_picture import TIES, knowledge_figures
from drivetrain.report.paired_test import METHOD
from drivetrain.report.run_data import Row, RunData, best_index, device_in_words, median

# ----------------------------------------------------------------------------------------------------------------------
# report.html: a run on one page that needs no network, from its folder alone.
#
# The figures are JSON inside the page, and everything in them is text to the page: names of runs, metrics and
# parameters can be anything. Only the two scripts below may run, by their hashes. Curves are drawn by uPlot (MIT),
# which is kept in `assets`.

ASSETS = Path(__file__).parent / "assets"
MOST_METRICS = 3  # in the headline
MOST_MEDIA, MOST_MEDIA_BYTES = 12, 200_000  # pictures that hooks logged, and of each
MOST_LETTERS = 4000  # of a text that was logged

# Events that a reader looks for, and the fields that say what happened.
TOLD = (
    "start", "resume", "extended", "job changed", "out of memory", "micro-batch capped", "bad step", "loss spike",
    "replicas differ", "checkpoint problem", "save failed", "save given up", "step not captured", "stopped by an error",
    "stop", "finish", "note",
)  # fmt: skip
DRAWN = ("training_metrics.png", "knowledge_graph.png")  # by the script, with more to see: for readers without it
_WORDS = ("words", "text", "error", "because", "cause", "problem", "way", "changes")


def page(data: RunData, summary: str, pictures: Mapping[str, str], *, live: bool = False) -> str:
    """Return the page of a run.

    Args:
        data: The records of the run.
        summary: The same in words.
        pictures: The names of those in the folder, with what they show.
        live: Whether a server shows it while the run goes on: the page then asks for `figures.json` below it.
    """
    below = "\n".join(_sections(data, summary, pictures, live=live))
    return document(data.title, _figures(data), "\n".join(_header(data, live=live)), below, live=live)


def live_figures(data: RunData) -> dict[str, Any]:
    """Return what changes on the page of a run while it goes on, for the page's own script."""
    return {**_figures(data), "about": _about(data, live=True), "headline": list(_headline(data))}


def document(name: str, figures: Mapping[str, Any], above: str, below: str, *, live: bool = False) -> str:
    """Return a page: curves, and what stands above and below them, as HTML."""
    drawn = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    body = "\n".join(
        [
            above,
            '<main id="curves" aria-label="Curves"></main><div id="drawn"></div>',
            below,
            f'<script type="application/json" id="figures"{" data-live" * live}>{drawn}</script>',
        ]
    )
    return sheet(name, body, ("uPlot.iife.min.js", "page.js"), live=live)


def sheet(title: str, body: str, scripts: Sequence[str], *, live: bool = False) -> str:
    """Return a page of ours: a body of HTML, and scripts of `assets`, which alone may run.

    Args:
        title: What the browser calls it; any text.
        body: HTML.
        scripts: File names, in their order.
        live: Whether its scripts may ask the server that it is from.
    """
    texts = [_asset(name) for name in scripts]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in texts)
    rules = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    rules += "; connect-src 'self'" * live
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(title)}</title>\n'
        f"<style>{_asset('uPlot.min.css')}{_asset('page.css')}</style>"
    )
    ends = "\n".join(f"<script>{script}</script>" for script in texts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n{ends}\n</body></html>\n'


def policy(document: str) -> str:
    """Return the policy that a page of ours has, for a server that sends it as well."""
    return document.partition('Content-Security-Policy" content="')[2].partition('"')[0]


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _figures(data: RunData) -> dict[str, Any]:
    return {
        "charts": charts(data),
        "telemetry": telemetry(data),
        "axes": axes(data),
        "timeline": timeline(data),
        "experts": experts(data),
        "knowledge": knowledge_figures(data),
        "ties": TIES,
        "resumed": [row["step"] for row in data.events if row.get("event") == "resume" and "step" in row],
    }


# Above the curves


def _about(data: RunData, *, live: bool) -> str:
    how, why, _ = data.standing
    steps, whole = data.steps[-1]["step"] if data.steps else 0, data.job.get("num_steps")
    of = f" of {whole:,}" if isinstance(whole, int) and how != "finished" else ""
    on = f", on {device_in_words(data)}" if data.plan else ""
    if how == "running":
        when = "" if live else f" when this page was written, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        left = "" if data.seconds_left is None else f", about {format_duration(max(1, round(data.seconds_left)))} left"
        return f"running{when}: " + (f"step {steps:,}{of}{left}" if steps else "before its first step") + on
    if how == "not begun":
        return f"{how}{on}"
    noun = "step" if steps == 1 and not of else "steps"
    return f"{how} after {steps:,}{of} {noun}{on}" + (f": {why}" if why else "")


def _header(data: RunData, *, live: bool) -> Iterator[str]:
    back = '<p class="about"><a href="/">All runs</a></p>' if live else ""
    yield f'<header><h1>{text(data.title)}</h1><p class="about" id="about">{text(_about(data, live=live))}</p>{back}'
    yield f"{cards(_headline(data))}</header>"


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return figures that matter most, each a name, a value and a remark."""
    told = "".join(
        f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd>{f'<dd class=note>{text(note)}</dd>' * bool(note)}</div>"
        for label, value, note in figures
    )
    return f'<dl class="cards">{told}</dl>'


def _headline(data: RunData) -> Iterator[tuple[str, str, str]]:
    """Yield the figures that matter most: a name, a value and a remark."""
    again = data.repeated_names.values()
    names = [name for name in data.metric_names if name.startswith("valid_") and name not in again]
    for name in sorted(names, key=lambda name: not Aim(name).is_clear)[:MOST_METRICS]:
        yield _metric_card(name, *data.metric(name), data.at_last)
    if not names and data.epochs:
        label, epoch = ("loss", "this epoch so far") if data.is_running else ("final loss", "the last epoch")
        yield label, f"{data.epochs[-1].loss:.4g}", f"mean of {epoch}"
    account = data.account
    if account is not None and account.wall_seconds:
        lost = account.failures_in_words()
        yield "wall time", format_duration(account.wall_seconds), f"interruptions {lost}" if lost else ""
        yield "goodput", f"{account.goodput:.1%}", "of the wall time went into steps that count"
    rate = median(row["samples_per_second"] for row in data.speed if "samples_per_second" in row)
    if rate is not None:
        items = median(row["items_per_second"] for row in data.speed if "items_per_second" in row)
        note = "" if items is None else f"{items:,.0f} {data.plan.get('items', 'items')} per second"
        yield "samples per second", f"{rate:,.0f}", note
    mfu = median(row["mfu"] for row in data.speed if "mfu" in row)
    if mfu is not None:
        yield "MFU", f"{mfu:.1%}", "of the device's peak rate"
    peak = data.peak_memory_gib
    if peak is not None:
        yield "peak memory", f"{peak:.2f} GiB", "allocated on the device"
    elif (held := data.process_memory_gib) is not None:
        yield "memory", f"{held:.2f} GiB", "the most that the process was seen to hold"
    findings = data.event("verdict").get("findings") or []
    if findings:
        yield "bottleneck", str(findings[0]["kind"]), str(findings[0]["words"])


def _metric_card(name: str, steps: list[float], values: list[float], at_last: str) -> tuple[str, str, str]:
    """Return the best value of a metric; the last one where its name does not say whether more or less is better."""
    label = f"validation {name.removeprefix('valid_').replace('_', ' ')}"
    if not Aim(name).is_clear:
        numbers = [value for value in values if math.isfinite(value)] or values
        return label, f"{values[-1]:.4g}", f"{at_last}; {min(numbers):.4g} to {max(numbers):.4g} in all"
    best = best_index(name, values)
    return f"best {label}", f"{values[best]:.4g}", f"step {steps[best]:,.0f}; {values[-1]:.4g} {at_last}"


# Below the curves


def _sections(data: RunData, summary: str, pictures: Mapping[str, str], *, live: bool) -> Iterator[str]:
    names = not_drawn(data)
    if names:
        told = f"Not drawn, since no value is a finite number: {format_list(names)}"
        yield f'<p class="told">{text(told)}</p>'
    yield from section("Plan", _plan(data))
    yield from section("What happened", _timeline(data))
    yield from section("What happened to the experts", _experts(data))
    yield from section("Logged pictures", _media(data))
    yield from section("Logged histograms", _histograms(data))
    yield from section("Logged texts", _texts(data))
    for name, about in pictures.items():
        source = _as_data(data.folder / name)
        if source and name in DRAWN:
            yield f'<noscript><h2>{text(about)}</h2><img src="{source}" alt="{text(about)}"></noscript>'
        elif source:
            yield from section(about, f'<img src="{source}" alt="{text(about)}" loading="lazy">')
    yield from section("In words", f"<pre>{text(summary)}</pre>")
    yield from section("To run it again", _again(data))
    yield from section("Files", f"<p>{text(data.folder)}</p>" if live else _files(data))


def section(title: str, body: str) -> Iterator[str]:
    """Yield a part of a page with its title, if it has a body, which is HTML."""
    if body:
        yield f"<section><h2>{text(title)}</h2>{body}</section>"


def _breakable(told: str) -> str:
    """Return a text whose long names may be broken behind their dots and underscores, on a narrow screen."""
    return re.sub(r"(?<=[a-z])([._])(?=[a-z])", r"\1<wbr>", told)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of texts; nothing where it has no rows."""
    if not rows:
        return ""
    cells = "".join(f"<th scope=col>{text(each)}</th>" for each in head)
    lines = "".join(f"<tr>{''.join(f'<td>{_breakable(text(each))}</td>' for each in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _plan(data: RunData) -> str:
    choices = data.plan.get("choices") or {}
    rows: list[tuple[object, ...]] = [
        (name, choice.get("value"), choice.get("why", ""), "; ".join(map(str, choice.get("else") or ())))
        for name, choice in choices.items()
        if isinstance(choice, dict)
    ]
    told = table(("setting", "value", "why", "else"), rows)
    return told + table(("forecast", "expected", "measured"), list(_forecasts(data))) if told else ""


def _forecasts(data: RunData) -> Iterator[tuple[object, ...]]:
    forecast = data.plan.get("forecast") or {}
    step = median(row["seconds"] for row in data.steps)
    if forecast.get("step_seconds") and step is not None:
        yield "seconds per step", f"{forecast['step_seconds']:.4g}", f"{step:.4g} (median)"
    if forecast.get("job_seconds") and data.steps and data.steps[-1]["step"] == data.job.get("num_steps"):
        seconds = sum(row["seconds"] for row in data.steps) + sum(row.get("seconds") or 0.0 for row in data.metrics)
        words = format_duration(forecast["job_seconds"]), format_duration(seconds)
        yield "steps and validations together", *words
    peak = data.peak_memory_gib
    expected = forecast.get("run_peak_bytes") or forecast.get("peak_bytes")
    if expected and peak is not None:
        yield "peak memory (GiB)", f"{expected / 2**30:.2f}", f"{peak:.2f}"


def _timeline(data: RunData) -> str:
    rows: list[tuple[object, ...]] = []
    failures = [row for row in data.attempts if row.get("event") in FAULTS]
    what, how = KILLED
    killed = [
        {"event": what, "words": how, "step": it.step, "time": datetime.fromtimestamp(it.at, UTC).isoformat()}
        for it in starts_and_marks(data)[1]
        if it.words.startswith(what)
    ]
    for row in sorted((*data.events, *failures, *killed), key=lambda row: str(row.get("time", ""))):
        kind = str(row.get("event"))
        if kind in TOLD or kind in FAULTS or kind == what:
            words = next((row[name] for name in _WORDS if row.get(name)), "")
            words = "; ".join(map(str, words)) if isinstance(words, list) else words
            when = str(row.get("time", ""))[:19].replace("T", " ")
            rows.append((when, row.get("step", ""), kind, words))
    return table(("time (UTC)", "step", "event", ""), rows)


def _experts(data: RunData) -> str:
    """Return the table of what became of experts, and of each sleep."""
    rows = [*data.told("expert"), *data.told("sleep")]
    words = [(f"{row['step']:,}", *_in_words(row)) for row in sorted(rows, key=lambda row: row["step"])]
    return table(("step", "what", "why, and what came of it"), [each for each in words if each[1]])


def _in_words(row: Row) -> tuple[str, str]:
    if row["event"] == "sleep":
        effect = [
            f"{name.replace('_', ' ')} {value:.4f} → {row['after'][name]:.4f}" for name, value in row["before"].items()
        ]
        done = [f"{stage['words']}{'' if stage['kept'] else ' (taken back)'}" for stage in row["stages"]]
        return f"sleep {row['cycle']}", f"{row['why']}; {'; '.join(done + effect)}; {row['seconds']:.1f} s"
    what, number = row["what"], row.get("expert")
    if what in ("active", "not merged"):
        return "", ""
    why = {
        "grown": "from expert {parent}: {why}"
        if "why" in row  # runs of before have none
        else "from expert {parent}: {new_share:.0%} of tokens are far from what all experts know",
        "merged": "into expert {into}: their outputs agree to {agreement:.1%}",
        "pruned": "its load was {share:.1%} of an even share",
        "split": "from expert {parent}, which had more than its share of many classes",
    }.get(what, "")
    return f"expert {number} {what}", why.format(**row)


def _media(data: RunData) -> str:
    paths = sorted((data.folder / "media").rglob("*.png"), key=lambda path: path.stat().st_mtime)
    small = [path for path in paths[-MOST_MEDIA:] if path.stat().st_size <= MOST_MEDIA_BYTES]
    figures = "".join(
        f'<figure><img src="{_as_data(path)}" alt="{text(path.stem)}">'
        f"<figcaption>{text(path.relative_to(data.folder / 'media'))}</figcaption></figure>"
        for path in small
    )
    rest = f"<p>{text(f'The latest of {len(paths)}; all are in the folder media.')}</p>" * (len(small) < len(paths))
    return f'<div class="media">{figures}</div>{rest}' if paths else ""


def _newest(folder: Path, ending: str) -> Iterator[tuple[str, str]]:
    """Yield what was logged last under each name, with the name of its file."""
    paths = sorted(folder.glob(f"*-*{ending}"), key=lambda path: path.stem.rpartition("-")[2])
    for path in list({path.stem.rpartition("-")[0]: path for path in paths}.values())[-MOST_MEDIA:]:
        yield path.name, _read(path)[:MOST_LETTERS]


def _histograms(data: RunData) -> str:
    """Return the latest histogram of each name as a small drawing."""
    figures = ""
    for name, content in _newest(data.folder / "media", ".json"):
        found = as_row(content.encode()) or {}
        counts, edges = found.get("counts") or [], found.get("edges") or []
        if len(edges) != len(counts) + 1 or not counts:
            continue
        most, width = max(counts) or 1, 200 / len(counts)
        bars = "".join(
            f'<rect x="{place * width:.2f}" y="{60 - 60 * count / most:.2f}" width="{width:.2f}" '
            f'height="{60 * count / most:.2f}"/>'
            for place, count in enumerate(counts)
        )
        about = f"{name}: from {edges[0]:.4g} to {edges[-1]:.4g}, at most {most:,.4g}"
        drawing = f'<svg viewBox="0 0 200 60" role="img" aria-label="{text(about)}">{bars}</svg>'
        figures += f"<figure>{drawing}<figcaption>{text(about)}</figcaption></figure>"
    return f'<div class="media">{figures}</div>' if figures else ""


def _texts(data: RunData) -> str:
    """Return the latest text of each name."""
    found = _newest(data.folder / "media", ".txt")
    return "".join(f"<p>{text(name)}</p><pre>{text(content)}</pre>" for name, content in found)


def _again(data: RunData) -> str:
    target, arguments = data.source.get("target"), [str(each) for each in data.source.get("arguments") or ()]
    told = ""
    if target:
        folder = data.folder.resolve()
        files = ["--config", str(folder / "config.yaml"), "--plan", str(folder / "plan.yaml")]
        words = ["drivetrain", "train", str(target), *files, "--name", f"{data.name}-again"]
        told = f"<pre>{text(shlex.join([*words, *(['--', *arguments] if arguments else [])]))}</pre>"
    versions = data.hardware.get("software") or {}
    known = "; ".join(f"{name} {value}" for name, value in versions.items() if value and isinstance(value, str))
    told += f"<p>{text(known)}</p>" if known else ""
    config = _read(data.folder / "config.yaml")
    return told + (f"<details><summary>Configuration</summary><pre>{text(config)}</pre></details>" if config else "")


def _files(data: RunData) -> str:
    names = sorted(path.name for path in data.folder.iterdir() if not path.name.startswith("."))
    links = "".join(f'<li><a href="./{quote(name)}">{text(name)}</a></li>' for name in names)
    return f'<ul class="files">{links}</ul>' if links else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _as_data(path: Path) -> str:
    try:
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return ""


def text(words: object) -> str:
    """Return any text as HTML that shows it."""
    return html.escape(str(words))


# ----------------------------------------------------------------------------------------------------------------------
# The page of several runs: their curves over each other, what differs, and the verdict. One file, like report.html.

MOST_RUNS = 64  # that are drawn: a page with more would be slow, and no one could tell them apart
MOST_POINTS = 40_000  # of all lines of a chart together
METHOD_IN_WORDS = (
    f"Method: {METHOD}. If a change did nothing, the runs of a pair could be swapped, and the sign of their difference "
    "would be a fair coin. The e-value is what betting 1 on those coins has come to; it reaches 20 with a chance of at "
    "most 1 in 20, at all looks together. This assumes that pairs are independent, and that none was left out for its "
    "outcome; the interval assumes in addition that differences are symmetric about their center. Validation data is "
    "compared by its length and by a few samples."
)


def comparison_page(comparison: RunComparison, title: str = "") -> str:
    """Return the page of a comparison; its title says how many runs are compared, if it is not given."""
    runs = comparison.runs[:MOST_RUNS]
    title = title or f"{format_count(len(comparison.runs), 'run')} compared"
    return document(title, _compared(comparison, runs), _above(comparison, title), "".join(_below(comparison)))


def _compared(comparison: RunComparison, runs: list[RunOfArm]) -> dict[str, Any]:
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
        one = len(values) == 1
        seeds = f"{'' if one else 'mean of '}{format_count(len(values), 'run')}, seed{'' if one else 's'} "
        seeds += format_list([*map(str, arm.seeds[:8])])
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

"""docs/benchmarks/index.md and side-by-side.md, as far as they are figures: written from the kept results."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import side_by_side_page

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks" / "index.md"
RESULTS = Path(__file__).parent / "results"
BEGIN = "<!-- begin: written by `python -m benchmarks table` -->"
END = "<!-- end -->"


def write(results: Path = RESULTS) -> list[Path]:
    for document, written in PAGES.items():
        text = document.read_text(encoding="utf-8")
        document.write_text(filled(text, results, written), encoding="utf-8")
    return list(PAGES)


def filled(text: str, results: Path = RESULTS, written: Callable[[Path], str] | None = None) -> str:
    """Return the document with its tables as the results have them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"a page of docs/benchmarks has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{(written or tables)(results)}\n{END}{after}"


def _documents(results: Path) -> list[Any]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]


def side_by_side(results: Path = RESULTS) -> str:
    """Return the tables with a column for each trainer."""
    kept = [document for document in _documents(results) if document.get("shown_as")]
    return "\n".join("\n".join([*_head(document), side_by_side_page.shown(document)]) for document in kept)


def tables(results: Path = RESULTS) -> str:
    documents = _documents(results)
    contests = [document for document in documents if "competitors" in document and not document.get("shown_as")]
    plain = [document for document in documents if "results" in document]
    return "\n".join([*map(_contest, contests), *map(_benchmark, plain)])


def _contest(document: Mapping[str, Any]) -> str:
    entries, unit = document["competitors"], document["unit"]
    most = max((entry["rate"]["median"] for entry in entries.values() if entry["rate"]), default=0.0)
    lines = [
        *_head(document),
        "; ".join(f"{name.replace('_', ' ')}: {_in_words(value)}" for name, value in document["workload"].items())
        + ".",
        "",
        f"| | {unit}, median | least | most | of the fastest | what it is |",
        "|---|---:|---:|---:|---:|---|",
    ]
    ranked = sorted(entries.items(), key=lambda item: -(item[1]["rate"] or {"median": 0})["median"])
    for name, entry in ranked:
        rate = entry["rate"]
        if rate is None:
            lines.append(f"| {name} | – | – | – | – | {entry['what']}; {entry.get('problem', 'no result')} |")
        else:
            figures = " | ".join(number(rate[key]) for key in ("median", "least", "most"))
            shown = f"**{name}**" if name.startswith("ours") else name
            lines.append(f"| {shown} | {figures} | {rate['median'] / most:.3f} | {entry['what']} |")
    lines.append("")
    promises = {**document.get("ratios", {}), **document.get("limits", {})}
    if promises:
        lines += ["| promised | measured | met |", "|---|---:|---|"]
        for words, found in promises.items():
            least = "at_least" in found
            bound = f"at least {found['at_least']:.3g} × {words}" if least else f"{words}: at most {found['at_most']:g}"
            measured = f"{found['value']:.3g} ×" if least else f"{found['value']:.3g}"
            without = f", without {', '.join(found['missing'])}" if found.get("missing") else ""
            lines.append(f"| {bound} | {measured} | {'yes' if found['met'] else f'**no**{without}'} |")
        lines.append("")
    lines += _planned(entries)
    if document.get("left_out"):
        lines += [f"Left out for want of time: {', '.join(document['left_out'])}.", ""]
    return "\n".join(lines)


def _planned(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the runs of ours say besides their rate."""
    kinds = {
        "planning_seconds": "planning, compiling included (s)",
        "compile_seconds": "of it compiling (s)",
        "seconds_until_trained": "until the first step is done (s)",
        "forecast_peak_bytes": "peak memory, forecast (GB)",
        "verified_peak_bytes": "when tried (GB)",
        "peak_bytes": "in the run (GB)",
        "whole_seconds": "whole time (s)",
    }
    runs = [
        (f"{name}, start {start}", run)
        for name, entry in entries.items()
        if name.startswith("ours")
        for start, run in enumerate(entry["runs"], start=1)
    ]
    shown = [kind for kind in kinds if any(run.get(kind) is not None for _, run in runs)]
    if not shown:
        return
    yield f"| | {' | '.join(kinds[kind] for kind in shown)} |"
    yield f"|---|{'---:|' * len(shown)}"
    for name, run in runs:
        figures = [run.get(kind) for kind in shown]
        cells = [
            "–" if value is None else number(value / 1e9 if kind.endswith("bytes") else value)
            for kind, value in zip(shown, figures, strict=True)
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _benchmark(document: Mapping[str, Any]) -> str:
    lines = [*_head(document), "| | median | least | most | samples |", "|---|---:|---:|---:|---:|"]
    for name, found in document["results"].items():
        if isinstance(found, Mapping) and "median" in found:
            figures = " | ".join(number(found[key]) for key in ("median", "least", "most"))
            lines.append(f"| {name} | {figures} | {found['samples']} |")
        else:
            lines.append(f"| {name} | {number(float(found))} | | | 1 |")
    return "\n".join([*lines, ""])


def _label(document: Mapping[str, Any]) -> str:
    """Return what to know about this measurement."""
    return f"; {document['label']}" if document.get("label") else ""


def _head(document: Mapping[str, Any]) -> list[str]:
    machine = document["machine"]
    devices = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['usable_cores']} cores"
    versions = [f"Python {machine['python']}"]
    names = ("torch", "lightning", "accelerate", "transformers")
    versions += [f"{name} {machine[name]}" for name in names if machine.get(name)]
    when = document["date"]
    if document.get("shown_as"):
        runs = [run for entry in document["competitors"].values() for run in entry["runs"]]
        revisions = dict.fromkeys(run.get("revision", document["revision"]) for run in runs)
        when += f"; revision {', '.join(revisions)}; load at the beginning {document['load']}"
    return [
        f"### {document['benchmark']}",
        "",
        f"`{document['command']}`; {devices}; {', '.join(versions)}; {when}{_label(document)}.",
        "",
    ]


PAGES: dict[Path, Callable[[Path], str]] = {DOCUMENT: tables, side_by_side_page.DOCUMENT: side_by_side}


def in_words(words: str, found: Mapping[str, Any]) -> str:
    if "at_least" in found:
        return f"{found['value']:.3g} × {words} ({found['against']}); at least {found['at_least']:.3g}"
    return f"{words}: {found['value']:.3g}; at most {found['at_most']:g}"


def number(value: float) -> str:
    """Return a number with four figures, thousands apart."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.3g}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def _in_words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple, dict)) else str(value)

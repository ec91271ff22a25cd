"""Writes report.html: a run on one self-contained page: text, pictures, what happened."""

import base64
import html
from collections.abc import Mapping
from pathlib import Path

from drivetrain.report.run_data import Row, RunData

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1180px; padding: 40px 28px 80px; background: #fff; color: #22303c;
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 28px; letter-spacing: -0.01em; }
h2 { margin: 44px 0 12px; font-size: 18px; }
p.about { margin: 4px 0 0; color: #66737f; }
img { display: block; width: 100%; border: 1px solid #e4e8ec; border-radius: 8px; margin: 14px 0; }
pre { background: #f6f8fa; border-radius: 8px; padding: 18px 20px; overflow-x: auto; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: #66737f; font-weight: 600; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid #e4e8ec; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


def page(data: RunData, summary: str, pictures: Mapping[str, str]) -> str:
    """Return the page. `pictures`: the names of those in the folder, with what they show."""
    parts = [f"<h1>{_text(data.name)}</h1>", f'<p class="about">{_text(_about(data))}</p>']
    for name, about in pictures.items():
        source = _as_data(data.folder / name)
        if source:
            parts.append(f'<h2>{_text(about)}</h2>\n<img src="{source}" alt="{_text(about)}">')
    parts += [_what_happened(data), f"<h2>In words</h2>\n<pre>{_text(summary)}</pre>"]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(data.name)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _about(data: RunData) -> str:
    end = data.event("finish", "stop")
    steps = data.steps[-1]["step"] if data.steps else 0
    how = {"finish": "finished", "stop": "stopped"}.get(str(end.get("event")), "not finished")
    found = [f"{how} after {steps:,} steps", *(f"on {data.plan['device']}" for _ in [0] if data.plan)]
    for name in data.metric_names:
        _, values = data.metric(name)
        found.append(f"{name.replace('_', ' ')} {values[-1]:.4g}")
    return ", ".join(found)


def _what_happened(data: RunData) -> str:
    """Return the table of what became of experts, and of each sleep."""
    rows = [*data.told("expert"), *data.told("sleep")]
    words = [(row["step"], *_in_words(row)) for row in sorted(rows, key=lambda row: row["step"])]
    lines = [
        f'<tr><td class="number">{step:,}</td><td>{_text(what)}</td><td>{_text(why)}</td></tr>'
        for step, what, why in words
        if what
    ]
    if not lines:
        return ""
    head = '<tr><th class="number">step</th><th>what</th><th>why, and what came of it</th></tr>'
    return f"<h2>What happened to the experts</h2>\n<table>{head}\n" + "\n".join(lines) + "</table>"


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


def _as_data(path: Path) -> str:
    try:
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return ""


def _text(words: str) -> str:
    return html.escape(str(words))

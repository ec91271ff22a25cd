"""Hooks of the site's build: parts of pages that are written from the code while the site is built."""

from typing import Any

from drivetrain.cli import COMMANDS, flag_parser
from drivetrain.config import SETTINGS, Setting
from drivetrain.plan.knobs import KNOBS

MARK = "<!-- commands: written from the code when the site is built -->"
PLANNED = "<!-- planned choices: rows written from the code when the site is built -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    if MARK in markdown:
        markdown = markdown.replace(MARK, commands())
    return markdown.replace(PLANNED, planned(markdown)) if PLANNED in markdown else markdown


def commands() -> str:
    """Return a section for each command: what it does, and what its `--help` prints."""
    sections = []
    for name, command in COMMANDS.items():
        text = flag_parser(name, command.load()).format_help_all().rstrip()
        sections.append(f"## drivetrain {name}\n\n{command.summary}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


def planned(page: str) -> str:
    """Return the rows of a table of settings for those that pin a planned choice and have no row in the page."""
    pins = {name for knob in KNOBS for name in knob.settings}
    return "\n".join(_row(each) for each in SETTINGS if each.name in pins and f"| `{each.name}` |" not in page)


def _row(setting: Setting) -> str:
    takes = ", ".join(f"`{choice}`" for choice in setting.choices) or setting.allowed
    default = "auto" if setting.default is None else f"`{setting.default}`"
    cells = (f"`{setting.name}`", ", ".join(f"`{alias}`" for alias in setting.aliases), takes, default)
    return f"| {' | '.join(cells)} |"

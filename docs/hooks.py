"""Hooks of the site's build: parts of pages that are written from the code while the site is built."""

from typing import Any

from drivetrain.cli import COMMANDS, flag_parser

MARK = "<!-- commands: written from the code when the site is built -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def commands() -> str:
    """Return a section for each command: what it does, and what its `--help` prints."""
    sections = []
    for name, command in COMMANDS.items():
        text = flag_parser(name, command.load()).format_help_all().rstrip()
        sections.append(f"## drivetrain {name}\n\n{command.summary}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)

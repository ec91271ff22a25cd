"""What the documents show is true: Python blocks run, commands and flags exist, links lead somewhere."""

import json
import re
import shlex
from pathlib import Path

import pytest
from docs.hooks import on_page_markdown

from drivetrain.cli import COMMANDS, flag_parser
from drivetrain.config import SETTINGS
from tests import warm_python

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (path.relative_to(ROOT).as_posix(), text)
        for path in DOCUMENTS
        for found, text in BLOCK.findall(path.read_text(encoding="utf-8"))
        if found == language
    ]


# Parts to put into our files, each of which runs in the test of its room: test_knobs, test_contract, test_trackers,
# test_own_recipe, test_own_command, test_verify.
PARTS = "CONTRIBUTING.md"


# Drawing takes longer than all else that the pages do: README.md shows that a report is drawn.
NOT_DRAWN = """
from drivetrain.api import driving, training
driving.write_report = training.write_report = lambda folder, **how: []
"""


@pytest.mark.parametrize("document", sorted({document for document, _ in blocks("python")} - {PARTS}))
def test_python_runs(document: str, tmp_path: Path) -> None:
    """All blocks of a document, one after the other, as somebody would type them."""
    code = "\n".join(text for found, text in blocks("python") if found == document)
    done = warm_python.run(["-c", code if document == "README.md" else NOT_DRAWN + code], cwd=tmp_path)
    assert done.returncode == 0, f"{document}:\n{code}\n{done.stderr}"


def commands_shown() -> list[tuple[str, str]]:
    """Every `drivetrain …` line of a shell block, without its comment."""
    return [
        (document, line.split("#")[0].strip())
        for document, text in blocks("bash")
        for line in text.splitlines()
        if line.strip().startswith("drivetrain ")
    ]


@pytest.mark.parametrize(("document", "line"), commands_shown())
def test_commands_and_flags_exist(document: str, line: str, tmp_path: Path) -> None:
    name, *rest = shlex.split(line)[1:]
    assert name in COMMANDS, document
    parser = flag_parser(name, COMMANDS[name].load())
    parsed = parser.parse(rest)
    assert parsed.problems == [], (document, line)
    assert parser.missing_positionals(parsed) == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = {word for path in DOCUMENTS for word in re.findall(r"\bmake ([a-z]+)\b(?= |`|$)", path.read_text("utf-8"))}
    assert {"demo", "test", "lint", "bench", "soak"} <= targets
    assert {word for word in shown if word in {"demo", "test", "lint", "bench", "soak", "install", "clean"}} <= targets


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+?)\)", path.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_table_of_settings_is_whole() -> None:
    text = on_page_markdown((ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8"))
    rows = {row[0]: row for row in re.findall(r"^\| `([a-z_.]+)` \| ([^|]*) \|", text, re.MULTILINE)}
    assert set(rows) == {setting.name for setting in SETTINGS}
    for setting in SETTINGS:
        assert all(f"`{alias}`" in rows[setting.name][1] for alias in setting.aliases), setting.name


def test_the_wrong_input_that_is_shown_is_what_is_printed() -> None:
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    command, _, expected = next(body for kind, body in BLOCK.findall(text) if kind == "text").partition("\n")
    words = shlex.split(command.removeprefix("$ "))[1:]
    done = warm_python.run(["-m", "drivetrain", *words])
    assert done.returncode == 2
    assert done.stderr == expected


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_figures_of_the_first_screen_are_the_kept_results(page: str) -> None:
    rows = re.findall(
        r"^\| .*?, ((?:1,000 )?)\w+/s \|(.*)\| `python -m benchmarks ([\w-]+)` \|$",
        (ROOT / page).read_text("utf-8"),
        re.M,
    )
    assert len(rows) == 3
    for thousands, cells, benchmark in rows:
        kept = json.loads((ROOT / f"benchmarks/results/{benchmark}-h200.json").read_text("utf-8"))["competitors"]
        rates = {name: each["rate"]["median"] / (1000 if thousands else 1) for name, each in kept.items()}
        by_hand = max(rate for name, rate in rates.items() if kept[name]["what"].startswith("by hand"))
        expected = [rates["ours"], by_hand, rates.get("lightning-default"), rates.get("accelerate-default")]
        for cell, rate in zip(cells.split("|"), expected, strict=True):
            assert (cell.strip() == "") == (rate is None), (benchmark, cell)
            if rate is not None:
                digits = len(cell.strip().partition(".")[2])
                assert cell.strip() == f"{rate:,.{digits}f}", (benchmark, cell, rate)

"""The documentation builds as a site: strictly, with every page, and without anything from the network."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import drivetrain
from drivetrain.cli import COMMANDS
from tests import warm_python

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]  # --quiet hides warnings from strict
    done = warm_python.run(words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def built(site: Path, page: Path) -> str:
    return (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")


class _Text(HTMLParser):
    """Collects the text of paragraphs outside of code: there, Markdown that was not understood shows."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self._is_inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.paragraphs[-1] += data


def test_every_page_is_built_and_its_markdown_is_understood(site: Path) -> None:
    """A list without an empty line before it, or a table with a wrong row, would be shown as it was typed."""
    found = []
    for page in PAGES:
        text = _Text()
        text.feed(built(site, page))
        found += [
            f"{page.relative_to(ROOT)}: {paragraph[:80]}"
            for paragraph in text.paragraphs
            if re.search(r"^(- |\* |\d+\. |\||#|```)|\n(- |\||```|\d+\. )", paragraph)
        ]
    assert found == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc="(https?:)?//|<link[^>]*\shref="(https?:)?//|@import|url\(http"""
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > len(PAGES)
    assert [file.name for file in files if loads.search(file.read_text(encoding="utf-8"))] == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = built(site, ROOT / "docs" / "reference" / "api.md")
    for name in set(drivetrain.__all__) - {"__version__"}:
        home = drivetrain._HOME[name]
        assert f'id="drivetrain.{name}"' in page or f'id="{home}.{name}"' in page, name


def test_the_reference_has_every_command(site: Path) -> None:
    page = built(site, ROOT / "docs" / "reference" / "command-line.md")
    assert [name for name in COMMANDS if f"usage: drivetrain {name}" not in page] == []

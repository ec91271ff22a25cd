"""Draws the layers from the code: `python -m docs.layer_picture` writes docs/images/layers.svg.

The rows are the table that `tests/test_architecture.py` enforces, what a package is comes from its docstring, and what
it imports from its imports. A test fails if the picture is not the one that the code gives.
"""

import ast
from collections import defaultdict
from html import escape
from pathlib import Path
from textwrap import wrap

from tests.test_architecture import LAYERS, PACKAGE, imports_of, package_of

PICTURE = Path(__file__).parent / "images" / "layers.svg"
WIDTH, LEFT, GAP, LINE, PADDING = 1120, 36, 10, 17, 10
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 13px; fill: #1f2937 }
  .name { font-weight: 700; font-size: 15px; fill: #1e3a8a }
  .uses { fill: #4b5563; font-size: 12px }
  .row { fill: #6b7280; font-size: 13px }
  .box { fill: #eef2ff; stroke: #6366f1; stroke-width: 1 }
"""


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)


def picture() -> str:
    """Return the picture as SVG: a row of boxes per layer, the highest on top, on a light card in any color scheme."""
    uses = rooms_used()
    shapes: list[str] = []
    top = GAP
    for number, packages in reversed(list(enumerate(LAYERS))):
        packages = tuple(package for package in packages if package != "__main__")
        if not packages:
            continue
        width = (WIDTH - LEFT - GAP * len(packages)) / len(packages)
        texts = [_lines(package, uses[package], int(width / 7.4)) for package in packages]
        height = LINE * max(map(len, texts)) + 2 * PADDING
        shapes.append(f'<text class="row" x="{GAP}" y="{top + height / 2 + 4:.0f}">{number}</text>')
        for index, lines in enumerate(texts):
            left = LEFT + index * (width + GAP)
            box = f'x="{left:.0f}" y="{top}" width="{width:.0f}" height="{height}" rx="6"'
            shapes.append(f'<rect class="box" {box}/>')
            for line, (kind, text) in enumerate(lines):
                at = f'x="{left + PADDING:.0f}" y="{top + PADDING + LINE * (line + 1) - 4}"'
                shapes.append(f'<text class="{kind}" {at}>{escape(text)}</text>')
        top += height + GAP
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    title = "<title>The layers of drivetrain: a row imports only from rows below it</title>"
    card = f'<rect width="{WIDTH}" height="{top}" rx="8" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, title, f"<style>{STYLE}</style>", card, *shapes, "</svg>", ""])


def rooms_used() -> dict[str, list[str]]:
    """Return for each package the packages that it imports, the highest first; late imports by name aside."""
    found: dict[str, set[str]] = defaultdict(set)
    for entry in imports_of(PACKAGE):
        parts = entry.target.split(".")
        if entry.file != "__init__.py" and len(parts) > 1 and parts[1] != package_of(entry.file):
            found[package_of(entry.file)].add(parts[1])
    order = [package for row in reversed(LAYERS) for package in row]
    return {package: [other for other in order if other in found[package]] for package in order}


def _lines(package: str, uses: list[str], num_letters: int) -> list[tuple[str, str]]:
    lines = [("name", package)]
    lines += [("what", text) for text in wrap(_what_it_is(package), num_letters)]
    lines += [("uses", text) for text in wrap("imports " + (", ".join(uses) or "nothing"), num_letters)]
    return lines


def _what_it_is(package: str) -> str:
    """Return the first sentence of the package's docstring."""
    folder = PACKAGE / package
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else None
    sentence = " ".join((text or "").split("\n\n")[0].split()).replace("`", "")
    end = sentence.find(". ")
    return sentence[: end + 1] if end > 0 else sentence


if __name__ == "__main__":
    main()

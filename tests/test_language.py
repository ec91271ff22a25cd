"""Docstrings are sentences about what they document, and pages and messages use plain words."""

import io
import re
import tokenize
from collections.abc import Iterator

from benchmarks.structure import SOURCE, without_subject

ROOT = SOURCE.parents[1]


def test_no_docstring_begins_with_a_bare_preposition() -> None:
    """A reader cannot know what "Of one of its steps" is about."""
    files = [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "studies").rglob("*.py")]
    assert list(without_subject(sorted(files))) == []


# Words that stop a fluent reader, each with a plain one: fix, is reported, your own, no one or nothing, any.
QUAINT = re.compile(r"\b(mend(s|ed)?|is said|one's own|nobody|whoever)\b", re.IGNORECASE)


def test_no_page_or_message_has_quaint_words() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir(), *SOURCE.rglob("*.py")]
    pages += (ROOT / "benchmarks").rglob("*.py")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in pages
        if path.suffix in (".md", ".py", ".yaml")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (match := QUAINT.search(line))
    ]
    assert found == []


# Pages, docstrings and comments are in American English. Code and what programs print are left as they are: some of it
# is a key on the disk.
BRITISH = re.compile(
    r"\b(behaviours?|colours?|favour|neighbour(?:s|ing)?|learnt|licence|labelled|modelled|centre[ds]?"
    r"|(?:normal|renormal|special|initial|organ|reorgan|util|optim|serial|recogn|summar|minim|maxim|general|synchron|quant|final)"
    r"is(?:e[drs]?|ing|ation)"
    r")\b",
    re.IGNORECASE,
)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<!-- begin:.*?<!-- end -->", re.MULTILINE | re.DOTALL)


def test_pages_are_in_american_english() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [
        f"{page.relative_to(ROOT)}: {match[0]}"
        for page in pages
        for match in BRITISH.finditer(CODE.sub("", page.read_text(encoding="utf-8")))
    ]
    assert found == []


# Keys and values that are in files of existing runs.
ON_DISK = ("buffers not synchronised", "specialisation", '"specialise"')


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments, docstrings and other strings of a module, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and not any(kept in token.string for kept in ON_DISK):
            yield token.start[0], token.string


def test_the_source_is_in_american_english() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {match[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        if BRITISH.search(source := path.read_text(encoding="utf-8"))  # to tell words from code takes long
        for line, text in prose_of(source)
        for match in BRITISH.finditer(CODE.sub("", text))
    ]
    assert found == []

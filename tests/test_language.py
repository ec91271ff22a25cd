"""Docstrings are sentences about what they document."""

from benchmarks.structure import SOURCE, without_subject


def test_no_docstring_begins_with_a_bare_preposition() -> None:
    """A reader cannot know what "Of one of its steps" is about."""
    assert list(without_subject(sorted(SOURCE.rglob("*.py")))) == []

"""The figures in the document are those of the kept results."""

import json
from pathlib import Path

import pytest
from benchmarks.contest import Book

from benchmarks import table
from tests.benchmarks.odd_contest import contest

MACHINE = {"cpu": "a chip", "usable_cores": 2, "gpus": [], "python": "3.12", "torch": "2.11", "lightning": "2.6"}


@pytest.mark.parametrize("document", table.PAGES, ids=lambda path: path.stem)
def test_the_document_agrees_with_the_results(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert text == table.filled(text, written=table.PAGES[document]), "run `python -m benchmarks table`"


def results(folder: Path, seconds: float) -> Path:
    odd = contest("odd")
    book = Book(folder / "odd.json", odd, MACHINE, keep=False)
    book.add("ours", [seconds], {"planning_seconds": 4.25, "peak_bytes": 2_500_000_000, "pid": 7})
    book.add("hand-1", [0.001, 0.002], {})
    book.add_problem("hang", "took longer than 1 s")
    return folder


def test_a_contest_as_a_table(tmp_path: Path) -> None:
    text = table.tables(results(tmp_path, 0.0005))
    assert "`python -m benchmarks odd`; a chip, 2 cores; Python 3.12, torch 2.11, lightning 2.6; 20" in text
    assert "| **ours** | 2,000 | 2,000 | 2,000 | 1.000 | fast |" in text
    assert "| hand-1 | 750.0 | 500.0 | 1,000 | 0.375 | slow |" in text
    assert "| hang | – | – | – | – | takes for ever; took longer than 1 s |" in text
    assert "| at least 2 × by hand | 2.67 × | **no**, without hand-2 |" in text
    assert "| process: at most 0 | 7 | **no** |" in text
    assert "| ours, start 1 | 4.250 | 2.500 |" in text


def test_other_results_give_another_document(tmp_path: Path) -> None:
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    first = table.filled(text, results(tmp_path, 0.0005))
    assert first.startswith("before\n")
    assert first.endswith("\nafter\n")
    assert "old" not in first
    assert table.filled(first, tmp_path) == first
    assert table.filled(first, results(tmp_path, 0.0006)) != first


def test_plain_results_are_listed_too(tmp_path: Path) -> None:
    found = {"a step (µs)": {"median": 12.5, "least": 11, "most": 14, "samples": 7}, "passed": 15}
    document = {"benchmark": "x", "command": "x", "date": "2026-01-01", "machine": MACHINE, "results": found}
    (tmp_path / "x.json").write_text(json.dumps(document))
    text = table.tables(tmp_path)
    assert "| a step (µs) | 12.50 | 11.00 | 14.00 | 7 |" in text
    assert "| passed | 15.00 | | | 1 |" in text


@pytest.mark.parametrize(
    ("value", "shown"), [(535_123.4, "535,123"), (123.456, "123.5"), (0.98765, "0.988"), (1e-7, "1e-07"), (0, "0.000")]
)
def test_numbers(value: float, shown: str) -> None:
    assert table.number(value) == shown

"""No flags on a CPU is nearly as fast as the best that was found by hand."""

import json
from pathlib import Path

import pytest
from benchmarks.contest import Book, run_contest

from benchmarks import cpu


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", cpu.NAMES)
def test_no_flags_against_the_best_by_hand(name: str, tmp_path: Path) -> None:
    contest = cpu.contest(name)
    book = Book(tmp_path / "cpu.json", contest, {}, keep=False)
    run_contest(contest, book)
    found = book.document
    problems = {one: entry["problem"] for one, entry in found["competitors"].items() if "problem" in entry}
    assert not problems
    (ratio,) = found["ratios"].values()
    rates = {one: entry["rate"] for one, entry in found["competitors"].items()}
    assert ratio["met"], json.dumps({"ratio": ratio, "rates": rates, "plan": found["competitors"]["ours"]["runs"]})

"""No flags on a CPU is nearly as fast as the best that was found by hand."""

import json
from pathlib import Path

import pytest
from benchmarks.contest import Book, run_contest

from benchmarks import cpu
from drivetrain.hardware.host import find_cpu


@pytest.mark.parametrize(("precisions", "tries"), [(("fp32", "bf16"), True), (("fp64", "fp32", "fp16"), False)])
def test_bf16_is_tried_where_the_cpu_has_it(
    precisions: tuple[str, ...], tries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = find_cpu().model_copy(update={"precisions": precisions})
    monkeypatch.setattr(cpu, "find_cpu", lambda: here)
    left_out = {each.name: each.why_not for each in cpu.contest("cpu-mlp").competitors if each.why_not}
    assert left_out == ({} if tries else {"hand-bf16": "this CPU has no instructions for bf16"})


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", cpu.NAMES)
def test_no_flags_against_the_best_by_hand(name: str, tmp_path: Path) -> None:
    contest = cpu.contest(name)
    book = Book(tmp_path / "cpu.json", contest, {}, keep=False)
    run_contest(contest, book)
    found = book.document
    problems = {one: entry["problem"] for one, entry in found["competitors"].items() if "problem" in entry}
    assert all(problem.startswith("left out: this CPU") for problem in problems.values()), problems
    (ratio,) = found["ratios"].values()
    rates = {one: entry["rate"] for one, entry in found["competitors"].items()}
    assert ratio["met"], json.dumps({"ratio": ratio, "rates": rates, "plan": found["competitors"]["ours"]["runs"]})

"""Competitors are measured one by one; what one of them does wrong costs nobody else a result."""

import json
from pathlib import Path
from typing import Any

from benchmarks.contest import Aim, Book, Limit, limits, ratios, run_contest

from tests.benchmarks.odd_contest import contest

MACHINE = {"cpu": "one"}


def run(path: Path, **options: Any) -> dict[str, Any]:
    odd = contest("odd")
    keep = bool(options.get("only"))
    run_contest(odd, Book(path, odd, MACHINE, keep=keep), say=lambda text: None, **options)
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_all_have_their_turn_whatever_the_others_do(tmp_path: Path) -> None:
    found = run(tmp_path / "odd.json")
    entries = found["competitors"]
    assert list(entries) == ["ours", "hand-1", "crash", "hang", "fail", "missing", "hopeless", "hand-2"]
    assert entries["crash"]["problem"].startswith("its process ended with 3")
    assert entries["hang"]["problem"] == "took longer than 1 s"
    assert entries["fail"]["problem"] == "ValueError: no such luck"
    assert entries["missing"]["problem"] == "left out: no_such_package_at_all is not installed here"
    assert entries["hopeless"]["problem"] == "left out: this machine is too old"
    assert [len(entries[name]["runs"]) for name in ("ours", "hand-1", "hand-2")] == [2, 1, 2]  # hand-2 was the best
    assert entries["hand-2"]["rate"] == {"median": 3.3334, "least": 2.6667, "most": 4.0, "samples": 4}
    runs = {name: entry["runs"] for name, entry in entries.items()}
    assert len({run["pid"] for name in ("ours", "hand-1") for run in runs[name]}) == 3, "ours has processes of its own"
    assert runs["hand-2"][0]["known"].keys() == {"ours", "hand-1"}
    # Medians of ours 8.33 and of hand-2 3.33.
    assert found["ratios"] == {"by hand": {"value": 2.4999, "at_least": 2.0, "met": True, "against": "hand-2"}}
    assert not found["limits"]["process"]["met"]


def test_a_result_is_in_the_file_before_the_next_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    odd = contest("odd")
    seen: list[list[str]] = []
    book = Book(path, odd, MACHINE, keep=False)
    run_contest(
        odd,
        book,
        only=["hand-1", "fail", "hand-2"],
        say=lambda text: seen.append(list(json.loads(path.read_text())["competitors"])),
    )
    assert seen == [["hand-1"], ["hand-1", "fail"], ["hand-1", "fail", "hand-2"]]


def test_some_alone_keep_the_results_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    run(path, only=["hand-1", "hand-2"])
    again = run(path, only=["hand-1"])
    assert [len(again["competitors"][name]["runs"]) for name in ("hand-1", "hand-2")] == [1, 1]
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["machine"] = {"cpu": "another"}
    path.write_text(json.dumps(kept), encoding="utf-8")
    elsewhere = run(path, only=["hand-1"])
    assert list(elsewhere["competitors"]) == ["hand-1"], "figures of two machines do not stand side by side"


def test_results_beside_a_gpu_are_kept_whatever_the_cores_and_say_how_many(tmp_path: Path) -> None:
    path, odd = tmp_path / "odd.json", contest("odd")
    for cores in (7, 16):
        book = Book(path, odd, {"cpu": "x", "usable_cores": cores, "gpus": ["H200"]}, keep=True)
        run_contest(odd, book, only=["hand-1" if cores == 7 else "hand-2"], say=lambda text: None)
    runs = {name: entry["runs"][0] for name, entry in book.document["competitors"].items()}
    assert runs["hand-1"]["usable_cores"] == 7
    assert "usable_cores" not in runs["hand-2"]
    without = Book(path, odd, {"cpu": "x", "usable_cores": 7, "gpus": []}, keep=True)
    assert not without.document["competitors"], "on a CPU, the cores are what is measured"


def test_each_has_one_turn_if_asked_for(tmp_path: Path) -> None:
    found = run(tmp_path / "odd.json", only=["ours", "hand-2"], once=True)
    assert {name: len(entry["runs"]) for name, entry in found["competitors"].items()} == {"ours": 1, "hand-2": 1}
    found = run(tmp_path / "odd.json", only=["ours", "hand-2"])
    assert len(found["competitors"]["ours"]["runs"]) == 2


def test_nobody_begins_after_the_budget(tmp_path: Path) -> None:
    found = run(tmp_path / "odd.json", budget_seconds=0.0)
    assert found["left_out"] == list(contest("odd").order)
    assert found["competitors"] == {}


def test_ratios_are_against_the_fastest() -> None:
    aims = [Aim("both", ("a", "b"), 1.0), Aim("missing", ("c",), 1.0)]
    found = ratios(aims, {"ours": 10.0, "a": 5.0, "b": 12.5})
    assert found == {"both": {"value": 0.8, "at_least": 1.0, "met": False, "against": "b"}}
    assert ratios(aims, {"a": 1.0}) == {}
    part = ratios(aims, {"ours": 10.0, "a": 5.0})["both"]
    assert (part["value"], part["missing"], part["met"]) == (2.0, ["b"], False), "the other one may be faster"
    assert ratios(aims, {"ours": 10.0, "a": 5.0}, {"b"})["both"]["met"], "it cannot be, on this machine"


def test_limits_hold_for_the_first_start() -> None:
    entries = {"ours": {"runs": [{"planning": 70.0}, {"planning": 1.0}]}}
    assert limits([Limit("planning", "planning", 60)], entries) == {
        "planning": {"value": 70.0, "at_most": 60, "met": False}
    }

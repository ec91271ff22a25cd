"""Trainers side by side: what is read from their runs is what happened in them."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.contest import Circumstances
from benchmarks.side_by_side import SMOKE, TRAINERS, contest, ends_of_steps, killed, reached, speed, stalls, windows
from benchmarks.side_by_side_page import shown

from benchmarks import side_by_side
from tests import warm_python

TOLD = Circumstances(smoke=True, is_warming=False, known={})
TEN = replace(SMOKE, save_every=20, warm_steps=10)


def steps_of(usual: float, blocked: Mapping[int, float], count: int = 60) -> list[float]:
    """The ends of steps that take `usual` seconds, but for those that took longer, by number."""
    ends, now = [], 100.0
    for step in range(1, count + 1):
        now += blocked.get(step, usual)
        ends.append(now)
    return ends


def test_saves_are_not_part_of_the_speed() -> None:
    ends = steps_of(0.1, {1: 30.0, 21: 2.1, 41: 2.1})
    assert windows(ends, TEN) == pytest.approx([0.1] * 5)


@pytest.mark.parametrize(("is_ours", "held_up"), [(False, 21), (True, 20), (True, 23)])
def test_what_a_save_costs(is_ours: bool, held_up: int) -> None:
    """Others save between steps 20 and 21; one of ours may hold up any step from 20 on."""
    longest, everything = stalls(steps_of(0.1, {held_up: 0.35}), TEN, 0.1, is_ours)
    assert longest == pytest.approx([250.0, 0.0], abs=1e-6)
    assert everything == pytest.approx([250.0, 0.0], abs=1e-6)


def test_a_loss_is_reached_by_the_mean_of_ten_steps() -> None:
    ends = steps_of(0.1, {}, 30)
    losses = [5.0] * 10 + [3.0] * 20
    assert reached(losses, ends, 4.0) == ends[14]  # five of ten
    assert reached(losses, ends, 2.9) is None


def test_steps_of_ours_are_counted_from_the_start_of_the_process() -> None:
    assert ends_of_steps({"times": [12.0, 13.5], "began": 10.0}) == [2.0, 3.5]
    ours = {"step_seconds": [1.0, 0.5], "plan": {"seconds_until_start": 4.0}, "times": [0.0], "began": 10.0}
    assert ends_of_steps(ours) == [5.0, 5.5]


def warm(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> int:
    done = warm_python.run(words, cwd=folder, env=environment)
    log.write_text(done.stdout + done.stderr)
    return done.returncode


def test_runs_are_watched_killed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes and a real SIGKILL: a loop that forgets generators and place comes to other weights."""
    monkeypatch.setattr(side_by_side, "run_python", warm)
    whole = speed("plain", replace(SMOKE, steps=30, save_every=10), False, TOLD)
    assert all(seconds > 0 for seconds in whole.seconds)
    assert whole.facts["first_step_seconds"] > 0
    assert len(whole.facts["losses"]) == 3
    assert whole.facts["peak_bytes"] > 1e8
    json.dumps(whole.facts)
    facts = killed("plain", SMOKE, TOLD).facts
    assert facts["steps_lost"] == 2  # of 12, with a save every 4 and a kill after 6
    assert facts["seconds_lost"] > 0
    assert not facts["same_bits"]
    assert facts["differs_from_step"] == 5


def test_a_failure_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> int:
        log.write_text("one\ntwo\nno such flag\n")
        return 2

    monkeypatch.setattr(side_by_side, "run_python", fail)
    with pytest.raises(RuntimeError, match=r"ended with 2: one \| two \| no such flag"):
        speed("plain", SMOKE, False, TOLD)


def test_ours_is_read_from_its_folder_and_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "run_python", warm)
    whole = speed("ours", replace(SMOKE, steps=30, save_every=10), True, TOLD)
    assert whole.facts["planning_seconds"] >= 0
    assert whole.facts["cpu_ms_per_step"] > 0
    assert whole.facts["first_step_seconds"] > 0
    assert statistics.median(whole.seconds) < 1
    facts = killed("ours", SMOKE, TOLD).facts
    assert facts["same_bits"]
    assert facts["steps_lost"] in (2, 6)  # the save after step 4 may still be under way after step 6


def kept(name: str, **facts: object) -> dict[str, object]:
    return {"what": name, "rate": None, "runs": [{"rates": [], **facts}]}


def test_the_page_has_a_column_for_each_trainer_and_says_where_ours_is_behind() -> None:
    entries: dict[str, object] = {
        "ours": kept("a", rates=[90.0, 110.0], save_stall_ms=[5.0], planning_seconds=2.0),
        "plain": kept("b", rates=[50.0, 60.0], save_stall_ms=[40.0]),
        "tuned": kept("c", rates=[104.0, 108.0], save_stall_ms=[40.0], target_seconds=None),
        "hf": {"what": "d", "rate": None, "runs": [], "problem": "left out: transformers is not installed here"},
        "ours-tiny": kept("a", step_us=[120.0]),
        "tuned-tiny": kept("c", step_us=[100.0]),
        "plain-tiny": kept("b", step_us=[300.0]),
        "ours-killed": kept("a", steps_lost=2, seconds_lost=5.0, same_bits=True, repeats=True),
        "tuned-killed": kept("a", steps_lost=2, seconds_lost=5.0, same_bits=False, repeats=False, differs_from_step=3),
        "plain-killed": kept("b", steps_lost=2, seconds_lost=4.0, same_bits=False, repeats=True, differs_from_step=5),
    }
    machine = {"gpus": [], "cpu": "a chip"}
    workload = {"model": "small", "target_loss": 3.5}
    document = {"competitors": entries, "machine": machine, "unit": "tokens/s", "workload": workload}
    rows = {row.split(" | ")[0].strip("| "): row for row in shown(document).splitlines() if row.startswith("|")}
    cells = rows["killed and resumed: same bits"].split(" | ")[1:5]
    assert cells == ["yes", "no, from step 5 on", "cannot be told: it does not repeat undisturbed", "not run"]
    assert "| 5 | 40 | 40 | not run" in rows["a save stops training for (ms)"]
    text = shown(document)
    assert "left out: transformers is not installed here" in text
    behind = text.split("Where ours is behind:")[1]
    assert "| tokens/s, best flags | 100 (90 to 110) | 106 (104 to 108) (tuned loop) | within the spread" in behind
    assert "| a tiny step over the tuned loop's (µs of CPU) | 20 | 0 (tuned loop) |" in behind
    assert "| killed: until back at that step (s) | 5 | 4 (plain loop) |" in behind
    assert "a save stops training" not in behind


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in TRAINERS if name not in ("ours", "plain", "tuned")])
def test_other_trainers_at_a_tiny_size(name: str) -> None:
    """Real interpreters: each starts for seconds, so this is no part of `make test`."""
    for kind in ("", "-default", "-tiny", "-killed"):
        pytest.importorskip(TRAINERS[name][1][0])
        contest("side-by-side", True).competitor(f"{name}{kind}").measure(TOLD)

"""The count of samples that a run with lost machines missed or had twice, and the runs themselves."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kills import WAYS, Row, diaries, kept_samples, lost_samples
from benchmarks.kills_job import GLOBAL_BATCH, NUM_SAMPLES
from benchmarks.random_kills import Outcome

from benchmarks import kills

NUM_RANKS = 8


def epoch() -> list[list[int]]:
    return [list(range(start, start + GLOBAL_BATCH)) for start in range(0, NUM_SAMPLES, GLOBAL_BATCH)]


def rows(attempt: int, first: int, last: int, num_ranks: int = NUM_RANKS, begins: float = 0.0) -> list[Row]:
    """What the ranks of an attempt write down, each its share of every step."""
    share = GLOBAL_BATCH // num_ranks
    return [
        Row(rank, step, begins + step, attempt, epoch()[(step - 1) % 100][rank * share : (rank + 1) * share])
        for step in range(first, last + 1)
        for rank in range(num_ranks)
    ]


def test_whole_epochs_and_a_begun_one_lose_nothing() -> None:
    assert lost_samples([*epoch(), *epoch()[::-1], *epoch()[:7]]) == (0, 0)


def test_a_step_done_twice_and_one_left_out_are_counted() -> None:
    steps = epoch()
    steps[5] = steps[4]
    assert lost_samples(steps) == (GLOBAL_BATCH, GLOBAL_BATCH)
    steps = epoch()
    steps[3] = steps[3][:-2]  # a rank whose samples are missing
    assert lost_samples(steps) == (2, 0)


def test_steps_that_were_done_again_count_once() -> None:
    """A host is lost in step 35, and the ranks go on from the checkpoint of step 20: as many, or fewer."""
    for num_ranks in (NUM_RANKS, 6):
        found = rows(11, 1, 35) + rows(12, 21, 60, num_ranks, begins=100.0)
        assert lost_samples(kept_samples(found, 60)) == (0, 0)
    planted = [row for row in found if (row.attempt, row.rank, row.step) != (12, 3, 33)]
    assert lost_samples(kept_samples(planted, 60)) == (8, 0)
    fifth = rows(12, 5, 5, 6)
    again = [
        row._replace(samples=fifth[row.rank].samples) if (row.attempt, row.step) == (12, 33) else row for row in found
    ]
    assert lost_samples(kept_samples(again, 60)) == (GLOBAL_BATCH, GLOBAL_BATCH)


def test_a_host_that_is_lost_before_it_writes_down_a_step_loses_no_sample(tmp_path: Path) -> None:
    """Its step is in no checkpoint: it is done again, or the run ends before, and it does not count.

    A count of all steps that rank 0 had recorded, and not of those that a checkpoint holds, found 12 samples lost here.
    """
    found = [row for row in rows(11, 1, 36) if row.step < 36 or row.rank < 6]
    assert lost_samples(kept_samples(found, 36)) == (12, 0)
    assert lost_samples(kept_samples(found, 20)) == (0, 0)
    for row in found:
        with (tmp_path / f"diary-{row.rank}").open("a") as file:
            file.write(f"{row.step} {row.at} {row.attempt} {','.join(map(str, row.samples))}\n")
    with (tmp_path / "diary-7").open("a") as file:
        file.write("36 36.0 11 1729,17")  # cut off by the kill
    assert sorted(diaries(tmp_path)) == sorted(found)


def settings(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"minutes": 20.0, "every": (45.0, 75.0), "repair": 8.0, "seed": 1, "at_a_time": 1, **changes}
    )


def saved_step(folder: Path) -> int:
    """The last step that is saved, by the names alone: a running job removes older checkpoints meanwhile."""
    found = (folder / "runs" / "kills" / "checkpoints").glob("step-*/manifest.json")
    return max((int(path.parent.name[5:]) for path in found), default=0)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.is_ours])
def test_no_sample_is_lost_or_comes_twice(tmp_path: Path, name: str) -> None:
    """A host is lost whenever some more steps are saved, three times; over more than one epoch."""
    way, never = WAYS[name], 1e9
    with kills.hosts_of(kills.kind_of_hosts(), tmp_path, way.num_hosts) as hosts:
        lane = kills.Lane(way, hosts, settings(every=(never, never)))
        for num_kills, steps in enumerate((30, 60, 90, 130)):
            while saved_step(tmp_path) < steps or lane.num_kills < num_kills:
                lane.due = 0.0 if lane.num_kills < num_kills else never  # one that meets nothing is tried again
                lane.look(time.monotonic())
                time.sleep(0.2)
        assert lane.stop() == ""
    found = kills.measured(way, tmp_path, 1.0)
    assert lane.endings == []
    assert found["steps_kept"] >= 130
    assert (found["samples_lost"], found["samples_twice"]) == (0, 0)
    for path in tmp_path.glob("diary-5"):  # a planted loss: what one rank did in one step
        lines = path.read_text().splitlines(keepends=True)
        step = max(int(line.split()[0]) for line in lines if int(line.split()[0]) <= found["steps_kept"])
        path.write_text("".join(line for line in lines if line.split()[0] != str(step)))
    assert kills.measured(way, tmp_path, 1.0)["samples_lost"] > 0


def test_the_table_is_written_from_the_result(tmp_path: Path) -> None:
    way = {
        "kills": 18, "goodput": 0.875, "steps_kept": 7410, "steps_done_again": 301, "step_seconds": 0.1337,
        "samples_lost": 0, "samples_twice": 0, "final_loss": 0.0123, "started_again_by_hand": 2,
        "hosts": kills.LOOPBACK,
    }  # fmt: skip
    document = {
        "command": "python -m benchmarks.kills --at-a-time 4", "time": "2026-11-17T15:00:00+00:00",
        "settings": kills.settings_of(settings(minutes=20.0, at_a_time=4)),
        "machine": {"cpu": "some CPU", "cores": 16}, "versions": {"torch": "2.13.0"}, "ways": {"ours, fewer": way},
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{kills.BEGIN}\nold\n{kills.END}\nafter\n")
    kills.write_tables([tmp_path / "result.json"], page)
    text = page.read_text()
    assert "| ours, fewer | 18 | 2 | 87.5% | 7,410 | 301 | 0.134 | 0 | 0 | 0.0123 |" in text
    assert "(loopback addresses)" in text
    assert "4 ways at a time" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_random_kills_find_whatever_differs() -> None:
    steps = [{"step": 1, "loss": 1.0, "grad_norm": 2.0}, {"step": 2, "loss": 1.0, "grad_norm": None}]
    whole = Outcome({"weight": "a", "bias": "b"}, steps)
    assert whole.differences(Outcome(dict(whole.tensors), [{**steps[0], "grad_norm": None}, steps[1]])) == []
    other = Outcome({"weight": "a", "bias": "c"}, [{**steps[0], "grad_norm": 2.5}, {**steps[1], "loss": 1.5}])
    words = ["bias", "grad_norm of step 1: 2.0, and 2.5", "loss of step 2: 1.0, and 1.5"]
    assert sorted(whole.differences(other)) == words
    assert whole.differences(Outcome({"weight": "a"}, steps[:1])) == ["bias", "2 steps, and 1"]

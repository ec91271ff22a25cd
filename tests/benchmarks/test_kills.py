"""The count of samples that a run with lost machines missed or had twice."""

from benchmarks.kills import lost_samples
from benchmarks.kills_job import GLOBAL_BATCH, NUM_SAMPLES


def epoch() -> list[list[int]]:
    return [list(range(start, start + GLOBAL_BATCH)) for start in range(0, NUM_SAMPLES, GLOBAL_BATCH)]


def test_whole_epochs_and_a_begun_one_lose_nothing() -> None:
    assert lost_samples([*epoch(), *epoch()[::-1], *epoch()[:7]]) == (0, 0)


def test_a_step_done_twice_and_one_left_out_are_counted() -> None:
    steps = epoch()
    steps[5] = steps[4]
    assert lost_samples(steps) == (GLOBAL_BATCH, GLOBAL_BATCH)
    steps = epoch()
    steps[3] = steps[3][:-2]  # a rank whose samples are missing
    assert lost_samples(steps) == (2, 0)

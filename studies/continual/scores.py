"""Scores of a matrix of accuracies: row i is after task i was trained on, column j is of the test set of task j."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Scores:
    accuracy: float  # mean over all tasks, after the last
    learned: float  # mean over tasks of the accuracy right after each was trained on
    forgetting: float  # mean over all but the last: best since it was trained on, before the last task, less the end's
    backward_transfer: float  # mean over all but the last: the end's less that right after it was trained on
    retention: float  # mean over all but the last: the end's as a part of that best
    over_time: tuple[float, ...]  # after each task: mean over the tasks so far


def scores_of(matrix: Sequence[Sequence[float]]) -> Scores:
    last = matrix[-1]
    # A task counts from when it was trained on: before, its accuracy is chance. The end itself is no best of before.
    bests = [max(row[task] for row in matrix[task:-1]) for task in range(len(matrix) - 1)]
    ends = last[: len(bests)]
    return Scores(
        accuracy=fmean(last),
        learned=fmean(row[task] for task, row in enumerate(matrix)),
        forgetting=_mean(best - end for best, end in zip(bests, ends, strict=True)),
        backward_transfer=_mean(end - matrix[task][task] for task, end in enumerate(ends)),
        retention=_mean((end / best if best else 1.0) for best, end in zip(bests, ends, strict=True)) if bests else 1.0,
        over_time=tuple(fmean(row[: task + 1]) for task, row in enumerate(matrix)),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0

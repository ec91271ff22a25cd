"""What a matrix of accuracies says, against values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies.continual.scores import Scores, scores_of

# Rows: after task 1, 2, 3. Columns: accuracy on task 1, 2, 3. The first task is best remembered after the second.
MATRIX = [
    [0.90, 0.20, 0.10],
    [0.95, 0.80, 0.15],
    [0.60, 0.70, 0.85],
]


def test_by_hand() -> None:
    found = scores_of(MATRIX)
    assert found.accuracy == pytest.approx((0.60 + 0.70 + 0.85) / 3)
    assert found.learned == pytest.approx((0.90 + 0.80 + 0.85) / 3)
    assert found.forgetting == pytest.approx(((0.95 - 0.60) + (0.80 - 0.70)) / 2)
    assert found.backward_transfer == pytest.approx(((0.60 - 0.90) + (0.70 - 0.80)) / 2)
    assert found.retention == pytest.approx((0.60 / 0.95 + 0.70 / 0.80) / 2)
    assert found.over_time == pytest.approx((0.90, (0.95 + 0.80) / 2, (0.60 + 0.70 + 0.85) / 3))


def test_what_was_known_before_it_was_taught_is_not_forgotten() -> None:
    """Accuracy on a task before it was trained on is chance: it does not count as a best."""
    assert scores_of([[0.5, 0.9, 0.1], [0.5, 0.6, 0.1], [0.5, 0.6, 0.4]]).forgetting == pytest.approx(0.0)


def test_a_task_that_gets_better_later_is_negative_forgetting() -> None:
    assert scores_of([[0.5, 0.1], [0.7, 0.9]]).forgetting == pytest.approx(-0.2)
    assert scores_of([[0.5, 0.1], [0.7, 0.9]]).backward_transfer == pytest.approx(0.2)


def test_one_task_has_nothing_to_forget() -> None:
    assert scores_of([[0.75]]) == Scores(0.75, 0.75, 0.0, 0.0, 1.0, (0.75,))


def test_nothing_learnt_is_nothing_kept() -> None:
    assert scores_of([[0.0, 0.0], [0.0, 0.5]]).retention == 1.0


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=n, max_size=n)))  # fmt: skip  # noqa: E501
def test_bounds(matrix: list[list[float]]) -> None:
    found = scores_of(matrix)
    assert 0 <= found.accuracy <= 1
    assert -1 <= found.backward_transfer <= 1
    assert found.forgetting >= -found.backward_transfer - 1e-12  # the best is at least what it was when taught
    assert len(found.over_time) == len(matrix)
    assert math.isclose(found.over_time[-1], found.accuracy, abs_tol=1e-12)

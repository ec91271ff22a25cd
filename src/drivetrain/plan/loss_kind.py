"""Determines what kind of loss a scalar is, judged from gradients: a batch's gradient against those of its parts.

A batch is cut into three unequal parts. Where its gradient g is a sum Σ αᵢ gᵢ of the parts' gradients, the factors α
tell how the loss weights its parts: nᵢ/n for a mean over samples, 1 for a sum, cᵢ/c for a mean over what a count c
counts. Where no α fits, samples of the batch influence each other. This file only judges: the inner products of the
gradients come in as numbers.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from drivetrain.core.value import Value

# In fp32 the right factors fit to 6e-7, and the nearest wrong count to 5e-3.
TOLERANCE = 1e-5
FLOORS = 30  # rounding errors of a batch in another order that may be taken for rounding
MOST_TOLERANCE = 1e-3  # beyond it, rounding hides what is looked for

Kind = Literal["samples", "sum", "count", "weighted", "coupled", "unknown"]


class Finding(Value):
    """The kind of a loss that follows from its gradients."""

    kind: Kind
    counts: tuple[int, ...] = ()  # numbers of the counts that explain it (`samples`: as well), the likeliest first
    residual: float = float("nan")  # of the explanation, relative to the gradient


def judge(
    products: Sequence[Sequence[float]],
    sizes: Sequence[int],
    counts: Sequence[Sequence[float]] = (),
    tolerance: float = TOLERANCE,
) -> Finding:
    """Judge a loss by its gradients.

    Args:
        products: inner products of the gradients of the whole batch (row 0) and of its parts (the rows after it).
        sizes: how many samples each part has.
        counts: for each candidate, what it counts in each part.
        tolerance: the largest residual that counts as rounding.
    """
    matrix = np.array(products, dtype=np.float64)
    if not np.isfinite(matrix).all() or not matrix[0, 0] > 0:
        return Finding(kind="unknown")
    by_samples = _residual(matrix, _shares(sizes))
    by_sum = _residual(matrix, np.ones(len(sizes)))
    by_count = [_residual(matrix, _shares(each)) if sum(each) > 0 else np.inf for each in counts]
    fitting = tuple(number for number, residual in enumerate(by_count) if residual <= tolerance)
    if by_samples <= tolerance:
        return Finding(kind="samples", counts=fitting, residual=by_samples)
    if fitting:
        return Finding(kind="count", counts=fitting, residual=by_count[fitting[0]])
    if by_sum <= tolerance:
        return Finding(kind="sum", residual=by_sum)
    factors, *_ = np.linalg.lstsq(matrix[1:, 1:], matrix[1:, 0], rcond=1e-12)
    free = _residual(matrix, factors)
    if free <= tolerance and abs(factors.sum() - 1) <= 1e-3:
        return Finding(kind="weighted", residual=free)
    return Finding(kind="coupled", residual=min(by_samples, by_sum, free, *by_count))


def _shares(counts: Sequence[float]) -> np.ndarray:
    values = np.array(counts, dtype=np.float64)
    shares: np.ndarray = values / values.sum()
    return shares


def _residual(matrix: np.ndarray, factors: np.ndarray) -> float:
    """Return the norm of the batch's gradient minus the weighted sum of its parts', relative to the former."""
    left = matrix[0, 0] - 2 * factors @ matrix[1:, 0] + factors @ matrix[1:, 1:] @ factors
    return float(np.sqrt(max(left, 0.0) / matrix[0, 0]))

"""Decides how a job's scalar losses are weighted when micro-batches and ranks are combined, with the reason.

The kind of a loss is judged from gradients. A batch is cut into three unequal parts. Where its gradient g is a sum
Σ αᵢ gᵢ of the parts' gradients, the factors α tell how the loss weights its parts: nᵢ/n for a mean over samples, 1 for
a sum, cᵢ/c for a mean over what a count c counts. Where no α fits, samples of the batch influence each other. This file
only judges: the inner products of the gradients come in as numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.metrics import Logged, LossSum, UndividedLoss
from drivetrain.core.value import Value
from drivetrain.data.batch import Count

# In fp32 the right factors fit to 6e-7, and the nearest wrong count to 5e-3.
TOLERANCE = 1e-5
FLOORS = 30  # rounding errors of a batch in another order that may be taken for rounding
MOST_TOLERANCE = 1e-3  # beyond it, rounding hides what is looked for

Kind = Literal["samples", "sum", "count", "weighted", "divided", "coupled", "unknown"]


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


By = Literal["samples", "tokens", "sum"]


class Other(Value):
    """Another count that explained the loss as well, and what it counted for each item of the chosen one."""

    count: Count
    ratio: float


class Weighting(Value):
    """The rule by which losses of micro-batches become the loss of a step. A `LossSum` needs none and is left alone."""

    by: By = "samples"
    count: Count | None = None  # with `tokens`: what the loss is a mean over
    others: tuple[Other, ...] = ()  # what explains the loss as well on the samples seen so far
    holds_division: str = ""  # why the micro-batch is part of what is learned; empty if it may be tuned
    reason: str = ""
    notes: tuple[str, ...] = ()  # what is to be said of the loss besides

    def weigh(self, result: Any, batch: Any) -> Any:
        """Turn what the loss function returned into a term of the step's sum."""
        if self.by == "samples" or not isinstance(result, Tensor):
            return result
        if self.count is None:
            return UndividedLoss(result)
        count = self.count.of(batch).to(result.device)
        # A batch that counts nothing has 0/0 for its loss, and contributes nothing.
        return LossSum(torch.where(count > 0, result * count, torch.zeros_like(result)), count)

    def counts_nothing(self, batch: Any) -> bool:
        """Tell whether a batch on the host has none of what the loss is a mean over."""
        return self.count is not None and self.count.is_zero(batch)

    def is_unambiguous(self, batch: Any, num_samples: int) -> bool:
        """Tell whether every explanation that is left weights this batch alike."""
        chosen = num_samples if self.count is None else self.count.number(batch)
        return all(_are_close(other.count.number(batch), chosen * other.ratio) for other in self.others)

    def ambiguous_samples(self, batch: Any) -> Tensor:
        """Find the samples of a batch, by their rows, that the explanations that are left weight differently."""
        found = [
            other.count.by_sample(batch).double()
            - other.ratio * (1.0 if self.count is None else self.count.by_sample(batch).double())
            for other in self.others
        ]
        return torch.stack(found).abs().amax(0).gt(1e-6).nonzero().flatten()

    def without(self, before: "Weighting", *, closed: bool) -> "Weighting":
        """Return the same rule with only those explanations open that were open before, too; or with none."""
        if closed:
            return self.closed()
        open_before = {before.count, *(other.count for other in before.others)}
        return self.model_copy(update={"others": tuple(other for other in self.others if other.count in open_before)})

    def closed(self) -> "Weighting":
        """Return the same rule with nothing left to look for."""
        return self.model_copy(update={"others": ()})

    def __str__(self) -> str:
        return {"samples": "by samples", "tokens": f"by {self.count}", "sum": "as a sum"}[self.by]


class LossRule:
    """Holds the weighting of a run, which may change while explanations are open."""

    def __init__(self, weighting: Weighting) -> None:
        self.weighting = weighting

    def around(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Weight what a loss function returns; the function itself where nothing is left to be done."""
        if self.weighting.by == "samples" and not self.weighting.others:
            return loss

        def weighted_loss(model: Any, batch: Any) -> Any:
            result, weighting = loss(model, batch), self.weighting
            if weighting.by == "samples":
                return result
            if isinstance(result, Logged):
                return result._replace(result=weighting.weigh(result.result, batch))
            return weighting.weigh(result, batch)

        return weighted_loss


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(1.0, abs(one), abs(other))


def weighting_of(
    finding: Finding, counts: Sequence[Count], totals: Sequence[float], num_samples: int, couples: str = ""
) -> Weighting:
    """Decide how a loss is weighted from what its gradients say.

    Args:
        finding: what kind of loss the gradients show.
        counts: the counts that explain it, the likeliest first.
        totals: what each of them counts in the batch that was measured.
        num_samples: how many samples that batch has.
        couples: why the model couples the samples of a batch (batch normalization), if it does.
    """
    if finding.kind == "samples":
        return Weighting(
            others=_others(counts, totals, num_samples, shifted=False),
            holds_division=couples,
            reason="a mean over samples",
        )
    if finding.kind == "count":
        return Weighting(
            by="tokens",
            count=counts[0],
            others=_others(counts[1:], totals[1:], totals[0], shifted=True),
            holds_division=couples,
            reason=f"a mean over {counts[0]}, not over samples",
        )
    if finding.kind == "sum":
        return Weighting(by="sum", holds_division=couples, reason="a sum over the batch, not a mean")
    reason = _REASONS[finding.kind]
    return Weighting(holds_division=couples or reason, reason=reason)


_REASONS = {
    "weighted": "the loss is a weighted mean whose weights match no count in the batch (it computes them, for example)",
    "divided": "the loss divides a sum over all samples by a count of some (the positive ones, for example)",
    "coupled": "the loss is not a mean or a sum over samples: it couples the samples of a batch, or adds means over "
    "different items, or terms that belong to no sample",
    "unknown": "how the loss weights its samples could not be found out",
}


def _others(counts: Sequence[Count], totals: Sequence[float], chosen: float, *, shifted: bool) -> tuple[Other, ...]:
    """Return what later batches are compared by. Shifted variants of one tensor differ where the tensor itself does."""
    return tuple(
        Other(count=count, ratio=total / chosen)
        for count, total in zip(counts, totals, strict=True)
        if shifted or count.part == "all"
    )

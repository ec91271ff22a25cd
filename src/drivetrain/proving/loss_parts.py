"""Computes a loss on one undivided batch, from its documentation alone: a scalar, a sum by its count, or named parts.

Nothing here is shared with the trainer. A part is the mean over its own items: those that `Job.count` counts, those of
its `LossSum`, else the samples. Their weighted sum is the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.loss import LossSum
from drivetrain.job import Job

WHOLE = ""  # the name of a loss that has no named parts
AUXILIARY = "auxiliary loss"  # what mixtures of experts add to named parts


@dataclass(frozen=True)
class PartMean:
    """One part of a loss on one batch.

    Attributes:
        mean: the mean over its items; 0 where there are none.
        count: the number of its items; None: it is divided by samples.
        is_late: whether only the forward tells the count.
    """

    mean: Tensor
    count: float | None = None
    is_late: bool = False


def part_means(job: Job, result: Any, batch: Any) -> dict[str, PartMean]:
    """Split what a loss function returned for a batch into the means of its parts."""
    if not isinstance(result, Mapping):
        return {WHOLE: PartMean(result.total / result.count if isinstance(result, LossSum) else result)}
    counts: Mapping[str, Any] = {} if job.count is None else job.count(batch)
    return {name: _mean(part, counts.get(name)) for name, part in result.items()}


def _mean(part: Tensor | LossSum, counted: Any) -> PartMean:
    if isinstance(part, LossSum):
        number = float(part.count if counted is None else counted)
        return PartMean(_unless_empty(part.total, number) / (number or 1.0), number, counted is None)
    if counted is None:
        return PartMean(part)
    return PartMean(_unless_empty(part, float(counted)), float(counted))


def _unless_empty(value: Tensor, number: float) -> Tensor:
    """Return the value; a zero that still depends on the weights where there are no items and the mean is 0/0."""
    return torch.where(torch.full_like(value, number > 0, dtype=torch.bool), value, torch.zeros_like(value))


def part_weight(job: Job, name: str, step: int) -> float:
    """Return the weight of a part after `step` steps."""
    weight = (job.loss_weights or {}).get(name, 1.0)
    return float(weight(step)) if callable(weight) else float(weight)


def weighted_sum(job: Job, parts: Mapping[str, PartMean], step: int) -> Tensor:
    """Return the loss of a batch: its parts' means, weighted and added up."""
    terms = [part.mean * part_weight(job, name, step) if name else part.mean for name, part in parts.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total

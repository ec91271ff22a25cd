"""What losses and metrics return besides a scalar, and sums and counts of it, exact where they are whole numbers.

A loss may return a sum with its count, or named parts of either kind. Of a validation metric each rank counts its own
samples; the global result is the sum over ranks. Nothing is averaged twice, so the result does not depend on how the
samples were divided.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.widths import widened
from drivetrain.core.world import World


@dataclass(frozen=True)
class LossSum:
    """A loss summed over items (tokens, pixels, pairs), and their number.

    The loss of a step is the sum over all items of its global batch (all micro-batches, all ranks) divided by their
    number: not a mean of means. The items that a plain scalar is a mean of are determined before the first step.

    Args:
        total: The sum over the items of a batch, a scalar tensor.
        count: How many items there are.

    Example:
        >>> def loss(model, batch):
        ...     losses = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        ...     return dt.LossSum(losses.sum(), losses.numel())
        >>> loss(torch.nn.Linear(4, 3), [torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)]).count
        8
    """

    total: Tensor
    count: Tensor | float


@dataclass(frozen=True)
class UndividedLoss:
    """A loss that is added up over the micro-batches and ranks of a step and divided by nothing.

    Loss functions do not return it: a scalar that was found to be a sum over its batch is turned into one.
    """

    total: Tensor


NamedLosses = Mapping[str, Tensor | LossSum]
LossWeight = float | Callable[[int], float]  # of a part; a function gets the number of steps done
PartCounts = Mapping[str, Tensor | float]
CountFunction = Callable[[object], PartCounts]


def summed_by_count(parts: NamedLosses, counts: PartCounts) -> dict[str, Tensor | LossSum]:
    """Turn the means whose items are counted into sums over these items."""
    return {name: _summed(part, counts[name]) if name in counts else part for name, part in parts.items()}


def _summed(part: Tensor | LossSum, count: Tensor | float) -> Tensor | LossSum:
    if not isinstance(part, Tensor):
        return part
    if part.dtype in (torch.bfloat16, torch.float16):
        part = part.float()  # a count does not fit into these
    if isinstance(count, Tensor):
        count = count.detach().to(part.device, part.dtype, non_blocking=True)
        # The mean over no items is 0/0: it contributes nothing.
        return LossSum(torch.where(count > 0, part * count, torch.zeros_like(part)), count)
    if count:
        return LossSum(part * count, count)
    # Still a function of the weights, with a gradient of zero: DDP waits for the gradient of every weight.
    never = torch.zeros_like(part, dtype=torch.bool)
    return LossSum(torch.where(never, part, torch.zeros_like(part)), count)


MetricFunction = Callable[[Any, Any], Tensor | LossSum]


@runtime_checkable
class MetricObject(Protocol):
    """A metric object as in torchmetrics: updated batch by batch, with its own reduction over ranks."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


class Counted(NamedTuple):
    """A sum and the number of items it is over, on the host. Whole numbers are `int`, however large."""

    total: int | float
    num_items: int | float


class Tally:
    """Accumulates one metric on one rank. Adds on the device, so that the host does not wait for each batch."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._totals: list[Tensor] = []
        self._counts: list[Tensor | float] = []
        self._kind: Literal["whole", "real"] | None = None

    def add(self, value: Tensor | LossSum | UndividedLoss, num_samples: int) -> None:
        """Add a mean over the batch's samples, a `LossSum`, or a tensor with one entry (number or boolean) per item.

        An undivided loss is reported per sample: its sum over the whole set would depend on the size of the set.
        """
        if isinstance(value, LossSum):
            total, count = value.total, value.count
            self._check_scalar(total)
        elif isinstance(value, UndividedLoss):
            total, count = widened(value.total), num_samples
        elif not isinstance(value, Tensor):
            raise DrivetrainError(
                f"the metric {self._name!r} returned {type(value).__name__}, expected a tensor or a LossSum",
                remedy="return a tensor (a mean over the batch, or an entry per item), or dt.LossSum(sum, count)",
            )
        elif value.dim() or not value.is_floating_point():
            total, count = value.detach(), value.numel()
            total = widened(total).sum() if value.is_floating_point() else total.long().sum()
        else:
            total, count = widened(value) * num_samples, num_samples
        kind: Literal["whole", "real"] = "real" if total.is_floating_point() else "whole"
        if self._kind not in (None, kind):
            raise DrivetrainError(
                f"the metric {self._name!r} counts in whole numbers on one batch and in real ones on another",
                remedy="return the same type for every batch",
            )
        self._kind = kind
        self._totals.append(widened(total.detach()) if kind == "real" else total.detach().long())
        self._counts.append(count.detach() if isinstance(count, Tensor) else count)

    def read(self) -> Counted | None:
        """Return the sum and count, or None if nothing was added. The host waits for the device here."""
        if not self._totals:
            return None
        total = torch.stack(self._totals).sum().item()
        return Counted(total, sum(count.item() if isinstance(count, Tensor) else count for count in self._counts))

    def _check_scalar(self, total: Any) -> None:
        if not isinstance(total, Tensor) or total.dim():
            shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise DrivetrainError(
                f"the metric {self._name!r} returned a LossSum whose total is {shape}, not a scalar",
                remedy="sum it, or give a metric of its own for each entry",
            )


def over_all_ranks(counted: Mapping[str, Counted | None], world: World) -> dict[str, float]:
    """Return each metric over all ranks' samples; bitwise equal on every rank, as the sums are made in one order."""
    by_rank: list[dict[str, list[int | float] | None]] = world.gather(
        {name: None if found is None else list(found) for name, found in counted.items()}
    )
    names = list(by_rank[0])
    for rank, found in enumerate(by_rank):
        if list(found) != names:
            raise DrivetrainError(
                f"rank 0 has the metrics {', '.join(names)} and rank {rank} has {', '.join(found)}",
                remedy="give the same metrics on every rank",
            )
    return {name: _quotient(name, [found[name] for found in by_rank]) for name in names}


def _quotient(name: str, by_rank: Sequence[Sequence[int | float] | None]) -> float:
    seen = [(rank, found) for rank, found in enumerate(by_rank) if found is not None]
    kinds = {isinstance(found[0], int): rank for rank, found in seen}
    if len(kinds) > 1:
        raise DrivetrainError(
            f"the metric {name!r} counts whole numbers on rank {kinds[True]} and real ones on rank {kinds[False]}",
            remedy="return the same type on every rank",
        )
    totals, counts = [found[0] for _, found in seen], [found[1] for _, found in seen]
    total = sum(totals) if kinds.get(True) is not None else _sum(totals)
    count = _sum(counts)
    return total / count if count else math.nan


def _sum(values: Sequence[int | float]) -> int | float:
    """Sum whole numbers exactly; others as if added without rounding, unless one is not finite."""
    if all(isinstance(value, int) for value in values):
        return sum(values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def flattened(name: str, value: Any) -> dict[str, float]:
    """Turn the result of a metric object into named numbers: a number, a dictionary of them, or a few in a tensor."""
    if isinstance(value, Mapping):
        return {
            key: number for inner, part in value.items() for key, number in flattened(f"{name}_{inner}", part).items()
        }
    if isinstance(value, Tensor) and value.dim():
        return {f"{name}_{index}": float(part) for index, part in enumerate(value.flatten().tolist())}
    return {name: float(value)}

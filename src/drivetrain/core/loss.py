"""Return types of loss functions besides a scalar: a sum with its count, or named parts of either kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """A loss summed over items (tokens, pixels, pairs), and their number.

    The loss of a step is the sum over all items of its global batch (all micro-batches, all ranks) divided by their
    number: not a mean of means. The items that a plain scalar is a mean of are determined before the first step.
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

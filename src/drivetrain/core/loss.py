"""What a loss function returns when its items are not samples: a sum, and how many items it is over."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """A loss summed over items (tokens, pixels, pairs), and their number.

    The loss of a step is the sum over all items of its global batch (all micro-batches, all ranks) by their number:
    not a mean of means. What a plain scalar is a mean of is measured before the first step.
    """

    total: Tensor
    count: Tensor | float


@dataclass(frozen=True)
class UndividedLoss:
    """A loss that is added up over the micro-batches and ranks of a step and divided by nothing.

    Loss functions do not return it: a scalar that was found to be a sum over its batch is turned into one.
    """

    total: Tensor

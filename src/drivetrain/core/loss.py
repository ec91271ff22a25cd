"""What a loss function returns when its items are not samples: a sum, and how many items it is over."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """A loss summed over items (tokens, pixels, pairs), and their number.

    The loss of a step is the sum over all items of its global batch (all micro-batches, all ranks) by their number:
    not a mean of means. A plain scalar is taken as the mean over the samples of its batch.
    """

    total: Tensor
    count: Tensor | float

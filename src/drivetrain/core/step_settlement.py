"""What layers of a model do at the end of a step, beside the optimizer: a strategy calls it and knows no such layer.

A mixture of experts sums the loads of its experts over all ranks, moves their biases, and has losses of its own.
"""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn


class StepSettlement(Protocol):
    """Settles a step for all layers of a kind in one model."""

    group: dist.ProcessGroup | None  # of the ranks that share a step; set by the strategy

    def take_auxiliary(self) -> Tensor | None:
        """Hand over the losses that the last forward left, to be added to a mean loss; None if there are none."""

    def settle(self) -> None:
        """End a step, on all ranks together. The host does not wait."""

    def forget(self) -> None:
        """Drop what was counted since the last step: it is not part of one."""


class NoSettlement:
    """Does nothing, in a model without such layers."""

    group: dist.ProcessGroup | None = None

    def take_auxiliary(self) -> Tensor | None:
        return None

    def settle(self) -> None:
        pass

    def forget(self) -> None:
        pass


def settlement_of(model: nn.Module) -> StepSettlement:
    """Return the settlement of a model: what the class of a layer makes, if it has `make_settlement(model)`."""
    for module in model.modules():
        make = getattr(type(module), "make_settlement", None)
        if make is not None:
            made: StepSettlement = make(model)
            return made
    return NoSettlement()

"""Collectives over sharded gradients: global norm, inf flag, loss sums. All ranks call these together."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.world import World


def norm_over_ranks(parts: Iterable[Tensor], world: World, dtype: torch.dtype) -> Tensor:
    """Return the norm of all gradients of all ranks, from each rank's own parts."""
    gradients = [part.grad for part in parts if part.grad is not None and part.numel()]
    own = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    squared = own.to(world.device, torch.float64).square()
    dist.all_reduce(squared, group=world.group)
    return squared.sqrt().to(dtype)


def share_infinities(found: Iterable[Tensor], world: World) -> None:
    """Set the inf flag on all ranks if it is set on one: a step is skipped by all or by none."""
    for flag in found:
        dist.all_reduce(flag, dist.ReduceOp.MAX, world.group)


class Sums:
    """Loss sum, count and stop requests over all ranks: sent before backward, taken after it, so that no rank waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.stop = False  # this rank's wish, which travels with the next sums
        self._sums: Tensor | None = None
        self._on_its_way: dist.Work | None = None

    def send(self, losses: Iterable[tuple[Tensor, float]], count: Tensor | float) -> None:
        """Start the all-reduce, in float64: counts stay exact, and sums are as good as the losses they are made of."""
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        for value, factor in losses:
            self._sums[0] += value.double() * factor
        self._sums[1] += count
        self._sums[2] += float(self.stop)
        if self._world.group is not None:
            self._on_its_way = dist.all_reduce(self._sums, group=self._world.group, async_op=True)

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss sum, count, and how many ranks want to stop."""
        assert self._sums is not None, "backward comes before step"
        if self._on_its_way is not None:
            self._on_its_way.wait()  # of the stream, on a GPU; elsewhere backward took longer than three numbers do
        total, count, stopping = self._sums.unbind()
        self._sums = self._on_its_way = None
        return total, count, stopping

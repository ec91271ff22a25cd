"""What gradients come to of which every rank has a part. All ranks call these together."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.world import World


def norm_over_ranks(parts: Iterable[Tensor], world: World, dtype: torch.dtype) -> Tensor:
    """The norm of all gradients of all ranks, from each rank's own parts."""
    gradients = [part.grad for part in parts if part.grad is not None and part.numel()]
    own = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    squared = own.to(world.device, torch.float64).square()
    dist.all_reduce(squared, group=world.group)
    return squared.sqrt().to(dtype)


def share_infinities(found: Iterable[Tensor], world: World) -> None:
    """1 on all ranks where it is on one: a step is skipped by all or by none."""
    for flag in found:
        dist.all_reduce(flag, dist.ReduceOp.MAX, world.group)

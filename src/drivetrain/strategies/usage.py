"""Tracks which weights a step of a sharded model used.

A plain loop leaves the gradient of an unused weight at None, and the optimizer does not touch it. A gradient of zero is
not the same: weight decay and momentum still move the weight. So ranks agree on what none of them used.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import is_distributed
from drivetrain.core.world import World
from drivetrain.strategies.sharding import Sharded


class Usage:
    """Records, per step, which weights got a gradient from samples that count. All ranks call everything together.

    With `reduces_unused`, torch gives every unused shard a gradient of zero, so use is seen by hooks on the gathered
    weights. Without it, all ranks must use the same weights in every step, which `refuse_unequal` checks: torch packs
    only the gradients that exist, and would add those of one weight to those of another.
    """

    def __init__(self, sharded: Sharded, world: World) -> None:
        self._world, self._reduces_unused = world, sharded.options.reduces_unused
        self.counts = True  # whether the samples of this micro-step do
        self._used: set[str] = set()
        self._cut = {name: tensor for name, tensor in sharded.parameters.items() if tensor.requires_grad}
        whole = {name: tensor for name, tensor in sharded.replicated.items() if tensor.requires_grad}
        self._tracked: dict[str, Tensor] = {**(self._cut if self._reduces_unused else {}), **whole}
        self._gathered: dict[str, Tensor] = {}  # the weights that have a hook
        self._unused_first: list[str] | None = None  # by all ranks, in the first step
        for name, parameter in whole.items():
            self._watch(name, parameter)
        if self._reduces_unused:
            self._watch_units(sharded)

    def clear(self) -> None:
        self._used.clear()

    def unused_by_all(self) -> set[Tensor]:
        """Return the tracked weights that no rank used since the last `clear`."""
        if not self._tracked:
            return set()
        missing = [name for name in self._tracked if name not in self._used]
        if self._world.group is not None:
            flags = torch.tensor([name in self._used for name in self._tracked], dtype=torch.int32)
            flags = flags.to(self._world.collective_device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, self._world.group)
            if missing:
                # The host waits for the device: what is not used here may be used by others.
                found = dict(zip(self._tracked, flags.tolist(), strict=True))
                missing = [name for name in missing if not found[name]]
        return {self._tracked[name] for name in missing}

    def refuse_unequal(self) -> None:
        """Raise where ranks use different weights. In the first step ranks compare; later, each compares with that."""
        if self._reduces_unused or self._world.size == 1:
            return
        unused = [name for name, tensor in self._cut.items() if tensor.grad is None]
        if self._unused_first is None:
            for rank, others in enumerate(self._world.gather(unused)):
                if others != unused:
                    raise _unequal(sorted(set(others) ^ set(unused))[0], f"ranks {self._world.rank} and {rank} differ")
            self._unused_first = unused
        elif unused != self._unused_first:
            odd = sorted(set(unused) ^ set(self._unused_first))[0]
            raise _unequal(odd, f"rank {self._world.rank} uses other weights in this step than in the first one")

    def _watch(self, name: str, parameter: Tensor) -> None:
        if self._gathered.get(name) is parameter:
            return
        self._gathered[name] = parameter

        def note(_: Tensor) -> None:
            if self.counts:
                self._used.add(name)

        cast(Any, parameter).register_post_accumulate_grad_hook(note)

    def _watch_units(self, sharded: Sharded) -> None:
        """Register hooks on units: once gathered, their modules hold whole weights, and these get the gradients."""
        units = {
            name: m for name, m in sharded.model.named_modules() if any(m is unit for unit in sharded.fully_sharded)
        }
        by_unit: dict[str, list[str]] = {name: [] for name in units}
        for name in self._cut:
            inside = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
            by_unit[max(inside, key=len)].append(name)
        for unit, names in by_unit.items():
            if names:
                units[unit].register_forward_pre_hook(self._watching(sharded.model, names))

    def _watching(self, model: nn.Module, names: list[str]) -> Callable[[nn.Module, Any], None]:
        places = []
        for name in names:
            path, _, attribute = name.rpartition(".")
            places.append((name, model.get_submodule(path), attribute))

        def watch(_: nn.Module, __: Any) -> None:
            for name, module, attribute in places:
                parameter = module._parameters[attribute]
                if parameter is not None and parameter.requires_grad and not is_distributed(parameter):
                    self._watch(name, parameter)

        return watch


def _unequal(name: str, how: str) -> DrivetrainError:
    return DrivetrainError(
        f"{how} ({name} is used by one and not by the other), and fsdp would add the gradients of one weight to those "
        "of another",
        remedy="use every weight in every step, or --find-unused-parameters (torch 2.13 or newer), or "
        "--parallel-strategy ddp --find-unused-parameters",
    )

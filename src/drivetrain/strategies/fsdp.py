"""Fully sharded data parallel: every rank holds a shard of the weights, their gradients and the optimizer's state.

The model comes sharded (`sharding.shard`). Its optimizer holds plain tensors, this rank's parts, so its operations on
each element run at full speed, and on that element alone. What needs the whole, the norm that clips, is a sum over
ranks. Loss sum, count and stop request are all-reduced while backward runs, so a step does not wait for them.

A plain loop leaves the gradient of an unused weight at None, and the optimizer does not touch it. A gradient of zero is
not the same: weight decay and momentum still move the weight. So ranks agree on what none of them used (`Usage`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import StepOutcome
from drivetrain.core.plugins import Conflict
from drivetrain.core.state import Shard, TensorSource, is_distributed, local_part, put_away
from drivetrain.core.world import World
from drivetrain.strategies.base import Objective, ObjectiveCall, StrategyParts, Trial, rescaling, try_out
from drivetrain.strategies.replicated import load_whole_state, share_buffers, whole_state
from drivetrain.strategies.sharding import Sharded, Sums, norm_over_ranks, share_infinities
from drivetrain.strategies.spec import StrategyContext, StrategySpec


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


class FsdpStrategy:
    """One process per device; each gathers one block after the other, and keeps its own shard of each."""

    name = "fsdp"

    def __init__(self, world: World, sharded: Sharded) -> None:
        self._world, self._sharded = world, sharded

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        """Take the parts over. A trial without a batch is not run: in a user's own loop the batch is not known yet."""
        sharded = self._sharded
        held = set(parts.trained)
        owners = {part: owner for part, owner in sharded.owners.items() if part in held}
        self._parts = parts = replace(parts, owners=owners)
        whole = parts.of_all_turns  # has the scaler, which a copy of it would not share by itself
        self._saved = parts if whole is None else replace(whole, owners=sharded.owners, of_all_turns=whole)
        parts.mixtures.group = self._world.group
        self._replicated = [p for p in sharded.replicated.values() if p.requires_grad]
        self._objective = Objective(parts, scale=1.0)
        self._has_buffers = any(True for _ in parts.model.buffers())
        self._sums = Sums(self._world)
        self._begins, self._accumulates = True, False
        self._samples = 0
        self._usage = Usage(sharded, self._world)
        if trial.batch is not None:
            with _in_words():
                try_out(self._call, parts.model, trial)
            self._refuse_without_gradient(self._parts.owners.values())
            self._usage.refuse_unequal()
            self._objective.take_tallies()
            parts.forget_step()
            self._clear()
        return self._call

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        self._usage.counts = weight > 0
        if self._begins:
            self._begins, self._samples = False, step_samples
            if self._has_buffers and self._world.size > 1 and self._sharded.options.broadcast_buffers:
                share_buffers(self._parts.model, self._world)
        return self._objective.forward(batch, num_samples, step_samples, weight)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._accumulating()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        keeps_whole = self._sharded.options.accumulate == "whole"
        self._accumulates = True
        if keeps_whole:
            self._reduce_gradients(False)
        try:
            yield
        finally:
            self._accumulates = False
            if keeps_whole:
                self._reduce_gradients(True)

    def _reduce_gradients(self, wanted: bool) -> None:
        for module in self._sharded.fully_sharded:
            module.set_requires_gradient_sync(wanted, recurse=False)

    def backward(self, objective: Tensor) -> None:
        if not self._accumulates:
            self._sums.send(*self._objective.take_tallies())
        torch.autograd.backward(self._parts.scaler.scale(objective))

    def step(self, stop: float) -> StepOutcome:
        self._hand_over_gradients()
        total, count, stopping = self._sums.take()
        if self._objective.counts_items:
            self._rescale(rescaling(self._samples, count))
        norm, skipped = self._parts.update(None, self if self._world.size > 1 else None, [total])
        if norm is not None:
            norm = norm.to(self._world.device)  # offloaded gradients have theirs in host memory
        self._clear()
        self._sums.stop = stop  # travels with the next sums
        return self._parts.outcome([(total, 1.0)], count, stopping, norm, skipped)

    def _hand_over_gradients(self) -> None:
        """Give the optimizer the reduced shards, without a copy. Gradients of replicated parameters are summed here.

        A weight that no rank used keeps no gradient: an optimizer moves even those whose gradient is zero.
        """
        self._usage.refuse_unequal()
        unused = self._usage.unused_by_all()
        for part, owner in self._parts.owners.items():
            part.grad = None if owner.grad is None or owner in unused else local_part(owner.grad)
        if not unused:
            self._refuse_without_gradient(self._parts.owners)
        for parameter in self._replicated:
            if parameter in unused:
                parameter.grad = None
            elif self._world.group is not None:
                # A rank whose samples did not use it takes part all the same.
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient, group=self._world.group)
                parameter.grad = gradient

    def _refuse_without_gradient(self, cut: Iterable[Tensor]) -> None:
        """Raise if no sharded weight has a gradient. Replicated weights get theirs without torch's hooks."""
        trained = [tensor for tensor in cut if tensor.requires_grad]
        if trained and all(tensor.grad is None for tensor in trained):
            raise _no_gradient()

    def _rescale(self, factor: Tensor | float) -> None:
        """Rescale the gradients. Offloaded ones are in host memory, those of replicated parameters are not."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in self._parts.trained:
            if parameter.grad is not None:
                by_device.setdefault(parameter.grad.device, []).append(parameter.grad)
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)

    def _clear(self) -> None:
        for tensors in (self._parts.owners, self._sharded.parameters.values(), self._replicated):
            for tensor in tensors:
                tensor.grad = None
        self._usage.clear()
        self._begins = True

    # What is only known of all parts together

    def norm(self, parts: list[Tensor]) -> Tensor:
        """Return the norm of the gradients of all ranks; replicated gradients count once."""
        if not self._has_first_copy:
            parts = []
        elif not self._world.is_main:
            whole = set(self._replicated)
            parts = [part for part in parts if part not in whole]
        return norm_over_ranks(parts, self._world, self._parts.trained[0].dtype)

    def share_infinities(self, found: list[Tensor]) -> None:
        share_infinities(found, self._world)

    # Checkpoints

    @property
    def _has_first_copy(self) -> bool:
        """Whether this rank shares the first copy of the model: it speaks for the ranks of others."""
        return self._world.rank < self._world.size // self._sharded.options.replicas

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        """Return this rank's shards; on rank 0 also what all ranks have."""
        put_away(self._parts.model)
        shards, meta = whole_state(self._saved)
        return [shard for shard in shards if (shard.is_part and self._has_first_copy) or self._world.is_main], meta

    def load(self, source: TensorSource) -> None:
        put_away(self._parts.model)
        load_whole_state(self._saved, source)

    def close(self) -> None:
        pass


def _no_gradient() -> DrivetrainError:
    return DrivetrainError(
        "backward reached no weight: torch has lost the hook that it put on what the model returned",
        remedy="do not change the model's output in place: write y = y + 1, not y += 1",
    )


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" in str(error):
            raise DrivetrainError(
                "backward needs the weights of a block that were not gathered again: torch has lost the hook that it "
                f"put on what the block returned ({error})",
                remedy="do not change what a block returns in place: write x = x + y, not x += y; a loss that "
                "differentiates a gradient (torch.autograd.grad with create_graph=True) needs --parallel-strategy ddp",
            ) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise DrivetrainError(
            "a weight was used outside the forward of the module that holds it: with fsdp it is gathered only there, "
            f"and is a shard anywhere else ({error})",
            remedy="call the model, and its blocks, as modules; compute penalties on weights inside the model's "
            "forward; or use --parallel-strategy ddp",
        ) from error


def _make(context: StrategyContext) -> FsdpStrategy:
    assert context.sharded is not None, "the model is cut first"
    return FsdpStrategy(context.world, context.sharded)


SPEC = StrategySpec(
    make=_make,
    memory="shards",
    why_not_captured="fsdp: FSDP2 keeps events of its own streams from one module to the next, and a recording must "
    "not wait for one from outside of it (CUDA_ERROR_STREAM_CAPTURE_ISOLATION); not tried here",
    several_optimizers=True,
    options=(
        "distributed.fsdp_offload",
        "distributed.fsdp_cast",
        "distributed.fsdp_accumulate",
        "distributed.fsdp_reshard",
        "distributed.fsdp_unit_blocks",
        "distributed.fsdp_gather_ahead",
        "distributed.fsdp_replicas",
    ),
    conflicts=(
        Conflict(
            when={"distributed.fsdp_offload": True, "precision.dtype": "fp16"},
            message="steps the optimizer in host memory, and {asked} scales gradients on the GPU",
            at="distributed.fsdp_offload",
            asked="precision.dtype",
            remedy="use --precision bf16, or drop --fsdp-offload",
        ),
    ),
)

"""Balances the load of experts: a bias on the choice, auxiliary losses, and the end of a step, which settles loads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.moe.bounds import check_every
from drivetrain.moe.layer.mixture import MixtureOfExperts


def mixtures_in(model: nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the layers of a model that are mixtures of experts, by name; a layer with two names once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}


def refuse_too_many(max_experts: int | None, model: nn.Module, of: str) -> None:
    """Refuse more experts than any mixture of the model has slots for."""
    slots = max((layer.num_slots for layer in mixtures_in(model).values()), default=0)
    if max_experts is not None and 0 < slots < max_experts:
        raise DrivetrainError(
            f"{of}: max_experts is {max_experts}, and the model's mixtures have room for {slots}",
            remedy=f"give max_experts up to {slots}, or the MixtureOfExperts num_slots={max_experts}",
        )


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """Return the auxiliary losses of the last forward, to be added to a mean loss; None if there are none.

    It hands them over: a second call finds none. `train` and `drive` add those that the loss function has left.
    """
    return take_auxiliary(mixtures_in(model).values())


def take_auxiliary(layers: Iterable[MixtureOfExperts]) -> Tensor | None:
    found: Tensor | None = None
    for layer in layers:
        losses, layer.tally.losses = layer.tally.losses, []
        if losses:
            device = losses[0][0].device
            mean = torch.stack([value.to(device) for value, _ in losses]).sum() / sum(count for _, count in losses)
            found = mean if found is None else found + mean.to(found.device)
    return found


@dataclass(frozen=True)
class _Alike:
    """Layers with equally many slots, settled together: a few kernels for all of them, not for each."""

    layers: tuple[MixtureOfExperts, ...]
    rates: Tensor


class Settlement:
    """Ends a step for all mixtures of a model: sums loads over all ranks, and moves biases."""

    group: dist.ProcessGroup | None = None  # of the ranks that share a step; set by the strategy

    def __init__(self, model: nn.Module) -> None:
        layers = list(mixtures_in(model).values())
        self.layers: Sequence[MixtureOfExperts] = layers
        kinds = sorted({(layer.num_slots, str(layer.load.device)) for layer in layers})
        groups = [
            tuple(layer for layer in layers if (layer.num_slots, str(layer.load.device)) == kind) for kind in kinds
        ]
        self._groups = [
            _Alike(group, torch.tensor([[layer.balance.bias_rate] for layer in group], device=group[0].load.device))
            for group in groups
        ]

    def forget(self) -> None:
        """Drop the counts since the last step: they are not part of one."""
        for layer in self.layers:
            layer.tally.forget()

    @torch.no_grad()
    def settle(self) -> None:
        """Settle loads and biases; collective where there are several ranks, with equal results.

        The host does not wait.
        """
        for group in self._groups:
            layers = group.layers
            counts = torch.stack([layer.tally.total(layer.load.device) for layer in layers])
            load = _over_all_ranks(counts, self.group)
            active = torch.stack([layer.router.active for layer in layers])
            mean = load.sum(1, keepdim=True) / active.sum(1, keepdim=True)
            moved = group.rates * torch.sign(mean - load) * active
            torch._foreach_add_([layer.router.bias for layer in layers], list(moved.unbind()))
            torch._foreach_copy_([layer.load for layer in layers], list(load.unbind()))
            torch._foreach_add_([layer.uses for layer in layers], list(load.unbind()))
            torch._foreach_zero_([counts for layer in layers for counts in layer.tally.counts.values()])
        for layer in self.layers:
            layer.tally.losses.clear()


def _over_all_ranks(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


class LoadReport:
    """A hook that writes the load figures of all mixtures into the run's event log, as events named `load`.

    The events also hold, by the experts' numbers, how many tokens of the last step each got, and its rank.
    """

    def __init__(self, every: int = 100) -> None:
        check_every("LoadReport", every)
        self.every = every

    def __call__(self, context: StepContext) -> None:
        for name, layer in mixtures_in(context.model).items():
            numbers = layer.expert_ids.tolist()
            ranks, _ = layer.dispatcher.placement(layer.num_slots)
            loads, places = (
                {str(number): value for number, value in zip(numbers, values, strict=True) if number >= 0}
                for values in (layer.load.tolist(), ranks)
            )
            facts = layer.figures().as_dict()
            context.tell("load", step=context.step, layer=name, **facts, loads=loads, ranks=places)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def load_metrics(model: nn.Module) -> dict[str, float]:
    """Return figures of the last step's loads, layer by layer, for the records. The host waits for the device."""
    return {
        f"{name}/{figure}" if name else figure: value
        for name, layer in mixtures_in(model).items()
        for figure, value in layer.figures().as_dict().items()
    }

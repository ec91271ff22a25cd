"""Balances the load of experts: a bias on the choice, auxiliary losses, and the end of a step, which settles loads."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.moe.bounds import check_every
from drivetrain.moe.layer.mixture import Settlement, mixtures_in, take_auxiliary

__all__ = ["LoadReport", "Settlement", "auxiliary_loss", "load_metrics", "mixtures_in", "refuse_too_many"]


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

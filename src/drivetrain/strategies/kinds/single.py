"""One process, one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.plugins import Conflict
from drivetrain.core.records import StepOutcome
from drivetrain.core.state import Shard, TensorSource
from drivetrain.core.world import World
from drivetrain.strategies.base import Objective, ObjectiveCall, StrategyParts, Trial, rescaling, try_out
from drivetrain.strategies.replicated import load_whole_state, whole_state
from drivetrain.strategies.spec import StrategySpec


class SingleStrategy:
    """Trains on one device: nothing is shared, so nothing is reduced."""

    name = "single"

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        self.parts = parts
        self._objective = Objective(parts, scale=1.0)
        self._scaler = parts.scaler if parts.precision.scales_loss else None
        self._samples = trial.num_samples
        parts.optimizer.zero_grad()
        self._begins = False  # the trial looks whether the loss function clears gradients
        try_out(self._call, parts.model, trial)
        self._objective.take_tallies()
        parts.forget_step()
        self._begins = True
        return self._call

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs for named parts of the loss and for logged values."""
        return self.parts.loss_parts.num_values + self.parts.step_log.num_values

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        if self._begins:
            # Here and not after the last step: what is freed now is at once used again, while it is in the cache.
            self.parts.optimizer.zero_grad()
            self._begins = False
            self._samples = step_samples
        # Straight to forward: nothing hooks into this module, and its call costs microseconds.
        return self._objective.forward(batch, num_samples, step_samples, weight)

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, objective: Tensor) -> None:
        if self._scaler is not None:
            objective = self._scaler.scale(objective)
        torch.autograd.backward(objective)

    def step(self, stop: float) -> StepOutcome:
        outcome = self.move(float(stop))
        self.follow()
        return outcome

    def move(self, stop: float = 0.0) -> StepOutcome:
        losses, count = self._objective.take_tallies()
        factor = rescaling(self._samples, count) if self._objective.counts_items else None
        norm, skipped = self.parts.move(factor, loss=[value for value, _ in losses])
        self._begins = True
        return self.parts.outcome(losses, count, stop, norm, skipped)

    def follow(self) -> None:
        self.parts.follow()

    def abandon(self) -> None:
        """Discard the step: the gradients are cleared when the next one begins."""
        self._objective.take_tallies()
        self.parts.forget_step()
        self.parts.mixtures.forget()
        self._begins = True
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()
            for name in ("grad_scale", "found_inf"):  # what the scaler lends a fused optimizer for its step
                vars(self.parts.optimizer).pop(name, None)

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        return whole_state(self.parts.saved)

    def load(self, source: TensorSource) -> None:
        load_whole_state(self.parts.saved, source)

    def close(self) -> None:
        pass


SPEC = StrategySpec(
    make=lambda context: SingleStrategy(context.world),
    processes="one",
    captures=True,
    several_optimizers=True,
    takes=("ddp",),  # one process communicates nothing: they change nothing
    conflicts=(
        Conflict(
            when={"device.mode": "multi_gpu"},
            message="uses one GPU, but {asked} asks for several",
            asked="device.mode",
            allowed="auto, data_parallel, ddp, fsdp with that mode",
        ),
    ),
)

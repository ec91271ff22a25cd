"""One process, one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.records import StepOutcome
from drivetrain.core.state import Shard, TensorSource
from drivetrain.core.world import World
from drivetrain.strategies.base import Objective, ObjectiveCall, StrategyParts, Trial, try_out
from drivetrain.strategies.replicated import load_whole_state, whole_state

_NOTHING_AROUND = nullcontext()


class SingleStrategy:
    """Nothing is shared, so nothing is reduced."""

    name = "single"

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        self._parts = parts
        self._objective = Objective(parts, scale=1.0)
        self._samples = 0
        try_out(self._call, parts.model, trial)
        self._objective.take_tallies()
        parts.optimizer.zero_grad()
        return self._call

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        self._samples = step_samples
        objective: Tensor = self._objective(batch, num_samples, step_samples, weight)
        return objective

    def accumulate(self, is_last: bool) -> AbstractContextManager[Any]:
        return _NOTHING_AROUND

    def backward(self, objective: Tensor) -> None:
        torch.autograd.backward(self._parts.scaler.scale(objective))

    def step(self, stop: bool) -> StepOutcome:
        total, count = self._objective.take_tallies()
        norm = self._parts.update(self._samples / count if self._objective.counts_items else None)
        self._parts.optimizer.zero_grad()
        return StepOutcome(total, count, float(stop), norm)

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        return whole_state(self._parts.model, self._parts.optimizer)

    def load(self, source: TensorSource) -> None:
        load_whole_state(self._parts.model, self._parts.optimizer, source)

    def close(self) -> None:
        pass

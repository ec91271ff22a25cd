"""One optimizer step over one global batch: forward and backward of each micro-batch, then the strategy's step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from drivetrain.core.records import StepOutcome
from drivetrain.core.world import World
from drivetrain.data.division import Place
from drivetrain.data.items import map_tensors, seed_all
from drivetrain.data.loader import MicroBatch
from drivetrain.data.stream import key_of
from drivetrain.strategies.base import ObjectiveCall, Strategy


class Stepper:
    """Runs steps. What the model draws at random is keyed by (seed, step, rank, micro-step), and so is not saved."""

    def __init__(
        self,
        strategy: Strategy,
        objective: ObjectiveCall,
        world: World,
        seed: int,
        before_micro_step: Callable[[Any], None] | None = None,
    ) -> None:
        self._strategy, self._objective, self._world, self._seed = strategy, objective, world, seed
        self._before_micro_step = before_micro_step
        self._generator = torch.cuda.default_generators[world.device.index] if world.device.type == "cuda" else None

    def run(self, place: Place, micro_batches: Iterator[MicroBatch], stop: bool) -> StepOutcome:
        strategy, rank, num_samples = self._strategy, self._world.rank, place.num_samples
        for micro in micro_batches:
            self._seed_model(key_of(self._seed, place.step, rank, micro.index))
            batch = to_device(micro.batch, self._world.device)
            if self._before_micro_step is not None:
                self._before_micro_step(batch)
            with strategy.accumulate(micro.is_last):
                objective = self._objective(batch, micro.num_samples, num_samples, micro.weight)
                strategy.backward(objective)
        return strategy.step(stop)

    def _seed_model(self, key: int) -> None:
        seed_all(key)
        if self._generator is not None:
            self._generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch, its tensors on the device. The copy of pinned memory does not wait."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)

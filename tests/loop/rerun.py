"""A recorder for machines without a GPU. As with CUDA, recording executes nothing, and a replay executes all of it."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.moe import MixtureOfExperts


class Rerun:
    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.num_recorded = self.num_replayed = 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        before = [tensor.detach().clone() for tensor in self._tensors()]
        generator = torch.get_rng_state()
        try:
            body()
        finally:
            torch.set_rng_state(generator)
            with torch.no_grad():
                for tensor, value in zip(self._tensors(), before, strict=True):
                    tensor.copy_(value)
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            body()

        return replay

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        for module in self._model.modules():
            if isinstance(module, MixtureOfExperts):
                yield from module.tally.counts.values()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

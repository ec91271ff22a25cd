"""An exponential moving average (EMA) of the weights: often better than the weights; it is validated and exported."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drivetrain.core.state import local_part, put_away


class Average:
    """An exponential moving average of the parameters that train. Buffers are not averaged.

    The decay of update n is min(decay, (1 + n) / (10 + n)): early on the weights move fast, and the first ones, which
    are random, should not be remembered for long. Of a sharded model, every rank averages its part.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self.num_updates = 0
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._live = [local_part(parameter) for parameter in self._trained]
        self._averaged = [part.clone() for part in self._live]
        self._model = model

    def of(self, parameter: Tensor) -> Tensor | None:
        return next((a for p, a in zip(self._trained, self._averaged, strict=True) if p is parameter), None)

    def cut(self, parameter: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
        """Take other rows of a parameter that this rank holds now: the average gets the same rows."""
        for number, trained in enumerate(self._trained):
            if trained is parameter:
                self._live[number] = local_part(parameter)
                self._averaged[number] = fill(self._averaged[number])

    @torch.no_grad()
    def update(self) -> None:
        self.num_updates += 1
        decay = min(self._decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(self._averaged, self._live, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context. They are copied, so that addresses stay the same."""
        put_away(self._model)  # what was gathered of the others is not to be used any more
        with torch.no_grad():
            live = [part.clone() for part in self._live]
            torch._foreach_copy_(self._live, self._averaged)
        try:
            yield
        finally:
            put_away(self._model)  # what was gathered of the others is not to be used any more
            with torch.no_grad():
                torch._foreach_copy_(self._live, live)

    def named(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the averages and their parameters, by the model's own names; tied weights under each of theirs."""
        averages = {id(parameter): average for parameter, average in zip(self._trained, self._averaged, strict=True)}
        named = self._model.state_dict(keep_vars=True)
        return {name: (averages[id(value)], value) for name, value in named.items() if id(value) in averages}

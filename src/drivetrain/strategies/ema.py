"""Averages of the weights, often better than the weights: they are validated and exported.

`Average` is an exponential moving average (EMA), updated with each step. `RunningMean` is the plain mean of stochastic
weight averaging (SWA), which takes the weights of some steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from drivetrain.core.averaging import SWA
from drivetrain.core.state import TensorSource, local_part, put_away, read_for

AVERAGE = "ema/"  # before the names of averaged weights in a checkpoint, of either kind


class Average:
    """An exponential moving average of the parameters that train. Buffers are not averaged.

    The decay of update n is min(decay, (1 + n) / (10 + n)): early on the weights move fast, and the first ones, which
    are random, should not be remembered for long. Of a sharded model, every rank averages its part.
    """

    every: int | Literal["epoch"] = "epoch"  # how often `after_step` has something to do

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

    def after_step(self, steps_done: int, *, ends_epoch: bool) -> None:
        """Take the weights of a step, where the average is one over some steps. The host does not wait."""

    def finish(self) -> None:
        """Complete the average at the end of a run, on all ranks together."""

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Take up what a checkpoint holds."""
        self.num_updates = source.meta["num_averaged"]
        for name, (average, of) in self.named().items():
            average.copy_(read_for(of, source, AVERAGE + name))

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


class RunningMean(Average):
    """The mean of the weights of some steps, each with the same weight. Before the first, it is nothing at all.

    The statistics of batch-norm layers belong to the weights that computed them. Those of the mean are computed anew,
    by `compute_statistics`, when the mean is used.
    """

    def __init__(self, model: nn.Module, swa: SWA, first_step: int) -> None:
        super().__init__(model, decay=0.0)
        self.every = swa.every
        self._first_step = first_step
        self._buffers = [buffer for layer in batch_norms(model) for buffer in statistics_of(layer)]
        self._statistics = [buffer.clone() for buffer in self._buffers]
        self._is_current = not self._buffers  # the statistics are those of the mean as it is now
        self.compute_statistics: Callable[[], Sequence[Tensor]] | None = None  # of the weights that are in the model

    def update(self) -> None:
        """Do nothing: only some steps count, and `after_step` knows which."""

    @torch.no_grad()
    def after_step(self, steps_done: int, *, ends_epoch: bool) -> None:
        is_due = ends_epoch if self.every == "epoch" else steps_done % self.every == 0
        if steps_done < self._first_step or not is_due:
            return
        self.num_updates += 1
        torch._foreach_lerp_(self._averaged, self._live, 1 / self.num_updates)
        self._is_current = not self._buffers

    def finish(self) -> None:
        if self.num_updates and not self._is_current:
            with self.in_place():
                pass

    def begin_anew_after(self, steps_done: int) -> bool:
        """Drop what was averaged if a run that was made longer has not come to its first step. Return whether it did.

        Averaging does not change the training: the run is then the one that would have come of the longer job.
        """
        if steps_done < self._first_step:
            self.num_updates, self._is_current = 0, not self._buffers
        return not self.num_updates

    def load(self, source: TensorSource) -> None:
        self._is_current = not self._buffers
        self.num_updates = source.meta["num_averaged"]
        if self.num_updates and self._buffers:
            ours = {id(buffer) for buffer in self._buffers}
            named = self._model.state_dict(keep_vars=True)
            names = [name for name, value in named.items() if id(value) in ours]
            self._is_current = all(AVERAGE + name in source.keys for name in names)
        super().load(source)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        if not self.num_updates:
            yield
            return
        with super().in_place():
            live = [buffer.clone() for buffer in self._buffers]
            try:
                if not self._is_current and self.compute_statistics is not None:
                    with torch.no_grad():
                        for held, computed in zip(self._statistics, self.compute_statistics(), strict=True):
                            held.copy_(computed)
                    self._is_current = True
                if self._is_current:
                    self._put(self._statistics)
                yield
            finally:
                self._put(live)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)

    def named(self) -> dict[str, tuple[Tensor, Tensor]]:
        if not self.num_updates:
            return {}
        found = super().named()
        if self._is_current:
            held = {id(buffer): value for buffer, value in zip(self._buffers, self._statistics, strict=True)}
            named = self._model.state_dict(keep_vars=True)
            found |= {name: (held[id(value)], value) for name, value in named.items() if id(value) in held}
        return found


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the model's batch-norm layers that keep statistics."""
    found = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in found if layer.running_mean is not None and layer.running_var is not None]


def statistics_of(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the running mean and variance of a batch-norm layer."""
    mean, variance = layer.running_mean, layer.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(variance, Tensor)
    return mean, variance


def make_average(model: nn.Module, ema: float | None, swa: SWA | None, num_steps: int | None) -> Average | None:
    """Make the average that a job asks for; None if it asks for none."""
    if swa is not None:
        return RunningMean(model, swa, swa.first_step(num_steps))
    return None if ema is None else Average(model, ema)

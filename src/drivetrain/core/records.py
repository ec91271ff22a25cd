"""The result of a step: its tensors on the device, and the record that is logged."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drivetrain.core.widths import widened


class PartLoss(NamedTuple):
    """One named part of a step's loss."""

    loss: float  # its mean, without its weight; nan if the step had no item of it
    num_items: float  # the number of items of the mean: samples, or the part's count


class PartReader(Protocol):
    """Interprets the numbers of a step's named loss parts."""

    def read(self, values: Sequence[float], step: int, num_samples: float) -> tuple[float, dict[str, PartLoss]]:
        """Return the weighted loss and its parts; `step` is the number of steps done before this one."""


class PartTotals(NamedTuple):
    """Sums and counts of the named parts of a step's loss, in one tensor of float64."""

    values: Tensor
    reader: PartReader


class LoggedTotals(NamedTuple):
    """Sums of the values that a step logged, and their counts."""

    values: Tensor  # all sums; behind them all counts, where the host does not know these
    names: Sequence[str]
    factor: float = 1.0  # of the sums
    counts: Sequence[float] | float | None = None  # one for each, or the one that all have

    def read(self, values: Sequence[float]) -> dict[str, float]:
        """Return the mean of each, given the values on the host; nan for one without an item."""
        counts, factor = self.counts, self.factor
        if counts == factor and counts:  # means over one micro-batch: they are what was logged
            return dict(zip(self.names, values, strict=False))
        if isinstance(counts, float):
            counts = [counts] * len(self.names)
        if counts is None:
            counts = values[len(self.names) :]
        return {
            name: total * factor / count if count else math.nan
            for name, total, count in zip(self.names, values, counts, strict=False)
        }


class ResultRows(Protocol):
    """The results of CUDA-graph replays in a table on the device, a row each. Can be read only once."""

    count: int  # replays

    def take(self) -> list[list[float]]:
        """Return one row per replay; blocks until the device has finished them."""

    def is_there(self) -> bool:
        """Return whether `take` will not block."""


SKIPPED_IF_BAD = -1.0  # as `skipped`: the weights stayed as they were if the loss or the norm is not finite


class StepOutcome(NamedTuple):
    """The result of a strategy's `step`. Its tensors may not be computed yet; reading one waits for the device."""

    losses: Sequence[tuple[Tensor, float]]  # the step's loss sum is the sum of the products
    num_items: Tensor | float
    stop: Tensor | float  # above 0 if any rank asks to stop
    grad_norm: Tensor | None
    skipped: Tensor | float = 0.0  # 1 if the weights stayed as they were (fp16, infinite gradients); of turns a share
    packed: Tensor | None = None  # what `pack` gives, where the device has it already; overwritten by the next step
    rows: "ResultRows | None" = None  # what `pack` gives of one replay or several, until it is read
    named: PartTotals | None = None  # of a loss with named parts, which has no `losses`
    logged: LoggedTotals | dict[str, float] | None = None  # of a loss that logs values; means, on a host alone

    def parts(self) -> list[Tensor | float]:
        norm = 0.0 if self.grad_norm is None else self.grad_norm
        return [self.num_items, self.stop, norm, self.skipped, *(value for value, _ in self.losses)]

    def pack(self) -> Tensor:
        """Pack its tensors into one of float64: `parts` in order, then named loss parts, then logged values."""
        # Only tensors: copying a host number to the device, to read it back, would make the host wait.
        on_device = [widened(part) for part in self.parts() if isinstance(part, Tensor)]
        others = [widened(found.values) for found in (self.named, self.logged) if isinstance(found, tuple)]
        if others:
            return torch.cat([torch.stack(on_device), *others]) if on_device else torch.cat(others)
        return torch.stack(on_device) if len(on_device) > 1 else on_device[0].reshape(1)


class StepRecord(NamedTuple):
    """The record of one optimizer step, as it is logged. `loss` is over the whole global batch, all ranks."""

    step: int  # how many optimizer steps are done
    epoch: int  # how many epochs were done when it began
    samples: int
    loss: float
    num_items: float  # what the loss is over: samples, or what `LossSum` counted
    lr: float
    grad_norm: float | None
    seconds: float
    skipped: bool = False  # fp16: gradients were infinite, the weights stayed; batch and schedule went on
    parts: Mapping[str, PartLoss] | None = None  # of a loss with named parts: `loss` is their weighted sum
    logged: Mapping[str, float] | None = None  # what the loss logged; nan for a value that no batch of the step had

    def as_json(self) -> str:
        """Return the JSON that `json.dumps` would write, in a third of the time: this runs in every step."""
        norm, more = self.grad_norm, "" if self.parts is None else self._parts_json(self.parts)
        if self.logged:
            for name, value in self.logged.items():
                more += _key(name) + (repr(value) if isfinite(value) else _json_or_null(value))
        return (
            f'{{"step": {self.step}, "epoch": {self.epoch}, "samples": {self.samples}, "loss": {_json(self.loss)}, '
            f'"num_items": {_json(self.num_items)}, "lr": {_json(self.lr)}, '
            f'"grad_norm": {"null" if norm is None else _json(norm)}, "seconds": {self.seconds!r}, '
            f'"skipped": {"true" if self.skipped else "false"}{more}}}'
        )

    def _parts_json(self, parts: Mapping[str, PartLoss]) -> str:
        """Return `loss_NAME` for each part, and `num_items_NAME` where its count differs from the step's."""
        values: dict[str, float | None] = {}
        for name, part in parts.items():
            values[f"loss_{name}"] = None if math.isnan(part.loss) else part.loss
            if part.num_items != self.num_items:
                values[f"num_items_{name}"] = part.num_items
        return "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())


# What `as_json` writes itself; and `time`, for readers that add one.
RESERVED_NAMES = (*StepRecord._fields[:9], "time")


@cache  # names are the same in every step
def _key(name: str) -> str:
    return f", {json.dumps(name)}: "


def _json(number: float) -> str:
    return repr(number) if isfinite(number) else json.dumps(number)


def _json_or_null(number: float) -> str:
    return "null" if math.isnan(number) else json.dumps(number)

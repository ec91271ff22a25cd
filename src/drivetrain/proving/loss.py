"""The loss of a job under test: computed on one undivided batch, with its randomness controlled.

Where divisions of a batch are compared, randomness is off or keyed by sample. Dropout is turned off. Other draws (a
VAE's noise, a diffusion step) are keyed: each sample's rows come from a generator seeded with the sample's number, so
that a sample sees the same noise in any micro-batch and on any rank.

A loss is computed from its documentation alone: a scalar, a sum by its count, or named parts. Nothing here is shared
with the trainer. A part is the mean over its own items: those that `Job.count` counts, those of its `LossSum`, else the
samples. Their weighted sum is the loss.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.core.isolation import EagerDispatchMode
from drivetrain.core.metrics import LossSum
from drivetrain.job import Job

_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)
_FACTORIES = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like"}
_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_"}
_FUNCTIONAL = {"bernoulli", "normal", "poisson", "normal_functional"}
WHOLE = ""  # the name of a loss that has no named parts
AUXILIARY = "auxiliary loss"  # what mixtures of experts add to named parts


def turn_dropout_off(model: nn.Module) -> None:
    """Set every dropout probability of a model's modules to 0. `dropout_off` handles the functions."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0


@contextmanager
def dropout_off() -> Iterator[None]:
    """Replace torch's dropout functions, and the dropout of its attention, by ones that drop nothing."""
    kept = {name: getattr(functional, name) for name in (*_DROPOUTS, "scaled_dot_product_attention")}
    dropout, attention = torch.dropout, kept["scaled_dot_product_attention"]

    def identity(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002  (torch's own name, for callers)
        return input

    def without_dropout(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 1:
            args = (args[0], 0.0, *args[2:])
        else:
            kwargs["dropout_p"] = 0.0
        result: Tensor = attention(query, key, value, *args, **kwargs)
        return result

    for name in _DROPOUTS:
        setattr(functional, name, identity)
    functional.scaled_dot_product_attention = without_dropout
    torch.dropout = identity
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(functional, name, function)
        torch.dropout = dropout


class KeyedDraws(EagerDispatchMode):
    """Keys draws of the loss by sample: rows of a draw whose first dimension is the batch's belong to its samples.

    A draw of another shape (a scalar that decides for the whole batch) is keyed by its place among the draws alone, so
    it is the same in every part of a batch.
    """

    def __init__(self, numbers: Sequence[int], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers, self._seed, self._count = list(numbers), seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name not in _FACTORIES | _IN_PLACE | _FUNCTIONAL:
            return func(*args, **kwargs)
        self._count += 1
        rows, samples = _num_rows(args), len(self._numbers)
        if not rows or not samples or rows % samples:
            return self._with_seed(0, func, args, kwargs)
        own = rows // samples
        # What a sample gets must not depend on its place, so each draws a tensor of its own rows alone.
        drawn = torch.cat([
            self._with_seed(number + 1, func, _rows_of(args, rows, place * own, own), kwargs)
            for place, number in enumerate(self._numbers)
        ])  # fmt: skip
        return args[0].copy_(drawn) if name in _IN_PLACE else drawn

    def _with_seed(self, number: int, func: Any, args: Any, kwargs: Any) -> Tensor:
        key = hash((self._seed, number, self._count)) & 0x7FFFFFFF
        torch.default_generator.manual_seed(key)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(key)
        result: Tensor = func(*args, **kwargs)
        return result


def _num_rows(args: Any) -> int:
    """Return the first dimension of what is drawn; 0 for a scalar."""
    for arg in args:
        if isinstance(arg, Tensor) and arg.dim():
            return arg.shape[0]
        if isinstance(arg, (list, tuple)) and arg:
            return int(arg[0])
    return 0


def _rows_of(args: Any, rows: int, start: int, count: int) -> list[Any]:
    """Return the arguments of a draw for some of its rows alone."""

    def cut(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.dim() and arg.shape[0] == rows:
            return arg[start : start + count].clone()
        if isinstance(arg, (list, tuple)) and arg and arg[0] == rows:
            return [count, *arg[1:]]
        return arg

    return [cut(arg) for arg in args]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(key: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def state_of_generators() -> int:
    """Return a number that changes whenever one of the global generators is drawn from."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return hash((python, numpy[1].tobytes(), numpy[2], own.numpy().tobytes()))  # type: ignore[index]


@dataclass(frozen=True)
class PartMean:
    """One part of a loss on one batch.

    Attributes:
        mean: the mean over its items; 0 where there are none.
        count: the number of its items; None: it is divided by samples.
        is_late: whether only the forward tells the count.
    """

    mean: Tensor
    count: float | None = None
    is_late: bool = False


def part_means(job: Job, result: Any, batch: Any) -> dict[str, PartMean]:
    """Split what a loss function returned for a batch into the means of its parts."""
    if not isinstance(result, Mapping):
        return {WHOLE: PartMean(result.total / result.count if isinstance(result, LossSum) else result)}
    counts: Mapping[str, Any] = {} if job.count is None else job.count(batch)
    return {name: _mean(part, counts.get(name)) for name, part in result.items()}


def _mean(part: Tensor | LossSum, counted: Any) -> PartMean:
    if isinstance(part, LossSum):
        number = float(part.count if counted is None else counted)
        return PartMean(_unless_empty(part.total, number) / (number or 1.0), number, counted is None)
    if counted is None:
        return PartMean(part)
    return PartMean(_unless_empty(part, float(counted)), float(counted))


def _unless_empty(value: Tensor, number: float) -> Tensor:
    """Return the value; a zero that still depends on the weights where there are no items and the mean is 0/0."""
    return torch.where(torch.full_like(value, number > 0, dtype=torch.bool), value, torch.zeros_like(value))


def part_weight(job: Job, name: str, step: int) -> float:
    """Return the weight of a part after `step` steps."""
    weight = (job.loss_weights or {}).get(name, 1.0)
    return float(weight(step)) if callable(weight) else float(weight)


def weighted_sum(job: Job, parts: Mapping[str, PartMean], step: int) -> Tensor:
    """Return the loss of a batch: its parts' means, weighted and added up."""
    terms = [part.mean * part_weight(job, name, step) if name else part.mean for name, part in parts.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total

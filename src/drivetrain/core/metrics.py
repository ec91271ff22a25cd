"""What steps, losses, metrics and hooks report: the record of a step, sums and counts, and the values of `dt.log`."""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from math import isfinite
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.precision import widened
from drivetrain.core.world import World

# ----------------------------------------------------------------------------------------------------------------------
# The result of a step: its tensors on the device, and the record that is logged.


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


@cache  # names are the same in every step
def _key(name: str) -> str:
    return f", {json.dumps(name)}: "


def _json(number: float) -> str:
    return repr(number) if isfinite(number) else json.dumps(number)


def _json_or_null(number: float) -> str:
    return "null" if math.isnan(number) else json.dumps(number)


# ----------------------------------------------------------------------------------------------------------------------
# What losses and metrics return besides a scalar, and sums and counts of it, exact where they are whole numbers.
#
# A loss may return a sum with its count, or named parts of either kind. Of a validation metric each rank counts its own
# samples; the global result is the sum over ranks. Nothing is averaged twice, so the result does not depend on how the
# samples were divided.


@dataclass(frozen=True)
class LossSum:
    """A loss summed over items (tokens, pixels, pairs), and their number.

    The loss of a step is the sum over all items of its global batch (all micro-batches, all ranks) divided by their
    number: not a mean of means. The items that a plain scalar is a mean of are determined before the first step.

    Args:
        total: The sum over the items of a batch, a scalar tensor.
        count: How many items there are.

    Example:
        >>> def loss(model, batch):
        ...     losses = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        ...     return dt.LossSum(losses.sum(), losses.numel())
        >>> loss(torch.nn.Linear(4, 3), [torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)]).count
        8
    """

    total: Tensor
    count: Tensor | float


@dataclass(frozen=True)
class UndividedLoss:
    """A loss that is added up over the micro-batches and ranks of a step and divided by nothing.

    Loss functions do not return it: a scalar that was found to be a sum over its batch is turned into one.
    """

    total: Tensor


NamedLosses = Mapping[str, Tensor | LossSum]
LossWeight = float | Callable[[int], float]  # of a part; a function gets the number of steps done
PartCounts = Mapping[str, Tensor | float]
CountFunction = Callable[[object], PartCounts]


def summed_by_count(parts: NamedLosses, counts: PartCounts) -> dict[str, Tensor | LossSum]:
    """Turn the means whose items are counted into sums over these items."""
    return {name: _summed(part, counts[name]) if name in counts else part for name, part in parts.items()}


def _summed(part: Tensor | LossSum, count: Tensor | float) -> Tensor | LossSum:
    if not isinstance(part, Tensor):
        return part
    if part.dtype in (torch.bfloat16, torch.float16):
        part = part.float()  # a count does not fit into these
    if isinstance(count, Tensor):
        count = count.detach().to(part.device, part.dtype, non_blocking=True)
        # The mean over no items is 0/0: it contributes nothing.
        return LossSum(torch.where(count > 0, part * count, torch.zeros_like(part)), count)
    if count:
        return LossSum(part * count, count)
    # Still a function of the weights, with a gradient of zero: DDP waits for the gradient of every weight.
    never = torch.zeros_like(part, dtype=torch.bool)
    return LossSum(torch.where(never, part, torch.zeros_like(part)), count)


MetricFunction = Callable[[Any, Any], Tensor | LossSum]


@runtime_checkable
class MetricObject(Protocol):
    """A metric object as in torchmetrics: updated batch by batch, with its own reduction over ranks."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


class Counted(NamedTuple):
    """A sum and the number of items it is over, on the host. Whole numbers are `int`, however large."""

    total: int | float
    num_items: int | float


_OF_A_METRIC = (
    "return a tensor (a mean over the batch, or an entry per item), or dt.LossSum(sum, count); for a figure of the "
    "whole set, such as AUC, an object with update(output, target), compute() and reset()"
)
_IN_EVALUATION = (
    "validation calls the loss with the model in evaluation mode; where the model returns no losses then, as detectors "
    "do, have the loss call model.train() first, and model.train(was_training) at its end"
)


class Tally:
    """Accumulates one metric on one rank. Adds on the device, so that the host does not wait for each batch."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._totals: list[Tensor] = []
        self._counts: list[Tensor | float] = []
        self._kind: Literal["whole", "real"] | None = None

    def add(self, value: Tensor | LossSum | UndividedLoss, num_samples: int) -> None:
        """Add a mean over the batch's samples, a `LossSum`, or a tensor with one entry (number or boolean) per item.

        An undivided loss is reported per sample: its sum over the whole set would depend on the size of the set.
        """
        if isinstance(value, LossSum):
            total, count = value.total, value.count
            self._check_scalar(total)
        elif isinstance(value, UndividedLoss):
            total, count = widened(value.total), num_samples
        elif not isinstance(value, Tensor):
            raise DrivetrainError(
                f"the metric {self._name!r} returned {type(value).__name__}, expected a tensor or a LossSum",
                remedy=_IN_EVALUATION if self._name == "loss" else _OF_A_METRIC,
            )
        elif value.dim() or not value.is_floating_point():
            total, count = value.detach(), value.numel()
            total = widened(total).sum() if value.is_floating_point() else total.long().sum()
        else:
            total, count = widened(value) * num_samples, num_samples
        kind: Literal["whole", "real"] = "real" if total.is_floating_point() else "whole"
        if self._kind not in (None, kind):
            raise DrivetrainError(
                f"the metric {self._name!r} counts in whole numbers on one batch and in real ones on another",
                remedy="return the same type for every batch",
            )
        self._kind = kind
        self._totals.append(widened(total.detach()) if kind == "real" else total.detach().long())
        self._counts.append(count.detach() if isinstance(count, Tensor) else count)

    def read(self) -> Counted | None:
        """Return the sum and count, or None if nothing was added. The host waits for the device here."""
        if not self._totals:
            return None
        total = torch.stack(self._totals).sum().item()
        return Counted(total, sum(count.item() if isinstance(count, Tensor) else count for count in self._counts))

    def _check_scalar(self, total: Any) -> None:
        if not isinstance(total, Tensor) or total.dim():
            shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise DrivetrainError(
                f"the metric {self._name!r} returned a LossSum whose total is {shape}, not a scalar",
                remedy="sum it, or give a metric of its own for each entry",
            )


def over_all_ranks(counted: Mapping[str, Counted | None], world: World) -> dict[str, float]:
    """Return each metric over all ranks' samples; bitwise equal on every rank, as the sums are made in one order."""
    by_rank: list[dict[str, list[int | float] | None]] = world.gather(
        {name: None if found is None else list(found) for name, found in counted.items()}
    )
    names = list(by_rank[0])
    for rank, found in enumerate(by_rank):
        if list(found) != names:
            raise DrivetrainError(
                f"rank 0 has the metrics {', '.join(names)} and rank {rank} has {', '.join(found)}",
                remedy="give the same metrics on every rank",
            )
    return {name: _quotient(name, [found[name] for found in by_rank]) for name in names}


def _quotient(name: str, by_rank: Sequence[Sequence[int | float] | None]) -> float:
    seen = [(rank, found) for rank, found in enumerate(by_rank) if found is not None]
    kinds = {isinstance(found[0], int): rank for rank, found in seen}
    if len(kinds) > 1:
        raise DrivetrainError(
            f"the metric {name!r} counts whole numbers on rank {kinds[True]} and real ones on rank {kinds[False]}",
            remedy="return the same type on every rank",
        )
    totals, counts = [found[0] for _, found in seen], [found[1] for _, found in seen]
    total = sum(totals) if kinds.get(True) is not None else _sum(totals)
    count = _sum(counts)
    return total / count if count else math.nan


def _sum(values: Sequence[int | float]) -> int | float:
    """Sum whole numbers exactly; others as if added without rounding, unless one is not finite."""
    if all(isinstance(value, int) for value in values):
        return sum(values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def flattened(name: str, value: Any) -> dict[str, float]:
    """Turn the result of a metric object into named numbers: a number, a dictionary of them, or a few in a tensor."""
    if isinstance(value, Mapping):
        return {
            key: number for inner, part in value.items() for key, number in flattened(f"{name}_{inner}", part).items()
        }
    if isinstance(value, Tensor) and value.dim():
        return {f"{name}_{index}": float(part) for index, part in enumerate(value.flatten().tolist())}
    return {name: float(value)}


# ----------------------------------------------------------------------------------------------------------------------
# `dt.log(name, value)`: values that a loss, a metric or a hook reports beside its result.
#
# In a loss the values are outputs of the function that is compiled and captured: `logging_loss` makes a fresh
# dictionary, lets the loss fill it, and returns it beside the result. A list or a context variable from outside would
# recompile every step or break the graph.


@dataclass(frozen=True)
class Image:
    """A picture to log from a hook.

    Args:
        pixels: A tensor of (height, width), or of (channels, height, width) with 1, 3 or 4 channels: `uint8` from 0 to
            255, or floating point from 0 to 1, which is clipped to that.

    Example:
        >>> import torch
        >>> import drivetrain as dt
        >>> def show(context):
        ...     images, labels = context.batch()
        ...     dt.log("first image", dt.Image(images[0]))
        >>> hook = dt.every("epoch", show)
    """

    pixels: Tensor

    def as_bytes(self) -> Tensor:
        """Return the pixels as (height, width, channels) of `uint8`, on the host."""
        return self._bytes

    def as_png(self) -> bytes:
        """Return the picture as a PNG file."""
        return self._png

    @cached_property  # once for the run's folder and all trackers, as the PNG
    def _bytes(self) -> Tensor:
        found = self.pixels.detach().cpu()
        found = found.unsqueeze(0) if found.dim() == 2 else found
        if found.dim() != 3 or found.shape[0] not in (1, 3, 4):
            raise DrivetrainError(
                f"dt.Image got a tensor of shape {tuple(self.pixels.shape)}",
                remedy="give (height, width), or (channels, height, width) with 1, 3 or 4 channels",
            )
        if found.is_floating_point():
            found = found.float().nan_to_num().clamp(0, 1).mul(255).round()
        return found.to(torch.uint8).permute(1, 2, 0).contiguous()

    @cached_property
    def _png(self) -> bytes:
        from PIL import Image as Picture

        pixels = self._bytes.numpy()
        written = io.BytesIO()
        Picture.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(written, "png")
        return written.getvalue()


@dataclass(frozen=True)
class Histogram:
    """The distribution of some values, to log from a hook.

    Args:
        values: A tensor of any shape. Values that are not finite are left out.
        bins: How many bins it is divided into.

    Example:
        >>> import drivetrain as dt
        >>> hook = dt.every(100, lambda context: dt.log("weights", dt.Histogram(next(context.model.parameters()))))
    """

    values: Tensor
    bins: int = 64

    def counted(self) -> tuple[list[float], list[float]]:
        """Return how many values are in each bin, and the edges of the bins, one more than these."""
        return self._counted

    @cached_property
    def _counted(self) -> tuple[list[float], list[float]]:
        found = self.values.detach().cpu().double().flatten()
        counts, edges = torch.histogram(found[found.isfinite()], self.bins)
        return counts.tolist(), edges.tolist()


@dataclass(frozen=True)
class Text:
    """Text to log from a hook, such as a sample that a language model wrote.

    Args:
        text: The text.

    Example:
        >>> import drivetrain as dt
        >>> hook = dt.every("epoch", lambda context: dt.log("sample", dt.Text("Once upon a time")))
    """

    text: str


Media = Image | Histogram | Text
LoggedValue = Tensor | LossSum | float | Media
LoggedValues = dict[str, list[LoggedValue]]  # the values of each call, by name


class Logged(NamedTuple):
    """The result of a loss function, with the values that it logged."""

    result: Any
    values: LoggedValues


class _Current:
    """The dictionary that values are logged to now; None: they are not wanted."""

    def __init__(self) -> None:
        self.values: LoggedValues | None = None
        self.copies = False  # in hooks: what was logged is read later, and the tensor may have changed by then


_current = _Current()
_codes: WeakKeyDictionary[CodeType, CodeType] = WeakKeyDictionary()  # of `logging_loss`, by that of the loss


def log(name: str, value: LoggedValue) -> None:
    """Log a value under a name, from a loss function, a metric or a hook.

    In a loss it is averaged over the samples of the step, all micro-batches and all ranks, and stands in `steps.jsonl`,
    on the terminal, in the report and in the trackers. It does not make the host wait, and works in compiled and
    captured steps. During validation the same call, from the loss or from a metric, gives a validation metric,
    `valid_NAME`. In a hook, the value of rank 0 is recorded, in `metrics.jsonl`. Outside a run nothing is logged.

    The names that a loss logs are fixed by its first batch: a new one later is an error. Calls while activations are
    recomputed, and for batches that only keep a rank in step, are ignored.

    Args:
        name: The name of the curve. With a slash, as in `debug/norm`, trackers show it in a group of that name.
        value: A scalar tensor or a number, which is taken as a mean over the batch's samples; or `dt.LossSum(sum,
            count)` for a mean over something else, such as tokens. From a hook also a `dt.Image`, `dt.Histogram` or
            `dt.Text`, for the trackers that take them and for the folder `media` of the run.

    Example:
        >>> import torch
        >>> import drivetrain as dt
        >>> def loss(model, batch):
        ...     inputs, labels = batch
        ...     outputs = model(inputs)
        ...     dt.log("accuracy", (outputs.argmax(1) == labels).float().mean())
        ...     return torch.nn.functional.cross_entropy(outputs, labels)
    """
    found = _current.values
    if found is not None:
        # Only the dictionary is touched here: this is traced by the compiler. Values are checked when they are read.
        if _current.copies:
            value = copied(value)
        # What is not traced is detached where it is read: on a CPU the number is all that is taken, and a tensor more
        # costs as much as all else.
        kept = value.detach() if is_dynamo_compiling() and isinstance(value, Tensor) and value.requires_grad else value
        if name in found:
            found[name].append(kept)
        else:
            found[name] = [kept]


def collect_into(values: LoggedValues | None) -> None:
    """Log into this dictionary from now on; None: log nowhere."""
    _current.values = values


@contextmanager
def collecting(*, copies: bool = False) -> Iterator[LoggedValues]:
    """Collect what is logged inside, such as in a hook; `copies` makes it independent of tensors that change."""
    before = _current.values, _current.copies
    values: LoggedValues = {}
    _current.values, _current.copies = values, copies
    try:
        yield values
    finally:
        _current.values, _current.copies = before


def copied(value: LoggedValue) -> LoggedValue:
    """Return a value that does not change with the tensors it was made of. Pictures and histograms are on the host."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Image):
        return Image(_copy_on_host(value.pixels))
    if isinstance(value, Histogram):
        return Histogram(_copy_on_host(value.values), value.bins)
    if isinstance(value, LossSum):
        count = value.count.detach().clone() if isinstance(value.count, Tensor) else value.count
        return LossSum(torch.as_tensor(value.total).detach().clone(), count)
    return value


def _copy_on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def logging_loss(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the loss function with what it logs as a second output; where it logs nothing, its result as it is."""

    def call(model: Any, batch: Any) -> Any:
        values: LoggedValues = {}
        _current.values = values
        result = loss(model, batch)
        _current.values = None
        return Logged(result, values) if values else result

    # The compiler keeps what it made with the code object, and only so much. So each loss function has one of its own,
    # and always the same one: what was compiled for a trial is used again.
    own = getattr(loss, "__code__", None) or getattr(type(loss).__call__, "__code__", None)
    code = call.__code__.replace() if own is None else _codes.setdefault(own, call.__code__.replace())
    found = FunctionType(code, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
    found.__wrapped__ = loss  # type: ignore[attr-defined]
    return found


def one_value(name: object, values: list[LoggedValue]) -> tuple[Any, Tensor | float | None]:
    """Return the value logged under a name as a total and its count; without a count, it is a mean over samples."""
    if not isinstance(name, str) or not name:
        raise DrivetrainError(
            f"dt.log got the name {name!r}, expected a str", remedy='dt.log("accuracy", value): the name comes first'
        )
    for value in values:
        if isinstance(value, Media):
            raise DrivetrainError(
                f"dt.log({name!r}, …) got a {type(value).__name__} in a loss or metric, expected a scalar",
                remedy="log it from a hook, which has the batch: dt.every(100, lambda context: dt.log(…))",
            )
        total = value.total if isinstance(value, LossSum) else value
        is_scalar = total.numel() == 1 if isinstance(total, Tensor) else isinstance(total, (int, float))
        if not is_scalar:
            found = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise DrivetrainError(
                f"dt.log({name!r}, …) got {found}, expected a scalar",
                remedy="log value.mean(), or dt.LossSum(sum, count)",
            )
    sums = [value for value in values if isinstance(value, LossSum)]
    if not sums:
        return sum(map(_scalar, values)) / len(values) if len(values) > 1 else _scalar(values[0]), None
    if len(sums) < len(values):
        raise DrivetrainError(
            f"dt.log({name!r}, …) got a mean and a LossSum for one batch", remedy="log one kind under one name"
        )
    return sum(_scalar(value.total) for value in sums), sum(value.count for value in sums)


def _scalar(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach().reshape(()) if value.dim() else value.detach()


def media_of(values: LoggedValues) -> dict[str, Media]:
    """Take the pictures, histograms and texts out of logged values; the last of each name."""
    found = {name: logged[-1] for name, logged in values.items() if isinstance(logged[-1], Media)}
    for name in found:
        del values[name]
    return {name: value for name, value in found.items() if isinstance(value, Media)}


def on_host(values: Mapping[str, list[LoggedValue]]) -> dict[str, float]:
    """Return logged values as numbers. The host waits for the device."""
    found = {}
    for name, logged in values.items():
        total, count = one_value(name, logged)
        found[name] = float(total) if count is None else float(total) / float(count) if float(count) else float("nan")
    return found

"""`dt.log(name, value)`: values that a loss, a metric or a hook reports beside its result.

In a loss the values are outputs of the function that is compiled and captured: `logging_loss` makes a fresh dictionary,
lets the loss fill it, and returns it beside the result. A list or a context variable from outside would recompile every
step or break the graph.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import LossSum


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

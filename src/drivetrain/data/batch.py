"""The contents of a batch: tensors in any nesting of containers, objects with a `to` method; and counts of its items.

A loss that is a mean over tokens divides by a count: labels that are not ignored, mask entries, lengths, elements.
`candidates` lists those that a batch offers; a `Count` is a value that survives JSON, so that a run can record by which
one it weights its loss.
"""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.value import Value

IGNORE_INDEX = -100  # what torch and transformers leave out of a cross-entropy
_PADDING = (-1, 0, 1)  # other values that mark positions to leave out, in labels and in masks
_MOST_CLASSES = 1000  # whose weights are kept with a run
_MOST_TARGETS = 256  # of a sample, for which every batch is looked at: sounds and pictures take too long
Part = Literal["all", "from the second", "up to the last", "from the second row", "up to the last row"]
_PART_WORDS: dict[Part, str] = {
    "all": "",
    "from the second": "[:, 1:]",
    "up to the last": "[:, :-1]",
    "from the second row": "[1:]",
    "up to the last row": "[:-1]",
}
LeafPath = tuple[str | int, ...]


class MicroBatch(NamedTuple):
    """The data of one forward and backward."""

    batch: Any
    num_samples: int
    weight: int
    number: int  # within the step
    is_last: bool


def map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """Return the same structure with `change` applied to every leaf.

    Dictionaries, lists, tuples, named tuples and dataclasses are structure. An object with a `to` method is a leaf,
    whatever it is besides: a packed sequence is a named tuple, parts of which must stay on the host.
    """
    if isinstance(batch, Tensor) or (hasattr(batch, "to") and not isinstance(batch, type)):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed: Any = copy.copy(batch)  # keeps what the type holds besides its entries, such as a default
        for key, value in batch.items():
            changed[key] = map_leaves(change, value)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(change, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_leaves(change, value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, map_leaves(change, getattr(batch, field.name)))
        return changed
    return change(batch)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the same structure with `change` applied to every tensor."""
    return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def pinned(batch: Any) -> Any:
    """Return the same batch in page-locked memory, as far as its parts can be."""
    return map_leaves(lambda leaf: leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf, batch)


def moved(leaf: Any, device: torch.device) -> Any:
    """Move a leaf to the device. The copy from pinned memory does not wait."""
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    if not hasattr(leaf, "to"):
        return leaf
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:  # a user's `to` may take nothing but the device
        return leaf.to(device)


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Copy a batch to the device on the current stream."""
    if device.type == "cpu" and not channels_last:
        return batch
    return map_leaves(lambda leaf: in_format(moved(leaf, device), channels_last), batch)


def note_one_sample(error: Exception, num_samples: int) -> None:
    """Add to an error of the user's code that its batch has one sample, which much code is not written for."""
    if num_samples == 1 and not isinstance(error, DrivetrainError):
        error.add_note(
            "drivetrain: its batch has 1 sample: squeeze() drops that dimension, too, where squeeze(1) does not, and "
            "batch normalization needs 2"
        )


def in_format(leaf: Any, channels_last: bool) -> Any:
    """Put images (floating, four dimensions) into channels-last layout, if asked to. The values stay."""
    if channels_last and isinstance(leaf, Tensor) and leaf.dim() == 4 and leaf.is_floating_point():
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf


def leaves(batch: Any) -> Iterator[Any]:
    """Yield every leaf of a batch or an item, in order."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from leaves(getattr(batch, field.name))
    else:
        yield batch


class Count(Value):
    """The number of items of a batch's tensor that a loss may average over."""

    path: LeafPath  # to the tensor: keys, positions, field names
    kind: Literal["unequal", "not nan", "sum", "numel", "class weights"]
    ignored: int = 0  # of `unequal` and `class weights`: the value that is not counted
    weights: tuple[float, ...] = ()  # of `class weights`: what a label of each class counts
    part: Part = "all"  # next-token losses leave out the first label of each sample: a column, or a row of time steps

    def of(self, batch: Any) -> Tensor:
        """Count the items of a batch, as a tensor on its device, without waiting for the device."""
        tensor = _at(batch, self.path)
        if self.kind == "sum":
            total = tensor.sum(dtype=torch.float64 if tensor.is_floating_point() else torch.int64)
            return total if self.part == "all" else total - tensor.numel()
        cut = _cut(tensor, self.part)
        if self.kind == "numel":
            return torch.full((), _num_positions(cut), device=cut.device)
        return self._counted(cut).sum()

    def _counted(self, tensor: Tensor) -> Tensor:
        """Return what each item counts."""
        if self.kind == "class weights":
            weights, labels = _on_device(self.weights, tensor.device), tensor.long()
            return weights[labels.clamp(0, len(weights) - 1)] * (labels != self.ignored)
        return ~tensor.isnan() if self.kind == "not nan" else tensor != self.ignored

    def number(self, batch: Any) -> float:
        """Count the items of a batch that is on the host."""
        if self.kind == "numel":
            return float(_num_positions(_cut(_at(batch, self.path), self.part)))
        return float(self.of(batch))

    def is_zero(self, batch: Any) -> bool:
        """Tell whether a batch that is on the host has nothing of what is counted."""
        if self.kind in ("sum", "numel") or not all(self.weights):
            return not self.number(batch)
        items = _cut(_at(batch, self.path), self.part)  # the first sample mostly has some already

        def has_some(items: Tensor) -> bool:
            return bool((items != self.ignored if self.weights else self._counted(items)).any())

        return not (has_some(items[:1]) or has_some(items[1:]))

    def numbers(self, batches: Sequence[Any]) -> list[float]:
        """Count the items of each of several batches on the host, at once if their tensors have one shape and dtype."""
        tensors = [_at(batch, self.path) for batch in batches]
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
            return [self.number(batch) for batch in batches]
        if self.kind == "numel":
            return [self.number(batches[0])] * len(batches)
        rows = torch.stack(tensors if self.kind == "sum" else [_cut(tensor, self.part) for tensor in tensors])
        if self.kind != "sum":
            return self._counted(rows).flatten(1).sum(1).double().tolist()
        totals = rows.flatten(1).sum(1, dtype=torch.float64 if rows.is_floating_point() else torch.int64).double()
        return (totals if self.part == "all" else totals - tensors[0].numel()).tolist()

    def is_in(self, batch: Any) -> bool:
        """Tell whether a batch has the tensor: collate functions may leave one out."""
        try:
            _cut(_at(batch, self.path), self.part)
        except (KeyError, IndexError, AttributeError, AssertionError, TypeError):
            return False
        return True

    def leaves_out_samples(self, batches: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Tell whether it leaves out a row, and rows are samples, not time steps."""
        lengths = [len(_at(batch, self.path)) for batch in batches]
        return self.part.endswith(" row") and lengths == list(sizes)

    def by_sample(self, batch: Any) -> Tensor:
        """Count the items of each sample of a batch whose tensor has one row per sample."""
        tensor = _cut(_at(batch, self.path), "all" if self.kind == "sum" else self.part)
        rows = tensor.reshape(len(tensor), -1)
        if self.kind == "sum":
            return rows.double().sum(1) - (0 if self.part == "all" else rows.shape[1])
        if self.kind == "numel":
            return torch.full((len(rows),), float(_num_positions(tensor[:1])), device=rows.device)
        return self._counted(rows).sum(1)

    def __str__(self) -> str:
        name = _in_words(self.path)
        if self.kind == "sum":
            return f"the sum of {name}" if self.part == "all" else f"the sum of {name} - 1"
        name += _PART_WORDS[self.part]
        if self.kind == "class weights":
            return f"the class weights of {name}"
        if self.kind == "not nan":
            return f"{name} that is not NaN"
        return f"the elements of {name}" if self.kind == "numel" else f"{name} != {self.ignored}"


@functools.lru_cache(32)
def _on_device(weights: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64, device=device)


class ClassWeights(NamedTuple):
    """The weights of the classes in a cross-entropy, and the label that it leaves out."""

    weights: tuple[float, ...]
    ignored: int


def candidates(batch: Any, ignored: Sequence[int] = (), classes: Sequence[ClassWeights] = ()) -> list[Count]:
    """List the counts that a batch offers, the likeliest first.

    Args:
        batch: What a loss function is called with.
        ignored: Values that mark labels to leave out, in this batch or in others.
        classes: The class weights that the loss is known to have.
    """
    found: list[Count] = []
    for path, tensor in _tensors(batch):
        if tensor.dim() == 0 or tensor.is_complex() or not tensor.numel():
            continue
        parts: tuple[Part, ...] = ("all", "from the second", "up to the last") if tensor.dim() > 1 else ("all",)
        values = _ignored_values(tensor, ignored)
        found += [Count(path=path, kind="unequal", ignored=value, part=part) for value in values for part in parts]
        named = [each for each in classes if _may_be_labels(tensor, each)]
        found += [
            Count(path=path, kind="class weights", ignored=ignore, weights=weights, part=part)
            for weights, ignore in named
            for part in (parts if tensor.dim() == 2 else ("all",))
        ]
        if tensor.is_floating_point():  # perhaps targets of which some are not known
            found += [Count(path=path, kind="not nan", part=part) for part in _not_nan_in(tensor, parts)]
        if tensor.dim() == 2 and not tensor.is_floating_point():  # perhaps with time first, as `pad_sequence` makes it
            rows: tuple[Part, ...] = ("from the second row", "up to the last row")
            found += [Count(path=path, kind="unequal", ignored=value, part=part) for value in values for part in rows]
        if _may_be_lengths(tensor):
            shifts: tuple[Part, ...] = ("all", "from the second") if tensor.dim() == 1 else ("all",)
            found += [Count(path=path, kind="sum", part=part) for part in shifts]
        found += [Count(path=path, kind="numel", part=part) for part in parts]
    return sorted(found, key=_rank)


def _rank(count: Count) -> tuple[int, int]:
    """Rank labels before masks, masks before lengths, lengths before shapes; named labels before other tensors."""
    ranks = {"class weights": 0, "unequal": 1 + (count.ignored != IGNORE_INDEX), "not nan": 2, "sum": 3, "numel": 4}
    kind = ranks[count.kind]
    is_label = any(isinstance(key, str) and ("label" in key or "target" in key) for key in count.path)
    return kind, 0 if is_label else 1


def _ignored_values(tensor: Tensor, known: Sequence[int]) -> list[int]:
    """Return the values that may mark positions to leave out."""
    if tensor.is_floating_point():
        return [0, 1] if tensor.dim() <= 2 and bool(((tensor == 0) | (tensor == 1)).all()) else []
    if tensor.dtype is torch.bool:
        return [0, 1]
    if tensor.dim() > 4 or tensor.dtype is torch.uint8:  # pictures
        return [value for value in known if 0 <= value < 256]  # or labels, a byte each
    ends = [tensor[..., -1].flatten()] if tensor.dim() > 1 else []
    ends += [tensor[-1]] if tensor.dim() == 2 else []  # with time first
    last = [int(end.mode().values) for end in ends]
    present = [value for value in dict.fromkeys((*_PADDING, *last)) if bool((tensor == value).any())]
    return list(dict.fromkeys((IGNORE_INDEX, *known, *present)))


def _not_nan_in(tensor: Tensor, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the parts to count without NaN; where there is none, other batches may have some, if it is small."""
    if bool(tensor.isnan().any()):
        return parts
    return parts[:1] if tensor.dim() <= 2 and tensor.numel() <= _MOST_TARGETS * len(tensor) else ()


def _may_be_labels(tensor: Tensor, classes: ClassWeights) -> bool:
    """Return whether it may hold the labels of classes, one for each sample or position."""
    if tensor.is_floating_point() or tensor.dtype is torch.bool or len(classes.weights) > _MOST_CLASSES:
        return False
    labels = tensor.long()
    return bool(((labels == classes.ignored) | ((labels >= 0) & (labels < len(classes.weights)))).all())


def _may_be_lengths(tensor: Tensor) -> bool:
    """Return whether it may hold lengths or sample weights: numbers from 0 on, one or a row of them per sample."""
    return tensor.dim() <= 2 and tensor.dtype is not torch.bool and bool((tensor >= 0).all())


def _num_positions(tensor: Tensor) -> int:
    return tensor.shape[0] * (tensor.shape[1] if tensor.dim() > 1 else 1)


def _cut(tensor: Tensor, part: Part) -> Tensor:
    if part == "all" or tensor.dim() < 2:
        return tensor
    if part in ("from the second row", "up to the last row"):
        return tensor[1:] if part == "from the second row" else tensor[:-1]
    return tensor[:, 1:] if part == "from the second" else tensor[:, :-1]


def _tensors(batch: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Tensor]]:
    if isinstance(batch, Tensor):
        if batch.layout is torch.strided:
            yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            if isinstance(key, (str, int)):
                yield from _tensors(value, (*path, key))
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            yield from _tensors(value, (*path, number))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _tensors(getattr(batch, field.name), (*path, field.name))


def _at(batch: Any, path: LeafPath) -> Tensor:
    for key in path:
        is_structure = isinstance(batch, (Mapping, list, tuple))
        batch = operator.getitem(batch, key) if is_structure else getattr(batch, str(key))
    assert isinstance(batch, Tensor)
    return batch


def _in_words(path: LeafPath) -> str:
    """Return the tensor's name in the batch, as Python spells it."""
    if not path:
        return "the batch"
    first, rest = path[0], path[1:]
    name = first if isinstance(first, str) else f"batch[{first}]"
    return name + "".join(f"[{key!r}]" if isinstance(key, int) else f".{key}" for key in rest)


def described(batch: Any) -> str:
    """Describe the structure of a batch for an error: kinds, shapes and dtypes, but no values."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (list, tuple)):
        opening, closing = "[]" if isinstance(batch, list) else "()"
        shown = [described(value) for value in batch[:8]] + (["…"] if len(batch) > 8 else [])
        return opening + ", ".join(shown) + closing
    return type(batch).__name__

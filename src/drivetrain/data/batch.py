"""The contents of a batch: tensors in any nesting of containers, and objects with a `to` method."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


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

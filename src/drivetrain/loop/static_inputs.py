"""Finds what has to be the same in each batch of a captured step: structure, shapes, types, and all non-tensors."""

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.data.resident import Rows

_PLAIN = (type(None), bool, int, float, str, bytes)


class NotStaticError(Exception):
    """Raised for something in a batch that a captured step cannot take as a new input."""


def signature(batch: Any, tensors: list[Tensor]) -> Hashable:
    """Return a value that is equal for batches that fit one captured step. The tensors are appended in order."""
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided:
            raise NotStaticError(f"a batch holds a tensor of layout {batch.layout}")
        tensors.append(batch)
        return batch.shape, batch.dtype, batch.stride(), batch.device
    kind = type(batch)
    if kind is Rows:
        if batch.window is not None:
            return kind, id(batch.resident), id(batch.window), batch.count
        return kind, id(batch.resident), signature(batch.samples, tensors)
    if kind in _PLAIN:
        return kind, batch  # with its kind: 1, 1.0 and True are equal
    if isinstance(batch, (list, tuple)):
        return kind, *[signature(value, tensors) for value in batch]
    if isinstance(batch, Mapping):
        return kind, *[(key, signature(value, tensors)) for key, value in batch.items()]
    if dataclasses.is_dataclass(batch):
        return kind, *[signature(getattr(batch, field.name), tensors) for field in dataclasses.fields(batch)]
    raise NotStaticError(f"a batch holds a {kind.__name__}, which a recorded step cannot be given anew")


def with_tensors(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same structure with these tensors in place of the batch's."""
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Rows):
        return batch if batch.window is not None else Rows(batch.resident, next(tensors))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(with_tensors(value, tensors) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(with_tensors(value, tensors) for value in batch)
    if isinstance(batch, MutableMapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = with_tensors(value, tensors)
        return changed
    if isinstance(batch, Mapping):
        raise NotStaticError(f"a batch holds a {type(batch).__name__}, which cannot be given other entries")
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, with_tensors(getattr(batch, field.name), tensors))
        return changed
    return batch

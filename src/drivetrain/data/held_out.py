"""Data that is held out of training: one data set, or several by name."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.data.source import Source, source_of

_NAME = re.compile(r"[A-Za-z0-9]+([_-][A-Za-z0-9]+)*")
_EITHER = (
    "give columns of one data set as tensors; give data sets by name as Datasets, DataLoaders, dictionaries of tensors,"
    " or lists of tuples or dictionaries"
)


def sets_of(data: Any) -> dict[str, Source]:
    """Identify held-out data: one data set, whose name is empty, or several by name.

    A dictionary of tensors or arrays is one data set in columns; a dictionary of data sets is several. What could be
    either is refused.
    """
    if not isinstance(data, Mapping) or hasattr(data, "__getitems__") or not data:
        return {"": source_of(data)}
    columns = [name for name, value in data.items() if isinstance(value, (Tensor, np.ndarray))]
    if len(columns) == len(data):
        return {"": source_of(data)}
    if columns:
        other = next(name for name in data if name not in columns)
        raise DrivetrainError(
            f"{columns[0]!r} is a {type(data[columns[0]]).__name__} and {other!r} a {type(data[other]).__name__}: are"
            " they columns of one data set, or data sets by name?",
            remedy=_EITHER,
        )
    return {_checked_name(name): _source_of_set(name, value) for name, value in data.items()}


def metric_names(sets: Iterable[str], names: Iterable[str], prefix: str) -> list[str]:
    """Return the full names of metrics that are measured over sets. Those without a set are of the first one."""
    names = list(names)
    return [f"{prefix}{'_'.join(filter(None, (of, name)))}" for of in dict.fromkeys(("", *sets)) for name in names]


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "loss":
        raise DrivetrainError(
            f"{name!r} cannot be the name of a data set: it becomes a part of the names of metrics",
            remedy="letters and digits, with single _ or - between them, and not 'loss': valid_clean_loss is the loss "
            "over the set 'clean'",
        )
    return name


def _source_of_set(name: str, data: Any) -> Source:
    if isinstance(data, (list, tuple)) and data and not isinstance(data[0], (tuple, Mapping)):
        raise DrivetrainError(
            f"{name!r} is a {type(data).__name__} of {type(data[0]).__name__}: is it a column of one data set, or a"
            " data set of its own?",
            remedy=_EITHER,
        )
    try:
        return source_of(data)
    except DrivetrainError as error:
        raise DrivetrainError(f"{name!r}: {error.message}", remedy=error.remedy) from error

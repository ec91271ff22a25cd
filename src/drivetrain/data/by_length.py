"""Groups samples of similar length into batches, so that little is padded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import generators_kept
from drivetrain.data.division import Indices
from drivetrain.data.source import Source, source_of

Lengths = Sequence[int] | NDArray[Any] | Callable[[Any], int]


def by_length(data: Any, lengths: Lengths = len) -> Source:
    """Have a job group samples of similar length into its global batches, in an order that follows from its seed.

    The shuffled samples of an epoch are taken in pools of 64 global batches (of a quarter of the epoch, where that is
    less). Those of a pool are sorted by length and cut into batches, which are then shuffled. Each epoch has every
    sample once and groups other samples together; any number of devices has the same batches; a run that was
    interrupted goes on exactly.

    Args:
        data: A data set, as `Job` takes it, whose samples have numbers: not something that can only be iterated.
        lengths: The length of each sample, in the order of the data; or a function from a sample to its length, which
            reads every sample once.

    Returns:
        The data with its lengths, for `Job(data=…)`.

    Example:
        >>> texts = [[1, 2, 3], [1], [1, 2], [1, 2, 3, 4]]
        >>> dt.by_length(texts, [len(text) for text in texts]).lengths.tolist()
        [3, 1, 2, 4]
    """
    source = source_of(data)
    if not source.is_keyed:
        raise DrivetrainError(
            f"{type(source.dataset).__name__} has an order of its own or can only be iterated: its samples cannot be "
            "grouped by length",
            remedy="give a map-style data set, or a list, without a sampler",
        )
    found = _measured(source.dataset, lengths) if callable(lengths) else list(lengths)
    if len(found) != len(source.dataset):
        raise DrivetrainError(
            f"there are {len(found)} lengths for {len(source.dataset)} samples", remedy="give one per sample"
        )
    return replace(source, lengths=_checked(found))


def _measured(dataset: Any, length: Callable[[Any], int]) -> list[int]:
    found = []
    with generators_kept():
        for number in range(len(dataset)):
            try:
                found.append(length(dataset[number]))
            except TypeError as error:
                raise DrivetrainError(
                    f"the length of sample {number} is not known: {error}",
                    remedy="give a function from a sample to its length: dt.by_length(data, lambda item: …)",
                ) from error
    return found


def _checked(lengths: list[Any]) -> Indices:
    bad = next((each for each in lengths if not hasattr(each, "__index__") or each < 0), None)
    if bad is not None:
        raise DrivetrainError(f"a length is a number from 0, and not {bad!r}", remedy="give whole numbers")
    return np.array([int(each) for each in lengths], dtype=np.int64)

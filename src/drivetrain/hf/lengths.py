"""The lengths of tokenized samples, and the few lengths that batches are padded to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.data.division import Indices, SampleStream
from drivetrain.data.keyed_items import Columns
from drivetrain.hf.rows import ParquetRows, list_lengths

MULTIPLE = 8  # of tokens: what matrix units take at once
MOST_CANDIDATES = 512
MOST_SIMULATED = 20_000  # samples, for the share of padding


def known_lengths(data: Any, column: str) -> Indices | None:
    """Return the number of tokens of each sample where that takes no reading of samples; None otherwise."""
    if isinstance(data, Columns):
        tokens = data.tensors.get(column)
        return None if tokens is None or tokens.dim() != 2 else np.full(len(tokens), tokens.shape[1], np.int64)
    if isinstance(data, ParquetRows):
        return data.lengths(column)
    if type(data).__module__.partition(".")[0] == "datasets":
        # A selection of rows has its lengths in another order.
        is_whole = column in (getattr(data, "column_names", None) or ()) and getattr(data, "_indices", None) is None
        return list_lengths(data.data, column) if is_whole else None
    if isinstance(data, (list, tuple)):
        try:
            return np.array([len(item[column]) for item in data], dtype=np.int64)
        except (TypeError, KeyError, IndexError):
            return None  # what is wrong with it is told where it is collated
    return None


def buckets_for(lengths: NDArray[Any], most: int) -> tuple[int, ...]:
    """Return at most so many lengths, such that padding each sample to the next of them adds the fewest tokens."""
    if lengths.min() == lengths.max():
        return (max(1, int(lengths.max())),)
    coarse = MULTIPLE * max(1, -(-int(lengths.max()) // (MULTIPLE * MOST_CANDIDATES)))
    values, counts = np.unique(-(-np.maximum(lengths, 1) // coarse) * coarse, return_counts=True)
    until = np.concatenate([[0], np.cumsum(counts)])
    # best[j]: the fewest tokens of all samples up to the j-th value, the last of which is a bucket.
    best = until[1:] * values
    choices = list[NDArray[np.int64]]()
    for _ in range(1, min(most, len(values))):
        # The bucket before the last, at i < j: what is longer is padded to the j-th value.
        costs = best[:, None] + (until[1:][None, :] - until[1:][:, None]) * values[None, :]
        costs[np.tril_indices(len(values))] = np.iinfo(np.int64).max
        chosen = costs.argmin(axis=0)
        choices.append(np.where(costs.min(axis=0) < best, chosen, -1))
        best = np.minimum(best, costs.min(axis=0))
    return tuple(int(values[index]) for index in _traced(choices, len(values) - 1))


def _traced(choices: Sequence[NDArray[np.int64]], last: int) -> list[int]:
    found = [last]
    for before in reversed(choices):
        if before[found[0]] >= 0:
            found.insert(0, int(before[found[0]]))
    return found


def next_bucket(length: int, buckets: Sequence[int]) -> int:
    """Return the length that a batch is padded to whose longest sample has so many tokens."""
    return next((each for each in buckets if each >= length), -(-length // MULTIPLE) * MULTIPLE if buckets else length)


def pack_rows(lengths: Sequence[int], row: int) -> list[list[int]]:
    """Distribute samples over rows: the longest first, each into the first row that has room for it."""
    rows, room = list[list[int]](), list[int]()
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        place = next((at for at, left in enumerate(room) if left >= lengths[index]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row)
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


def padding_share(
    lengths: Indices, stream: SampleStream, batch: int, buckets: Sequence[int], *, packs: bool = False
) -> float:
    """Return the share of padding in the first epoch's global batches, each as one micro-batch."""
    stop = min(stream.num_samples, max(batch, MOST_SIMULATED - MOST_SIMULATED % batch))
    order = stream.samples(0, 0, stop)
    computed = 0
    for start in range(0, stop, batch):
        chosen = lengths[order[start : start + batch]]
        row = next_bucket(int(chosen.max()), buckets)
        computed += row * (len(pack_rows(chosen.tolist(), row)) if packs else len(chosen))
    return 1 - float(lengths[order].sum()) / max(1, computed)


def in_words(buckets: Sequence[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, buckets[:-1])), str(buckets[-1])]))

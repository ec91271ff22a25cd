"""Checks whether ranks have the same samples under the same numbers, by comparing a few of them.

Files that are listed in another order on another machine make a dataset of the same length whose samples are trained on
twice or never, and nothing shows it. So a few items are compared. Legitimate differences do not count: rounding on
another processor, file locations, items that differ each time they are read.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.isolation import generators_kept
from drivetrain.data.keyed_items import Generators, KeyedItems, spread_over

MOST_ITEMS = 8
READING_SECONDS = 1.0  # per data set; an item that is begun is finished
# Rereads before a difference counts: an undetected coin flip agrees this often once in 65,536 times, on two ranks.
TIMES_AGAIN, AGAIN_SECONDS = 8, 30.0
MOST_LEAVES, MOST_VALUES = 64, 64
# What other processors and decoders make of one file: some levels of an image's 256, and more at a few sharp edges.
TOLERANCE, MOST_APART = 0.05, 0.1
FRACTION, WHOLE, TEXT = "numbers", "whole numbers", "texts"


class Glance(NamedTuple):
    """A few samples by their numbers, as this rank has them. Items without anything to compare are left out."""

    length: int
    digests: dict[int, str]  # to the bit
    sketches: dict[int, list[Any]]  # to rounding


def glance(items: KeyedItems, numbers: Sequence[int] = (), seconds: float | None = None) -> Glance:
    """Read a few items, in the same order on every rank: `numbers`, or some from everywhere.

    Stops after `seconds`. An item that raises is left to the loader, which reports where. Global generators and those
    of the dataset are afterwards in the state they were in.
    """
    found = Glance(len(items), {}, {})
    generators = Generators([items.dataset])
    began = time.monotonic()
    with generators_kept(), generators.kept():
        before = generators.states()
        for sample in numbers or _in_turn(found.length):
            digest, sketch = _look(items, sample)
            if generators.states() != before:  # its items are random, and not by the key
                return Glance(found.length, {}, {})
            if sketch:
                found.digests[sample], found.sketches[sample] = digest, sketch
            if time.monotonic() - began > (READING_SECONDS if seconds is None else seconds):
                break
    return found


def are_steady(items: KeyedItems, seen: Mapping[int, str]) -> bool:
    """Return whether items are the same each time they are read; False where checking takes too long."""
    generators = Generators([items.dataset])
    began = time.monotonic()
    with generators_kept(), generators.kept():
        for _ in range(TIMES_AGAIN):
            if any(_look(items, sample)[0] != digest for sample, digest in seen.items()):
                return False
            if time.monotonic() - began > AGAIN_SECONDS:
                return False
    return True


def _in_turn(length: int) -> list[int]:
    """Return the numbers to read, both ends first: where time is short, only these are read."""
    numbers = spread_over(length, MOST_ITEMS)
    return list(dict.fromkeys([*numbers[:1], *numbers[-1:], *numbers]))


def _look(items: KeyedItems, sample: int) -> tuple[str, list[Any]]:
    try:
        parts = list(_parts(items.keyed(0, sample)))
        return _digest(parts), list(islice(_sketch(parts), MOST_LEAVES))
    except Exception:  # noqa: BLE001  (of its own making: an item of a kind that cannot be looked into is left out)
        return "", []


def _parts(item: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts of an item with their paths in it; other kinds are left out."""
    if isinstance(item, (list, tuple)) and item and all(type(entry) in (int, float) for entry in item):
        yield name, np.asarray(item)
    elif isinstance(item, Mapping):
        for key in item:
            yield from _parts(item[key], f"{name}[{key!r}]" if isinstance(key, (str, int)) else name)
    elif isinstance(item, (list, tuple)):
        for number, entry in enumerate(item):
            yield from _parts(entry, f"{name}[{number}]")
    elif isinstance(item, Tensor):
        if item.layout is torch.strided and not item.is_quantized and item.device.type != "meta":
            yield name, item.detach()
    elif isinstance(item, (np.ndarray, np.generic)):
        if item.dtype.kind in "biufcmM":
            yield name, np.asarray(item)
    elif isinstance(item, int):
        yield name, np.asarray(item) if abs(item) < 2**63 else str(item)
    elif isinstance(item, (float, complex)) or hasattr(item, "__array_interface__"):  # such as an image of PIL's
        yield name, np.asarray(item)
    elif isinstance(item, (str, bytes, PurePath)):
        yield name, item


def _digest(parts: Sequence[tuple[str, Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, part in parts:
        data: Any
        if isinstance(part, Tensor):
            kind, shape = str(part.dtype), tuple(part.shape)
            data = part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(part, np.ndarray):
            kind, shape = str(part.dtype), part.shape
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        else:
            kind, shape, data = type(part).__name__, (), part if isinstance(part, bytes) else str(part).encode()
        digest.update(f"{name} {kind} {shape} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def _sketch(parts: Sequence[tuple[str, Any]]) -> Iterator[list[Any]]:
    """Yield what is compared between machines, as JSON: each part's path, kind, shape, some values and some means.

    Texts beside numbers are mostly file names, and those may lie elsewhere: they count only in items without
    arrays, and then without the folder.
    """
    parts = sorted(parts, key=lambda part: part[0])
    numbers = [(name, part) for name, part in parts if isinstance(part, (Tensor, np.ndarray))]
    has_arrays = any(part.ndim for _, part in numbers)
    for name, part in numbers:
        values = _flat(part)
        kind = FRACTION if _doubles(values[:0]).dtype.kind == "f" else WHOLE
        yield [name, kind, [int(size) for size in part.shape], _some(values), _means(values)]
    for name, part in () if has_arrays else parts:
        if isinstance(part, (str, bytes, PurePath)):
            text = part if isinstance(part, bytes) else _without_folder(str(part)).encode()
            yield [name, TEXT, [], [hashlib.blake2b(text, digest_size=8).hexdigest()], []]


Numbers = Tensor | np.ndarray[Any, Any]


def _flat(part: Numbers) -> Numbers:
    """Return its numbers as one row, not converted to doubles: an item may be large, and many ranks read it."""
    if isinstance(part, Tensor):
        return (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).reshape(-1)
    if part.dtype.kind == "c":
        part = np.stack([part.real, part.imag], -1)
    return (part.astype(np.int64) if part.dtype.kind in "mM" else part).reshape(-1)


def _doubles(values: Numbers) -> np.ndarray[Any, Any]:
    """Return whole numbers unchanged, others in double precision."""
    if isinstance(values, Tensor):
        return (values.to(torch.float64) if values.is_floating_point() else values).cpu().numpy()
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def _some(values: Numbers) -> list[Any]:
    if len(values) <= MOST_VALUES:
        return _plain(_doubles(values))
    places = np.linspace(0, len(values) - 1, MOST_VALUES).round().astype(np.int64)
    return _plain(_doubles(values[torch.from_numpy(places) if isinstance(values, Tensor) else places]))


def _means(values: Numbers) -> list[Any]:
    """Return the means of stretches: data that is mostly zeros has nothing else to identify it."""
    if len(values) <= MOST_VALUES:
        return []
    split: Any = torch.tensor_split if isinstance(values, Tensor) else np.array_split
    with np.errstate(all="ignore"):
        return _plain(np.asarray([_doubles(part).mean(dtype=np.float64) for part in split(values, MOST_VALUES)]))


def _plain(values: np.ndarray[Any, Any]) -> list[Any]:
    return [value if value == value else None for value in values.tolist()]


def _without_folder(text: str) -> str:
    return text.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]


def difference(one: Sequence[list[Any]], other: Sequence[list[Any]]) -> str:
    """Describe where two sketches are of different samples; empty if they may be of the same one."""
    for mine, yours in zip_longest(one, other):
        if mine is None or yours is None or mine[:2] != yours[:2] or len(mine[2]) != len(yours[2]):
            return "it holds other things"
        name, kind, shape, *values = mine
        where = f" at {name}" if name else ""
        if shape != yours[2]:
            # What is cut where it falls silent may come out a little longer on another processor.
            if any(abs(size - its) > TOLERANCE * max(size, its) for size, its in zip(shape, yours[2], strict=True)):
                return f"its shape is {tuple(shape)} and not {tuple(yours[2])}{where}"
            continue
        is_exact = not shape and kind != FRACTION
        if any(_are_apart(some, others, is_exact) for some, others in zip(values, yours[3:], strict=True)):
            what = f"it is {values[0][0]} and not {yours[3][0]}" if not shape and kind != TEXT else f"its {kind} differ"
            return what + where
    return ""


def _are_apart(values: Sequence[Any], others: Sequence[Any], is_exact: bool) -> bool:
    if is_exact or values == others:
        return values != others
    sizes = [abs(value) for value in (*values, *others) if value is not None and np.isfinite(value)]
    allowed = TOLERANCE * max(sizes, default=0.0)
    num_apart: int = sum(
        one != other and (one is None or other is None or not abs(one - other) <= allowed)
        for one, other in zip(values, others, strict=True)
    )
    return num_apart > MOST_APART * len(values)

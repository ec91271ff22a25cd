"""A job's data, whatever it was given as; what is held out of it; and batches of samples of similar length."""

import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import generators_kept
from drivetrain.core.precision import as_real
from drivetrain.data.division import Indices, LengthGroupedStream, SampleStream
from drivetrain.data.external_order import ItemEntries, ReadOrder, SamplerEntries, has_state, is_iterator, loses_items
from drivetrain.data.keyed_items import Collate, Columns, Generators, KeyedItems, spread_over

# ----------------------------------------------------------------------------------------------------------------------
# Identifies a job's data: a dataset, tensors, a list, an iterable, or a DataLoader; and what was taken from it.
#
# Nothing is taken silently: `notes` lists it in sentences, which a run prints and records.
#
# Whether ranks have the same samples under the same numbers is checked by comparing a few of them (`glance`). Files
# that are listed in another order on another machine make a dataset of the same length whose samples are trained on
# twice or never, and nothing shows it. Legitimate differences do not count: rounding on another processor, file
# locations, items that differ each time they are read.

_SETTINGS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("pinned memory", lambda loader: bool(loader.pin_memory)),
    ("prefetch factor", lambda loader: loader.num_workers > 0 and loader.prefetch_factor is not None),
    ("worker_init_fn", lambda loader: loader.worker_init_fn is not None),
    ("timeout", lambda loader: loader.timeout > 0),
)
MOST_ITEMS = 8
READING_SECONDS = 1.0  # per data set; an item that is begun is finished
# Rereads before a difference counts: an undetected coin flip agrees this often once in 65,536 times, on two ranks.
TIMES_AGAIN, AGAIN_SECONDS = 8, 30.0
MOST_LEAVES, MOST_VALUES = 64, 64
# What other processors and decoders make of one file: some levels of an image's 256, and more at a few sharp edges.
TOLERANCE, MOST_APART = 0.05, 0.1
FRACTION, WHOLE, TEXT = "numbers", "whole numbers", "texts"
Numbers = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True)
class WorkerWishes:
    """The worker settings of a handed-in DataLoader. None: not set."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    init_function: Callable[[int], None] | None = None
    timeout_seconds: float = 0
    context: Any = None


@dataclass(frozen=True)
class Source:
    """The source of samples, and of their order. Fields that are None are for the job to set."""

    dataset: Any
    is_iterable: bool = False
    sampler: Iterable[Any] | None = None  # replaces the keyed order
    batch_sampler: Iterable[Any] | None = None  # its batches are the global batches
    shuffle: bool | None = None
    collate: Collate | None = None
    global_batch: int | None = None
    sizes_vary: bool = False  # of the batch sampler's batches, as far as is known: `global_batch` is the largest seen
    drop_last: bool = False
    lengths: Indices | None = field(default=None, compare=False, repr=False)  # samples are grouped by them
    wishes: WorkerWishes = WorkerWishes()
    notes: tuple[str, ...] = ()

    @property
    def is_keyed(self) -> bool:
        """Whether the order is keyed: a formula, whose length is known."""
        return not self.is_iterable and self.sampler is None and self.batch_sampler is None

    @property
    def order_name(self) -> str:
        """The name of the order, for the record."""
        maker = self.batch_sampler if self.batch_sampler is not None else self.sampler
        return type(self.dataset if maker is None else maker).__name__

    def samples_per_epoch(self, global_batch: int | None) -> int | None:
        """Return the samples of an epoch as far as known beforehand. Only the keyed order is sure to keep to it."""
        if self.batch_sampler is not None:
            return None
        length = _length(self.sampler if self.sampler is not None else self.dataset)
        if length is None or not self.drop_last or not global_batch:
            return length
        return length - length % global_batch

    def steps_per_epoch(self, global_batch: int) -> int | None:
        if self.batch_sampler is not None:
            return _length(self.batch_sampler)
        samples = self.samples_per_epoch(global_batch)
        return None if samples is None else -(-samples // global_batch)

    @property
    def grouping(self) -> str:
        """A mark of the lengths that samples are grouped by; empty if they are not."""
        if self.lengths is None:
            return ""
        return hashlib.blake2b(self.lengths.tobytes(), digest_size=8).hexdigest()

    def order(self, global_batch: int, seed: int, *, shuffle: bool) -> SampleStream | ReadOrder:
        if self.is_keyed and self.lengths is not None:
            return LengthGroupedStream(self.lengths, seed, global_batch)
        if self.is_keyed:
            return SampleStream(len(self.dataset), seed, shuffle=shuffle)
        if self.batch_sampler is not None:
            return ReadOrder(SamplerEntries(self.batch_sampler, seed, in_batches=True), global_batch, in_batches=True)
        if self.sampler is not None:
            return ReadOrder(SamplerEntries(self.sampler, seed), global_batch, drop_last=self.drop_last)
        return ReadOrder(ItemEntries(self.dataset, seed), global_batch, drop_last=self.drop_last)


def source_of(data: Any) -> Source:
    """Identify the data. Raises a DrivetrainError where it cannot be trained on."""
    if isinstance(data, Source):
        return data
    if isinstance(data, DataLoader):
        return _of_loader(data)
    if isinstance(data, Mapping) and not hasattr(data, "__getitems__"):
        return Source(_columns(data))
    if isinstance(data, type) or inspect.isroutine(data):
        kind = f"the class {data.__name__}" if isinstance(data, type) else "a function"
        raise DrivetrainError(f"expected a Dataset, got {kind}", remedy="call it: data=MyDataset(…)")
    if isinstance(data, (str, bytes, Path)):
        raise DrivetrainError(
            f"expected a Dataset, got {type(data).__name__}",
            remedy="open the file or folder that it names, and pass a Dataset made from it",
        )
    if any(base.__name__ == "DataFrame" for base in type(data).__mro__):
        raise DrivetrainError("expected a Dataset, got a DataFrame, whose [0] is a column and not a row", remedy=_FRAME)
    _refuse_separate_tensors(data)
    if not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Source(data)
    if hasattr(data, "__iter__"):
        return Source(data, is_iterable=True, shuffle=False, notes=tuple(_notes_on_iterating(data)))
    raise DrivetrainError(
        f"expected a Dataset, got {type(data).__name__}: it has neither __len__ and __getitem__ nor __iter__",
        remedy="give a data set (__len__ and __getitem__, or __iter__), a list of items, a dictionary of tensors of "
        "equal length, or a DataLoader",
    )


def _notes_on_iterating(data: Any) -> Iterable[str]:
    yield (
        "the data set can only be iterated: every rank reads all of it, with one worker at most, and keeps its slices; "
        "it is not shuffled"
    )
    if not has_state(data):
        why = "it has no state_dict and load_state_dict"
        if loses_items(data):
            why = "its state leaves out the items in its shuffle buffer, and is not used"
        yield f"{why}: a resumed run reads again, without training, what the epoch has had so far"


_LIST = "make it a tensor, or give a list of items"
_FRAME = 'give its columns as arrays: data={"x": df[[…]].to_numpy("float32"), "y": df["y"].to_numpy("float32")}'
_BOTH = (
    "make it a tensor. To train on several data sets at once, make one whose items have a part of each: "
    "__getitem__(i) returns (first[i], second[i % len(second)])"
)


def _columns(data: Mapping[Any, Any]) -> Columns:
    if not data:
        raise DrivetrainError("the data set is empty", remedy="check the path or the filter it was made with")
    tensors = {}
    for name, value in data.items():
        if not isinstance(value, (Tensor, np.ndarray)) or value.ndim == 0:
            raise DrivetrainError(
                f"expected a dictionary of tensors or arrays of equal length, got {type(value).__name__} for {name!r}",
                remedy=_remedy_for(value),
            )
        try:
            tensors[str(name)] = torch.as_tensor(value)
        except TypeError as error:
            raise DrivetrainError(
                f"{name!r} cannot be made a tensor: {error}", remedy="give numbers, or a list of items"
            ) from None
    lengths = {name: len(value) for name, value in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise DrivetrainError(
            f"the tensors of the data are of unequal length: {lengths}", remedy="each needs one row per sample"
        )
    return Columns(tensors)


def _remedy_for(value: Any) -> str:
    """Return what to give in place of a value that is no column."""
    if hasattr(value, "to_numpy"):
        return _FRAME
    return _BOTH if hasattr(value, "__getitem__") or isinstance(value, DataLoader) else _LIST


def _refuse_separate_tensors(data: Any) -> None:
    """Refuse (images, labels), which is not two items, though it could be read so."""
    if not isinstance(data, (list, tuple)) or not 2 <= len(data) <= 8:
        return
    if not all(isinstance(part, (Tensor, np.ndarray)) and part.ndim for part in data):
        return
    lengths, shapes = {len(part) for part in data}, {(part.ndim, part.dtype) for part in data}
    if len(lengths) == 1 and len(shapes) > 1:
        raise DrivetrainError(
            f"a {type(data).__name__} of {len(data)} tensors of {lengths.pop()} rows is taken for {len(data)} items",
            remedy="give TensorDataset(*tensors), or a dictionary with a name for each",
        )


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _of_loader(loader: DataLoader[Any]) -> Source:
    taken = ["data set", "collate function", f"{loader.num_workers} workers"]
    taken += [name for name, is_set in _SETTINGS if is_set(loader)]
    note = f"taken from the DataLoader: its {', '.join(taken)}; it is not iterated itself"
    inner = source_of(loader.dataset)
    source = replace(inner, collate=loader.collate_fn, wishes=_wishes(loader), notes=(note, *inner.notes))
    batch_size, drop_last, sampler = loader.batch_size, loader.drop_last, loader.sampler
    if type(loader.batch_sampler) is BatchSampler:
        # Torch makes one from a batch size, too; a user's means the same.
        batch_size, drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        sampler = loader.batch_sampler.sampler
    elif loader.batch_sampler is not None:
        kind = type(loader.batch_sampler).__name__
        said = f"the batches of its {kind} are the global batches, in its order"
        size, is_said = _nominal(loader.batch_sampler)
        return replace(
            source,
            batch_sampler=loader.batch_sampler,
            global_batch=size,
            sizes_vary=not is_said,
            notes=(*source.notes, said),
        )
    if batch_size is None:
        raise _whole_batches()
    source = replace(source, global_batch=batch_size, drop_last=drop_last)
    notes = [f"its batch size of {batch_size} is the global batch, over all devices, unless the job says another"]
    if drop_last:
        notes.append("drop_last: samples that do not fill a batch are left out, other ones in each epoch")
    if not source.is_iterable:
        shuffle, kept, said = _on_sampler(sampler, _length(loader.dataset))
        notes.append(said)
        source = replace(source, sampler=kept, shuffle=shuffle)
    return replace(source, notes=(*source.notes, *notes))


def _wishes(loader: DataLoader[Any]) -> WorkerWishes:
    has_workers = loader.num_workers > 0
    return WorkerWishes(
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor if has_workers else None,
        pin_memory=True if loader.pin_memory else None,  # torch's default of False says nothing
        init_function=loader.worker_init_fn,
        timeout_seconds=loader.timeout,
        context=loader.multiprocessing_context if has_workers else None,
    )


def _whole_batches() -> DrivetrainError:
    return DrivetrainError(
        "the DataLoader has batch_size=None: its items are whole batches, which cannot be divided over devices",
        remedy="give it a batch size and single samples as items; batches of your own making need a batch_sampler",
    )


def _on_sampler(sampler: Any, length: int | None) -> tuple[bool | None, Any, str]:
    """Return whether a sampler means shuffling, the sampler itself if it is used, and the note about it."""
    kind, is_whole = type(sampler).__name__, _length(sampler) == length
    if type(sampler) is SequentialSampler and is_whole:
        return False, None, "its order is the data set's own (SequentialSampler): shuffle=False"
    is_drawn_once = type(sampler) is RandomSampler and not sampler.replacement
    if is_drawn_once and is_whole and sampler.num_samples == len(sampler.data_source):
        return True, None, "its RandomSampler means shuffle=True, in the order that follows from the job's seed"
    if isinstance(sampler, DistributedSampler):
        note = f"its {kind} is replaced: each batch is divided over the ranks here, and all need the whole order"
        return sampler.shuffle, None, note
    return None, sampler, f"its {kind} is used: read once per epoch, alike on every rank, its draws keyed by the seed"


def _nominal(batch_sampler: Any) -> tuple[int | None, bool]:
    """Return the batch size, and whether the sampler states it. Otherwise that of the largest of many batches is taken.

    It only determines how much memory a step takes: steps are the sampler's batches, whatever their sizes.
    """
    size = getattr(batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size, True
    if is_iterator(batch_sampler):
        return None, False
    return SamplerEntries(batch_sampler, seed=0, in_batches=True).largest_batch(), False


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


def _flat(part: Numbers) -> Numbers:
    """Return its numbers as one row, not converted to doubles: an item may be large, and many ranks read it."""
    if isinstance(part, Tensor):
        return as_real(part).reshape(-1)
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


# ----------------------------------------------------------------------------------------------------------------------
# Data that is held out of training: one data set, or several by name.

_NAME = re.compile(r"[A-Za-z0-9]+([_-][A-Za-z0-9]+)*")
_EITHER = (
    "give columns of one data set as tensors; give data sets by name as Datasets, DataLoaders, dictionaries of tensors,"
    " or lists of tuples or dictionaries"
)


def sets_of(data: Any) -> dict[str, Source]:
    """Identify held-out data: one data set, whose name is empty, or several by name.

    A dictionary of tensors or arrays is one data set in columns; a dictionary of data sets is several. What could be
    either is refused. Of a DataLoader, the samples that its sampler chooses are the set, in the order of the data.
    """
    return {name: _held_out(source) for name, source in _named(data).items()}


def _named(data: Any) -> dict[str, Source]:
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


_MOST_TIMES = 16  # that a sampler of a held-out set may yield each sample, on average


def _held_out(source: Source) -> Source:
    """Return the samples of a held-out set that its sampler chooses, drawn by a key, as a set without a sampler."""
    sampler = source.sampler if source.batch_sampler is None else source.batch_sampler
    if sampler is None:
        return replace(source, lengths=None)
    in_batches, length = source.batch_sampler is not None, len(source.dataset)
    with generators_kept(), Generators([sampler]).kept():
        entries = SamplerEntries(sampler, 0, in_batches=in_batches).begin(0, 0, None)
        keys = (key for entry in entries for key in (entry if in_batches else [entry]))
        chosen = list(islice(keys, _MOST_TIMES * length + 1))
    if len(chosen) > _MOST_TIMES * length:
        raise DrivetrainError(
            f"the {source.order_name} of a set that is held out yields more than {len(chosen) - 1} samples of {length}",
            remedy="give the data set itself, or torch.utils.data.Subset(dataset, indices)",
        )
    if all(isinstance(key, int) for key in chosen):
        chosen.sort()
    dataset = source.dataset if chosen == list(range(length)) else Subset(source.dataset, chosen)
    return replace(source, dataset=dataset, sampler=None, batch_sampler=None, lengths=None)


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


# ----------------------------------------------------------------------------------------------------------------------
# Groups samples of similar length into batches, so that little is padded.

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

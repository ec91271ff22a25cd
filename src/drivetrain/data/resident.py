"""Data sets that are held on the device: as columns, and how a map-style dataset is copied there."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import generators_kept
from drivetrain.core.processes import forking, outlive_signals
from drivetrain.core.value import format_bytes
from drivetrain.data.batch import in_format, map_leaves
from drivetrain.data.keyed_items import (
    GATHERED,
    Collate,
    Columns,
    Generators,
    ItemError,
    KeyedItems,
    draws_anything,
    spread_over,
)
from drivetrain.data.source import Source

# ----------------------------------------------------------------------------------------------------------------------
# A map-style dataset as columns: one tensor per leaf of its items, a row per sample, on the device.
#
# Batches are gathered there, in the order of the sample stream, with the same bits as fetching items and stacking them.
# `reading` makes one, or says why a dataset cannot be one.

# Types that torch cannot gather are gathered as bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_CHANNELS_INNERMOST, _AND_BACK = (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True)
class Column:
    """One leaf of all items. `rows` is its memory layout: images are perhaps channels-last."""

    rows: Tensor
    dtype: torch.dtype
    is_permuted: bool = False
    turns_late: bool = False  # there was no memory to convert the column: each batch is converted

    @classmethod
    def empty(cls, num_rows: int, like: Tensor, device: torch.device, *, channels_last: bool) -> "Column":
        """Allocate a column for rows like those of the batch `like`."""
        is_permuted = _turns(like, channels_last)
        shape = (like.permute(_CHANNELS_INNERMOST) if is_permuted else like).shape
        rows = torch.empty((num_rows, *shape[1:]), dtype=_stored(like.dtype), device=device)
        return cls(rows, like.dtype, is_permuted)

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device, *, channels_last: bool) -> "Column":
        """Make a column of a tensor, without a copy if it is on the device and in the right layout already."""
        is_permuted = _turns(tensor, channels_last)
        rows = tensor.detach().to(device)
        rows = rows.permute(_CHANNELS_INNERMOST).contiguous() if is_permuted else rows
        return cls(rows.view(_stored(tensor.dtype)), tensor.dtype, is_permuted)

    def put(self, start: int, batch: Tensor) -> None:
        found = batch.view(_stored(batch.dtype))
        self.rows[start : start + len(batch)].copy_(found.permute(_CHANNELS_INNERMOST) if self.is_permuted else found)

    def gather(self, samples: Tensor) -> Tensor:
        # `rows[samples]` would wake all threads of a CPU for a small batch.
        found = self.rows.index_select(0, samples)
        if self.is_permuted:
            found = found.permute(_AND_BACK)
        found = found if found.dtype is self.dtype else found.view(self.dtype)
        return in_format(found, True) if self.turns_late else found

    def turned(self, channels_last: bool) -> "Column":
        """Return the same column in channels-last layout or not."""
        if not self.is_permuted and not _turns(self.rows.view(self.dtype), channels_last):
            return replace(self, turns_late=False)
        if self.is_permuted == channels_last:
            return self
        try:
            rows = self.rows.permute(_CHANNELS_INNERMOST if channels_last else _AND_BACK).contiguous()
        except torch.OutOfMemoryError:
            if not channels_last:
                raise
            return replace(self, turns_late=True)
        return replace(self, rows=rows, is_permuted=channels_last, turns_late=False)

    def gather_into(self, out: Tensor, samples: Tensor) -> Tensor:
        if self.turns_late:
            return out.copy_(self.gather(samples))
        if len(out) != len(samples):  # torch would make another tensor of it, and leave the given one as it is
            raise ValueError(f"{len(samples)} samples do not go into a batch of {len(out)}")
        as_it_lies = out.view(self.rows.dtype)
        as_it_lies = as_it_lies.permute(_CHANNELS_INNERMOST) if self.is_permuted else as_it_lies
        torch.index_select(self.rows, 0, samples, out=as_it_lies)
        return out


def _stored(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in GATHERED else _BITS[dtype.itemsize]


def _turns(batch: Tensor, channels_last: bool) -> bool:
    """Return whether the feed would change a batch's layout.

    One channel, or one pixel, has both layouts at once, and stays.
    """
    if batch.dim() != 4 or not batch.is_floating_point() or not channels_last:
        return False
    plain = torch.empty((1, *batch.shape[1:]), device="meta")
    return in_format(plain, True) is not plain


class Resident:
    """The columns of a dataset on a device."""

    def __init__(
        self, columns: Sequence[Column], template: Any, device: torch.device, *, channels_last: bool = False
    ) -> None:
        self.columns, self.device, self.channels_last = list(columns), device, channels_last
        self._make = _maker(template)
        self._plain = self._plain_rows()

    def _plain_rows(self) -> list[Tensor] | None:
        """Return the columns' rows where a gathered row needs no conversion."""
        is_plain = all(
            column.rows.dtype is column.dtype and not (column.is_permuted or column.turns_late)
            for column in self.columns
        )
        return [column.rows for column in self.columns] if is_plain else None

    def turn(self, channels_last: bool) -> None:
        """Have batches in channels-last layout, or not, from now on; one column after the other, to save memory."""
        if channels_last == self.channels_last:
            return
        self._plain = None
        for number in range(len(self.columns)):
            self.columns[number] = self.columns[number].turned(channels_last)
        self.channels_last = channels_last
        self._plain = self._plain_rows()

    def __len__(self) -> int:
        return len(self.columns[0].rows)

    @property
    def num_bytes(self) -> int:
        return sum(column.rows.nbytes for column in self.columns)

    def gather(self, samples: Tensor, out: Any = None) -> Any:
        """Gather the batch of samples whose numbers are on the device: one kernel per column; the host does not wait.

        With `out`, a batch of the same structure, shapes and layout, its tensors are filled and returned.
        """
        if out is None and self._plain is not None:  # a microsecond per column less
            return self._make([rows.index_select(0, samples) for rows in self._plain])
        if out is None:
            return self._make([column.gather(samples) for column in self.columns])
        columns = iter(self.columns)
        return map_leaves(lambda leaf: next(columns).gather_into(leaf, samples), out)

    def numbers(self, samples: Any) -> Tensor:
        """Copy sample numbers to the device. The copy does not make the host wait."""
        return self.on_host(samples).to(self.device, non_blocking=True)

    def on_host(self, samples: Any) -> Tensor:
        """Put sample numbers into memory from which a copy to the device does not make the host wait."""
        found = torch.as_tensor(samples, dtype=torch.int64)
        return found.pin_memory() if self.device.type == "cuda" else found


class Window:
    """The sample numbers of the next steps, on the device, and a place in them.

    A captured step reads from its place on and advances it by itself, so replays can follow each other without anything
    enqueued between them, which would keep the device from starting the second at once.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.numbers = torch.zeros(length, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self._place: int | None = 0  # its value once all enqueued work is done; None: unknown

    def fill(self, numbers: Tensor) -> None:
        """Fill the window with other numbers; work enqueued before still reads the old ones."""
        self.numbers[: len(numbers)].copy_(numbers, non_blocking=True)

    def go_to(self, start: int) -> None:
        if self._place != start:
            self.place.fill_(start)
            self._place = start

    def passed(self, count: int) -> None:
        """Note that a replay was enqueued that advances the place by `count`."""
        assert self._place is not None
        self._place += count

    def lose_place(self) -> None:
        self._place = None

    def chosen(self, offsets: Tensor) -> Tensor:
        """Return the numbers at these offsets from the place; captured in the graph."""
        return self.numbers.index_select(0, self.place + offsets)


class Rows:
    """Samples of resident data that were not gathered yet: the consumer gathers them where it needs the batch.

    They are given by their numbers, or by their place in a window.
    """

    __slots__ = ("_samples", "count", "resident", "start", "window")

    def __init__(
        self,
        resident: Resident,
        samples: Tensor | None = None,
        window: Window | None = None,
        start: int = 0,
        count: int = 0,
    ) -> None:
        self.resident, self._samples = resident, samples
        self.window, self.start, self.count = window, start, count

    @property
    def samples(self) -> Tensor:
        if self._samples is None:
            assert self.window is not None
            return self.window.numbers.narrow(0, self.start, self.count)
        return self._samples

    def gather(self, out: Any = None) -> Any:
        return self.resident.gather(self.samples, out)


def _maker(template: Any) -> Callable[[list[Tensor]], Any]:
    """Return a function that builds a batch from tensors, in leaf order; common structures need no traversal."""
    if isinstance(template, Tensor):
        return lambda tensors: tensors[0]
    if type(template) is list and all(isinstance(part, Tensor) for part in template):
        return lambda tensors: tensors
    if type(template) is dict and all(isinstance(part, Tensor) for part in template.values()):
        names = tuple(template)
        return lambda tensors: dict(zip(names, tensors, strict=True))

    def walk(tensors: list[Tensor]) -> Any:
        following = iter(tensors)
        return map_leaves(lambda leaf: next(following), template)

    return walk


# What is in memory already


def in_memory(dataset: Any) -> Any:
    """Return the columns of a dataset made of tensors, as a batch of all its samples; None for any other."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is Columns:
        return dict(dataset.tensors)
    if type(dataset) is Tensor and dataset.dim():
        return dataset
    if type(dataset) is Subset:
        whole = in_memory(dataset.dataset)
        if whole is not None and all(leaf.layout is torch.strided for leaf in leaves_of(whole)):
            chosen = torch.as_tensor(dataset.indices, dtype=torch.int64)
            return map_leaves(lambda leaf: leaf[chosen.to(leaf.device)], whole)
    return None


def num_bytes_in_memory(dataset: Any) -> int | None:
    """Return the bytes of a dataset made of tensors, without copying it; None for any other."""
    if type(dataset) is Subset:
        inner = num_bytes_in_memory(dataset.dataset)
        return None if inner is None else inner * len(dataset) // max(1, len(dataset.dataset))  # type: ignore[arg-type]
    whole = in_memory(dataset)
    return None if whole is None else sum(num_bytes_of(leaf) for leaf in leaves_of(whole))


def leaves_of(batch: Any) -> list[Any]:
    """Return the leaves in the order in which a batch is built from them."""
    found: list[Any] = []
    map_leaves(found.append, batch)
    return found


def num_bytes_of(leaf: Tensor) -> int:
    return leaf.numel() * leaf.element_size()


# ----------------------------------------------------------------------------------------------------------------------
# Turns a map-style dataset into its resident form, or gives the reason why it cannot be.
#
# Only items that are the same every time may be resident. So every item is read while the generators are watched, some
# are read twice more, and any obstacle is reported as text.

NUM_PROBES = 16  # items that are read twice more than needed, spread over the data set
CHUNK_BYTES, CHUNK_ITEMS = 8 * 1024**2, 1024  # of items that are read and stacked at once
SECONDS_OF_SILENCE = 2.0

_MOST_KEYS = 8  # that a message names


class NotResidentError(DrivetrainError):
    """The data set cannot be resident; `message` is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, remedy="--resident off, or auto, fetches its items batch by batch")


class Probed(NamedTuple):
    """The findings of reading a few items of a dataset."""

    why_not: str  # it cannot be resident; empty if nothing speaks against it
    num_bytes: int | None  # that it takes; None if it cannot be


def probed(source: Source, collate: Collate, limit_bytes: float) -> Probed:
    try:
        with generators_kept():
            return Probed("", _Probes(source, collate, limit_bytes).num_bytes)
    except NotResidentError as error:
        return Probed(error.message, None)


def why_not_resident(source: Source, collate: Collate, limit_bytes: float) -> str:
    """Return why a dataset cannot be resident, as far as a few items show; empty if there is no obstacle."""
    return probed(source, collate, limit_bytes).why_not


def make_resident(
    source: Source,
    collate: Collate,
    device: torch.device,
    limit_bytes: float,
    *,
    channels_last: bool = False,
    num_workers: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Resident:
    """Read every item once, by worker processes if asked to. Raises a NotResidentError with the reason."""
    with generators_kept():
        probes = _Probes(source, collate, limit_bytes)
        try:
            if probes.whole is not None:
                columns = [Column.of(leaf, device, channels_last=channels_last) for leaf in leaves_of(probes.whole)]
                return Resident(columns, probes.template, device, channels_last=channels_last)
            return _read(source, probes, device, channels_last, num_workers, say)
        except torch.OutOfMemoryError as error:
            raise NotResidentError(
                f"there is no memory for its {format_bytes(probes.num_bytes)} on {device}: {str(error).splitlines()[0]}"
            ) from None


class _Probes:
    """Reads a few items to find obstacles. Raises a NotResidentError with the reason."""

    def __init__(self, source: Source, collate: Collate, limit_bytes: float) -> None:
        dataset = source.dataset
        if source.is_iterable:
            raise NotResidentError("it can only be iterated: its items have no numbers to gather by")
        self.num_samples = len(dataset)
        if self.num_samples == 0:
            raise NotResidentError("it is empty")
        known = num_bytes_in_memory(dataset)
        if known is not None:
            _refuse_too_large(known, limit_bytes)
        self.whole = in_memory(dataset)
        if self.whole is None and source.wishes.init_function is not None:
            raise NotResidentError("its worker_init_fn may decide what items are, and would not be called")
        if hasattr(dataset, "set_epoch"):
            raise NotResidentError("it has set_epoch: its items may be others in each epoch")
        self.generators = Generators([dataset])
        self.samples = spread_over(self.num_samples, NUM_PROBES)
        self._items = KeyedItems(dataset, 0)
        self.signature: Any = None
        if self.whole is None or collate is not default_collate:
            self.batch = self._read_twice()
            self.template = _stacked([self._read(sample) for sample in self.samples[:2]])
            if collate is not default_collate:
                self._compare(collate)
        if self.whole is not None:
            self.batch = None
            self.template = self.whole
        leaves = leaves_of(self.template)
        if not leaves:
            raise NotResidentError("its items hold no numbers")
        for leaf in leaves:
            if problem := _problem_with(leaf):
                raise NotResidentError(problem)
        count = self.num_samples if self.whole is not None else min(2, self.num_samples)
        if any(leaf.dim() == 0 or len(leaf) != count for leaf in leaves):
            raise NotResidentError("a batch of its items does not have a row for each")
        self.item_bytes = sum(num_bytes_of(leaf) for leaf in leaves) / count
        self.num_bytes = round(self.item_bytes * self.num_samples)
        _refuse_too_large(self.num_bytes, limit_bytes)

    def _read(self, sample: int) -> Any:
        try:
            (item,) = self._items.__getitems__([(0, sample)])
        except ItemError as error:
            raise NotResidentError(error.message.splitlines()[0]) from None
        if self._items.draws:
            raise NotResidentError(f"its items draw random numbers (seen in item {sample}): they differ in every epoch")
        signature = signature_of(item)
        if self.signature is None:
            self.signature = signature
        elif signature != self.signature:
            raise NotResidentError(_unlike(sample, signature, self.samples[0], self.signature))
        return item

    def _read_twice(self) -> Any:
        """Return the probes as a batch.

        Each is stacked by itself when first read, so that reused memory shows as well.
        """
        before = self.generators.states()
        alone = [_stacked([self._read(sample)]) for sample in self.samples]
        items = [self._read(sample) for sample in self.samples]
        batch = _stacked(items)
        if self.generators.states() != before:
            raise NotResidentError(_OWN_GENERATOR)
        rows = [_tensors_in(one) for one in alone]  # texts are no rows: there are as many as items
        for number, leaf in enumerate(_tensors_in(batch)):
            if not identical(torch.cat([one[number] for one in rows]), leaf):
                raise NotResidentError(
                    "its items differ when they are read twice: they depend on a generator of their own, a clock, or "
                    "memory that is used again"
                )
        return batch

    def _compare(self, collate: Collate) -> None:
        """Check that a user's collate function does nothing but stack."""
        name = getattr(collate, "__name__", type(collate).__name__)
        items = [self._read(sample) for sample in self.samples]
        for count in sorted({1, 2, len(items)}):
            generators = Generators([collate])
            before = generators.states()
            try:
                drew, found = draws_anything(lambda: collate(items[:count]))  # noqa: B023  (called at once)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is not stacking)
                raise NotResidentError(f"its collate function {name} raised {type(error).__name__}: {error}") from None
            if drew or generators.states() != before:
                raise NotResidentError(f"its collate function {name} draws random numbers")
            if not identical(found, _stacked([self._read(sample) for sample in self.samples[:count]])):
                raise NotResidentError(f"its collate function {name} does something else than stack items")


def _tensors_in(batch: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]  # others are refused, by what they are


_OWN_GENERATOR = "its items draw from a generator of their own: they differ every time they are read"


def _refuse_too_large(num_bytes: int, limit_bytes: float) -> None:
    if num_bytes > limit_bytes:
        raise NotResidentError(
            f"it takes {format_bytes(num_bytes)}, and {format_bytes(limit_bytes)} may be used for it"
        )


def _stacked(items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except Exception as error:  # noqa: BLE001  (torch raises several kinds for what it cannot stack)
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotResidentError(f"its items cannot be stacked: {told}") from None


def _problem_with(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"its items hold {type(leaf).__name__}, and only numbers can be gathered on a device"
    if type(leaf) is not Tensor or leaf.is_quantized:
        return f"its items hold {'quantized tensors' if leaf.is_quantized else type(leaf).__name__}, not plain tensors"
    if leaf.layout is not torch.strided:
        return f"its items hold tensors of layout {str(leaf.layout).removeprefix('torch.')}"
    if leaf.requires_grad:
        return "its tensors require gradients"
    return ""


def signature_of(item: Any) -> Any:
    """Return kinds, dtypes and shapes of an item, which must be equal for a batch to be rows of one tensor."""
    if isinstance(item, Tensor):
        return (type(item), item.dtype, tuple(item.shape))
    if isinstance(item, np.ndarray):
        return (type(item), item.dtype, item.shape)
    if isinstance(item, Mapping):
        return (type(item), tuple((key, signature_of(value)) for key, value in item.items()))
    if isinstance(item, (list, tuple)):
        return (type(item), tuple((number, signature_of(value)) for number, value in enumerate(item)))
    return (type(item),)


def _unlike(sample: int, signature: Any, first: int, other: Any) -> str:
    where, one, two = _first_difference(signature, other, "")
    return (
        f"its items are not alike: item {sample}{where} is {_shape_words(one)}, "
        f"and item {first}{where} is {_shape_words(two)}"
    )


def _first_difference(one: Any, other: Any, where: str) -> tuple[str, Any, Any]:
    is_nested = len(one) == len(other) == 2 and one[0] is other[0]
    if is_nested and [key for key, _ in one[1]] == [key for key, _ in other[1]]:
        for (key, inner), (_, others) in zip(one[1], other[1], strict=True):
            if inner != others:
                return _first_difference(inner, others, f"{where}[{key!r}]")
    return where, one, other


def _shape_words(signature: Any) -> str:
    kind = signature[0].__name__
    if len(signature) == 3:
        return f"a {kind} of {str(signature[1]).removeprefix('torch.')} and shape {tuple(signature[2])}"
    if len(signature) == 2:
        keys = [key for key, _ in signature[1]]
        if keys == list(range(len(keys))):
            return f"a {kind} of length {len(keys)}"
        return f"a {kind} with {keys[:_MOST_KEYS]}{' and more' if len(keys) > _MOST_KEYS else ''}"
    return f"of type {kind}"


def identical(one: Any, other: Any) -> bool:
    """Return whether two batches are bitwise equal: structure, types, shapes, memory layout, and every number."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        if one.layout is not torch.strided or one.stride() != other.stride():
            return False
        return bool(torch.equal(_bits(one), _bits(other)))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor as bits, so that a NaN equals itself and 0 differs from -0."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


# Reading all of it


class _Chunk(NamedTuple):
    """Consecutive items, stacked; or the reason why there are none."""

    batch: Any
    problem: str = ""


class _Chunks(Dataset[_Chunk]):
    """The dataset in chunks. Problems are returned, not raised: so they come back from a worker unchanged."""

    def __init__(self, dataset: Any, num_samples: int, size: int, signature: Any, first: int) -> None:
        self._items, self._num_samples, self._size = KeyedItems(dataset, 0), num_samples, size
        self._signature, self._first = signature, first
        self._generators: Generators | None = None  # found where it is read

    def __len__(self) -> int:
        return -(-self._num_samples // self._size)

    def __getitem__(self, number: int) -> _Chunk:
        if self._generators is None:
            self._generators = Generators([self._items.dataset])
        start = number * self._size
        samples = range(start, min(start + self._size, self._num_samples))
        before = self._generators.states()
        try:
            items = self._items.__getitems__([(0, sample) for sample in samples])
        except ItemError as error:
            return _Chunk(None, error.message.splitlines()[0])
        if self._items.draws:
            where = f"items {start} to {samples[-1]}"
            return _Chunk(None, f"its items draw random numbers (seen in {where}): they differ in every epoch")
        if self._generators.states() != before:
            return _Chunk(None, _OWN_GENERATOR)
        for sample, item in zip(samples, items, strict=True):
            signature = signature_of(item)
            if signature != self._signature:
                return _Chunk(None, _unlike(sample, signature, self._first, self._signature))
        try:
            return _Chunk(_stacked(items))
        except NotResidentError as error:
            return _Chunk(None, error.message)


def _read(
    source: Source,
    probes: _Probes,
    device: torch.device,
    channels_last: bool,
    num_workers: int,
    say: Callable[[str], None],
) -> Resident:
    size = max(1, min(CHUNK_ITEMS, int(CHUNK_BYTES // max(1.0, probes.item_bytes))))
    chunks = _Chunks(source.dataset, probes.num_samples, size, probes.signature, probes.samples[0])
    columns = [
        Column.empty(probes.num_samples, leaf, device, channels_last=channels_last)
        for leaf in leaves_of(probes.template)
    ]
    began = told = time.monotonic()
    done = 0
    for chunk in _each(chunks, source, num_workers):
        if chunk.problem:
            raise NotResidentError(chunk.problem)
        leaves = leaves_of(chunk.batch)
        for column, leaf in zip(columns, leaves, strict=True):
            column.put(done, leaf)
        done += len(leaves[0])
        now = time.monotonic()
        if now - told > SECONDS_OF_SILENCE:
            told = now
            left = (now - began) / done * (probes.num_samples - done)
            say(f"reading the data set onto {device}: {done:,} of {probes.num_samples:,} items, {left:.0f} s left")
    resident = Resident(columns, probes.template, device, channels_last=channels_last)
    again = leaves_of(resident.gather(resident.numbers(probes.samples)))
    if not all(torch.equal(_bits(one), _bits(two)) for one, two in zip(again, leaves_of(probes.batch), strict=True)):
        raise NotResidentError("its items changed while it was read")
    return resident


def _each(chunks: _Chunks, source: Source, num_workers: int) -> Iterator[_Chunk]:
    if num_workers == 0 or len(chunks) < 2 * num_workers:
        yield from (chunks[number] for number in range(len(chunks)))
        return
    loader = DataLoader(
        chunks,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=source.wishes.context,
        worker_init_fn=outlive_signals,
    )
    try:
        with forking():
            workers = iter(loader)
    except (AttributeError, TypeError, OSError, RuntimeError, ImportError):  # no workers possible: read here
        yield from _each(chunks, source, 0)
        return
    try:
        yield from workers
    finally:
        end_workers = getattr(workers, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()

"""A map-style dataset as columns: one tensor per leaf of its items, a row per sample, on the device.

Batches are gathered there, in the order of the sample stream, with the same bits as fetching items and stacking them.
`reading` makes one, or says why a dataset cannot be one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from drivetrain.data.batch import in_format, map_leaves
from drivetrain.data.keyed_items import GATHERED, Columns

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

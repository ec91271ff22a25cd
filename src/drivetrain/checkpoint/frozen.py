"""Frozen weights: parameters in no optimizer, stored once per run for as long as they do not change.

A parameter that no optimizer holds may still change: the teacher of a momentum encoder moves, and a hook may load other
weights. So each save compares checksums, computed where the weights are, with those of the start. Unchanged weights are
in a folder that checkpoints share; a weight that has changed on any rank goes into this checkpoint, and into all that
follow.

On a CPU the checksums are known when a save begins, and changed weights are copied like all else. On a GPU training
does not wait for them: the writing thread learns of a change after training has gone on. It then copies the weights,
and compares the checksum of the copy with that of the save's step, so that nothing wrong is ever stored. A weight that
was changed once is stored right that way. One that changes in every step is copied like all else as soon as that is
known: if it does so in the first step, which is checked in the background, or in a way that torch counts. A change that
begins later, and unseen (through `.data`, inside a CUDA graph), costs one checkpoint: it is given up, and the next one
holds the weight.

A checksum is a sum over a tensor's elements modulo 2**64, in which each element's bits count by a factor that depends
on the element's place in the whole tensor. So a change of any single element always changes it, elements that trade
places do, too, and the checksums of a tensor's parts add up to that of the whole, however ranks divide its rows. All of
it is integer arithmetic: every device computes the same number.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from drivetrain.checkpoint.files import CheckpointError
from drivetrain.checkpoint.manifest import Manifest, StoredFile, StoredTensor
from drivetrain.checkpoint.staging import has_room
from drivetrain.checkpoint.tensor_file import CODES
from drivetrain.core.state import Shard
from drivetrain.core.value import Value, format_bytes

BLOCK_WORDS = 2**16  # places in a block have a factor each, and so have blocks
# How much is multiplied at a time. On a CPU it should stay in the cache; on a GPU each piece costs two launches.
CPU_WORDS, DEVICE_WORDS = 2**16, 2**23

MODULUS = 2**64
_WORD_TYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}
Values = Callable[[], list[int]]
_on_devices: dict[torch.device, Tensor] = {}
SHOWN = 3


class Region(NamedTuple):
    """A tensor that is all rows, or some successive rows, of a whole."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    first_row: int = 0


class _Piece(NamedTuple):
    """Some words of a region: a part of one block, or several whole blocks."""

    start: int
    stop: int
    place: int  # of the first word in its block
    block: int  # the number of the first block in the whole tensor


def start_checksums(regions: Sequence[Region]) -> Values:
    """Start computing the checksum of each region. Return a function that waits for the device and returns them.

    On a GPU this only enqueues work on the current stream, so the checksums are of what the tensors hold at that point
    of the stream. On a CPU they are computed at once.
    """
    by_device: dict[torch.device, list[int]] = {}
    for number, region in enumerate(regions):
        by_device.setdefault(region.tensor.device, []).append(number)
    started = [
        (numbers, _start_on(device, [regions[number] for number in numbers])) for device, numbers in by_device.items()
    ]

    def values() -> list[int]:
        found = [0] * len(regions)
        for numbers, wait in started:
            for number, value in zip(numbers, wait(), strict=True):
                found[number] = value
        return found

    return values


def checksums(regions: Sequence[Region]) -> list[int]:
    """Return the checksum of each region. The host waits for the device here."""
    return start_checksums(regions)()


@torch.no_grad()
def _start_on(device: torch.device, regions: Sequence[Region]) -> Values:
    most = CPU_WORDS if device.type == "cpu" else DEVICE_WORDS
    words = [_words(region) for region in regions]
    pieces = [_pieces(region, len(own), most) for region, own in zip(regions, words, strict=True)]
    num_sums = sum(_num_blocks(piece) for own in pieces for piece in own)
    sums = torch.zeros(num_sums, dtype=torch.int64, device=device)
    longest = max((piece.stop - piece.start for own in pieces for piece in own), default=0)
    products, factors = torch.empty(longest + 2, dtype=torch.int32, device=device), _place_factors(device)
    at = 0
    for own_words, own_pieces in zip(words, pieces, strict=True):
        for piece in own_pieces:
            at = _sum_piece(own_words, piece, products, factors, sums, at)
    weights = [_block_factors(own) for own in pieces]
    if device.type == "cuda":
        host = torch.empty(num_sums, dtype=torch.int64, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
    else:
        host, copied = sums.cpu(), None

    def values() -> list[int]:
        if copied is not None:
            copied.synchronize()
        found, first = [], 0
        for own in weights:
            part = host[first : first + len(own)].numpy().view(np.uint64)
            found.append(int((part * own).sum(dtype=np.uint64)))
            first += len(own)
        return found

    return values


def _sum_piece(words: Tensor, piece: _Piece, products: Tensor, factors: Tensor, sums: Tensor, at: int) -> int:
    """Write the sum of each block of the piece into `sums`, from `at` on; return where the next ones belong.

    Products of 32 bits are added two at a time, as numbers of 64: those at places 2n and 2n + 1. A product whose
    neighbor belongs to another part of the tensor has a zero beside it.
    """
    length, num_blocks = piece.stop - piece.start, _num_blocks(piece)
    width, before = length // num_blocks, piece.place % 2
    padded = before + length + (before + length) % 2
    if padded != length:
        products[:padded].zero_()
    rows = words[piece.start : piece.stop].view(num_blocks, width)
    out = products[before : before + length].view(num_blocks, width)
    torch.mul(rows, factors[piece.place : piece.place + width], out=out)
    pairs = products[:padded].view(torch.int64).view(num_blocks, padded // (2 * num_blocks))
    torch.sum(pairs, 1, out=sums[at : at + num_blocks])
    return at + num_blocks


def _words(region: Region) -> Tensor:
    """Return the region's bits as integers, in the order of its elements."""
    tensor = region.tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    kind = _word_type(region)
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % kind.itemsize:
        flat = flat.clone()
    return flat.view(torch.uint8).view(kind) if flat.numel() else torch.empty(0, dtype=kind, device=flat.device)


def _word_type(region: Region) -> torch.dtype:
    """Return the widest integer type that a row is a whole number of."""
    row_bytes = math.prod(region.global_shape[1:]) * region.tensor.element_size()
    return _WORD_TYPES[next(size for size in _WORD_TYPES if row_bytes % size == 0)]


def _row_words(region: Region) -> int:
    return math.prod(region.global_shape[1:]) * region.tensor.element_size() // _word_type(region).itemsize


def _pieces(region: Region, num_words: int, most: int) -> list[_Piece]:
    first = region.first_row * _row_words(region)
    pieces, start = [], 0
    while start < num_words:
        block, place = divmod(first + start, BLOCK_WORDS)
        left = num_words - start
        length = min(BLOCK_WORDS - place, left)
        if length == BLOCK_WORDS:
            length = min(left, most) // BLOCK_WORDS * BLOCK_WORDS
        pieces.append(_Piece(start, start + length, place, block))
        start += length
    return pieces


def _num_blocks(piece: _Piece) -> int:
    return max(1, (piece.stop - piece.start) // BLOCK_WORDS)


def _block_factors(pieces: Sequence[_Piece]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    blocks = [np.arange(piece.block, piece.block + _num_blocks(piece), dtype=np.uint64) for piece in pieces]
    return _mixed(np.concatenate(blocks) + np.uint64(2**32)) if blocks else np.zeros(0, dtype=np.uint64)


def _place_factors(device: torch.device) -> Tensor:
    if device not in _on_devices:
        _on_devices[device] = _host_factors().to(device)
    return _on_devices[device]


@cache
def _host_factors() -> Tensor:
    mixed = _mixed(np.arange(BLOCK_WORDS, dtype=np.uint64))
    return torch.from_numpy((mixed & np.uint64(2**32 - 1)).astype(np.uint32).view(np.int32))


def _mixed(numbers: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return odd numbers that look random (splitmix64). Odd ones have an inverse, so no change is multiplied away."""
    state = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def total(parts: Iterable[int]) -> int:
    """Return the checksum of a whole tensor, from those of its parts."""
    return sum(parts) % MODULUS


class _Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class _Reference(NamedTuple):
    """The state of a frozen weight on this rank before the first step: later saves are compared with it."""

    kind: _Kind
    checksum: int


@dataclass(frozen=True)
class Split:
    """A state as a save sees it: the shards that are copied and written, and frozen weights, which are only compared.

    A frozen weight that may have changed is among both.
    """

    written: Sequence[Shard]
    frozen: Mapping[str, Shard] = field(default_factory=dict)
    values: Values = list  # the checksums of `frozen`, in its order; waits for the device
    clones: Mapping[str, Tensor] = field(default_factory=dict)  # of those yet to be stored, where there is room

    def as_it_was(self, key: str) -> Shard:
        """Return a frozen weight, which training may have changed since, unless it was cloned."""
        return _with(self.frozen[key], self.clones.get(key, self.frozen[key].tensor))


class FrozenReport(Value):
    """Tells the other ranks, in a save, which frozen weights of this rank have changed and which are not stored yet."""

    changed: tuple[str, ...] = ()
    # By key: the checksum of its part; type and shape of the whole.
    new: dict[str, tuple[int, str, tuple[int, ...]]] = Field(default_factory=dict)
    lost: tuple[str, ...] = ()  # shared folders that are gone; rank 0 looks


class FrozenAgreement(Value):
    """The conclusions that all ranks draw from the reports of a save."""

    changed: tuple[str, ...] = ()
    new: dict[str, tuple[int, str, tuple[int, ...]]] = Field(default_factory=dict)  # the checksum is that of the whole
    lost: tuple[str, ...] = ()

    @classmethod
    def of(cls, reports: Sequence[FrozenReport]) -> "FrozenAgreement":
        new: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        for report in reports:
            for key, (checksum, dtype, shape) in report.new.items():
                before = new[key][0] if key in new else 0
                new[key] = (total((before, checksum)), dtype, shape)
        return cls(
            changed=tuple(sorted({key for report in reports for key in report.changed})),
            new=new,
            lost=tuple(sorted({name for report in reports for name in report.lost})),
        )


@dataclass(frozen=True)
class FrozenNews:
    """A message for one line of output, and for an event."""

    event: str
    text: str
    facts: Mapping[str, Any]


class FrozenMovedError(CheckpointError):
    """A frozen weight differs from what it was at the step that is being saved."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"{name_of(key)} is in no optimizer and was taken to be frozen, but it changed while it was being saved",
            remedy="nothing is to be done: the next checkpoint holds it, like what is trained",
        )
        self.key = key


class FrozenWeights:
    """This rank's frozen weights, and what all ranks have agreed on about them.

    Used by one thread at a time: the training thread begins a save only when the last one is over.
    """

    def __init__(self) -> None:
        self.moved: set[str] = set()  # keys; the same on all ranks, as are the next two
        self.stored: dict[str, StoredTensor] = {}  # what is in shared folders
        self.folders: dict[str, dict[str, StoredFile]] = {}
        self.news: list[FrozenNews] = []
        self._totals: dict[str, int] = {}  # checksums of whole tensors
        self._found: dict[str, tuple[StoredTensor, int]] = {}  # in the checkpoint that the run goes on from
        self._references: dict[str, _Reference] = {}
        self._pending: Callable[[], None] | None = None  # settles references whose checksums are being computed
        self._suspects: set[str] = set()  # seen to change on this rank, and not agreed upon yet
        self._marks: dict[str, Any] = {}

    # In the thread that trains

    def resume(self, manifest: Manifest) -> None:
        """Continue from a checkpoint: shared weights are not written again, those that had moved are not compared."""
        self.moved = set(manifest.moved)
        self.folders = dict(manifest.shared)
        self._found = {key: (manifest.tensors[key], int(value, 16)) for key, value in manifest.frozen.items()}

    def watch(self, shards: Sequence[Shard]) -> None:
        """Take the frozen weights as the reference for later comparisons; called before the first step."""
        frozen = self._frozen(shards)
        self._marks = {key: _mark(shard.tensor) for key, shard in frozen.items()}
        values = start_checksums([_region(shard) for shard in frozen.values()])
        self._pending = lambda: self._refer(frozen, values())

    def look(self, shards: Sequence[Shard]) -> Callable[[], list[Shard]]:
        """Start comparing frozen weights after the first step.

        Returns a function that waits for the device and returns the shards that saves will copy.
        """
        frozen = self._frozen(shards)
        values = start_checksums([_region(shard) for shard in frozen.values()])

        def settle() -> list[Shard]:
            self._suspects.update(self._changed(frozen, values()))
            return [shard for shard in shards if shard.key not in frozen or shard.key in self._suspects]

        return settle

    def split(self, shards: Sequence[Shard], *, wait: bool, beside: bool) -> Split:
        """Divide a state that is to be saved.

        Args:
            shards: the state.
            wait: whether to wait for the checksums of a GPU.
            beside: whether training may go on while the state is saved.
        """
        frozen = self._frozen(shards)
        if not frozen:
            return Split(list(shards))
        values = start_checksums([_region(shard) for shard in frozen.values()])
        if wait or _are_known_at_once(frozen):
            known = values()
            self._suspects.update(self._changed(frozen, known))
            suspects, values = self._suspects, lambda: known
        else:
            marks = {key: _mark(shard.tensor) for key, shard in frozen.items()}
            suspects = self._suspects | {key for key, mark in marks.items() if self._marks.get(key, mark) != mark}
            self._marks = marks
        written = [shard for shard in shards if shard.key not in frozen or shard.key in suspects]
        return Split(written, frozen, values, self._clones(frozen, suspects) if beside else {})

    # In the thread that writes

    def report(self, split: Split, lost: Sequence[str]) -> FrozenReport:
        """Compare this rank's frozen weights with their references. Waits for the device."""
        values = split.values()
        changed = self._suspects | self._changed(split.frozen, values)
        new = {
            key: (value, CODES[shard.tensor.dtype], tuple(shard.global_shape))
            for (key, shard), value in zip(split.frozen.items(), values, strict=True)
            if key not in self._totals
        }
        return FrozenReport(changed=tuple(sorted(changed)), new=new, lost=tuple(lost))

    def agree(self, step: int, agreed: FrozenAgreement) -> None:
        """Take over what the ranks agreed on."""
        for name in agreed.lost:
            self.folders.pop(name, None)
            self.stored = {key: tensor for key, tensor in self.stored.items() if name not in tensor.folders}
            self._found = {key: found for key, found in self._found.items() if name not in found[0].folders}
        self.note_moved(step, set(agreed.changed))
        for key, (checksum, dtype, shape) in agreed.new.items():
            self._totals[key] = checksum
            tensor, stored = self._found.get(key, (None, 0))
            if tensor is not None and (stored, tensor.dtype, tensor.shape) == (checksum, dtype, shape):
                self.stored[key] = tensor

    def note_moved(self, step: int, keys: set[str]) -> None:
        """Store these with every checkpoint from now on."""
        new = sorted(keys - self.moved)
        self.moved.update(new)
        self._suspects -= self.moved
        for key in new:
            self.stored.pop(key, None)
        if new:
            names = [name_of(key) for key in new]
            text = (
                f"{some(names)} changed by step {step} though no optimizer holds "
                f"{'it' if len(names) == 1 else 'them'}: stored with every checkpoint from now on"
            )
            self.news.append(FrozenNews("frozen weights changed", text, {"step": step, "names": names}))

    def note_stored(
        self, step: int, folder: str, files: Mapping[str, StoredFile], tensors: Mapping[str, StoredTensor]
    ) -> None:
        """Record that these are in a new shared folder, which a checkpoint names."""
        self.folders[folder] = dict(files)
        self.stored.update(tensors)
        num_bytes = sum(file.size for file in files.values())
        text = (
            f"{len(tensors)} frozen tensors ({format_bytes(num_bytes)}) are stored once, in {folder}: "
            "checkpoints hold the rest"
        )
        facts = {"step": step, "folder": folder, "bytes": num_bytes, "names": [name_of(key) for key in tensors]}
        self.news.append(FrozenNews("frozen weights stored", text, facts))

    def to_be_stored(self, split: Split) -> list[Shard]:
        """Return this rank's frozen weights that are in no shared folder yet."""
        return [split.as_it_was(key) for key in split.frozen if key not in self.moved and key not in self.stored]

    def to_be_written(self, split: Split, copied: Sequence[Shard]) -> list[Shard]:
        """Return this rank's shards for the checkpoint itself; `copied` are the copies of `split.written`.

        Frozen weights that were copied needlessly are left out; those that turned out to have changed are copied here.
        """
        there = {shard.key for shard in copied}
        kept = [shard for shard in copied if shard.key not in split.frozen or shard.key in self.moved]
        late = [split.as_it_was(key) for key in split.frozen if key in self.moved and key not in there]
        if late:
            by_key = dict(zip(split.frozen, split.values(), strict=True))
            kept += [_with(shard, verified_copy(shard, by_key[shard.key])) for shard in late]
        return kept

    def stored_copy(self, shard: Shard) -> Tensor:
        """Copy a weight that is to be shared into host memory; raise if it has changed."""
        return verified_copy(shard, self._references[shard.key].checksum)

    def shared_by(self, split: Split) -> dict[str, StoredTensor]:
        """Return what a checkpoint of this state takes from shared folders. Rank 0 holds a part of each such tensor."""
        return {key: self.stored[key] for key in split.frozen if key in self.stored}

    def checksums_of(self, keys: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
        """Return the checksums of whole tensors in the form that the manifest stores."""
        return {key: f"{self._totals[key]:016x}" for key in keys}

    def take_news(self) -> list[FrozenNews]:
        return [self.news.pop(0) for _ in range(len(self.news))]

    def _frozen(self, shards: Sequence[Shard]) -> dict[str, Shard]:
        return {
            shard.key: shard
            for shard in shards
            if shard.is_untrained and shard.key not in self.moved and _is_plain(shard.tensor) and _is_rows(shard)
        }

    @torch.no_grad()
    def _clones(self, frozen: Mapping[str, Shard], suspects: set[str]) -> dict[str, Tensor]:
        """Clone, on their device, the weights that this save stores for the first time: they may change meanwhile.

        It happens once in a run. Where there is no room, weights are copied by the writing thread.
        """
        new = {key: shard for key, shard in frozen.items() if key not in suspects and not self._is_stored(shard)}
        by_device: dict[torch.device, int] = {}
        for shard in new.values():
            by_device[shard.tensor.device] = by_device.get(shard.tensor.device, 0) + shard.tensor.nbytes
        room = {device: device.type == "cpu" or has_room(device, size) for device, size in by_device.items()}
        try:
            return {key: shard.tensor.detach().clone() for key, shard in new.items() if room[shard.tensor.device]}
        except (torch.OutOfMemoryError, MemoryError):
            return {}

    def _is_stored(self, shard: Shard) -> bool:
        """Return whether it is in a shared folder, or likely to be: the checksums of all ranks decide."""
        found, _ = self._found.get(shard.key, (None, 0))
        expected = (CODES[shard.tensor.dtype], tuple(shard.global_shape))
        return shard.key in self.stored or (found is not None and (found.dtype, found.shape) == expected)

    def _changed(self, frozen: Mapping[str, Shard], values: Sequence[int]) -> set[str]:
        """Return those that differ from their references. A weight without a reference gets one."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending()
        self._refer(frozen, values)
        return {
            key
            for (key, shard), value in zip(frozen.items(), values, strict=True)
            if self._references[key] != _Reference(_kind(shard), value)
        }

    def _refer(self, frozen: Mapping[str, Shard], values: Sequence[int]) -> None:
        for (key, shard), value in zip(frozen.items(), values, strict=True):
            self._references.setdefault(key, _Reference(_kind(shard), value))


def verified_copy(shard: Shard, checksum: int) -> Tensor:
    """Copy a tensor that had this checksum into host memory, beside training; raise if it has changed."""
    tensor = shard.tensor.detach()
    if tensor.is_cuda:
        # A separate stream: on the training stream the copy would wait for the steps in flight.
        stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            copied = tensor.to("cpu")  # the host waits for the device here
    else:
        copied = tensor.clone(memory_format=torch.contiguous_format)
    if checksums([_region(_with(shard, copied))]) != [checksum]:
        raise FrozenMovedError(shard.key)
    return copied


def name_of(key: str) -> str:
    """Return a parameter's name in the model."""
    return key.removeprefix("model/")


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _are_known_at_once(frozen: Mapping[str, Shard]) -> bool:
    """Return whether the checksums are known without waiting for a device."""
    return all(shard.tensor.is_cpu for shard in frozen.values())


def _region(shard: Shard) -> Region:
    return Region(shard.tensor, tuple(shard.global_shape), shard.offsets[0] if shard.offsets else 0)


def _with(shard: Shard, tensor: Tensor) -> Shard:
    return Shard(shard.key, tensor, shard.global_shape, shard.offsets, shard.is_part)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether its bits can be read as they lie in memory.

    Others (subclasses, sparse ones) are saved like all else.
    """
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return type(tensor) is Tensor and tensor.dtype in CODES and is_dense


def _is_rows(shard: Shard) -> bool:
    """Return whether it is a range of whole rows: only of these do checksums add up. Others are in every checkpoint."""
    return tuple(shard.tensor.shape[1:]) == tuple(shard.global_shape[1:]) and not any(shard.offsets[1:])


def _kind(shard: Shard) -> _Kind:
    tensor = shard.tensor
    return _Kind(tensor.dtype, tuple(tensor.shape), tuple(shard.global_shape), tuple(shard.offsets))


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return a mark that changes with most changes of a tensor, at no cost. Checksums find the others."""
    return (-1 if tensor.is_inference() else tensor._version), tensor.data_ptr()

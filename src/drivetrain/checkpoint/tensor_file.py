"""Safetensors files, written as a stream and read by ranges; what can be stored; and boxes of a tensor's indices.

The `save_file` of safetensors wants every tensor in host memory at once and leaves the hash to a second reading. Here
one tensor at a time comes from its device, and the hash is of what was to be written, not of what the disk returns.
Reading is the library's.

State that cannot be stored is refused before a byte is written: a trainer asks at the start of a run.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint.files import CheckpointDamagedError, CheckpointError
from drivetrain.core.precision import as_real
from drivetrain.core.state import Shard

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

_PAIRS = {"C128": "F64"}  # what safetensors has no type for: each number is stored as its two parts
_PAIRS_KEY = "drivetrain.pairs"
LARGEST_HEADER_BYTES = 100_000_000  # the library refuses to read a longer one
RESERVED_NAME = "__metadata__"


# Types that numpy has, too, under a name that a memoryview knows: their bytes are had in one call.
_PLAIN = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8})


@dataclass(frozen=True)
class Entry:
    """One tensor of a file that is to be written."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.code].itemsize


def in_file(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return as what a tensor of this type and shape is stored."""
    return (_PAIRS[code], (*shape, 2)) if code in _PAIRS else (code, shape)


def described_pairs(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the metadata of a file that says which of its tensors hold the two parts of complex numbers."""
    pairs = {entry.name: entry.code for entry in entries if entry.code in _PAIRS}
    return {_PAIRS_KEY: json.dumps(pairs)} if pairs else {}


class Arrangement(NamedTuple):
    """The header of a file, and the numbers of the tensors that follow it. It does not depend on their values."""

    opening: bytes
    order: list[int]


def arranged(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> Arrangement:
    # Wide elements first, as the library does: then each tensor starts at a multiple of its element's size.
    order = sorted(range(len(entries)), key=lambda number: -DTYPES[entries[number].code].itemsize)
    header: dict[str, Any] = {RESERVED_NAME: dict(metadata)} if metadata else {}
    position = 0
    for number in order:
        entry = entries[number]
        end = position + entry.num_bytes
        code, shape = in_file(entry.code, entry.shape)
        header[entry.name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER_BYTES:
        raise CheckpointError(
            f"{len(entries)} tensors are too many for one file: the table of their names takes {len(text)} bytes",
            remedy="hand them in on more ranks, or under shorter names",
        )
    opening = len(text).to_bytes(8, "little") + text
    return Arrangement(opening, [number for number in order if entries[number].num_bytes])


def encoded(arrangement: Arrangement, load: Callable[[int], Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file, piece by piece. A tensor is loaded by its number when its turn comes."""
    yield memoryview(arrangement.opening)
    for number in arrangement.order:
        yield _bytes_of(load(number))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's elements in order; the host waits for the device here."""
    on_host = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    if on_host.is_conj() or on_host.is_neg() or not on_host.is_contiguous():
        on_host = on_host.resolve_conj().resolve_neg().contiguous()
    if on_host.dtype in _PLAIN:
        return on_host.numpy().data.cast("B")
    return on_host.view(-1).view(torch.uint8).numpy().data


# The bits of a number without its sign are at least this large if it is not finite.
_LEAST_NOT_FINITE: Mapping[torch.dtype, tuple[Any, int]] = {
    torch.float16: (np.uint16, 0x7C00),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float8_e5m2: (np.uint8, 0x7C),
    torch.float8_e4m3fn: (np.uint8, 0x7F),  # it has no infinities
}
_PIECE_ELEMENTS = 2**19  # whose bits stay in the cache


@torch.no_grad()
def not_finite(tensor: Tensor) -> str:
    """Return `nan` or `inf` if a tensor has such an element; empty if it has none, or is not of floating point.

    One pass in one thread, without the GIL: it runs beside training. For tensors on a device, the host waits for it.
    """
    tensor = as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return ""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.is_contiguous() and _is_seen_to_be_finite(tensor.view(-1)):
        return ""
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    return "" if bool(wide.isfinite().all()) else "nan" if bool(wide.isnan().any()) else "inf"


def _is_seen_to_be_finite(flat: Tensor) -> bool:
    """Return whether all elements are finite. False may be wrong: the sum of large ones may overflow."""
    if flat.dtype in _LEAST_NOT_FINITE:
        return _has_finite_bits(flat)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(flat.numpy())))


def _has_finite_bits(flat: Tensor) -> bool:
    kind, least = _LEAST_NOT_FINITE[flat.dtype]
    bits = flat.view(torch.uint8).numpy().view(kind)
    without_sign = np.empty(min(len(bits), _PIECE_ELEMENTS), dtype=kind)
    mask: Any = kind(np.iinfo(kind).max >> 1)
    for start in range(0, len(bits), _PIECE_ELEMENTS):
        piece = bits[start : start + _PIECE_ELEMENTS]
        if np.bitwise_and(piece, mask, out=without_sign[: len(piece)]).max() >= least:
            return False
    return True


class TensorFile:
    """An existing file. Ranges come from a memory map, so a slice costs a slice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            opener: Any = safe_open  # its methods carry no types
            self._open = opener(str(path), framework="pt")
            self.names = frozenset(self._open.keys())
        except SafetensorError as error:
            raise CheckpointDamagedError(f"{path} is not a safetensors file: {error}", path=path) from None

    def layout(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return the type code and shape of a tensor; None if it is not in the file."""
        if name not in self.names:
            return None
        view = self._open.get_slice(name)
        return view.get_dtype(), tuple(view.get_shape())

    def pairs(self) -> dict[str, str]:
        """Return the type code of each tensor that the file says is stored as pairs, where it has their form."""
        try:
            told = json.loads((self._open.metadata() or {}).get(_PAIRS_KEY, "{}"))
        except ValueError:
            return {}
        found = {name: self.layout(name) for name in told} if isinstance(told, dict) else {}
        return {
            name: code
            for code, stored in _PAIRS.items()
            for name, layout in found.items()
            if told[name] == code and layout is not None and layout[0] == stored and layout[1][-1:] == (2,)
        }

    def read(self, name: str, slices: tuple[slice, ...], code: str = "") -> Tensor:
        """Return a range of a tensor. Its type code is needed where it is not stored as what it is."""
        try:
            tensor: Tensor = self._open.get_slice(name)[slices] if slices else self._open.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointDamagedError(f"{name} cannot be read from {self.path}: {error}", path=self.path) from None
        # In the file, pairs lie at multiples of 8 bytes. Complex numbers of 16 bytes have to lie at multiples of 16: on
        # x86, torch copies them by instructions that end the process otherwise. So the pairs are copied first.
        return torch.view_as_complex(tensor.clone(memory_format=torch.contiguous_format)) if code in _PAIRS else tensor


# Boxes that no straight cut divides are compared in pairs; real shards are never that many.
MOST_ENTANGLED_BOXES = 20_000


@dataclass(frozen=True)
class Box:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """Return the intersection of both boxes; None if it is empty."""
        starts = tuple(max(pair) for pair in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(min(pair) for pair in zip(self._stops, other._stops, strict=True))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds the outer one."""
        return tuple(
            slice(offset - base, offset - base + size)
            for offset, base, size in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )

    def fits_in(self, shape: Sequence[int]) -> bool:
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= total
            for offset, size, total in zip(self.offsets, self.shape, shape, strict=True)
        )

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return a problem, or empty if the boxes, which must fit in the shape, hold each of its elements exactly once."""
    solid = [box for box in boxes if box.volume]
    if overlap := _overlap(solid):
        return overlap
    missing = math.prod(shape) - sum(box.volume for box in solid)
    return f"{missing} of its {math.prod(shape)} elements are in no part" if missing else ""


def _overlap(boxes: list[Box]) -> str:
    """Find an overlap by cutting the boxes apart along any dimension, so that shards of any grid cost n log n."""
    groups = [boxes]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        dimensions = range(len(group[0].shape))
        parts = next((parts for d in dimensions if len(parts := list(_groups_along(group, d))) > 1), None)
        if parts is not None:
            groups.extend(parts)
        elif problem := _overlap_in_pairs(group):
            return problem
    return ""


def _groups_along(boxes: list[Box], dimension: int) -> Iterator[list[Box]]:
    """Yield groups of boxes that overlap along one dimension, directly or through others."""
    group: list[Box] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dimension]):
        if group and box.offsets[dimension] >= end:
            yield group
            group = []
        group.append(box)
        end = max(end, box.offsets[dimension] + box.shape[dimension])
    yield group


def _overlap_in_pairs(boxes: list[Box]) -> str:
    if len(boxes) > MOST_ENTANGLED_BOXES:
        return f"{len(boxes)} parts lie in a way that no sharding makes"
    starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    stops = starts + np.array([box.shape for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    for index in range(len(boxes) - 1):
        meets = (starts[index] < stops[index + 1 :]) & (starts[index + 1 :] < stops[index])
        for other in np.flatnonzero(meets.all(axis=1)):
            first, second = boxes[index], boxes[index + 1 + int(other)]
            return (
                f"the part at {list(first.offsets)} of shape {list(first.shape)} overlaps"
                f" the one at {list(second.offsets)} of shape {list(second.shape)}"
            )
    return ""


DEEPEST_META = 64


def refuse_unstorable_shards(shards: Iterable[Shard]) -> None:
    """Raise a CheckpointError that names the key of the first shard that cannot be stored."""
    for shard in shards:
        if problem := _shard_problem(shard):
            raise CheckpointError(f"the tensor {shard.key!r} cannot be saved: {problem[0]}", remedy=problem[1])


def _shard_problem(shard: Shard) -> tuple[str, str] | None:
    tensor: Any = shard.tensor  # whatever a user's state holds
    if not shard.key or not _is_text(shard.key):
        return "its name is empty or is not text", "give it a name"
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}, not a tensor", "put what is not a tensor into meta, as JSON"
    if hasattr(tensor, "to_local"):
        return "it is a distributed tensor", "hand in its local part, with the offsets of that part"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "without data" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        return f"it is {kind}", "hand in a dense tensor"
    if tensor.dtype not in CODES:
        return f"its type is {tensor.dtype}", "use one of " + ", ".join(sorted(map(str, CODES)))
    if not Box(tuple(shard.offsets), tuple(tensor.shape)).fits_in(shard.global_shape):
        return (
            f"a part of shape {list(tensor.shape)} at {list(shard.offsets)} does not lie in the global shape"
            f" {list(shard.global_shape)}",
            "offsets and shapes have one number per dimension, and the part ends inside the whole",
        )
    return None


def refuse_unstorable_meta(meta: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that names the first value that JSON cannot hold. Tuples come back as lists."""
    if not isinstance(meta, Mapping):
        raise CheckpointError(f"meta is a {type(meta).__name__}, not a mapping", remedy="hand in a dictionary")
    _refuse(dict(meta), "meta", 0)
    try:
        json.dumps(dict(meta), allow_nan=False)
    except ValueError as error:  # an integer of thousands of digits
        raise CheckpointError(
            f"meta cannot be saved as JSON: {error}", remedy="take out what JSON cannot hold"
        ) from None


def _refuse(value: object, where: str, depth: int) -> None:
    problem = ""
    if depth > DEEPEST_META:
        problem = f"is nested more than {DEEPEST_META} deep"
    elif isinstance(value, str):
        problem = "" if _is_text(value) else "is a string that is not text"
    elif isinstance(value, float):
        problem = "" if math.isfinite(value) else f"is {value}, which JSON does not know"
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not _is_text(key):
                problem = f"has the key {key!r}, which is not text: JSON would change it"
                break
            _refuse(item, f"{where}.{key}", depth + 1)
    elif value is not None and not isinstance(value, int):
        problem = f"is a {type(value).__name__}, which JSON does not know"
    if problem:
        raise CheckpointError(
            f"{where} {problem}", remedy="hand in tensors as shards, and all else as JSON (None for a missing number)"
        )


def _is_text(text: object) -> bool:
    """Return whether it is text without lone surrogates: a file with these could not be read back as UTF-8."""
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False

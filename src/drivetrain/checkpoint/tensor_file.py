"""A safetensors file, written as a stream and read by ranges.

The `save_file` of safetensors wants every tensor in host memory at once and leaves the hash to a second reading. Here
one tensor at a time comes from its device, and the hash is of what was to be written, not of what the disk returns.
Reading is the library's.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint.errors import CheckpointDamagedError, CheckpointError

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
}
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

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
        header[entry.name] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [position, end]}
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

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        try:
            tensor: Tensor = self._open.get_slice(name)[slices] if slices else self._open.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointDamagedError(f"{name} cannot be read from {self.path}: {error}", path=self.path) from None
        return tensor

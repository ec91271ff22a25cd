"""Reads arrays in the IDX format, as the handwritten digits of MNIST come, compressed or not."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Tensor:
    """Read the array of a file: two zero bytes, its type, the number of dimensions, each of them, then its elements."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, f"cannot be read: {error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise _bad(path, "is no IDX file: it begins otherwise")
    kind, num_dims = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * num_dims
    shape = [int.from_bytes(content[place : place + 4], "big") for place in range(4, start, 4)]
    if len(content) != start + math.prod(shape) * kind.itemsize:
        found = len(content) - start
        raise _bad(path, f"is torn: {found} bytes of elements where {shape} needs {math.prod(shape) * kind.itemsize}")
    values = np.frombuffer(content, kind, offset=start).reshape(shape)
    return torch.from_numpy(values.astype(kind.newbyteorder("=")))


def _bad(path: Path, what: str) -> DrivetrainError:
    return DrivetrainError(f"{path} {what}", remedy="delete it and fetch it again")

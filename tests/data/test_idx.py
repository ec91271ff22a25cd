"""IDX files, written by hand byte by byte."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import DrivetrainError
from drivetrain.data.idx import read_idx

SHORTS = bytes([0, 0, 0x0B, 2]) + struct.pack(">II6h", 2, 3, 1, -2, 3, 300, -400, 5)


@pytest.mark.parametrize("compressed", [False, True])
def test_numbers_come_back(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(SHORTS) if compressed else SHORTS)
    found = read_idx(path)
    assert found.dtype == torch.int16
    assert found.tolist() == [[1, -2, 3], [300, -400, 5]]


def test_bytes_and_reals(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 0, 128, 255]))
    assert read_idx(path).tolist() == [0, 128, 255]
    path.write_bytes(bytes([0, 0, 0x0E, 1]) + struct.pack(">Id", 1, 0.1))
    assert read_idx(path).tolist() == [0.1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (SHORTS[:-1], "is torn: 11 bytes"),
        (SHORTS + b"x", "is torn: 13 bytes"),
        (b"\x89PNG....", "is no IDX file"),
        (b"", "is no IDX file"),
        (gzip.compress(SHORTS, mtime=0)[:-12], "cannot be read"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DrivetrainError, match=words):
        read_idx(path)
    with pytest.raises(DrivetrainError, match="cannot be read"):
        read_idx(tmp_path / "missing")

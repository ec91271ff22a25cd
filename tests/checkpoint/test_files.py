"""What is written, in which order it reaches the disk, and where in a file it lies."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import Checkpointer, Files, Shard
from drivetrain.checkpoint.files import PIECE_BYTES, hash_of_pieces
from drivetrain.core.world import World


def by_definition(content: bytes) -> str:
    """The hash of a file, computed in one go: over the hashes of its pieces."""
    starts = range(0, len(content), PIECE_BYTES)
    return hashlib.sha256(
        b"".join(hashlib.sha256(content[start : start + PIECE_BYTES]).digest() for start in starts)
    ).hexdigest()


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0, 3, 1],
        [PIECE_BYTES],
        [3, PIECE_BYTES + 5, 1],
        [PIECE_BYTES - 1, 1, PIECE_BYTES + 1],
        [2 * PIECE_BYTES + 7, *[1000] * 300, 5 * PIECE_BYTES],
    ],
    ids=["none", "small", "one", "across", "exact", "many"],
)
def test_whatever_the_pieces_a_file_has_all_bytes_and_its_hash(tmp_path: Path, sizes: list[int]) -> None:
    pool = os.urandom(max(sizes, default=0) + len(sizes))
    chunks: list[bytes | memoryview] = [memoryview(pool)[number : number + size] for number, size in enumerate(sizes)]
    content = b"".join(chunks)
    written = Files().write_file(tmp_path / "file", iter(chunks))
    assert (tmp_path / "file").read_bytes() == content
    assert (written.size, written.sha256, written.piece_bytes) == (len(content), by_definition(content), PIECE_BYTES)
    with (tmp_path / "file").open("rb") as file:
        assert hash_of_pieces(file, len(content), PIECE_BYTES) == written.sha256


def test_an_error_of_a_thread_or_of_the_source_ends_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = bytes(PIECE_BYTES)

    def failing() -> Iterator[bytes]:
        yield from [large] * 3
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        Files().write_file(tmp_path / "file", failing())
    pwritev = os.pwritev

    def full(descriptor: int, buffers: Any, offset: int) -> int:
        if offset >= 2 * PIECE_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwritev(descriptor, [buffers[0][:1000]], offset)  # the system may take less

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        Files().write_file(tmp_path / "other", [large] * 12)
    assert (tmp_path / "other").stat().st_size <= 2 * PIECE_BYTES


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"older")
    with pytest.raises(FileExistsError):
        Files().write_file(tmp_path / "file", [b"newer"])
    assert (tmp_path / "file").read_bytes() == b"older"


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill cannot show this, only a loss of power could; so the order of the calls is what is tested."""
    events: list[str] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        size = f" of {path.stat().st_size} bytes" if path.is_file() else ""
        events.append(f"fsync {path.name.partition('.tmp')[0]}{size}")

    class RecordingFiles(Files):
        def rename(self, source: Path, target: Path) -> None:
            events.append(f"rename to {target.name[:13]}")
            super().rename(source, target)

    folder = tmp_path / "checkpoints"
    Checkpointer(folder, World()).save(1, [], {})
    monkeypatch.setattr(os, "fsync", fsync)
    saver = Checkpointer(folder, World(), keep_last=1, files=RecordingFiles())
    path = saver.save(2, [Shard.whole("w", torch.ones(3))], {})
    assert events == [
        f"fsync rank-00000.safetensors of {(path / 'rank-00000.safetensors').stat().st_size} bytes",
        f"fsync manifest.json of {(path / 'manifest.json').stat().st_size} bytes",
        "fsync .step-00000002",
        "rename to step-00000002",
        "fsync checkpoints",
        "rename to .trash-step-0",
    ]


def test_each_tensor_starts_at_a_multiple_of_its_elements_size(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.float64, torch.uint8, torch.bfloat16, torch.float32, torch.int8, torch.complex64]
    shards = [Shard.whole(str(dtype), torch.ones(3, dtype=dtype)) for dtype in dtypes]
    path = Checkpointer(tmp_path, World()).save(1, shards, {}) / "rank-00000.safetensors"
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    for dtype in dtypes:
        assert (8 + header_bytes + header[str(dtype)]["data_offsets"][0]) % dtype.itemsize == 0, dtype

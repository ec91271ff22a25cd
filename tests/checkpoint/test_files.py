"""What is written, in which order it reaches the disk, and where in a file it lies."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import Checkpointer, Files, Shard
from drivetrain.checkpoint.files import CHUNK_BYTES
from drivetrain.core.world import World


def test_large_and_small_pieces_are_written_and_hashed_whole(tmp_path: Path) -> None:
    large = os.urandom(CHUNK_BYTES + 5)
    written = Files().write_file(tmp_path / "file", [b"", b"abc", memoryview(large), b"z"])
    content = b"abc" + large + b"z"
    assert (tmp_path / "file").read_bytes() == content
    assert (written.size, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())


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

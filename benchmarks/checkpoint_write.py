"""How fast a checkpoint reaches the disk: ours, with the hash of every byte, against plain `safetensors` and fsync.

`checkpoint-write`: the same tensors of 1 GB in all, in host memory, written in turn to the same folder. Ours is the
writer of a rank's file: the header, the hashes, the data, fsync. The other is `safetensors.torch.save_file` and fsync
of that file, without any hash. `torch.save` with fsync is there for comparison. And ours beside a loop of short matrix
products in this process: what it costs the loop, and how long the file takes then. CHECKPOINT_FOLDER names the disk.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from drivetrain.checkpoint import Checkpoint, Checkpointer, Files, Shard
from drivetrain.checkpoint.tensor_file import CODES, Entry, arranged, encoded
from drivetrain.core.world import World

ROUNDS = int(os.environ.get("CHECKPOINT_ROUNDS", "7"))
NUM_BYTES = 10**9


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors as a transformer has them: some of many megabytes, more of a few kilobytes."""
    found: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    while sum(tensor.nbytes for tensor in found.values()) < NUM_BYTES:
        number = len(found) // 4
        for name, shape in (("attention", (2048, 1536)), ("mlp", (2048, 6144)), ("bias", (2048,)), ("norm", (2048,))):
            found[f"model/layers.{number}.{name}"] = torch.randn(*shape, generator=generator)
    return found


def ours(state: dict[str, torch.Tensor], path: Path) -> None:
    entries = [Entry(name, CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()]
    held = list(state.values())
    Files().write_file(path, encoded(arranged(entries), held.__getitem__))


def plain(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file(state, path)
    _fsync(path)


def torchs(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path)
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure() -> dict[str, list[float]]:
    state = tensors()
    size = sum(tensor.nbytes for tensor in state.values()) / 1e9
    writers: dict[str, Callable[[dict[str, torch.Tensor], Path], None]] = {
        "ours": ours,
        "safetensors + fsync": plain,
        "torch.save + fsync": torchs,
    }
    samples: dict[str, list[float]] = {}
    place = os.environ.get("CHECKPOINT_FOLDER")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for number in range(ROUNDS + 1):
            seconds = {}
            names = list(writers)[number % 3 :] + list(writers)[: number % 3]  # none is always the first
            for name in names:
                path = Path(folder) / "file"
                os.sync()
                began = time.perf_counter()
                writers[name](state, path)
                seconds[name] = time.perf_counter() - began
                path.unlink()
            if number:  # without the first
                for name, taken in seconds.items():
                    samples.setdefault(f"{name} (GB/s)", []).append(size / taken)
                ratio = seconds["safetensors + fsync"] / seconds["ours"]
                samples.setdefault("ours / (safetensors + fsync)", []).append(ratio)
        samples |= _whole(state, size, Path(folder))
        samples |= _beside(state, size, Path(folder))
    return samples


def _whole(state: dict[str, torch.Tensor], size: float, folder: Path) -> dict[str, list[float]]:
    """Measure a whole save, to the rename, and the verification of a whole checkpoint."""
    shards = [Shard.whole(name, tensor) for name, tensor in state.items()]
    saved, verified = [], []
    checkpointer = Checkpointer(folder / "checkpoints", World(), keep_last=1)
    for step in range(1, 4):
        began = time.perf_counter()
        path = checkpointer.save(step, shards, {})
        saved.append(size / (time.perf_counter() - began))
        began = time.perf_counter()
        Checkpoint.open(path).close()
        verified.append(size / (time.perf_counter() - began))
    return {"a whole checkpoint (GB/s)": saved, "verifying it (GB/s)": verified}


def _beside(state: dict[str, torch.Tensor], size: float, folder: Path) -> dict[str, list[float]]:
    """Measure what a write in another thread costs a loop that keeps a device busy by many short calls."""
    one = torch.randn(64, 64)

    def loop_seconds(num_calls: int = 20_000) -> float:
        began = time.perf_counter()
        for _ in range(num_calls):
            torch.mm(one, one)
        return time.perf_counter() - began

    alone, beside, written = [], [], []
    for number in range(3):
        alone.append(1e6 * loop_seconds() / 20_000)
        times: list[float] = []

        def write(number: int = number, times: list[float] = times) -> None:
            began = time.perf_counter()
            ours(state, folder / f"beside-{number}")
            times.append(size / (time.perf_counter() - began))

        thread = threading.Thread(target=write)
        thread.start()
        calls: list[float] = []
        while thread.is_alive():
            calls.append(1e6 * loop_seconds(200) / 200)
        thread.join()
        (folder / f"beside-{number}").unlink()
        beside += calls
        written += times
    return {
        "a call in a loop alone (us)": alone,
        "a call in a loop beside a write (us)": beside,
        "ours beside the loop (GB/s)": written,
    }

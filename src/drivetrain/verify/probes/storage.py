"""Probes of files and data: checkpoints are read back, disks are measured, loader workers lose no sample."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.core.value import MIB, format_bytes, format_digits
from drivetrain.verify.child import LONGEST_TMPDIR
from drivetrain.verify.probe import MeasuredRate, Outcome, Probe, ProbeSetup, failed, passed

# ----------------------------------------------------------------------------------------------------------------------
# Checks the run folder: a checkpoint is read back bit by bit, and how fast the disk below it writes and reads.

PROBES_STORAGE = (
    Probe(name="checkpoint", title="checkpoint", function="drivetrain.verify.probes.storage:checkpoint", order=130),
    Probe(name="disk", title="disk", function="drivetrain.verify.probes.storage:disk", measures_rates=True, order=140),
)

CHUNK_BYTES = 8 * MIB
KEPT_FREE_BYTES = 64 * MIB
OTHER_FOLDER = "drivetrain verify --output-dir FOLDER, with a folder that has room and that you may write to"


def make_folder(setup: ProbeSetup) -> Outcome | Path:
    """Make a folder for the probe below the run folder, or return why there cannot be one."""
    folder = Path(setup.run_scratch)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return failed(f"cannot write to {setup.run_folder}: {error.strerror}", remedy=OTHER_FOLDER)
    return folder


def lack_of_room(folder: Path, needed_bytes: int) -> Outcome | None:
    free = shutil.disk_usage(folder).free
    if free >= needed_bytes + KEPT_FREE_BYTES:
        return None
    return failed(
        f"{free // MIB:,} MiB are free at {folder.parents[1]}, but "
        f"{(needed_bytes + KEPT_FREE_BYTES) // MIB:,} MiB are needed",
        remedy=OTHER_FOLDER,
    )


def checkpoint(setup: ProbeSetup) -> Outcome:
    folder = make_folder(setup)
    if isinstance(folder, Outcome):
        return folder
    if refusal := lack_of_room(folder, 4 * MIB):
        return refusal
    device = torch.device(setup.devices[0])
    torch.manual_seed(0)
    model, optimizer = _make(device)
    features = torch.randn(16, 64, device=device)
    _step(model, optimizer, features)
    saved = state_tensors(model, optimizer)
    # Values that a comparison by `==` would pass or fail wrongly, and types whose bits a detour would lose.
    saved["extra.special"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45], device=device)
    saved["extra.bf16"] = torch.randn(7, device=device).bfloat16()
    saved["extra.empty"] = torch.empty(0, 3, device=device)
    path = folder / "checkpoint.safetensors"
    save_file(saved, path)
    size = path.stat().st_size
    loaded = load_file(path)
    if differing := differences(saved, loaded):
        return failed(
            f"{len(differing)} of {len(saved)} tensors came back changed: {', '.join(differing[:3])}",
            remedy="dmesg | tail shows disk errors; pip install --force-reinstall safetensors",
        )
    resumed, resumed_optimizer = _make(device)
    load_state_tensors(resumed, resumed_optimizer, loaded)
    _step(model, optimizer, features)
    _step(resumed, resumed_optimizer, features)
    if differing := differences(state_tensors(model, optimizer), state_tensors(resumed, resumed_optimizer)):
        return failed(
            f"the step after loading differs from the step without: {', '.join(differing[:3])}",
            remedy="drivetrain verify --only training shows whether steps repeat at all here",
        )
    return passed(
        f"{len(saved)} tensors, {format_bytes(size)}, same bits",
        detail="model and optimizer; the next step is the same",
    )


def _make(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, features: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(features) - features).square().mean().backward()
    optimizer.step()


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"model.{key}": tensor.detach().clone() for key, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": tensor.detach().clone() for key, tensor in state.items()}
    return tensors


def load_state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    model.load_state_dict({key[len("model.") :]: value for key, value in tensors.items() if key.startswith("model.")})
    states: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            states.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys whose tensors are not the same bit by bit, type by type."""
    return [key for key in left.keys() | right.keys() if not _same_bits(left.get(key), right.get(key))]


def _same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*flat)


def disk(setup: ProbeSetup) -> Outcome:
    folder = make_folder(setup)
    if isinstance(folder, Outcome):
        return folder
    num_bytes = (64 if setup.quick else 512) * MIB
    if refusal := lack_of_room(folder, num_bytes):
        return refusal
    # Random, since some file systems and disks compress. One that stores equal chunks once would still be flattered.
    chunk = os.urandom(CHUNK_BYTES)
    path = folder / "speed"
    limit_seconds = 2.0 if setup.quick else 10.0
    try:
        written, write_seconds = write_chunks(path, chunk, num_bytes, limit_seconds)
        from_disk = drop_from_page_cache(path)
        read_seconds = read_chunks(path, chunk, written)
    except OSError as error:
        return failed(f"{error.strerror} at {setup.run_folder}", remedy=OTHER_FOLDER)
    if read_seconds is None:
        return failed("bytes came back changed", remedy="dmesg | tail shows disk errors; use another disk")
    write, read = written / write_seconds / 1e9, written / read_seconds / 1e9
    kind = setup.hardware.disk.filesystem
    detail = f"{written // MIB} MiB with fsync at {setup.run_folder} ({kind})"
    rates = [MeasuredRate(of="disk", quantity="write", value=write, unit="GB/s")]
    if from_disk:
        rates.append(MeasuredRate(of="disk", quantity="read", value=read, unit="GB/s"))
    else:
        detail += "; the reading may be from memory"
    return passed(f"{format_digits(write)} GB/s write, {format_digits(read)} read", detail=detail, rates=tuple(rates))


def write_chunks(path: Path, chunk: bytes, num_bytes: int, limit_seconds: float) -> tuple[int, float]:
    """Return bytes written and seconds until they are on the disk. A slow disk gets fewer bytes, never more time."""
    written = 0
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while written < num_bytes and time.perf_counter() - started < limit_seconds:
            written += file.write(chunk)
            if written % (8 * CHUNK_BYTES) == 0:
                os.fsync(file.fileno())  # or the limit would see memory being filled, not the disk
        os.fsync(file.fileno())
    return written, time.perf_counter() - started


def drop_from_page_cache(path: Path) -> bool:
    """Drop a file from the page cache, and return whether the next read comes from the disk.

    It does not where the file system is in memory, or nothing can be dropped.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not is_in_memory(path)


def is_in_memory(path: Path) -> bool:
    """Return whether the file is on a file system that keeps its files in memory."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return False
    for line in mounts:
        _, mount_point, filesystem, *_ = line.split(" ")
        if path.resolve().is_relative_to(mount_point) and len(mount_point) >= len(best):
            best, kind = mount_point, filesystem
    return kind in ("tmpfs", "ramfs")


def read_chunks(path: Path, chunk: bytes, num_bytes: int) -> float | None:
    """Return the seconds to read everything back; None if it is not what was written."""
    seconds, done = 0.0, 0
    buffer = bytearray(len(chunk))
    with path.open("rb", buffering=0) as file:
        while done < num_bytes:
            started = time.perf_counter()
            size = file.readinto(buffer)
            seconds += time.perf_counter() - started  # without the comparison below
            start = done % len(chunk)
            if not size or buffer[:size] != (chunk[start:] + chunk[:start])[:size]:
                return None
            done += size
    return seconds


# ----------------------------------------------------------------------------------------------------------------------
# Checks a data loader with worker processes: every sample arrives once and in order, and how many per second.

PROBES_LOADER = (
    Probe(
        name="loader",
        title="data loader",
        function="drivetrain.verify.probes.storage:loader",
        measures_rates=True,
        order=100,
    ),
)

BATCH_SIZE = 32


class MadeUpImages(Dataset[tuple[torch.Tensor, int]]):
    """Samples that cost about what decoding a small image costs, and that contain their own index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, (3, 64, 64), generator=generator, dtype=torch.uint8)
        image = pixels.float().div_(255).sub_(0.5).flip(-1)
        image[0, 0, 0] = index
        return image, index


def worker_counts(num_usable_cores: int) -> tuple[int, ...]:
    return tuple(count for count in (0, 1, 2, 4) if count <= num_usable_cores)


def loader(setup: ProbeSetup) -> Outcome:
    if len(tempfile.gettempdir()) > LONGEST_TMPDIR:
        return failed(
            f"loader workers would hang: the path {tempfile.gettempdir()} is too long for their sockets",
            remedy="export TMPDIR=/tmp",
        )
    # One thread here as in the workers, where torch sets it: otherwise 0 workers would be measured with all cores.
    torch.set_num_threads(1)
    length = 512 if setup.quick else 4096
    rates: dict[int, float] = {}
    for num_workers in worker_counts(setup.hardware.cpu.num_usable):
        loader = DataLoader(
            MadeUpImages(length),
            batch_size=BATCH_SIZE,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=bool(setup.gpu_indices),
        )
        if problem := problem_with_order(loader, length):  # the first pass also starts the workers
            return failed(
                f"with {num_workers} workers {problem}",
                remedy="df -h /dev/shm shows its room (docker run --shm-size=8g); --num-workers 0 works without it",
            )
        started = time.perf_counter()
        for _ in loader:
            pass
        rates[num_workers] = length / (time.perf_counter() - started)
    best = max(rates, key=lambda count: rates[count])
    workers = "1 worker" if best == 1 else f"{best} workers"
    each = ", ".join(f"{count}: {rate:,.0f}" for count, rate in rates.items())
    return passed(f"{rates[best]:,.0f} samples/s ({workers})", detail=f"samples/s by workers: {each}; 64×64 images")


def problem_with_order(batches: Iterable[tuple[torch.Tensor, torch.Tensor]], length: int) -> str:
    """Return what is wrong with the batches; empty if every sample came once, in order, with its own content."""
    arrived: list[int] = []
    for images, indices in batches:
        if not torch.equal(images[:, 0, 0, 0], indices.to(images.dtype)):
            return "a sample arrived with another sample's content"
        arrived.extend(indices.tolist())
    if len(arrived) != length:
        return f"{len(arrived)} samples arrived instead of {length}"
    if arrived != list(range(length)):
        first = next(place for place, index in enumerate(arrived) if place != index)
        return f"samples arrived out of order from place {first} on"
    return ""

"""Rates that `drivetrain verify --save` measured on this machine: detect() uses them in place of data sheets.

One JSON file, `measured.json` in $DRIVETRAIN_CACHE, else $XDG_CACHE_HOME/drivetrain, else ~/.cache/drivetrain. A rate
holds for what it was measured with: a GPU with its torch and driver, a CPU with its usable cores and torch, a run
folder with its file system. After a change of one of these it is not used any more.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import write_atomically
from drivetrain.core.value import Value
from drivetrain.hardware.facts import Cpu, Disk, Gpu, Hardware, Note, Precision, Rate

_LOCK_PATIENCE_SECONDS = 10.0

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""TFLOP/s for matrix products, GB/s (10^9 bytes) for everything else."""


class GpuRates(Value):
    peaks: dict[Precision, Positive] = Field(default_factory=dict)
    memory_bandwidth: Positive | None = None
    host_to_device: Positive | None = None
    device_to_host: Positive | None = None


class CpuRates(Value):
    peaks: dict[Precision, Positive] = Field(default_factory=dict)
    memory_bandwidth: Positive | None = None


class DiskRates(Value):
    write: Positive | None = None
    read: Positive | None = None


class MeasuredRates(Value):
    """The results of one measurement; `gpus` by UUID. Rates that were not measured are left out."""

    gpus: dict[str, GpuRates] = Field(default_factory=dict)
    cpu: CpuRates | None = None
    disk: DiskRates | None = None
    source: str = Field(default="", description="empty: `drivetrain verify` with today's date")


class _StoredGpu(Value):
    rates: GpuRates
    source: str


class _StoredCpu(Value):
    rates: CpuRates
    source: str


class _StoredDisk(Value):
    rates: DiskRates
    source: str


class MeasuredStore(Value):
    """The file: all measurements so far, by what they were measured with."""

    format: int = 1
    gpus: dict[str, _StoredGpu] = Field(default_factory=dict)
    cpus: dict[str, _StoredCpu] = Field(default_factory=dict)
    disks: dict[str, _StoredDisk] = Field(default_factory=dict)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for measurements of this machine, whether it exists or not."""
    environ = os.environ if environ is None else environ
    if environ.get("DRIVETRAIN_CACHE"):
        return Path(environ["DRIVETRAIN_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "drivetrain"
    home = environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    return Path(home) / ".cache" / "drivetrain"


def measured_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the file, whether it exists or not."""
    return cache_folder(environ) / "measured.json"


def save_measured(hardware: Hardware, rates: MeasuredRates, environ: Mapping[str, str] | None = None) -> Path:
    """Add these rates to the file; its other contents stay. A crash leaves the old file or the new one."""
    path = measured_path(environ)
    source = rates.source or f"drivetrain verify, {datetime.now(UTC):%Y-%m-%d}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            store, damage = load_measured(environ)
            if damage and path.exists():
                path.replace(path.with_suffix(".unreadable"))  # kept for inspection
            write_atomically(path, _merged(store, hardware, rates, source).to_json(), f".{os.getpid()}")
    except OSError as error:
        raise DrivetrainError(
            f"the measured rates could not be saved to {path}: {error}",
            remedy="export DRIVETRAIN_CACHE=/a/folder/that/can/be/written",
        ) from error
    return path


def load_measured(environ: Mapping[str, str] | None = None) -> tuple[MeasuredStore, tuple[Note, ...]]:
    """Return all measurements so far. A file that cannot be read counts as empty, and the note says so."""
    path = measured_path(environ)
    try:
        store = MeasuredStore.from_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return MeasuredStore(), ()
    except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        cause = "it does not hold what drivetrain writes" if isinstance(error, ValidationError) else str(error)
        sentence = f"The measured rates in {str(path)!r} are not used: {cause}."
        return MeasuredStore(), (Note(severity="warning", sentence=sentence, remedy="drivetrain verify --save"),)
    return store, ()


def apply_measured(hardware: Hardware, environ: Mapping[str, str] | None = None) -> Hardware:
    """Return the hardware with measured rates in place of tabled ones, where this very combination was measured."""
    store, notes = load_measured(environ)
    return hardware.model_copy(
        update={
            "gpus": tuple(_measured_gpu(gpu, store.gpus.get(_gpu_key(gpu.uuid, hardware))) for gpu in hardware.gpus),
            "cpu": _measured_cpu(hardware.cpu, store.cpus.get(_cpu_key(hardware))),
            "disk": _measured_disk(hardware.disk, store.disks.get(_disk_key(hardware))),
            "notes": (*hardware.notes, *notes),
        }
    )


def _gpu_key(uuid: str, hardware: Hardware) -> str:
    return f"{uuid} | torch {hardware.software.torch} | driver {hardware.software.driver}"


def _cpu_key(hardware: Hardware) -> str:
    return f"{hardware.cpu.model} | {hardware.cpu.num_usable} cores | torch {hardware.software.torch}"


def _disk_key(hardware: Hardware) -> str:
    return f"{Path(hardware.disk.path).absolute()} | {hardware.disk.filesystem}"


def _measured_gpu(gpu: Gpu, stored: _StoredGpu | None) -> Gpu:
    if stored is None:
        return gpu
    rates, source = stored.rates, stored.source
    return gpu.model_copy(
        update={
            "peaks": {**gpu.peaks, **_tflops(rates.peaks, source)},
            "memory_bandwidth": _bandwidth(rates.memory_bandwidth, source) or gpu.memory_bandwidth,
            "host_to_device": _bandwidth(rates.host_to_device, source) or gpu.host_to_device,
            "device_to_host": _bandwidth(rates.device_to_host, source) or gpu.device_to_host,
        }
    )


def _measured_cpu(cpu: Cpu, stored: _StoredCpu | None) -> Cpu:
    if stored is None:
        return cpu
    rates, source = stored.rates, stored.source
    return cpu.model_copy(
        update={
            "peaks": {**cpu.peaks, **_tflops(rates.peaks, source)},
            "memory_bandwidth": _bandwidth(rates.memory_bandwidth, source) or cpu.memory_bandwidth,
        }
    )


def _measured_disk(disk: Disk, stored: _StoredDisk | None) -> Disk:
    if stored is None:
        return disk
    rates, source = stored.rates, stored.source
    return disk.model_copy(
        update={
            "write": _bandwidth(rates.write, source) or disk.write,
            "read": _bandwidth(rates.read, source) or disk.read,
        }
    )


def _tflops(peaks: Mapping[Precision, float], source: str) -> dict[Precision, Rate]:
    return {
        precision: Rate(value=value, unit="TFLOP/s", origin="measured", source=source)
        for precision, value in peaks.items()
    }


def _bandwidth(value: float | None, source: str) -> Rate | None:
    return None if value is None else Rate(value=value, unit="GB/s", origin="measured", source=source)


def _merged(store: MeasuredStore, hardware: Hardware, rates: MeasuredRates, source: str) -> MeasuredStore:
    gpus, cpus, disks = dict(store.gpus), dict(store.cpus), dict(store.disks)
    for uuid, gpu in rates.gpus.items():
        key = _gpu_key(uuid, hardware)
        gpus[key] = _StoredGpu(rates=_newer(gpus[key].rates if key in gpus else GpuRates(), gpu), source=source)
    if rates.cpu is not None:
        key = _cpu_key(hardware)
        cpus[key] = _StoredCpu(rates=_newer(cpus[key].rates if key in cpus else CpuRates(), rates.cpu), source=source)
    if rates.disk is not None:
        key = _disk_key(hardware)
        disks[key] = _StoredDisk(
            rates=_newer(disks[key].rates if key in disks else DiskRates(), rates.disk), source=source
        )
    return MeasuredStore(gpus=gpus, cpus=cpus, disks=disks)


Rates = TypeVar("Rates", bound=Value)


def _newer(old: Rates, new: Rates) -> Rates:
    """Return the new figures, with the old ones for what was not measured this time."""
    update = {name: value for name in type(new).model_fields if (value := getattr(new, name)) is not None}
    if "peaks" in update:
        update["peaks"] = {**getattr(old, "peaks", {}), **update["peaks"]}
    return old.model_copy(update=update)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Allow one writer at a time, so that none overwrites another's additions."""
    with path.open("a") as file:
        deadline = time.monotonic() + _LOCK_PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            except OSError:
                break  # a file system without locks: writing is still atomic, but one of two at once may be lost
        yield

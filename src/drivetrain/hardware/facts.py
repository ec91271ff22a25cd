"""Facts about a machine. Plain facts are as the driver or the kernel gave them; a rate names its source.

Rates that `drivetrain verify --save` measured on this machine are kept: detect() uses them in place of data sheets.
They are in one JSON file, `measured.json` in $DRIVETRAIN_CACHE, else $XDG_CACHE_HOME/drivetrain, else
~/.cache/drivetrain. A rate holds for what it was measured with: a GPU with its torch and driver, a CPU with its usable
cores and torch, a run folder with its file system. After a change of one of these it is not used any more.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import write_atomically
from drivetrain.core.value import Value

Origin = Literal["measured", "reported", "tabled"]
Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16"]
Accelerator = Literal["cpu", "cuda", "rocm", "mps"]
_LOCK_PATIENCE_SECONDS = 10.0
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""TFLOP/s for matrix products, GB/s (10^9 bytes) for everything else."""
Rates = TypeVar("Rates", bound=Value)


class Rate(Value):
    """A speed, and how far to trust it: `measured` here, `reported` by the driver, or `tabled` from a data sheet."""

    value: float
    unit: Literal["TFLOP/s", "GB/s"]
    origin: Origin
    source: str = Field(description="for example `vendor data sheet, dense` or `drivetrain verify, 2026-11-15`")


class Note(Value):
    """A fact that a user should know about this machine, in one sentence, with a remedy."""

    severity: Literal["problem", "warning", "info"]
    sentence: str
    remedy: str = ""


class MigSlice(Value):
    """The part of a GPU that is a MIG device."""

    parent_uuid: str
    profile: str = Field(description="as nvidia-smi names it, for example `1g.10gb`")


class Gpu(Value):
    """One device that this process may use."""

    index: int = Field(description="as this process and torch count, after CUDA_VISIBLE_DEVICES")
    physical_index: int = Field(description="as nvidia-smi counts")
    uuid: str
    name: str
    vendor: Literal["nvidia", "amd", "apple"]
    architecture: str = Field(description="`Hopper`, `gfx942`; empty if unknown")
    capability: tuple[int, int] | None = Field(default=None, description="CUDA compute capability")
    num_sms: int | None = None
    memory_total_bytes: int
    memory_free_bytes: int
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    clock_memory_max_mhz: int | None = None
    power_limit_watts: float | None = None
    pci_bus_id: str | None = None
    pcie_generation: int | None = Field(default=None, description="highest that card and slot can do together")
    pcie_width: int | None = None
    numa_node: int | None = Field(default=None, description="of the host, nearest to the card")
    num_nvlinks: int = Field(default=0, description="NVLinks that are up, to other GPUs or to a switch")
    mig: MigSlice | None = None
    precisions: tuple[Precision, ...] = Field(description="those the chip has hardware for")
    peaks: dict[Precision, Rate] = Field(default_factory=dict, description="dense matrix product, by precision")
    memory_bandwidth: Rate | None = None
    host_to_device: Rate | None = Field(default=None, description="copy from pinned host memory; only when measured")
    device_to_host: Rate | None = Field(default=None, description="copy to pinned host memory; only when measured")


class Link(Value):
    """The link between two of the visible GPUs; `a` and `b` are their indices."""

    a: int
    b: int
    kind: Literal["nvlink", "pcie switch", "host bridge", "numa node", "between numa nodes", "unknown"]
    num_nvlinks: int = 0
    bandwidth: Rate | None = Field(default=None, description="one direction, all links of the pair together")


class Cpu(Value):
    model: str
    machine: str = Field(description="`x86_64`, `aarch64`, `arm64`")
    num_logical: int = Field(description="cores of the host")
    num_affinity: int = Field(description="cores this process may be scheduled on")
    quota_cores: float | None = Field(default=None, description="CPU time allowed by cgroup, in cores; None: no limit")
    num_usable: int = Field(description="what to plan with: the least of the above, at least 1")
    num_numa_nodes: int = 1
    precisions: tuple[Precision, ...] = Field(description="those with instructions of their own")
    peaks: dict[Precision, Rate] = Field(
        default_factory=dict, description="matrix product, all usable cores; when measured"
    )
    memory_bandwidth: Rate | None = None


class Memory(Value):
    """RAM as this process may use it."""

    total_bytes: int = Field(description="what this process may use in all: the host's, or less by cgroup")
    free_bytes: int
    host_total_bytes: int
    limited_by: str = Field(default="", description="`cgroup v1` or `cgroup v2` where that is less than the host has")
    shm_total_bytes: int = Field(description="/dev/shm; 0 where there is none")
    shm_free_bytes: int


class Disk(Value):
    """The file system that the run folder is on."""

    path: str
    total_bytes: int
    free_bytes: int
    filesystem: str
    is_network: bool
    write: Rate | None = None
    read: Rate | None = None


class Software(Value):
    python: str
    platform: str
    torch: str = Field(description="version with build, for example `2.13.0+cpu`; empty if not installed")
    torch_backend: Literal["cpu", "cuda", "rocm", "none"]
    torch_cuda: str = Field(default="", description="CUDA (or HIP) version that torch was built for")
    driver: str = ""
    driver_cuda: str = Field(default="", description="newest CUDA version that the driver can run")
    cudnn: str = ""
    nccl: str = ""
    packages: dict[str, str] = Field(default_factory=dict, description="optional packages; empty version: missing")


class Hardware(Value):
    """Everything that `detect()` found.

    Args:
        accelerator: What kind of device training would run on.
        gpus: The GPUs that this process may use.
        links: The connections between them.
        cpu: The cores that this process may use.
        memory: The host's memory, total and free.
        disk: The disk of the run folder.
        software: Versions of the driver, CUDA, torch and others.
        notes: What is wrong, or could not be determined.

    Example:
        >>> dt.detect().memory.total_bytes > 0
        True
    """

    accelerator: Accelerator = Field(description="what kind of device training would run on")
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    cpu: Cpu
    memory: Memory
    disk: Disk
    software: Software
    notes: tuple[Note, ...] = ()


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

"""Facts about a machine. Plain facts are as the driver or the kernel gave them; a rate names its source."""

from typing import Literal

from pydantic import Field

from drivetrain.core.value import Value

Origin = Literal["measured", "reported", "tabled"]
Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16"]
Accelerator = Literal["cpu", "cuda", "rocm", "mps"]


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
    """Everything that `detect()` found."""

    accelerator: Accelerator = Field(description="what kind of device training would run on")
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    cpu: Cpu
    memory: Memory
    disk: Disk
    software: Software
    notes: tuple[Note, ...] = ()

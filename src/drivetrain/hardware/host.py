"""Cores, memory, shared memory and disk as this process may use them: in a container less than the host has.

Control groups (v1, v2, both) leave CPU time and memory to this process. A limit holds for everything below it, so the
least one counts between this process's group and the highest group that can be seen from here. A mount may start in the
middle of the hierarchy (containers), so paths are taken relative to the mount's root.
"""

import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

import psutil

from drivetrain.core.value import GIB, format_gib
from drivetrain.hardware.facts import Cpu, Disk, Memory, Note, Precision

NETWORK_FILESYSTEMS = frozenset(
    {
        "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvmfs2", "davfs", "dvs", "fhgfs", "gfs2",
        "glusterfs", "gpfs", "lustre", "mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs",
        "pvfs2", "quobyte", "smb2", "smb3", "smbfs", "vboxsf", "wekafs", "webdav",
    }
)  # fmt: skip
# FUSE says `fuse.<program>`; these programs reach over a network, the others (ntfs-3g, overlay) do not.
NETWORK_FUSE = frozenset(
    {
        "afs-fuse", "beegfs", "blobfuse", "blobfuse2", "ceph-fuse", "ceph", "cvmfs2", "dbfs", "gcsfuse",
        "glusterfs", "goofys", "hdfs", "juicefs", "mfs", "mount-s3", "mountpoint-s3", "moosefs", "orangefs",
        "quobyte", "rclone", "s3fs", "seaweedfs", "smbnetfs", "sshfs", "weed",
    }
)  # fmt: skip
# cgroup v1 says "no limit" with the largest page-aligned number.
_NO_LIMIT = 2**62
SMALL_SHM_BYTES = GIB
LOW_OPEN_FILES = 4096
LITTLE_DISK_BYTES = 10 * GIB
HARDLY_ANY_DISK_BYTES = GIB
# Arm's registry of implementers (0x41: Arm itself) and the cores found in servers and workstations.
_ARM_CORES = {
    (0x41, 0xD03): "Arm Cortex-A53",
    (0x41, 0xD07): "Arm Cortex-A57",
    (0x41, 0xD08): "Arm Cortex-A72",
    (0x41, 0xD0B): "Arm Cortex-A76",
    (0x41, 0xD0C): "Arm Neoverse-N1",
    (0x41, 0xD40): "Arm Neoverse-V1",
    (0x41, 0xD49): "Arm Neoverse-N2",
    (0x41, 0xD4F): "Arm Neoverse-V2",
    (0x41, 0xD83): "Arm Neoverse-V3AE",
    (0x41, 0xD84): "Arm Neoverse-V3",
    (0x41, 0xD8E): "Arm Neoverse-N3",
    (0x46, 0x001): "Fujitsu A64FX",
    (0x48, 0xD01): "HiSilicon Kunpeng-920",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
_BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
_FP16_FLAGS = {"amx_fp16", "avx512_fp16", "asimdhp"}
Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: the folder `root` of a file system appears at `point`."""

    root: str
    point: str
    filesystem: str
    super_options: tuple[str, ...] = ()

    @property
    def is_network(self) -> bool:
        kind, _, program = self.filesystem.partition(".")
        return kind in NETWORK_FILESYSTEMS or (kind == "fuse" and program in NETWORK_FUSE)


def read_mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """Return all mounts that this process sees; none where there is no mountinfo (macOS)."""
    try:
        text = (root / "proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ()
    return _parsed(text)


@lru_cache(maxsize=4)  # the text is read anew each time, and seldom another one
def _parsed(text: str) -> tuple[Mount, ...]:
    return tuple(parse_mountinfo(text.splitlines()))


def parse_mountinfo(lines: Iterable[str]) -> Iterable[Mount]:
    """Parse lines of mountinfo; those that cannot be read are left out: the rest is still useful."""
    for line in lines:
        before, separator, after = line.partition(" - ")
        head, tail = before.split(), after.split()
        if not separator or len(head) < 5 or not tail:
            continue
        options = tuple(tail[2].split(",")) if len(tail) > 2 else ()
        yield Mount(_unescape(head[3]), _unescape(head[4]), tail[0], options)


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that an absolute path is on: the longest mount point above it, and of equal ones the last."""
    wanted = PurePosixPath(path)
    best: Mount | None = None
    for mount in mounts:
        if wanted.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _unescape(text: str) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True)
class CpuLimit:
    cores: float
    version: str  # `cgroup v1`, `cgroup v2`


@dataclass(frozen=True)
class MemoryLimit:
    """The least limit, and the least room left under any limit; the two can belong to different groups."""

    total_bytes: int
    free_bytes: int
    version: str


def cpu_limit(root: Path = Path("/")) -> CpuLimit | None:
    """Return the limit of CPU time in cores; None where nothing limits it."""
    limits = [CpuLimit(cores, "cgroup v1") for group in _groups(root, "cpu") if (cores := _v1_cores(group)) is not None]
    limits += [CpuLimit(cores, "cgroup v2") for group in _groups(root, None) if (cores := _v2_cores(group)) is not None]
    return min(limits, key=lambda limit: limit.cores, default=None)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit of memory in bytes; None where there is none. The caller ignores one above the host's memory."""
    limits = [limit for group in _groups(root, "memory") if (limit := _v1_memory(group)) is not None]
    limits += [limit for group in _groups(root, None) if (limit := _v2_memory(group)) is not None]
    if not limits:
        return None
    least = min(limits, key=lambda limit: limit.total_bytes)
    return MemoryLimit(least.total_bytes, max(0, min(limit.free_bytes for limit in limits)), least.version)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how often the kernel's OOM killer acted in these groups. Only an increase means anything."""
    v1 = (_stat(group / "memory.oom_control") for group in _groups(root, "memory"))
    v2 = (_stat(group / "memory.events") for group in _groups(root, None))
    return sum(stat.get("oom_kill", 0) for stat in (*v1, *v2))


def _groups(root: Path, controller: str | None) -> Iterator[Path]:
    """Yield the folders of this process's group and those above it, innermost first; None means cgroup v2."""
    memberships = _memberships(root)
    for mount in read_mounts(root):
        if controller is None:
            is_ours, path = mount.filesystem == "cgroup2", memberships.get("")
        else:
            is_ours = mount.filesystem == "cgroup" and controller in mount.super_options
            path = memberships.get(controller)
        if is_ours:
            yield from _up_from(path, mount, root)


def _up_from(path: str | None, mount: Mount, root: Path) -> Iterator[Path]:
    top = root / mount.point.lstrip("/")
    inside = PurePosixPath(path or "/")
    base = PurePosixPath(mount.root)
    # Outside the mount, or through a namespace (`/..`): then the top is all that can be seen, and it is above us.
    parts: Sequence[str] = inside.relative_to(base).parts if inside.is_relative_to(base) else ()
    if ".." in parts:
        parts = ()
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _memberships(root: Path) -> dict[str, str]:
    """Return controller -> path of this process's group; the key of cgroup v2 is the empty string."""
    found: dict[str, str] = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                found[controller] = fields[2]
    return found


def _v1_cores(group: Path) -> float | None:
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 and period > 0 else None


def _v2_cores(group: Path) -> float | None:
    fields = (_text(group / "cpu.max") or "").split()
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return None  # `max 100000` is no limit
    quota, period = map(int, fields)
    return quota / period if quota > 0 and period > 0 else None


def _v1_memory(group: Path) -> MemoryLimit | None:
    stat = _stat(group / "memory.stat")
    # The hierarchical limit knows groups above the mount, too, which a container cannot see otherwise.
    limits = [_number(group / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
    usage = _number(group / "memory.usage_in_bytes")
    return _room(limits, usage, stat.get("total_inactive_file", stat.get("inactive_file", 0)), "cgroup v1")


def _v2_memory(group: Path) -> MemoryLimit | None:
    # Above memory.high the kernel slows the group until it stands still, so it is a limit as well.
    limits = [_number(group / "memory.max"), _number(group / "memory.high")]
    usage = _number(group / "memory.current")
    return _room(limits, usage, _stat(group / "memory.stat").get("inactive_file", 0), "cgroup v2")


def _room(limits: Sequence[int | None], usage: int | None, inactive_file: int, version: str) -> MemoryLimit | None:
    given = [limit for limit in limits if limit is not None and 0 <= limit < _NO_LIMIT]
    if not given:
        return None
    limit = min(given)
    # Pages of files not in use are given up before the limit hurts: they are free.
    held = max(0, (usage or 0) - inactive_file)
    return MemoryLimit(limit, max(0, limit - held), version)


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdecimal() else None  # `max` is no number: no limit


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Found(Generic[Fact]):
    """A fact, with notes on it for the user."""

    fact: Fact
    notes: tuple[Note, ...] = ()


def find_cpu(root: Path = Path("/")) -> Cpu:
    num_logical = os.cpu_count() or psutil.cpu_count() or 1
    # macOS has no affinity: every core it is.
    num_affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_logical
    limit = cpu_limit(root)
    usable = min(num_logical, num_affinity, int(limit.cores) if limit else num_logical)
    cpuinfo = _cpuinfo(root)
    return Cpu(
        model=_cpu_model(cpuinfo),
        machine=platform.machine(),
        num_logical=num_logical,
        num_affinity=num_affinity,
        quota_cores=limit.cores if limit else None,
        num_usable=max(1, usable),
        num_numa_nodes=_num_numa_nodes(root),
        precisions=_cpu_precisions(cpuinfo),
    )


def find_memory(root: Path = Path("/")) -> Found[Memory]:
    host_total, host_free = _host_memory(root)
    limit = memory_limit(root)
    limited = limit is not None and limit.total_bytes < host_total
    total = limit.total_bytes if limit and limited else host_total
    free = min(host_free, limit.free_bytes) if limit and limited else host_free
    shm_total, shm_free = _shm(root)
    memory = Memory(
        total_bytes=total,
        free_bytes=min(free, total),
        host_total_bytes=host_total,
        limited_by=limit.version if limit and limited else "",
        # A tmpfs takes its pages from RAM: it cannot hold more than that, whatever its own size says.
        shm_total_bytes=min(shm_total, total),
        shm_free_bytes=min(shm_free, free),
    )
    return Found(memory, _shm_notes(shm_total))


def find_disk(run_folder: Path, root: Path = Path("/")) -> Found[Disk]:
    existing = nearest_existing(run_folder)
    mount = mount_of(str(existing), read_mounts(root) or _psutil_mounts())
    space = os.statvfs(existing)
    disk = Disk(
        path=printable(run_folder),
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        filesystem=mount.filesystem if mount else "",
        is_network=mount.is_network if mount else False,
    )
    no_inodes = space.f_files > 0 and space.f_favail == 0
    return Found(disk, tuple(_disk_notes(disk, existing, no_inodes)))


def find_open_files_limit() -> tuple[Note, ...]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return open_files_notes(soft, hard)


def open_files_notes(soft: int, hard: int) -> tuple[Note, ...]:
    """Return notes on a low limit of open files, which ends training with `Too many open files`.

    Data loader workers pass tensors as open files.
    """
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= LOW_OPEN_FILES:
        return ()
    can_raise = hard == unlimited or hard >= LOW_OPEN_FILES
    target = 65536 if hard == unlimited else min(hard, 65536)
    return (
        Note(
            severity="warning" if soft < 1024 else "info",
            sentence=f"This process may open {soft} files at once; data loader workers can need more.",
            remedy=f"ulimit -n {target}" if can_raise else "docker run --ulimit nofile=65536:65536 …",
        ),
    )


def nearest_existing(folder: Path) -> Path:
    """Return the folder itself or the closest existing one above it, absolute and with links followed."""
    path = Path(os.path.realpath(folder))
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def printable(path: Path) -> str:
    """Return the path as text that can be stored: names on disk need not be valid text."""
    return str(path).encode("utf-8", errors="backslashreplace").decode("utf-8")


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the first processor's entries."""
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.lstrip().splitlines():
        key, separator, value = line.partition(":")
        if not separator:
            break  # an empty line: the next processor
        found[key.strip()] = value.strip()
    return found


def _cpu_model(cpuinfo: dict[str, str]) -> str:
    if "model name" in cpuinfo:
        return cpuinfo["model name"]
    if "CPU implementer" in cpuinfo and "CPU part" in cpuinfo:
        try:
            implementer, part = int(cpuinfo["CPU implementer"], 16), int(cpuinfo["CPU part"], 16)
        except ValueError:
            return platform.machine()
        return _ARM_CORES.get((implementer, part), f"Arm implementer {implementer:#04x} part {part:#05x}")
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def _sysctl(name: str) -> str:
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=1, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _cpu_precisions(cpuinfo: dict[str, str]) -> tuple[Precision, ...]:
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    precisions: list[Precision] = ["fp64", "fp32"]
    if flags & _FP16_FLAGS:
        precisions.append("fp16")
    if flags & _BF16_FLAGS:
        precisions.append("bf16")
    return tuple(precisions)


def _num_numa_nodes(root: Path) -> int:
    # A node without cores is memory only (a GPU's, on some machines), and nothing can run there.
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    return max(1, sum(1 for node in nodes if _stripped(node / "cpulist")))


def _stripped(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _host_memory(root: Path) -> tuple[int, int]:
    found: dict[str, int] = {}
    for line in _stripped(root / "proc/meminfo").splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 2 and fields[1].isdecimal():
            found[fields[0]] = int(fields[1]) * 1024
    if "MemTotal" in found and "MemAvailable" in found:
        return found["MemTotal"], found["MemAvailable"]
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _shm(root: Path) -> tuple[int, int]:
    try:
        space = os.statvfs(root / "dev/shm")
    except OSError:
        return 0, 0
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def _shm_notes(size: int) -> tuple[Note, ...]:
    if size >= SMALL_SHM_BYTES or sys.platform == "darwin":
        return ()
    return (
        Note(
            severity="warning",
            sentence=f"/dev/shm holds {format_gib(size)}; "
            "data loader workers pass batches through it and die when it is full.",
            remedy="docker run --shm-size=8g … (outside containers: sudo mount -o remount,size=8G /dev/shm)",
        ),
    )


def _psutil_mounts() -> tuple[Mount, ...]:
    try:
        partitions = psutil.disk_partitions(all=True)
    except (OSError, psutil.Error):
        return ()
    return tuple(Mount("/", partition.mountpoint, partition.fstype) for partition in partitions)


def _disk_notes(disk: Disk, existing: Path, no_inodes: bool) -> list[Note]:
    where = shlex.quote(printable(existing))
    notes: list[Note] = []
    if not existing.is_dir():
        notes.append(
            Note(
                severity="problem",
                sentence=f"The run folder {disk.path} cannot be made: {where} is a file.",
                remedy=f"mv {where} {where}.old",
            )
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        notes.append(
            Note(
                severity="problem",
                sentence=f"The run folder {disk.path} cannot be written: {where} is read-only or not yours.",
                remedy=f'sudo chown -R "$USER" {where} (or choose another run folder)',
            )
        )
    if no_inodes:
        notes.append(
            Note(
                severity="problem",
                sentence=f"The disk of the run folder {disk.path} can hold no more files (no inodes left).",
                remedy=f"df -i {where}, then remove old files",
            )
        )
    if disk.free_bytes < LITTLE_DISK_BYTES:
        notes.append(
            Note(
                severity="problem" if disk.free_bytes < HARDLY_ANY_DISK_BYTES else "warning",
                sentence=f"The disk of the run folder {disk.path} has {format_gib(disk.free_bytes)} free; "
                "checkpoints may not fit.",
                remedy=f"du -xh --max-depth=2 {where} | sort -h | tail, then remove what is not needed",
            )
        )
    if disk.is_network:
        notes.append(
            Note(
                severity="info",
                sentence=f"The run folder {disk.path} is on a network file system ({disk.filesystem}); "
                "checkpoints may take longer there.",
                remedy="drivetrain verify measures it; a local disk is usually faster",
            )
        )
    return notes

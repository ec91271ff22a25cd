"""The mounts of this machine, and the CPU time and memory that control groups (v1, v2, both) leave to this process.

A limit holds for everything below it, so the least one counts between this process's group and the highest group that
can be seen from here. A mount may start in the middle of the hierarchy (containers), so paths are taken relative to the
mount's root.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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


# cgroup v1 says "no limit" with the largest page-aligned number.
_NO_LIMIT = 2**62


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

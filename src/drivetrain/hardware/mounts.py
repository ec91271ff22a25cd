"""The mount points of file systems, as the kernel lists them in /proc/self/mountinfo."""

import re
from collections.abc import Iterable, Sequence
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

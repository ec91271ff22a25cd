"""The host's facts from planted files, and the notes on what is too small."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from drivetrain.core.value import GIB
from drivetrain.hardware.host import (
    Mount,
    cpu_limit,
    find_cpu,
    find_disk,
    find_memory,
    memory_limit,
    mount_of,
    nearest_existing,
    open_files_notes,
    parse_mountinfo,
)

MOUNTS = tuple(
    parse_mountinfo(
        [
            "29 1 254:0 / / rw - ext4 /dev/vda rw",
            "30 29 0:40 / /data rw shared:5 - nfs4 server:/x rw",
            "31 29 0:41 / /data/local rw - xfs /dev/sdb rw",
            "32 29 0:42 / /a\\040b rw - cifs //x/y rw",
            "33 29 0:43 / /twice rw - ext4 /dev/sdc rw",
            "34 29 0:44 / /twice rw - lustre x rw",
            "broken line",
            "35 29 - ",
        ]
    )
)
MIB = 1024**2
NO_LIMIT = 9223372036854771712
V1 = (
    ("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
    ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
)
V2 = (("/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"),)


def cpuinfo(root: Path, text: str) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(text)


@pytest.mark.parametrize(
    ("text", "model", "precisions"),
    [
        ("model name : Intel(R) Xeon(R)\nflags : sse avx2\n", "Intel(R) Xeon(R)", ("fp64", "fp32")),
        ("model name : X\nflags : avx512_bf16\n", "X", ("fp64", "fp32", "bf16")),
        ("model name : X\nflags : amx_bf16 amx_fp16\n", "X", ("fp64", "fp32", "fp16", "bf16")),
        ("model name : X\nflags : avx512_fp16\n", "X", ("fp64", "fp32", "fp16")),
        (
            "CPU implementer : 0x41\nCPU part : 0xd0c\nFeatures : fp asimdhp\n",
            "Arm Neoverse-N1",
            ("fp64", "fp32", "fp16"),
        ),
        ("CPU implementer : 0x41\nCPU part : 0xd4f\nFeatures : bf16\n", "Arm Neoverse-V2", ("fp64", "fp32", "bf16")),
        ("CPU implementer : 0x99\nCPU part : 0x001\n", "Arm implementer 0x99 part 0x001", ("fp64", "fp32")),
    ],
)
def test_cpu_model_and_precisions(tmp_path: Path, text: str, model: str, precisions: tuple[str, ...]) -> None:
    cpuinfo(tmp_path, "processor : 0\n" + text + "\nprocessor : 1\nmodel name : another\n")
    cpu = find_cpu(tmp_path)
    assert cpu.model == model
    assert cpu.precisions == precisions


def test_numa_nodes_without_cores_do_not_count(tmp_path: Path) -> None:
    for number, cores in enumerate(["0-31", "32-63", ""]):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    assert find_cpu(tmp_path).num_numa_nodes == 2


def test_a_root_with_nothing_in_it_still_gives_an_answer(tmp_path: Path) -> None:
    """As on macOS, where there is no /proc."""
    cpu, memory = find_cpu(tmp_path), find_memory(tmp_path).fact
    assert cpu.num_usable >= 1
    assert cpu.num_numa_nodes == 1
    assert memory.total_bytes == memory.host_total_bytes > 0
    assert (memory.shm_total_bytes, memory.shm_free_bytes) == (0, 0)


def test_shared_memory_is_never_more_than_ram(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)  # statvfs gives the disk below: larger than the RAM planted here
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    memory = find_memory(tmp_path).fact
    assert memory.shm_total_bytes == GIB
    assert memory.shm_free_bytes == GIB // 2


@pytest.mark.parametrize(
    ("path", "filesystem", "is_network"),
    [
        ("/home/me", "ext4", False),
        ("/data", "nfs4", True),
        ("/data/runs/1", "nfs4", True),
        ("/data/local/runs", "xfs", False),
        ("/database", "ext4", False),
        ("/a b/c", "cifs", True),
        ("/twice/x", "lustre", True),
    ],
)
def test_mount_of_a_path(path: str, filesystem: str, is_network: bool) -> None:
    mount = mount_of(path, MOUNTS)
    assert mount is not None
    assert (mount.filesystem, mount.is_network) == (filesystem, is_network)


@pytest.mark.parametrize(
    "kind",
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "glusterfs",
        "fuse.sshfs",
        "9p",
        "wekafs",
        "afs",
    ],
)
def test_network_file_systems(kind: str) -> None:
    assert Mount("/", "/", kind).is_network


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", "fuse.portal", "apfs"]
)
def test_local_file_systems(kind: str) -> None:
    assert not Mount("/", "/", kind).is_network


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = find_disk(tmp_path / "not/yet/here")
    assert found.fact.path == str(tmp_path / "not/yet/here")
    assert 0 < found.fact.free_bytes <= found.fact.total_bytes
    assert found.fact.filesystem
    assert not (tmp_path / "not").exists()
    assert nearest_existing(tmp_path / "not/yet/here") == tmp_path.resolve()


def test_disk_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert find_disk(tmp_path / "link/runs").fact.filesystem == "tmpfs"


def test_network_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("30 29 0:40 / / rw - nfs4 server:/x rw\n")
    found = find_disk(tmp_path, tmp_path)
    assert found.fact.is_network
    assert [note.severity for note in found.notes] == ["info"]
    assert "nfs4" in found.notes[0].sentence


def test_a_file_where_the_run_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    (note,) = find_disk(tmp_path / "runs" / "mine").notes
    assert note.severity == "problem"
    assert "is a file" in note.sentence


def test_a_folder_of_another() -> None:
    """As a user who is not root, in a folder that may be entered but not written."""
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-"))
    folder.chmod(0o555)
    try:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                if os.geteuid() == 0:
                    os.setuid(65534)
                notes = find_disk(folder / "runs").notes
                os._exit(0 if any("cannot be written" in note.sentence for note in notes) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("soft", "hard", "severity", "remedy"),
    [
        (256, -1, "warning", "ulimit -n 65536"),
        (1024, 524288, "info", "ulimit -n 65536"),
        (1024, 8192, "info", "ulimit -n 8192"),
        (1024, 1024, "info", "docker run --ulimit nofile=65536:65536 …"),
        (65536, 65536, None, ""),
        (-1, -1, None, ""),
    ],
)
def test_limit_of_open_files(soft: int, hard: int, severity: str | None, remedy: str) -> None:
    notes = open_files_notes(soft, hard)
    assert [note.severity for note in notes] == ([severity] if severity else [])
    assert [note.remedy for note in notes] == ([remedy] if severity else [])


def plant(root: Path, files: dict[str, str | int]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def mountinfo(*mounts: tuple[str, str, str, str]) -> str:
    """Lines of (root, mount point, type, super options)."""
    return "\n".join(
        f"{30 + number} 29 0:{number} {top} {point} rw,relatime shared:1 - {kind} {kind} {options}"
        for number, (top, point, kind, options) in enumerate(mounts)
    )


def test_v1_takes_the_least_on_the_way_up(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a/b\n2:cpu,cpuacct:/a/b\n0::/",
            "proc/self/mountinfo": mountinfo(*V1),
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": 400000,
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": 150000,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": NO_LIMIT,
            "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": 10 * MIB,
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 512 * MIB,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 300 * MIB,
            "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        },
    )
    cpu, memory = cpu_limit(tmp_path), memory_limit(tmp_path)
    assert cpu is not None
    assert (cpu.cores, cpu.version) == (1.5, "cgroup v1")
    assert memory is not None
    # 300 MiB used, of which 100 MiB are pages of files that can be dropped
    assert (memory.total_bytes, memory.free_bytes, memory.version) == (512 * MIB, 312 * MIB, "cgroup v1")


def test_v1_knows_limits_above_what_is_mounted(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/",
            "proc/self/mountinfo": mountinfo(*V1),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 0,
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {256 * MIB}",
        },
    )
    memory = memory_limit(tmp_path)
    assert memory is not None
    assert memory.total_bytes == 256 * MIB


def test_v2_takes_the_least_on_the_way_up(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job",
            "proc/self/mountinfo": mountinfo(*V2),
            "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000",
            "sys/fs/cgroup/user.slice/cpu.max": "250000 100000",
            "sys/fs/cgroup/user.slice/job/memory.max": 1024 * MIB,
            "sys/fs/cgroup/user.slice/job/memory.high": "max",
            "sys/fs/cgroup/user.slice/job/memory.current": 100 * MIB,
            "sys/fs/cgroup/user.slice/job/memory.stat": f"anon 5\ninactive_file {40 * MIB}",
            "sys/fs/cgroup/user.slice/memory.max": 2048 * MIB,
            "sys/fs/cgroup/user.slice/memory.current": 1900
            * MIB,  # the neighbors are full: less is free than our limit
        },
    )
    cpu, memory = cpu_limit(tmp_path), memory_limit(tmp_path)
    assert cpu is not None
    assert (cpu.cores, cpu.version) == (2.5, "cgroup v2")
    assert memory is not None
    assert (memory.total_bytes, memory.free_bytes, memory.version) == (1024 * MIB, 148 * MIB, "cgroup v2")


def test_v2_high_is_a_limit(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a",
            "proc/self/mountinfo": mountinfo(*V2),
            "sys/fs/cgroup/a/memory.max": "max",
            "sys/fs/cgroup/a/memory.high": 300 * MIB,
            "sys/fs/cgroup/a/memory.current": 0,
        },
    )
    memory = memory_limit(tmp_path)
    assert memory is not None
    assert memory.total_bytes == 300 * MIB


def test_no_limit_is_none(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/\n0::/a",
            "proc/self/mountinfo": mountinfo(*V1, ("/", "/sys/fs/cgroup/unified", "cgroup2", "rw")),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
            "sys/fs/cgroup/unified/a/memory.max": "max",
            "sys/fs/cgroup/unified/a/cpu.max": "max 100000",
        },
    )
    assert cpu_limit(tmp_path) is None
    assert memory_limit(tmp_path) is None


def test_hybrid_takes_the_lesser_of_both(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/\n0::/a",
            "proc/self/mountinfo": mountinfo(*V1, ("/", "/sys/fs/cgroup/unified", "cgroup2", "rw")),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 300000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 100 * MIB,
            "sys/fs/cgroup/unified/a/memory.max": 200 * MIB,
            "sys/fs/cgroup/unified/a/cpu.max": "100000 100000",
        },
    )
    cpu, memory = cpu_limit(tmp_path), memory_limit(tmp_path)
    assert cpu is not None
    assert (cpu.cores, cpu.version) == (1, "cgroup v2")
    assert memory is not None
    assert (memory.total_bytes, memory.version) == (100 * MIB, "cgroup v1")


@pytest.mark.parametrize(
    ("own", "mount_root"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's names are seen, the mount starts at the container
        ("/", "/"),  # a namespace of its own
        ("/", "/docker/abc"),  # a namespace of its own, mounted before it was made
        ("/", "/../../docker/abc"),
        ("/../elsewhere", "/"),  # moved out of the namespace's root
    ],
)
def test_containers(tmp_path: Path, own: str, mount_root: str) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{own}",
            "proc/self/mountinfo": mountinfo((mount_root, "/sys/fs/cgroup", "cgroup2", "ro")),
            "sys/fs/cgroup/memory.max": 64 * MIB,
            "sys/fs/cgroup/memory.current": 0,
            "sys/fs/cgroup/cpu.max": "50000 100000",
        },
    )
    cpu, memory = cpu_limit(tmp_path), memory_limit(tmp_path)
    assert cpu is not None
    assert cpu.cores == 0.5
    assert memory is not None
    assert memory.total_bytes == 64 * MIB


def test_a_group_inside_a_container(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc/inner",
            "proc/self/mountinfo": mountinfo(("/docker/abc", "/sys/fs/cgroup", "cgroup2", "rw")),
            "sys/fs/cgroup/memory.max": 64 * MIB,
            "sys/fs/cgroup/inner/memory.max": 32 * MIB,
        },
    )
    memory = memory_limit(tmp_path)
    assert memory is not None
    assert memory.total_bytes == 32 * MIB


@pytest.mark.parametrize("nonsense", ["", "x", "-5", "1 2 3", "0 0", "100000 0", "9" * 40])
def test_nonsense_limits_nothing_and_does_not_raise(tmp_path: Path, nonsense: str) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": f"0::/a\n{nonsense}\n4:memory:/\n1:cpu:/",
            "proc/self/mountinfo": mountinfo(*V1, *V2) + f"\n{nonsense}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": nonsense,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": nonsense,
            "sys/fs/cgroup/a/cpu.max": nonsense,
            "sys/fs/cgroup/a/memory.max": nonsense,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": nonsense,
        },
    )
    assert memory_limit(tmp_path) is None
    limit = cpu_limit(tmp_path)
    assert limit is None or limit.cores == 1  # 9…9 / 9…9


def test_quota_bounds_usable_cores_and_one_is_left(tmp_path: Path) -> None:
    files: dict[str, str | int] = {"proc/self/cgroup": "0::/", "proc/self/mountinfo": mountinfo(*V2)}
    plant(tmp_path, {**files, "sys/fs/cgroup/cpu.max": "50000 100000"})
    cpu = find_cpu(tmp_path)
    assert (cpu.quota_cores, cpu.num_usable) == (0.5, 1)
    plant(tmp_path, {"sys/fs/cgroup/cpu.max": "99900000 100000"})
    cpu = find_cpu(tmp_path)
    assert cpu.quota_cores == 999
    assert cpu.num_usable == cpu.num_affinity


def test_memory_is_the_lesser_of_host_and_group(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "proc/self/cgroup": "0::/",
        "proc/self/mountinfo": mountinfo(*V2),
        "proc/meminfo": f"MemTotal: {1024 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {100 * 1024} kB",
        "sys/fs/cgroup/memory.max": 512 * MIB,
        "sys/fs/cgroup/memory.current": 0,
    }
    plant(tmp_path, files)
    memory = find_memory(tmp_path).fact
    assert (memory.total_bytes, memory.host_total_bytes, memory.limited_by) == (512 * MIB, 1024 * MIB, "cgroup v2")
    assert memory.free_bytes == 100 * MIB  # the host is nearly full: the limit cannot be reached
    plant(tmp_path, {"sys/fs/cgroup/memory.max": 4096 * MIB})
    memory = find_memory(tmp_path).fact
    assert (memory.total_bytes, memory.limited_by) == (1024 * MIB, "")  # a limit above what there is limits nothing

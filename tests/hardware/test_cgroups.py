"""Control groups as trees of files: cgroup v1, v2, hybrid, containers with and without a namespace of their own."""

from pathlib import Path

import pytest

from drivetrain.hardware.cgroups import cpu_limit, memory_limit
from drivetrain.hardware.host import find_cpu, find_memory

MIB = 1024**2
NO_LIMIT = 9223372036854771712


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


V1 = (
    ("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
    ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
)
V2 = (("/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"),)


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
            * MIB,  # the neighbours are full: less is free than our limit
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

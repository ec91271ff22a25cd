"""The host's facts from planted files, and the notes on what is too small."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from drivetrain.core.value import GIB
from drivetrain.hardware.cgroups import Mount, mount_of, parse_mountinfo
from drivetrain.hardware.host import find_cpu, find_disk, find_memory, nearest_existing, open_files_notes


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

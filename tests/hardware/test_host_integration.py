"""Real limits: a control group, an affinity, a small /dev/shm, a read-only and a full disk; detect() under each."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.core.value import GIB
from drivetrain.hardware.host import _memberships, read_mounts
from tests.hardware.children import child_environ

MIB = 1024**2
DETECT = "import sys; from drivetrain.hardware import detect; print(detect(sys.argv[1]).to_json())"

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and unshare"
)


def detect_in_child(shell: str = "", folder: str = "runs", code: str = DETECT) -> dict[str, Any]:
    """detect() in a fresh process, after some shell commands that change the world around it."""
    script = f'set -e; {shell}\nexec "{sys.executable}" -c "$1" "$2"'
    answer = subprocess.run(
        ["sh", "-c", script, "sh", code, folder],
        env=child_environ(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if answer.returncode:
        raise RuntimeError(answer.stderr)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def detect_in_mount_namespace(shell: str, folder: str = "runs") -> dict[str, Any]:
    answer = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'set -e; {shell}\nexec "{sys.executable}" -c "$1" "$2"', "sh", DETECT, folder],
        env=child_environ(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if answer.returncode:
        pytest.skip(f"cannot mount here: {answer.stderr.strip()}")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def sentences(found: dict[str, Any], severity: str) -> str:
    return "\n".join(note["sentence"] for note in found["notes"] if note["severity"] == severity)


@contextlib.contextmanager
def control_group(controller: str, settings: dict[str, int]) -> Iterator[Path]:
    """A group below this process's own in cgroup v1, or a skip with the reason."""
    for mount in read_mounts():
        if mount.filesystem == "cgroup" and controller in mount.super_options:
            break
    else:
        pytest.skip(f"no cgroup v1 {controller} controller here")
    group = (
        Path(mount.point + _memberships(Path("/")).get(controller, "/").rstrip("/")) / f"drivetrain-{uuid.uuid4().hex}"
    )
    try:
        group.mkdir()
        for name, value in settings.items():
            (group / name).write_text(str(value))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_a_real_memory_limit() -> None:
    with control_group("memory", {"memory.limit_in_bytes": 512 * MIB}) as group:
        found = detect_in_child(f"echo $$ > {group}/cgroup.procs")
    memory = found["memory"]
    assert memory["total_bytes"] == 512 * MIB
    assert memory["limited_by"] == "cgroup v1"
    assert 256 * MIB < memory["free_bytes"] < 512 * MIB  # the child itself holds some of it
    assert memory["host_total_bytes"] > 512 * MIB
    assert memory["shm_total_bytes"] <= 512 * MIB


def test_a_real_cpu_quota() -> None:
    with control_group("cpu", {"cpu.cfs_period_us": 100000, "cpu.cfs_quota_us": 50000}) as group:
        found = detect_in_child(f"echo $$ > {group}/cgroup.procs")
    assert found["cpu"]["quota_cores"] == 0.5
    assert found["cpu"]["num_usable"] == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core only")
def test_a_real_affinity() -> None:
    everywhere = len(os.sched_getaffinity(0))
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); {DETECT}"
    cpu = detect_in_child(code=code)["cpu"]
    assert (cpu["num_affinity"], cpu["num_usable"]) == (1, 1)
    assert cpu["num_logical"] == os.cpu_count()
    assert detect_in_child()["cpu"]["num_affinity"] == everywhere


@needs_root
def test_a_small_shared_memory() -> None:
    found = detect_in_mount_namespace("mount -t tmpfs -o size=64m tmpfs /dev/shm")
    assert found["memory"]["shm_total_bytes"] == 64 * MIB
    assert "/dev/shm holds 64 MiB" in sentences(found, "warning")
    assert "--shm-size" in json.dumps(found["notes"])


@needs_root
def test_a_read_only_run_folder(tmp_path: Path) -> None:
    found = detect_in_mount_namespace(f"mount -t tmpfs -o ro,size=20g tmpfs {tmp_path}", str(tmp_path / "runs"))
    assert "cannot be written" in sentences(found, "problem")
    assert found["disk"]["filesystem"] == "tmpfs"


@needs_root
@pytest.mark.parametrize(("size", "severity"), [("64m", "problem"), ("4g", "warning"), ("20g", None)])
def test_a_disk_with_little_room(tmp_path: Path, size: str, severity: str | None) -> None:
    found = detect_in_mount_namespace(f"mount -t tmpfs -o size={size} tmpfs {tmp_path}", str(tmp_path / "runs"))
    said = [note["severity"] for note in found["notes"] if "checkpoints may not fit" in note["sentence"]]
    assert said == ([severity] if severity else [])


@needs_root
def test_a_disk_without_inodes(tmp_path: Path) -> None:
    found = detect_in_mount_namespace(
        f"mount -t tmpfs -o size=20g,nr_inodes=1 tmpfs {tmp_path}", str(tmp_path / "runs")
    )
    assert "no inodes left" in sentences(found, "problem")


def test_few_open_files() -> None:
    assert "may open 512 files" in sentences(detect_in_child("ulimit -n 512"), "warning")


def test_here_and_now_agrees_with_psutil() -> None:
    found = detect_in_child()
    assert found["memory"]["host_total_bytes"] == pytest.approx(psutil.virtual_memory().total, rel=0.2)
    assert found["memory"]["total_bytes"] <= found["memory"]["host_total_bytes"]
    assert abs(found["disk"]["total_bytes"] - psutil.disk_usage(".").total) < GIB
    assert found["cpu"]["num_logical"] == psutil.cpu_count()

"""The whole command on this machine, as a user types it."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from drivetrain.verify.probe import Report
from drivetrain.verify.runner import CHECKLIST

GPU_ONLY = {"matmul-tf32", "copies", "nccl", "gpu-use"}


def test_quick_on_a_cpu(tmp_path: Path) -> None:
    """Everything passes in under 20 s on two quiet cores; the limit here leaves room for a busy machine."""
    before = set(psutil.pids())
    started = time.monotonic()
    command = [sys.executable, "-m", "drivetrain", "verify", "--quick", "--json", "--save", "--gpu-mode", "cpu"]
    temporary = tempfile.mkdtemp(prefix="verify-")  # a short path: see LONGEST_TMPDIR
    environment = {**os.environ, "TMPDIR": temporary}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    print(f"drivetrain verify --quick took {seconds:.1f} s")
    report = Report.from_json(finished.stdout)
    assert [result.model_dump() for result in report.results if result.status == "failed"] == []
    assert finished.returncode == 0
    assert [result.name for result in report.results] == [probe.name for probe in CHECKLIST]
    # On a machine with a slow compiler (or a busy one) compiling is left out; it is not on two quiet cores.
    left_out = {result.name for result in report.results if result.status == "not applicable"}
    assert left_out - {"compile"} == GPU_ONLY
    print(f"compile: {next(result.figure or result.detail for result in report.results if result.name == 'compile')}")
    if os.getloadavg()[0] <= len(os.sched_getaffinity(0)):  # on a machine that does much else, time says nothing
        assert seconds < 30
    assert report.saved_to is not None
    assert Path(report.saved_to).is_file()
    # It leaves what it was asked to save, and nothing else.
    assert {path.name for path in tmp_path.iterdir()} <= {"drivetrain-cache"}
    Path(temporary).rmdir()  # empty, or this raises
    assert [pid for pid in set(psutil.pids()) - before if _belongs_to(pid, temporary)] == []


def _belongs_to(pid: int, temporary: str) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.environ()["TMPDIR"].startswith(temporary)
    except (psutil.Error, KeyError):
        return False

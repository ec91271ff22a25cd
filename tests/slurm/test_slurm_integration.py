"""A real SLURM: submitted by one command, saved on its signal, put back into the queue, finished to the same bits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.test_train_integration import SCRIPT, diary, losses, wait_for_step, weights
from tests.launch.jobs import launch, wait_for_words
from tests.launch.test_signals import SCRIPT as SIGNALED
from tests.launch.test_signals import SECONDS, SIGNALS, steps_saved
from tests.slurm.cluster import Cluster, is_possible

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(not is_possible(), reason="needs root, SLURM and munge")]
WHERE = """
from drivetrain.core.launchers import find_place
place = find_place()
print(f"{place.launcher} {place.rank} of {place.size}, {place.local_rank} of {place.local_size} {place.main_address}")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def test_srun_is_recognised(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    said = cluster.call("srun", "-N2", "-n4", sys.executable, str(script)).splitlines()
    assert sorted(said) == [f"srun {rank} of 4, {rank % 2} of 2 127.0.0.1" for rank in range(4)]
    said = cluster.call("srun", "-N1", "-n2", sys.executable, str(script)).splitlines()
    assert sorted(said) == [f"srun {rank} of 2, {rank} of 2 127.0.0.1" for rank in range(2)]


def test_a_job_trains_under_srun_alone(cluster: Cluster, tmp_path: Path) -> None:
    said = cluster.call("srun", "-N2", "-n2", sys.executable, str(SCRIPT), str(tmp_path), "6", timeout=200)
    assert said.count("finished 6") == 2, said


@pytest.mark.parametrize(("start", "tells"), [("", True), ("srun ", False)], ids=["python", "srun python"])
def test_training_alone_in_a_job_of_several_tasks_is_told(
    cluster: Cluster, tmp_path: Path, start: str, tells: bool
) -> None:
    batch, log = tmp_path / "job.sh", tmp_path / "log"
    batch.write_text(f"#!/bin/sh\n{start}{sys.executable} {SCRIPT} {tmp_path} 3\n")
    job = cluster.call("sbatch", "--parsable", "-N2", "-n2", f"--output={log}", str(batch)).strip()
    cluster.until(lambda: cluster.state(job).get("JobState") in ("COMPLETED", "FAILED"), "the end", 200)
    assert log.read_text().count("finished 3") == (1 if tells else 2), log.read_text()
    assert ("has 2 tasks (SLURM_NTASKS=2)" in log.read_text()) == tells


def test_saved_on_the_signal_requeued_and_finished_to_the_same_bits(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    steps = "60"
    inside(cluster, tmp_path, monkeypatch, PAUSE="0.1")
    done = launch(cut, "--submit", "--signal-seconds", "30", "--time-limit", "10", str(SCRIPT), str(cut), steps)
    assert done.code == 0, done.err
    job = done.out.split("submitted as job ")[1].split(";")[0]
    wait_for_step(cut, 5)
    assert f"{job} " in (now := status(cut)), now
    assert "RUNNING" in now.upper()
    cluster.call("scancel", "--signal=USR1", job)  # what SLURM sends before the limit, to the same processes
    signalled = time.monotonic()
    cluster.until(lambda: cluster.state(job).get("Restarts") == "1", "the restart")
    wait_for_step(cut, 6, after=signalled + 0.5)
    cluster.until(lambda: cluster.state(job).get("JobState") in ("COMPLETED", "FAILED"), "the end", 200)
    log = (cut / "runs" / f"slurm-{job}.log").read_text()
    assert cluster.state(job)["JobState"] == "COMPLETED", log
    assert "COMPLETED" in (ended := status(cut)).upper(), ended
    assert "stopped by SIGUSR1; the checkpoint of step" in log
    assert "going on from step" in log
    monkeypatch.setenv("PAUSE", "0")
    again = launch(whole, str(SCRIPT), str(whole), steps)
    assert again.code == 0, again.err
    assert weights(cut) == weights(whole)
    assert losses(cut) == losses(whole)


def inside(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """Give the test the environment of a user of the cluster."""
    command = folder / "bin" / "drivetrain"  # also where the package is not installed
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m drivetrain "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    for name, value in {**cluster.environment, "PATH": path, **more}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_every_process_of_the_step_saves(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Supervisor, workers, loader processes and the guard all get it."""
    inside(cluster, tmp_path, monkeypatch)
    done = launch(tmp_path, "--submit", "--time-limit", "10", str(SIGNALED), str(tmp_path), "20000")
    assert done.code == 0, done.err
    job = done.out.split("submitted as job ")[1].split(";")[0]
    wait_for_step(tmp_path, 3)
    began = time.monotonic()
    cluster.call("scancel", f"--signal={number.name[3:]}", job)
    cluster.until(lambda: steps_saved(tmp_path) > 0, "the checkpoint", SECONDS)
    print(f"{number.name}: saved after {time.monotonic() - began:.1f} s")
    log = tmp_path / "runs" / f"slurm-{job}.log"
    words = f"stopped by {number.name}; the checkpoint of step {steps_saved(tmp_path)} is saved"
    wait_for_words(log, words)
    if number == signal.SIGUSR1:
        cluster.until(lambda: cluster.state(job).get("Restarts") == "1", "the restart")
        cluster.call("scancel", job)
    else:
        assert [diary(tmp_path, rank)[-1][0] for rank in (0, 1)] == [steps_saved(tmp_path)] * 2
    ended = ("FAILED", "CANCELLED")
    cluster.until(lambda: cluster.state(job).get("JobState") in ended, "the end", 60)
    if number != signal.SIGUSR1:
        assert cluster.state(job)["ExitCode"] == f"{128 + number}:0"
    assert "Traceback" not in log.read_text()


def test_a_node_that_fails_at_once_ends_the_others(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a virtual environment that one node does not see: the first would wait for it for five minutes."""
    inside(cluster, tmp_path, monkeypatch)
    command = tmp_path / "bin" / "drivetrain"
    broken = '[ "$SLURM_NODEID" = 1 ] && { echo "the environment is not here" >&2; exit 127; }\n'
    command.write_text(command.read_text().replace("\n", "\n" + broken, 1))
    words = ("--submit", "--nodes", "2", "--time-limit", "10", str(SIGNALED), str(tmp_path), "20000")
    job = launch(tmp_path, *words).out.split("submitted as job ")[1].split(";")[0]
    cluster.until(lambda: cluster.state(job).get("JobState") == "FAILED", "the end", 120)
    log = (tmp_path / "runs" / f"slurm-{job}.log").read_text()
    assert "the environment is not here" in log
    assert "Exited with exit code 127" in log
    assert "n0: task 0: Terminated" in log or "SIGTERM before anything was started" in log


def status(folder: Path) -> str:
    """What the command shows of runs and jobs below a folder."""
    command = [sys.executable, "-m", "drivetrain", "status", "--slurm"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=folder).stdout


def test_what_sbatch_refuses_is_said(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    done = launch(tmp_path, "--submit", "--partition", "nowhere", str(SCRIPT))
    assert done.code == 1
    assert "sbatch refused" in done.err
    assert "invalid partition" in done.err

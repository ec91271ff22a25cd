"""On a Ray cluster of two hosts: actors are killed, all is stopped, and the run comes to the bits of a whole one."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from drivetrain import ConfigError, DrivetrainError
from drivetrain.launch.clusters import SlurmOptions
from drivetrain.launch.ray import launch_on_ray
from tests.commands.test_train_integration import SCRIPT, losses, train_whole, wait_for_step, weights
from tests.gloo_pool import GlooPool
from tests.launch.hosts import ADDRESSES, Hosts, two_hosts
from tests.launch.jobs import are_gone, environment, wait_for_words

PORT = 6399


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DrivetrainError, match="needs the package ray") as found:
        launch_on_ray(SlurmOptions(), SCRIPT, (), tmp_path)
    assert 'pip install "drivetrain[ray]"' in found.value.remedy


def test_flags_that_ray_decides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--slurm \(command line\): stands beside --ray") as found:
        launch_on_ray(SlurmOptions(slurm=True, node_rank=0, main_port=1), SCRIPT, (), tmp_path)
    assert "--node-rank (command line): is decided by Ray" in str(found.value)
    assert "--main-port (command line): is decided by Ray" in str(found.value)


@contextmanager
def cluster(hosts: Hosts) -> Iterator[None]:
    """Ray on both hosts, with one core each. The paths of its sockets have to be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
        other = [f"--address={ADDRESSES[0]}:{PORT}"]
        started = []
        try:
            for host, words in enumerate((head, other)):
                flags = [f"--node-ip-address={ADDRESSES[host]}", "--num-cpus=1", "--block"]
                with (hosts.folder / f"ray-{host}").open("w") as log:
                    process = subprocess.Popen(
                        ["ip", "netns", "exec", hosts.names[host], sys.executable, "-m", "ray.scripts.scripts",
                         "start", *words, *flags],
                        stdout=log, stderr=log, start_new_session=True,
                        env=environment(RAY_USAGE_STATS_ENABLED="0", PAUSE="0.02", HOLD="30"),
                    )  # fmt: skip
                started.append(process)
                wait_for_words(hosts.folder / f"ray-{host}", "Ray runtime started")
            yield
        finally:
            below = [child for process in started for child in psutil.Process(process.pid).children(recursive=True)]
            for child in below:
                with suppress(psutil.Error):
                    child.kill()
            for process in started:
                process.kill()
                process.wait()


@contextmanager
def command(hosts: Hosts, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command of a user, on the first host."""
    flags = ["--ray", "--nodes=2", "--cpu", "--num-processes=1", f"--output-dir={hosts.folder / 'runs'}"]
    with (hosts.folder / "output").open("a") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", hosts.names[0], sys.executable, "-m", "drivetrain", "launch", *flags, *words],
            stdout=log, stderr=log, cwd=hosts.folder, env=environment(RAY_ADDRESS=f"{ADDRESSES[0]}:{PORT}"),
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def actor_of(worker: int) -> psutil.Process:
    """The actor above a rank: its supervisor's parent."""
    return next(each for each in psutil.Process(worker).parents() if "MachineActor" in " ".join(each.cmdline()))


def test_lost_actors_and_a_stop_cost_nothing_but_time(gloo_pool: GlooPool, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="not tested here: --ray on a real cluster (make test-ray installs ray for it)")
    steps = "40"
    with two_hosts(tmp_path) as hosts, cluster(hosts):
        words = (str(SCRIPT), str(tmp_path), steps)
        with command(hosts, *words) as first:
            _, worker = wait_for_step(tmp_path, 5, rank=1)
            supervisor = psutil.Process(worker).ppid()
            actor_of(worker).kill()
            assert are_gone([supervisor, worker]) == []
            _, worker = wait_for_step(tmp_path, 30, after=time.monotonic(), rank=0)  # where all wait
            actor_of(worker).kill()  # that of the supervisor which decides
            wait_for_step(tmp_path, 30, after=time.monotonic(), rank=1)
            os.kill(first.pid, signal.SIGTERM)
            output = tmp_path / "output"
            wait_for_words(output, "SIGTERM: stopping after this step")
            (tmp_path / "go").write_text("")
            assert first.wait(120) == 128 + signal.SIGTERM, output.read_text()
        assert "the actor of node 1 is lost: starting it again" in output.read_text()
        assert "the actor of node 0 is lost" in output.read_text()
        assert "stopped by SIGTERM; the checkpoint of step" in output.read_text()
        with command(hosts, *words) as second:
            assert second.wait(180) == 0, output.read_text()
    gloo_pool.run(train_whole, str(tmp_path / "whole"), int(steps), world=2)
    assert weights(tmp_path) == weights(tmp_path / "whole")
    assert losses(tmp_path) == losses(tmp_path / "whole")

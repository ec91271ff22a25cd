"""Launching from Python."""

import os
import socket
from pathlib import Path

import pytest

import drivetrain as dt
from tests.launch.jobs import FOREIGN, script

JOB = """
import os
assert os.environ["MIMALLOC_PURGE_DELAY"] == "1000"  # torch for Arm reads it when it is loaded
import torch
import torch.distributed as dist
import drivetrain as dt

world = dt.setup_distributed_environment(world_size=2, backend="gloo")
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
inodes = {os.readlink(link) for link in links if os.path.lexists(link)}
found = []
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{name}").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            found.append(fields[1].split(":")[0])
open(f"listening-{world.rank}", "w").write(" ".join(found))
world.barrier()
open(f"sum-{world.rank}", "w").write(f"{total.item()} {world.device} {dist.get_backend()}")
world.close()

inputs, labels = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
job = dt.Job(
    name="fresh",
    model=lambda: torch.nn.Linear(8, 3),
    data=torch.utils.data.TensorDataset(inputs, labels),
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    global_batch=16,
    epochs=1,
)
result = dt.train(job, dt.configure(output_dir="trained", report=False), quiet=True)
open(f"trained-{world.rank}", "w").write(f"{result.steps} {result.is_main}")
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*FOREIGN, "MIMALLOC_PURGE_DELAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_two_processes_from_python(tmp_path: Path) -> None:
    """They train, freshly started, and nothing listens beyond loopback: neither torch's store nor gloo's sockets."""
    job = script(tmp_path, JOB)
    dt.launch_distributed_training(job, 2, cpu=True, output_dir=tmp_path / "runs")
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in (0, 1)] == ["3.0 cpu gloo"] * 2
    assert [(tmp_path / f"trained-{rank}").read_text() for rank in (0, 1)] == ["2 True", "2 False"]
    listening = [(tmp_path / f"listening-{rank}").read_text().split() for rank in (0, 1)]
    assert len(listening[0]) >= 2  # the store's, and gloo's own
    assert {address for addresses in listening for address in addresses} == {"0100007F"}


def test_a_failure_is_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = script(tmp_path, "import sys; raise ValueError(sys.argv[1])\n")
    with pytest.raises(dt.DrivetrainError, match="ended with exit code 1"):
        dt.launch_distributed_training(job, 2, arguments=["in words"], cpu=True, output_dir=tmp_path / "runs")
    assert capfd.readouterr().err.count("ValueError: in words") == 1


def test_options_that_are_not_there() -> None:
    with pytest.raises(dt.ConfigError, match="there is no such option"):
        dt.launch_distributed_training("job.py", num_process=2)


def test_a_world_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dt.DrivetrainError, match="world_size is 4, but python started 1 process"):
        dt.setup_distributed_environment(world_size=4)
    world = dt.setup_distributed_environment(1)
    assert (world.size, world.is_main) == (1, True)
    world.close()


def test_a_free_port_is_free() -> None:
    ports = {dt.get_free_port() for _ in range(5)}
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert os.environ.get("MASTER_PORT") is None

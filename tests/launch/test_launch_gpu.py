"""On a machine with a GPU: it is found and used, shared on request, and its memory running out has a name."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.commands.test_train_integration import SCRIPT, losses
from tests.launch.jobs import Ended, environment, launch, script

pytestmark = pytest.mark.gpu

FACTS = """
import json, os
import drivetrain as dt
world = dt.setup_distributed_environment()
import torch, torch.distributed as dist
total = torch.ones(1, device=world.device) * (world.rank + 1)
if dist.is_initialized():
    dist.all_reduce(total)
facts = [str(world.device), world.size, total.item(), dist.get_backend() if dist.is_initialized() else ""]
open(f"facts-{world.rank}", "w").write(json.dumps(facts))
world.close()
"""


def on_gpus(folder: Path, *words: str, num_processes: int | None = None, **more: str) -> Ended:
    """`launch` of the tests hides GPUs; this one does not."""
    flags = [] if num_processes is None else ["--num-processes", str(num_processes)]
    command = [sys.executable, "-m", "drivetrain", "launch", *flags, "--output-dir", str(folder / "runs"), *words]
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment(**more), cwd=folder
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def test_every_gpu_is_used(tmp_path: Path) -> None:
    done = on_gpus(tmp_path, str(script(tmp_path, FACTS)))
    assert done.code == 0, done.err
    number = torch.cuda.device_count()
    for rank in range(number):
        device, size, total, backend = json.loads((tmp_path / f"facts-{rank}").read_text())
        assert (device, size) == (f"cuda:{rank}", number)
        assert total == (number * (number + 1) / 2 if number > 1 else 1)
        assert backend == ("nccl" if number > 1 else "")


def test_more_processes_than_gpus(tmp_path: Path) -> None:
    number = torch.cuda.device_count() + 1
    job = script(tmp_path, FACTS)
    refused = on_gpus(tmp_path, str(job), num_processes=number)
    assert refused.code == 2
    assert f"{number} processes for {number - 1} GPU" in refused.err
    done = on_gpus(tmp_path, "--share-gpus", str(job), num_processes=number)
    assert done.code == 0, done.err
    for rank in range(number):
        device, size, total, backend = json.loads((tmp_path / f"facts-{rank}").read_text())
        assert (device, size, backend) == (f"cuda:{rank % (number - 1)}", number, "gloo")
        assert total == number * (number + 1) / 2


def test_two_ranks_train_on_one_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    gpu, cpu = tmp_path / "gpu", tmp_path / "cpu"
    gpu.mkdir()
    cpu.mkdir()
    done = on_gpus(
        gpu, "--gpu-ids", "0", "--share-gpus", str(SCRIPT), str(gpu), "8", num_processes=2, MODE="auto", PAUSE="0"
    )
    assert done.code == 0, done.err
    assert launch(cpu, str(SCRIPT), str(cpu), "8", PAUSE="0").code == 0
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-9)


def test_a_gpu_out_of_memory_has_a_name(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        "import os, time, torch\n"
        "if os.environ['RANK'] == '1':\n"
        "    torch.empty(1 << 45, device='cuda')\n"
        "time.sleep(60)\n",
    )
    done = on_gpus(tmp_path, "--share-gpus", "--gpu-ids", "0", str(job), num_processes=2)
    assert done.code == 1
    assert "rank 1" in done.err
    assert done.last_lines[-2] == "  cause:  out of memory (device)"
    assert "--batch-size" in done.last_lines[-1]

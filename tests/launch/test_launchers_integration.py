"""An unchanged script under other launchers, for real: two processes train, and come to what one process comes to."""

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_executable

SCRIPT = """
import sys, torch
import drivetrain as dt
generator = torch.Generator().manual_seed(1)
data = {"x": torch.randn(48, 4, generator=generator), "y": torch.randint(0, 3, (48,), generator=generator)}
job = dt.Job(name="mine", model=lambda: torch.nn.Linear(4, 3), data=data, global_batch=8, max_steps=6,
             loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
             optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
dt.train(job, dt.configure(output_dir=sys.argv[-1], gpu_mode="cpu", auto_optimize=False, report=False))
"""
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def tool(name: str) -> str | None:
    """Beside this Python, or anywhere."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def command(launcher: str, python: Path) -> list[str]:
    found = tool(launcher) or launcher
    return {
        "torchrun": [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        # `--cpu --num_processes 2` starts one process; this starts two, and the script itself asks for the CPU.
        "accelerate": [found, "launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
                       "no", "--dynamo_backend", "no", "--main_process_port", "0", "--multi_gpu"],
        "deepspeed": [found, "--num_accelerators", "2", "--master_port", "29631"],
        "mpirun": [found, "--allow-run-as-root", "--oversubscribe", "-np", "2", str(python)],
    }[launcher]  # fmt: skip


def why_not(launcher: str) -> str:
    if launcher in ("accelerate", "deepspeed") and importlib.util.find_spec(launcher) is None:
        return f"the package {launcher} is not installed"
    return f"{launcher} is not here" if launcher == "mpirun" and tool("mpirun") is None else ""


def trained(launcher: str, folder: Path) -> tuple[list[float], int]:
    script = folder / "train.py"
    environ = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    beside = str(Path(sys.executable).parent)
    environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{beside}:{os.environ['PATH']}"}
    python = warm_executable.made_in(folder)
    environ["PYTHON_EXEC"] = str(python)  # what torchrun starts
    words = [*command(launcher, python), str(script), str(folder / "runs")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, env=environ, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return what_was_learnt(folder / "runs" / "mine")


def what_was_learnt(run: Path) -> tuple[list[float], int]:
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    checkpoint = max((run / "checkpoints").glob("step-*/manifest.json"))
    return [row["loss"] for row in rows], json.loads(checkpoint.read_text())["manifest"]["world_size"]


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        "mpirun",
        pytest.param("deepspeed", marks=pytest.mark.deepspeed),
        pytest.param("accelerate", marks=pytest.mark.soak),
    ],
)
def test_two_processes_learn_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    if reason := why_not(launcher):
        pytest.skip(reason)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "alone")])
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    expected, one = what_was_learnt(tmp_path / "alone" / "mine")
    losses, world = trained(launcher, tmp_path)
    assert (one, world) == (1, 2)
    assert losses == pytest.approx(expected, rel=1e-6)

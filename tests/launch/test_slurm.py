"""The batch script, and what a supervisor reads inside the job. The real SLURM is in tests/slurm."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launch.clusters import SlurmOptions, batch_script, inside_slurm
from drivetrain.launch.layout import LaunchOptions
from tests.launch.jobs import launch, script

INSIDE = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node-that-is-not[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_the_script(tmp_path: Path) -> None:
    options = SlurmOptions(
        slurm=True,
        nodes=2,
        num_gpus=4,
        partition="long",
        account="me",
        time_limit="4:00:00",
        modules=("cuda/13", "gcc"),
        activate=Path("/home/me/it's"),
        max_restarts=5,
    )
    text = batch_script(options, Path("train.py"), ["--name", "a b"], Path("runs"), Path("/home/me"))
    for line in (
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --partition=long",
        "#SBATCH --account=me",
        "#SBATCH --time=4:00:00",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "module load cuda/13",
        """source '/home/me/it'"'"'s/bin/activate' || exit 1""",
        "srun --kill-on-bad-exit=1 --cpus-per-task=16 drivetrain launch --output-dir=runs --max-restarts=5 "
        "--num-gpus=4 train.py --name 'a b'",
    ):
        assert line in text.splitlines(), text
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_command_writes_it(tmp_path: Path) -> None:
    job = script(tmp_path, "")
    done = launch(tmp_path, "--slurm", str(job))
    assert done.code == 0
    path = tmp_path / "runs" / "job.sbatch"
    assert f"sbatch {path}" in done.out
    assert "--num-processes=2" in path.read_text()
    assert launch(tmp_path, "--slurm", str(tmp_path / "missing.py")).code == 2


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ({"cpu": True, "num_processes": 3}, 3),
        ({"cpu": True}, 1),
        ({"num_gpus": 2}, 8),
        ({"gpu_ids": (0, 1, 2)}, 12),
        ({}, 4),
        ({"num_gpus": 2, "cpus": 5}, 5),
    ],
)
def test_cores_are_asked_for(options: dict[str, Any], cpus: int) -> None:
    lines = batch_script(SlurmOptions(**options), Path("train.py"), [], Path("runs"), Path("/")).splitlines()
    assert f"#SBATCH --cpus-per-task={cpus}" in lines
    assert any(line.startswith("srun ") and f" --cpus-per-task={cpus} " in line for line in lines)


def test_the_environment_to_activate_is_there(tmp_path: Path) -> None:
    job = script(tmp_path, "")
    done = launch(tmp_path, "--submit", "--activate", str(tmp_path / "nowhere"), str(job))
    assert done.code == 2
    assert "--activate" in done.err
    assert f"there is no {tmp_path}/nowhere/bin/activate" in done.err
    assert not (tmp_path / "runs").exists()
    written = launch(tmp_path, "--slurm", "--activate", str(tmp_path / "nowhere"), str(job))
    assert written.code == 0
    assert f"there is no {tmp_path}/nowhere/bin/activate here" in written.out


def test_inside_a_job_nothing_needs_to_be_said() -> None:
    found = inside_slurm(LaunchOptions(), INSIDE)
    assert (found.nodes, found.node_rank, found.main_address, found.main_port) == ("2", 1, "10.0.0.1", 20077)
    given = LaunchOptions(nodes=3, node_rank=0, main_address="10.0.0.9")
    assert inside_slurm(given, INSIDE) is given


def test_machines_in_reserve_are_asked_of_slurm_and_wait_behind_the_others() -> None:
    options = SlurmOptions(slurm=True, nodes="3:4", spares=1, num_gpus=1)
    lines = batch_script(options, Path("train.py"), [], Path("runs"), Path("/home/me")).splitlines()
    assert "#SBATCH --nodes=5" in lines
    assert "#SBATCH --no-kill" in lines  # the job outlives a node
    assert any(line.startswith("srun --no-kill") and "--nodes=3:4" in line and "--spares=1" in line for line in lines)
    five = {**INSIDE, "SLURM_STEP_NUM_NODES": "5", "SLURM_STEP_NUM_TASKS": "5"}
    found = inside_slurm(LaunchOptions(nodes="3:4", spares=1), five)
    assert (found.least_nodes, found.most_nodes, found.num_machines, found.node_rank) == (3, 4, 5, 1)
    assert inside_slurm(LaunchOptions(spares=2), five).nodes == "3"


@pytest.mark.parametrize(
    "environ", [{}, {**INSIDE, "SLURM_STEP_NUM_TASKS": "4"}, {**INSIDE, "SLURM_STEP_NUM_NODES": "1"}]
)
def test_elsewhere_nothing_is_read(environ: dict[str, str]) -> None:
    assert inside_slurm(LaunchOptions(), environ).nodes == "1"

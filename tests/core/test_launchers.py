"""Every launcher's environment, as it was seen or as its source sets it, and what is read from it."""

import os
from pathlib import Path

import pytest
import torch

from drivetrain import DrivetrainError
from drivetrain.core.launchers import ProcessPlace, find_place, first_host, without_launcher
from drivetrain.core.world import World, choose_backend
from drivetrain.launch.layout import LaunchOptions
from drivetrain.launch.start import by_environment
from tests import warm_python

MAIN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
STANDARD = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MAIN}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node-that-is-not[07-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-1@1",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "\u0192Aj8DMdK1",
    "MASTER_ADDR": "10.0.0.1",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
INDEXED = {"JOB_COMPLETION_INDEX": "1"}
TWO_HERE = ("127.0.0.1", None)


@pytest.mark.parametrize(
    ("environ", "launcher", "numbers", "main"),
    [
        ({}, "python", (0, 1, 0, 1), ("", 0)),
        ({"DRIVETRAIN_LAUNCHED": "1", **STANDARD}, "drivetrain", (3, 4, 1, 2), ("10.0.0.1", 29500)),
        ({"TORCHELASTIC_RUN_ID": "none", **STANDARD}, "torchrun", (3, 4, 1, 2), ("10.0.0.1", 29500)),
        (STANDARD, "torchrun", (3, 4, 1, 2), ("10.0.0.1", 29500)),
        (
            {"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "bf16", **STANDARD},
            "accelerate",
            (3, 4, 1, 2),
            ("10.0.0.1", 29500),
        ),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate", (0, 1, 0, 1), ("", 0)),
        (
            {
                **MAIN,
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_SIZE": "2",
                "CROSS_RANK": "1",
                "CROSS_SIZE": "2",
            },
            "deepspeed",
            (3, 4, 1, 2),
            ("10.0.0.1", 29500),
        ),
        (SRUN, "srun", (3, 4, 1, 2), ("10.0.0.1", None)),
        ({**SRUN, **MAIN}, "srun", (3, 4, 1, 2), ("10.0.0.1", 29500)),
        (
            {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"},
            "srun",
            (3, 4, 1, 4),
            TWO_HERE,
        ),
        (OPEN_MPI, "mpirun", (1, 2, 1, 2), TWO_HERE),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            "mpirun",
            (1, 2, 1, 2),
            TWO_HERE,
        ),
        (
            {
                "MV2_COMM_WORLD_RANK": "0",
                "MV2_COMM_WORLD_SIZE": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "0",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "mpirun",
            (0, 2, 0, 2),
            TWO_HERE,
        ),
        (FLUX, "flux", (3, 4, 1, 2), ("10.0.0.1", None)),
        ({**FLUX, "FLUX_JOB_NNODES": "1", "MASTER_ADDR": ""}, "flux", (3, 4, 1, 4), TWO_HERE),
        # One process on each machine, as a PyTorchJob of Kubeflow sets them.
        ({"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", **MAIN}, "torchrun", (1, 2, 0, 1), ("10.0.0.1", 29500)),
        # `sbatch` without `srun`: a shell of one process, whatever the job has.
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "python", (0, 1, 0, 1), ("", 0)),
        ({"RANK": "1", "WORLD_SIZE": "2", **MAIN}, "torchrun", (1, 2, 1, 2), ("10.0.0.1", 29500)),
    ],
)
def test_the_table(
    environ: dict[str, str], launcher: str, numbers: tuple[int, ...], main: tuple[str, int | None]
) -> None:
    place = find_place(environ)
    assert place.launcher == launcher
    assert (place.rank, place.size, place.local_rank, place.local_size) == numbers
    assert place.main_address == main[0]
    if main[1] is None:  # made from the job's own number: the same for all its ranks, another for another job
        assert 20000 <= place.main_port < 32000
        assert find_place({**environ}).main_port == place.main_port
    else:
        assert place.main_port == main[1]


def test_another_step_of_a_job_meets_elsewhere() -> None:
    ports = {find_place({**SRUN, "SLURM_STEP_ID": str(step)}).main_port for step in range(20)}
    assert len(ports) > 15


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MAIN}, "rank 2 (RANK) of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MAIN}, "rank -1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT does not say"),
        ({"DRIVETRAIN_LAUNCHED": "1"}, "RANK and WORLD_SIZE are not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "several nodes"),
    ],
)
def test_half_an_environment_is_an_error(environ: dict[str, str], words: str) -> None:
    with pytest.raises(DrivetrainError) as caught:
        find_place(environ)
    assert words in str(caught.value)
    assert "remedy" in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("n1", "n1"), ("n[1-3]", "n1"), ("gpu[08,10-12]", "gpu08"), ("a,b[1-2]", "a"), ("r[1-2]-x,c", "r1-x"), ("", "")],
)
def test_the_first_of_slurms_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_the_environment_reads_back() -> None:
    place = ProcessPlace("torchrun", 3, 4, 1, 2, "10.0.0.1", 29500)
    assert find_place(place.environment) == place


def test_torchrun_itself(tmp_path: Path) -> None:
    """The real one: two processes, each finds its place."""
    script = tmp_path / "where.py"
    script.write_text(
        "from drivetrain.core.launchers import find_place\n"
        "place = find_place()\n"
        "print(f'{place.launcher} {place.rank} of {place.size}, {place.local_rank} of {place.local_size}\\n', end='')\n"
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = warm_python.run(words, env=environ)
    assert sorted(done.stdout.splitlines()) == ["torchrun 0 of 2, 0 of 2", "torchrun 1 of 2, 1 of 2"], done.stderr


@pytest.mark.parametrize(
    ("environ", "nodes", "main"),
    [
        (KUBEFLOW, "2", "job-node-0-0.job"),
        ({**KUBEFLOW, "PET_NODE_RANK": "", **INDEXED}, "2", "job-node-0-0.job"),
        (SAGEMAKER, "2", "algo-1"),
        (SKYPILOT, "2", "10.0.0.1"),
        ({**FLUX, "FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, "2", "10.0.0.1"),
    ],
)
def test_schedulers_of_machines_are_obeyed_by_the_launcher_and_never_a_world_of_one(
    environ: dict[str, str], nodes: str, main: str
) -> None:
    found = by_environment(LaunchOptions(), environ)
    assert (found.nodes, found.node_rank, found.main_address) == (nodes, 1, main)
    flags = LaunchOptions(nodes=3, node_rank=2, main_address="10.0.0.9")
    assert by_environment(flags, environ) is flags
    alone = LaunchOptions(nodes=1)
    assert by_environment(alone, environ) is alone
    if "FLUX_TASK_RANK" not in environ:  # which has ranks: one process on each machine is a world
        with pytest.raises(DrivetrainError, match=r"on 2 machines .*each would train alone") as told:
            World.detect(environ)
        assert "drivetrain launch train.py" in told.value.remedy
        assert World.detect({**environ, "RANK": "0", "WORLD_SIZE": "1"}).size == 1
    assert World.detect({**environ, **STANDARD, "DRIVETRAIN_LAUNCHED": "1"}).size == 4
    assert find_place(without_launcher(environ)) == ProcessPlace("python")
    assert World.detect(without_launcher(environ)).size == 1


def test_kubeflow_says_the_number_of_processes() -> None:
    found = by_environment(LaunchOptions(), KUBEFLOW)
    assert (found.num_processes, found.main_port) == (4, 29400)
    assert by_environment(LaunchOptions(num_processes=1), KUBEFLOW).num_processes == 1
    assert by_environment(LaunchOptions(), {**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"}).num_processes is None


def test_an_indexed_job_says_too_little() -> None:
    with pytest.raises(DrivetrainError, match=r"JOB_COMPLETION_INDEX=1.*--nodes and --main-address are missing"):
        by_environment(LaunchOptions(), INDEXED)
    with pytest.raises(DrivetrainError, match="as one of several"):
        World.detect(INDEXED)
    found = by_environment(LaunchOptions(nodes=4, main_address="job-0.job"), INDEXED)
    assert (found.nodes, found.node_rank, found.main_address) == ("4", 1, "job-0.job")


@pytest.mark.parametrize(
    "environ", [{**KUBEFLOW, "PET_NNODES": "1"}, {**SKYPILOT, "SKYPILOT_NUM_NODES": "1"}, {"SM_HOSTS": '["algo-1"]'}]
)
def test_one_machine_is_a_world_of_one(environ: dict[str, str]) -> None:
    assert World.detect(environ).size == 1
    assert by_environment(LaunchOptions(), environ).nodes == "1"


BATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
INTERACTIVE = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize("environ", [BATCH, INTERACTIVE], ids=["sbatch", "salloc"])
def test_training_alone_in_a_job_of_several_tasks_is_told_once(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drivetrain.core.launchers._alone", set())
    assert World.detect(environ).size == 1
    assert World.detect(environ).size == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "4 tasks (SLURM_NTASKS=4)" in line
    assert "trains alone" in line
    assert "`srun python train.py` uses them all" in line


@pytest.mark.parametrize(
    "environ",
    [
        {**SRUN, "SLURM_NTASKS": "4"},
        {**BATCH, "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1
        {**BATCH, "SLURM_NTASKS": "1"},
        {name: value for name, value in BATCH.items() if name != "SLURM_NTASKS"},
        {**BATCH, **OPEN_MPI},
        {**BATCH, **STANDARD, "DRIVETRAIN_LAUNCHED": "1"},
        {**BATCH, "RANK": "0", "WORLD_SIZE": "1"},  # meant
        without_launcher(BATCH),
        without_launcher({**SRUN, "SLURM_NTASKS": "4"}),
    ],
)
def test_who_does_not_train_alone_is_not_told(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drivetrain.core.launchers._alone", set())
    World.detect(environ)
    assert capsys.readouterr().err == ""


def test_hosts_that_are_no_list() -> None:
    with pytest.raises(DrivetrainError, match="SM_HOSTS is 'algo-1'"):
        World.detect({"SM_HOSTS": "algo-1"})


def test_ranks_without_local_ranks_do_not_choose_gloo_in_silence() -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]
    place = find_place({"RANK": "1", "WORLD_SIZE": "4", **MAIN})
    with pytest.raises(DrivetrainError, match="4 ranks, and nothing says which of them are on this machine") as told:
        choose_backend(place, gpus)
    assert "LOCAL_RANK and LOCAL_WORLD_SIZE" in told.value.remedy
    assert choose_backend(place, [torch.device("cpu")]) == "gloo"
    assert choose_backend(find_place({"RANK": "1", "WORLD_SIZE": "2", **MAIN}), gpus) == "nccl"
    assert choose_backend(find_place({**STANDARD, "LOCAL_WORLD_SIZE": "2"}), gpus) == "nccl"
    assert choose_backend(find_place({**STANDARD, "LOCAL_WORLD_SIZE": "4"}), gpus) == "gloo"

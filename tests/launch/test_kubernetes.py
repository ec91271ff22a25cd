"""The manifests for Kubernetes: what Kubeflow's own models make of them, and their command, run on two hosts."""

import importlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import ConfigError
from drivetrain.core.launchers import RESTART_OF_JOBSET, is_restart
from drivetrain.launch.clusters import KubernetesOptions, check, manifests, name_of
from tests.commands.test_train_integration import SCRIPT, losses, train_whole, wait_for_step, weights
from tests.gloo_pool import GlooPool
from tests.launch.hosts import ADDRESSES, Hosts, two_hosts
from tests.launch.jobs import launch
from tests.warm_python import WarmProcess

OPTIONS = KubernetesOptions(
    kubernetes=True, image="me/train:1", nodes=2, num_gpus=8, volume_claim="runs", stop_seconds=60, max_restarts=7
)


def test_the_models_of_kubeflow_read_them(tmp_path: Path) -> None:
    """As whole documents: a model drops what it does not know."""
    flags = ["--kubernetes", "--image", "me/train:1", "--nodes", "2", "--volume-claim", "runs", "--job-name", "My_Job"]
    done = launch(tmp_path, *flags, "/app/train.py", "--lr", "0.1")
    assert done.code == 0, done.err
    models = importlib.import_module("kubeflow_trainer_api.models")
    kinds = {"jobset": models.JobsetV1alpha2JobSet, "trainjob": models.TrainerV1alpha1TrainJob}
    for kind, model in kinds.items():
        document = yaml.safe_load((tmp_path / f"my-job.{kind}.yaml").read_text())
        assert model.from_dict(document).to_dict() == document
        broken = yaml.safe_load((tmp_path / f"my-job.{kind}.yaml").read_text())
        broken["spec"]["notAField"] = 1
        assert model.from_dict(broken).to_dict() != broken, "the comparison cannot fail"


def parts(options: KubernetesOptions = OPTIONS) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The job of the JobSet, its container, and the trainer of the TrainJob."""
    job_set, train_job = manifests(options, Path("/app/train.py"), ["--lr", "0.1"], Path("/runs"))
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return job, job["template"]["spec"]["containers"][0], train_job["spec"]["trainer"]


def test_what_the_pods_get() -> None:
    job, container, trainer = parts()
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 60, "the time to save"
    assert container["command"][:2] == ["drivetrain", "launch"]
    assert "--main-address=train-node-0-0.train" in container["command"]
    assert container["command"][-3:] == trainer["command"][-3:] == ["/app/train.py", "--lr", "0.1"]
    assert not any("--nodes" in word or "--main-address" in word for word in trainer["command"])
    assert trainer["numNodes"] == 2
    for resources in (container["resources"], trainer["resourcesPerNode"]):
        assert resources == {"requests": {"cpu": "32"}, "limits": {"nvidia.com/gpu": "8"}}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/runs"}
    assert is_restart({RESTART_OF_JOBSET: "1"})
    assert not is_restart({RESTART_OF_JOBSET: "0"})


@pytest.mark.parametrize(
    ("changes", "output_dir", "words"),
    [
        ({"image": None}, "/runs", "--image"),
        ({"volume_claim": None}, "/runs", "--volume-claim"),
        ({}, "runs", "--output-dir"),
        ({"slurm": True}, "/runs", "--slurm"),
        ({"nodes": "1:2"}, "/runs", "--nodes"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], output_dir: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(OPTIONS.model_copy(update=changes), Path(output_dir))
    with pytest.raises(ConfigError, match="cannot name a job"):
        name_of(OPTIONS, Path("1.py"))


def pods(hosts: Hosts, words: list[str], attempt: int) -> list[subprocess.Popen[str] | WarmProcess]:
    """The command of the JobSet in a pod each, with the variables that Kubernetes sets."""
    more = {RESTART_OF_JOBSET: str(attempt), "PAUSE": "0.05"}
    return [hosts.launch_words(host, words, forks=True, JOB_COMPLETION_INDEX=str(host), **more) for host in (0, 1)]


def command_of(folder: Path, *arguments: str) -> list[str]:
    options = KubernetesOptions(image="x", cpu=True, num_processes=1, nodes=2, volume_claim="runs", rejoin_seconds=1)
    job_set, _ = manifests(options, SCRIPT, arguments, folder / "runs")
    container = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    return list(container["command"][2:])


@pytest.mark.soak
def test_a_lost_pod_costs_nothing_but_time(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """A pod is killed; the JobSet starts both again, and they come to the same end as without."""
    folder, steps = tmp_path / "pods", "30"
    folder.mkdir()
    words = command_of(folder, str(folder), steps)
    with two_hosts(folder) as hosts, hosts.names_of(0) as first, hosts.names_of(1) as second:
        for names in (first, second):
            names.write_text(f"{ADDRESSES[0]} training-script-node-0-0.training-script\n")
        both = pods(hosts, words, 0)
        wait_for_step(folder, 5)
        os.killpg(both[1].pid, signal.SIGKILL)
        ended = hosts.end(0, both[0])
        assert ended.code == 1, ended.err
        assert "node lost" in ended.err
        both = pods(hosts, words, 1)
        for host, process in enumerate(both):
            ended = hosts.end(host, process)
            assert ended.code == 0, ended.err
    assert "going on from step" in (folder / "host-0.out").read_text()
    gloo_pool.run(train_whole, str(tmp_path / "whole"), int(steps), world=2)
    assert weights(folder) == weights(tmp_path / "whole")
    assert losses(folder) == losses(tmp_path / "whole")

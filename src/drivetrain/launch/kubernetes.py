"""Kubernetes: writes a JobSet, and a TrainJob of Kubeflow, from the flags, and applies the JobSet with kubectl.

Every pod runs one supervisor. They meet at the name of the first pod, which may appear later than the others. A pod
that is evicted gets SIGTERM and saves; whichever pod is lost, all start again, and go on from the last checkpoint.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.launchers import RESTART_OF_JOBSET
from drivetrain.core.run_folder import yaml_text
from drivetrain.launch.slurm import SlurmOptions, cores_of, gpus_of, launch_flags, submitted

JOB = "node"  # of a JobSet, and its container, as the runtimes of Kubeflow call them
RUNTIME = "torch-distributed"
REFUSED_CODE = 2  # wrong input, which another start does not fix
_LONGEST_NAME = 40  # what the names of pods add to it has to fit into 63 letters
_SECONDS_BEYOND_SAVING = 30
_RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"


class KubernetesOptions(SlurmOptions):
    kubernetes: bool = Field(
        False, description="write a JobSet and a TrainJob of Kubeflow instead of starting anything"
    )
    image: str | None = Field(None, description="container image that has drivetrain and the script")
    volume_claim: str | None = Field(
        None, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", description="claim of a shared volume, put at --output-dir"
    )


def manifests(
    options: KubernetesOptions, script: Path, arguments: Sequence[str], output_dir: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JobSet and the TrainJob, each of which runs the job."""
    name = name_of(options, script)
    nodes, gpus = options.num_machines, gpus_of(options)
    flags = launch_flags(options, output_dir)
    place = [f"--nodes={nodes}", f"--main-address={name}-{JOB}-0-0.{name}"] if nodes > 1 else []
    words = [str(script), *arguments]
    label = {"fieldRef": {"fieldPath": f"metadata.labels['{_RESTART_LABEL}']"}}
    environment = [{"name": RESTART_OF_JOBSET, "valueFrom": label}]
    resources: dict[str, Any] = {"requests": {"cpu": str(cores_of(options))}}
    if gpus:
        resources["limits"] = {"nvidia.com/gpu": str(gpus)}
    # Loader processes hand batches over in shared memory, of which a container has 64 MB.
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if options.volume_claim is not None:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": options.volume_claim}})
        mounts.append({"name": "runs", "mountPath": str(output_dir)})
    grace = int(options.stop_seconds) + _SECONDS_BEYOND_SAVING
    container = {
        "name": JOB,
        "image": options.image,
        "command": ["drivetrain", "launch", *flags, *place, *words],
        "env": environment,
        "resources": resources,
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
        "volumes": volumes,
    }
    patch = {
        "terminationGracePeriodSeconds": grace,
        "volumes": volumes,
        "containers": [{"name": JOB, "volumeMounts": mounts}],
    }
    trainer = {
        "image": options.image,
        "command": ["drivetrain", "launch", *flags, *words],  # Kubeflow's variables say the rest
        "numNodes": nodes,
        "env": environment,
        "resourcesPerNode": resources,
    }
    return _job_set(name, nodes, pod, options.max_restarts), _train_job(name, trainer, patch)


def _job_set(name: str, nodes: int, pod: dict[str, Any], max_restarts: int) -> dict[str, Any]:
    refused = {"containerName": JOB, "operator": "In", "values": [REFUSED_CODE]}
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # a pod that is lost starts all again: the others cannot go on without it
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": refused}]},
        "template": {"spec": pod},
    }
    rule = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": max_restarts, "rules": [rule]},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _train_job(name: str, trainer: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    job = {"name": JOB, "template": {"spec": {"template": {"spec": patch}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            "trainer": trainer,
            "runtimePatches": [{"manager": "drivetrain", "trainingRuntimeSpec": runtime}],
        },
    }


def name_of(options: KubernetesOptions, script: Path) -> str:
    """Return the job's name, as Kubernetes allows names."""
    name = re.sub(r"[^a-z0-9]+", "-", (options.job_name or script.stem).lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > _LONGEST_NAME:
        problem = f"{options.job_name or script.stem!r} cannot name a job of Kubernetes"
        allowed = f"a letter, then letters, digits and hyphens, at most {_LONGEST_NAME}"
        raise ConfigError([Problem("--job-name", problem, name, "command line", allowed, "--job-name NAME")])
    return name


def check(options: KubernetesOptions, output_dir: Path) -> None:
    """Refuse what cannot work there."""
    problems = []
    if options.image is None:
        remedy = "--image registry.example.org/me/train:1, with drivetrain and the script in it"
        problems.append(Problem("--image", "is missing: pods run an image", None, "command line", "", remedy))
    if options.slurm:
        problems.append(Problem("--slurm", "stands beside --kubernetes", None, "command line", "", "keep one"))
    if options.volume_claim is None and options.num_machines > 1:
        remedy = "--volume-claim NAME, of a volume that several pods may write to (ReadWriteMany)"
        what = "is missing: the pods share --output-dir, for checkpoints and to find each other"
        problems.append(Problem("--volume-claim", what, None, "command line", "", remedy))
    if not output_dir.is_absolute():
        remedy = "such as --output-dir /runs"
        problems.append(Problem("--output-dir", "is a path in the pods, and absolute", str(output_dir), "", "", remedy))
    if options.spares or options.least_nodes < options.most_nodes:
        what = "the JobSet starts all pods again when one is lost"
        problems.append(Problem("--spares" if options.spares else "--nodes", what, options.nodes, "", "", "--nodes N"))
    if problems:
        raise ConfigError(problems)


def write_manifests(options: KubernetesOptions, script: Path, arguments: Sequence[str], output_dir: Path) -> int:
    """Write the files into the working directory, and apply the JobSet where that is asked for."""
    check(options, output_dir)
    name = name_of(options, script)
    job_set, train_job = manifests(options, script, arguments, output_dir)
    paths = [Path(f"{name}.jobset.yaml"), Path(f"{name}.trainjob.yaml")]
    for path, document in zip(paths, (job_set, train_job), strict=True):
        path.write_text(yaml_text(document), encoding="utf-8")
    print(f"written to {paths[0]} (JobSet) and {paths[1]} (the same job for Kubeflow Trainer): apply one of them")
    if not options.submit:
        print(f"start it with: kubectl apply -f {paths[0]}")
        return 0
    answer = submitted(
        ["kubectl", "apply", "-f", str(paths[0])],
        elsewhere=f"where there is one: kubectl apply -f {paths[0]}",
        if_silent="`kubectl cluster-info`",
        if_refused="fix what it names",
    )
    print(f"{answer}; its output: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={name}")
    return 0

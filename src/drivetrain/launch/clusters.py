"""Schedulers of clusters: what SLURM and Kubernetes are given from the flags, and this machine's place in a job."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from drivetrain.config import Allowed
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.launchers import RESTART_OF_JOBSET, first_host, resolves
from drivetrain.core.run_folder import read_rows, yaml_text
from drivetrain.launch.layout import LaunchOptions

# ----------------------------------------------------------------------------------------------------------------------
# SLURM: makes a batch script from the flags, submits it, lists submitted jobs; in a job, finds this machine's place.
#
# The script starts one supervisor per node. A signal before the time limit makes them save and end with the code of
# that signal; the script then requeues the job, and its next start goes on from there.

REQUEUE_CODE = 128 + signal.SIGUSR1
CORES_PER_GPU = 4  # for the process itself, its saves, and two that load data; nodes have more for each GPU


class SlurmOptions(LaunchOptions):
    slurm: bool = Field(False, description="write a batch script for SLURM instead of starting anything")
    submit: bool = Field(False, description="and submit it with sbatch")
    job_name: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="its name there (default: the script's)"
    )
    partition: str | None = Field(None, pattern=r"^[\w.,-]+$", description="SLURM's partition")
    account: str | None = Field(None, pattern=r"^[\w.,-]+$", description="SLURM's account")
    time_limit: Annotated[str | None, Allowed("minutes, hours:minutes:seconds or days-hours")] = Field(
        None, pattern=r"^[\d:-]+$", description="SLURM's time limit per start, such as 4:00:00"
    )
    cpus: int | None = Field(
        None, ge=1, description="cores per node (default: 4 for each GPU; with --cpu, 1 for each process)"
    )
    modules: tuple[str, ...] = Field((), description="environment modules to load, such as cuda/13,gcc")
    activate: Path | None = Field(None, description="folder of the virtual environment to activate")
    signal_seconds: int = Field(
        120, ge=1, description="how long before the time limit to save and requeue (default: 120)"
    )


def gpus_of(options: SlurmOptions) -> int | None:
    """Return the GPUs that the job needs on each machine; None where that is not said."""
    if options.gpu_ids or options.num_gpus is not None or options.cpu:
        return len(options.gpu_ids) if options.gpu_ids else options.num_gpus
    return options.num_processes


def cores_of(options: SlurmOptions) -> int:
    """Return the cores that the job needs on each machine."""
    return options.cpus or (options.num_processes or 1 if options.cpu else CORES_PER_GPU * (gpus_of(options) or 1))


def batch_script(options: SlurmOptions, script: Path, arguments: Sequence[str], output_dir: Path, folder: Path) -> str:
    """Return the text of the script. `folder` is where it was written, and where it runs."""
    name = options.job_name or script.stem
    cpus = cores_of(options)
    asked = {
        "job-name": name,
        "nodes": options.num_machines,
        "ntasks-per-node": 1,  # a supervisor; it starts one process per GPU
        "gpus-per-node": gpus_of(options),
        "cpus-per-task": cpus,
        "partition": options.partition,
        "account": options.account,
        "time": options.time_limit,
        "output": f"{output_dir}/slurm-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{options.signal_seconds}",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None)]
    is_elastic = options.spares > 0 or options.least_nodes < options.most_nodes
    lines += ["#SBATCH --no-kill"] if is_elastic else []  # a node that fails does not end the job of the others
    lines += ["#SBATCH --requeue", "", f"cd {shlex.quote(str(folder))} || exit 1"]
    lines += [f"module load {shlex.quote(module)}" for module in options.modules]
    if options.activate is not None:
        lines.append(f"source {shlex.quote(str(_activation(options.activate)))} || exit 1")
    # A node that fails before it joins ends the others, which would wait for it; among spares it is one of those.
    step = ["--no-kill", "--kill-on-bad-exit=0"] if is_elastic else ["--kill-on-bad-exit=1"]
    step.append(f"--cpus-per-task={cpus}")  # srun does not take it from sbatch
    words = ["drivetrain", "launch", *launch_flags(options, output_dir), str(script), *arguments]
    lines += [
        "",
        f"srun {' '.join(step)} {shlex.join(words)}",
        "code=$?",
        f"# {REQUEUE_CODE}: saved after the signal above. The next start goes on from there.",
        f'[ "$code" -eq {REQUEUE_CODE} ] && scontrol requeue "$SLURM_JOB_ID"',
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def write_and_submit(options: SlurmOptions, script: Path, arguments: Sequence[str], output_dir: Path) -> int:
    name = options.job_name or script.stem
    if options.activate is not None and not _activation(options.activate).is_file():
        problem = f"there is no {_activation(options.activate)}"
        if options.submit:
            remedy = "give the folder of a virtual environment, as the nodes see it"
            raise ConfigError([Problem("--activate", problem, str(options.activate), "command line", "", remedy)])
        print(f"{problem} here: the script ends at once where it is not there either")
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / f"{name}.sbatch"
    path.write_text(batch_script(options, script, arguments, output_dir, Path.cwd()), encoding="utf-8")
    print(f"written to {path}")
    if not options.submit:
        print(f"submit it with: sbatch {path}")
        return 0
    answer = submitted(
        ["sbatch", "--parsable", str(path)],
        elsewhere=f"on a machine of the cluster: sbatch {path}",
        if_silent="`sinfo` says if SLURM is up",
        if_refused="fix what it names, or edit the script and submit it",
    )
    job = answer.partition(";")[0]
    output = f"{output_dir}/slurm-{job}.log"
    write_down(output_dir, job, name, path, output)
    print(f"submitted as job {job}; its output: {output}; `drivetrain status --slurm` shows it")
    return 0


def submitted(words: Sequence[str], *, elsewhere: str, if_silent: str, if_refused: str) -> str:
    """Hand a file to a scheduler's own command, and return what that answers.

    Args:
        words: The command. The file is its last word.
        elsewhere: The remedy where there is no such command.
        if_silent: The remedy if it does not answer.
        if_refused: The remedy if it refuses the file.
    """
    tool = words[0]
    if shutil.which(tool) is None:
        raise DrivetrainError(f"there is no {tool} here", remedy=elsewhere)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise DrivetrainError(f"{tool} did not answer within 60 s", remedy=if_silent) from None
    if done.returncode != 0:
        raise DrivetrainError(f"{tool} refused {words[-1]}: {done.stderr.strip()}", remedy=if_refused)
    return done.stdout.strip()


def _activation(folder: Path) -> Path:
    return folder / "bin" / "activate"


def inside_slurm(options: LaunchOptions, environ: Mapping[str, str] | None = None) -> LaunchOptions:
    """Fill in from `srun`, with one supervisor per node: how many, which one, where the first is, unless flags do."""
    environ = os.environ if environ is None else environ
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    one_each = nodes and environ.get("SLURM_STEP_NUM_TASKS") == nodes
    is_range = ":" in options.nodes
    if not one_each or ("nodes" in options.model_fields_set and not is_range) or nodes == "1":
        return options
    first = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    address = first if first and resolves(first) else environ.get("SLURM_LAUNCH_NODE_IPADDR", first)
    number = options.nodes if is_range else str(int(nodes) - options.spares)
    found = {"nodes": number, "node_rank": int(environ.get("SLURM_NODEID", "0")), "main_address": address}
    job = environ.get("SLURM_JOB_ID", "0")
    port = {} if "main_port" in options.model_fields_set else {"main_port": 20000 + int(job) % 12000}
    return options.model_copy(update={**found, **port})


def launch_flags(options: SlurmOptions, output_dir: Path) -> list[str]:
    """Return the flags that were given, except those that the scheduler decides."""
    flags = [f"--output-dir={output_dir}"]
    decided = {"node_rank"} | ({"nodes"} if ":" not in options.nodes else set())
    for name in sorted(options.model_fields_set & set(LaunchOptions.model_fields) - decided):
        value = getattr(options, name)
        if value is None or name == "gpu_ids":  # the scheduler hands out GPUs, and numbers them anew
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        flags.append(f"--{name.replace('_', '-')}={text}")
    return flags


_RECORD = "slurm-jobs.jsonl"
_ANSWER_SECONDS = 20


@dataclass(frozen=True)
class SlurmJob:
    """One job, as it was submitted; `state` and what follows as SLURM has it, empty where it does not know."""

    job: str
    name: str
    script: str
    output: str
    submitted: str
    state: str = ""
    elapsed: str = ""
    reason: str = ""


def write_down(output_dir: Path, job: str, name: str, script: Path, output: str) -> None:
    row = {"job": job, "name": name, "script": str(script), "output": output}
    with (output_dir / _RECORD).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "submitted": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")


def submitted_at(output_dir: Path, environ: Mapping[str, str] | None = None) -> float | None:
    """Return when this job was submitted, by the wall clock; None if that is not known, or if it was requeued."""
    environ = os.environ if environ is None else environ
    job = environ.get("SLURM_JOB_ID", "")
    if not job or environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return None
    found = [row.get("submitted") for row in read_rows(output_dir / _RECORD)[0] if row.get("job") == job]
    return datetime.fromisoformat(str(found[-1])).timestamp() if found and found[-1] else None


def jobs_of(output_dir: Path) -> tuple[list[SlurmJob], str]:
    """Return the jobs submitted into this folder, and why nothing more is known of them; empty if all is well."""
    try:
        rows, _ = read_rows(output_dir / _RECORD)
    except OSError:
        return [], ""
    names = [field.name for field in fields(SlurmJob)[:5]]  # as they are written down
    jobs = [SlurmJob(*(str(row[name]) for name in names)) for row in rows if row.keys() >= set(names)]
    if shutil.which("squeue") is None:
        return jobs, "squeue is not here: on a machine of the cluster this shows how they stand"
    known = _asked(
        ["sacct", "--noheader", "--parsable2", "--allocations", "--format", "JobID,State,Elapsed,Reason"], jobs
    )
    known |= _asked(["squeue", "--noheader", "--states", "all", "--format", "%i|%T|%M|%r"], jobs)
    return [SlurmJob(**{**vars(job), **known.get(job.job, {})}) for job in jobs], ""


def _asked(command: Sequence[str], jobs: Sequence[SlurmJob]) -> dict[str, dict[str, str]]:
    """Ask SLURM job by job: one that it has forgotten makes it refuse the whole list."""
    found: dict[str, dict[str, str]] = {}
    if shutil.which(command[0]) is None:
        return found
    for job in jobs:
        try:
            done = subprocess.run(
                [*command, "--jobs", job.job], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return found
        for line in done.stdout.splitlines() if done.returncode == 0 else ():
            number, state, elapsed, reason = (line.split("|") + [""] * 4)[:4]
            if number == job.job:
                reason = "" if reason in ("None", "(null)") else reason
                found[number] = {"state": state.split(" ")[0], "elapsed": elapsed, "reason": reason}
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Kubernetes: writes a JobSet, and a TrainJob of Kubeflow, from the flags, and applies the JobSet with kubectl.
#
# Every pod runs one supervisor. They meet at the name of the first pod, which may appear later than the others. A pod
# that is evicted gets SIGTERM and saves; whichever pod is lost, all start again, and go on from the last checkpoint.

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

"""`drivetrain launch SCRIPT`: runs an unchanged script on every GPU here, or on several machines."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from drivetrain.commands.command import Command
from drivetrain.config import Positional, Resolved, Rest
from drivetrain.hardware import detect
from drivetrain.launch.kubernetes import KubernetesOptions, write_manifests
from drivetrain.launch.ray import launch_on_ray
from drivetrain.launch.slurm import inside_slurm, write_and_submit
from drivetrain.launch.start import check_script, start

COMMAND = Command(
    summary="Starts a script on every GPU here, or on several machines; watches it, and says why it failed.",
    obeys=("run.output_dir", "distributed.skip_preflight", "watch.inject"),
    first=(
        "num_gpus",
        "gpu_ids",
        "cpu",
        "num_processes",
        "nodes",
        "node_rank",
        "main_address",
        "max_restarts",
        "slurm",
        "submit",
    ),
)
EXAMPLES = (
    "drivetrain launch train.py --lr 0.1         every GPU; what follows the script is the script's",
    "drivetrain launch --gpu-ids 0,1 train.py    these two",
    "drivetrain launch --cpu --num-processes 2 train.py",
    "drivetrain launch --nodes 2 --node-rank 0 --main-address 10.0.0.1 train.py   the main machine",
    "drivetrain launch --nodes 2 --node-rank 1 --main-address 10.0.0.1 train.py   the second",
    "drivetrain launch --slurm --submit --nodes 2 --num-gpus 4 --time-limit 4:00:00 train.py",
    "drivetrain launch --kubernetes --image me/train:1 --num-gpus 8 --output-dir /runs train.py",
    "drivetrain launch --ray --nodes 2 --num-gpus 8 --output-dir /shared/runs train.py",
)


class LaunchCommandOptions(KubernetesOptions):
    ray: bool = Field(False, description="start the job on the machines of a Ray cluster, and wait for its end")
    script: Annotated[Path, Positional()] = Field(description="a Python file; flags of ours stand before it")
    arguments: Annotated[tuple[str, ...], Rest()] = Field((), description="for the script, as they are")


def run(options: LaunchCommandOptions, resolved: Resolved) -> int:
    words = ("script", str(options.script), *options.arguments)
    config = resolved.config
    if options.ray:
        check_script(options.script)
        more = ["--skip-preflight"] if config.distributed.skip_preflight else []
        more += [f"--inject={config.watch.inject}"] if config.watch.inject else []
        return launch_on_ray(options, options.script, options.arguments, config.run.output_dir, more)
    if options.kubernetes:
        return write_manifests(options, options.script, options.arguments, config.run.output_dir)
    if options.slurm or options.submit:
        check_script(options.script)
        return write_and_submit(options, options.script, options.arguments, config.run.output_dir)
    return start(
        words,
        options.script,
        inside_slurm(options),
        detect(config.run.output_dir),
        config.run.output_dir,
        skip_preflight=config.distributed.skip_preflight,
        inject=config.watch.inject,
    )

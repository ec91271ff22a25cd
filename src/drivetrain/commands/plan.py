"""`drivetrain plan TARGET`: plans in this process, or in as many as `train` would start."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from drivetrain.commands.command import Command, ForScript
from drivetrain.commands.train import started
from drivetrain.config import Allowed, Flag, Positional, Resolved
from drivetrain.config.flags import COMMAND_LINE
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.hardware import Hardware, detect
from drivetrain.hardware.catalogue import Machine, machine_named, machine_of_memory
from drivetrain.launch.layout import LaunchOptions

COMMAND = Command(
    summary="How a job would be run here, and why; with --measure, tried on its own model. Trains nothing.",
    all_but=("watch", "checkpoint", "validation", "plan"),
    obeys=("plan.budget_seconds", "plan.file", "plan.cache"),
    here="drivetrain.commands.plan_in_process:run",
)
EXAMPLES = (
    "drivetrain plan digits                          by rule, at once",
    "drivetrain plan train.py --measure              tries ways of running the script's own job",
    "drivetrain plan digits --measure --out p.yaml   keeps it: `train digits --plan p.yaml` pins it",
    "drivetrain plan digits --cpu --num-processes 2  on two processes, as `train` with the same flags",
    "drivetrain plan train.py --for 8xH100           memory, time and days on other GPUs",
    "drivetrain plan train.py --for 2x8xH100 --mfu 0.4   the same on two nodes, at a stated MFU",
)


class PlanOptions(ForScript):
    target: Annotated[str, Positional()] = Field(description="a recipe, `module:function` or a script, as for `train`")
    measure: Annotated[bool, Flag("measure")] = Field(
        False, description="try ways of running a step on a copy of the model"
    )
    out: Annotated[Path | None, Flag("out")] = Field(
        None, description="write the plan as YAML, which `train --plan` takes"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="the whole plan as JSON")
    machine: Annotated[str | None, Flag("for"), Allowed("a number, x, and a card: 4xL4")] = Field(
        None,
        description="plan for a machine that is not here, such as 4xL4, 8xA100-80, or 2x8xH100 (nodes of 8), with a "
        "forecast of its time; with --measure from a step on one GPU here",
    )
    from_run: Annotated[Path | None, Flag("from-run")] = Field(
        None, description="with --for: forecast time from the steps of this run on one GPU, not from FLOPs"
    )
    mfu: Annotated[float | None, Flag("mfu")] = Field(
        None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="with --for: the part of the data sheet's FLOP/s to count with (default: 0.15 to 0.45)",
    )
    gpus: Annotated[int | None, Flag("gpus")] = Field(
        None, ge=1, description="the same for cards that are not in the table: how many; needs --gpu-memory"
    )
    gpu_memory: Annotated[float | None, Flag("gpu-memory")] = Field(
        None, gt=0, allow_inf_nan=False, description="and how many GB each has (of 10^9 bytes, as they are sold)"
    )
    num_processes: Annotated[int | None, Flag("num-processes")] = Field(
        None,
        ge=1,
        le=1024,
        description="plan for so many processes here (default: as many as `train` starts, one per GPU)",
    )
    cpu: Annotated[bool, Flag("cpu")] = Field(False, description="hide the GPUs from them")


def machine_of(given: Mapping[str, Any]) -> Hardware:
    """Return the machine that settings have to suit: the one that is planned for.

    Args:
        given: The options of the command, as far as they could be parsed.
    """
    here = detect()
    try:
        machine = planned_machine(given.get("machine"), given.get("gpus"), given.get("gpu_memory"))
    except ConfigError:
        return here  # the command itself says what is wrong with it
    return here if machine is None else machine.hardware(here)


def planned_machine(name: str | None, gpus: int | None, gpu_memory: float | None) -> Machine | None:
    """Return the machine to plan for, where it is another one than this.

    Args:
        name: What `--for` says, such as `8xH100`.
        gpus: What `--gpus` says.
        gpu_memory: What `--gpu-memory` says, in GB.
    """
    if name is not None and (gpus is not None or gpu_memory is not None):
        raise ConfigError([Problem("--for", "it says already how many GPUs of which kind", remedy="--for 4xL4")])
    if name is not None:
        return machine_named(name)
    if gpus is not None and gpu_memory is None:
        raise ConfigError([Problem("--gpus", "how much memory each has is missing", remedy="--gpus 8 --gpu-memory 24")])
    return None if gpu_memory is None else machine_of_memory(gpus or 1, gpu_memory)


def run(options: PlanOptions, resolved: Resolved) -> int | None:
    """Plan in other processes, and return the exit code; None: plan here, in this process."""
    given = options.model_fields_set & {"num_processes", "cpu"}
    elsewhere = {"--for": options.machine, "--gpus": options.gpus, "--gpu-memory": options.gpu_memory}
    there = next((flag for flag, value in elsewhere.items() if value is not None), "")
    if there and given:
        flag = "--cpu" if options.num_processes is None else "--num-processes"
        raise ConfigError([Problem(flag, f"{there} plans for a machine that is not here", remedy="keep one of them")])
    _refuse_idle_flags(options, there)
    budget = resolved.origins.get("plan.budget_seconds")
    if budget is not None and budget.source == COMMAND_LINE and not options.measure:
        remedy = "add --measure, or leave it out"
        message = "it is for measuring, and nothing is measured without --measure"
        raise ConfigError([Problem(budget.spelled, message, budget.value, budget.source, remedy=remedy)])
    if there:
        return None
    own = {"measure": options.measure, "out": options.out, "json": options.as_json}
    words = tuple(f"--{name}={value}" for name, value in own.items() if value)
    logs = Path(tempfile.mkdtemp(prefix="drivetrain-plan-"))
    launched = LaunchOptions(num_processes=options.num_processes, cpu=options.cpu, max_restarts=0, log_dir=logs)
    code = None
    try:
        code = started("plan", options.target, words, launched, given, resolved, options.arguments)
    finally:
        if not code:
            shutil.rmtree(logs, ignore_errors=True)
    return code


def _refuse_idle_flags(options: PlanOptions, there: str) -> None:
    """Raise where a flag of the forecast would do nothing, or two of them contradict each other."""
    ways = {"--measure": options.measure, "--from-run": options.from_run, "--mfu": options.mfu}
    given = [flag for flag, value in ways.items() if value]
    if not there and given and given != ["--measure"]:
        message = "it is for the time on a machine that is not here"
        raise ConfigError([Problem(given[-1], message, remedy="add --for 8xH100, or leave it out")])
    if there and len(given) > 1:
        message = f"{given[0]} says already where the time of a step comes from"
        raise ConfigError([Problem(given[1], message, remedy="keep one of them")])

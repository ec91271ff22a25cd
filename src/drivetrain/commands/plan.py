"""`drivetrain plan TARGET`: plans in this process, or in as many as `train` would start."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from drivetrain.commands.command import Command, ForScript
from drivetrain.commands.train import started
from drivetrain.config import Allowed, Flag, Positional, Resolved
from drivetrain.config.flags import COMMAND_LINE
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.launch.layout import LaunchOptions

COMMAND = Command(
    summary="How a job would be run here, and why; with --measure, tried on its own model. Trains nothing.",
    all_but=("watch", "checkpoint", "validation", "plan"),
    obeys=("plan.budget_seconds", "plan.file", "plan.cache"),
    here="drivetrain.commands.plan_in_process",
)
EXAMPLES = (
    "drivetrain plan digits                          by rule, at once",
    "drivetrain plan train.py --measure              tries ways of running the script's own job",
    "drivetrain plan digits --measure --out p.yaml   keeps it: `train digits --plan p.yaml` pins it",
    "drivetrain plan digits --cpu --num-processes 2  on two processes, as `train` with the same flags",
    "drivetrain plan train.py --for 4xL4             for a machine that is not here, without measuring",
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
        None, description="plan for a machine that is not here, such as 4xL4 or 8xA100-80; nothing is measured"
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


def run(options: PlanOptions, resolved: Resolved) -> int | None:
    """Plan in other processes, and return the exit code; None: plan here, in this process."""
    given = options.model_fields_set & {"num_processes", "cpu"}
    elsewhere = {"--for": options.machine, "--gpus": options.gpus, "--gpu-memory": options.gpu_memory}
    there = next((flag for flag, value in elsewhere.items() if value is not None), "")
    if there and given:
        flag = "--cpu" if options.num_processes is None else "--num-processes"
        raise ConfigError([Problem(flag, f"{there} plans for a machine that is not here", remedy="keep one of them")])
    budget = resolved.origins.get("plan.budget_seconds")
    if budget is not None and budget.source == COMMAND_LINE and not options.measure:
        remedy = "leave it out" if there else "add --measure, or leave it out"
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

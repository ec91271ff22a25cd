"""`drivetrain plan TARGET`: how a job would be run here, and why. Nothing is trained."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from drivetrain.config import Allowed, Config, Flag, Positional, Resolved
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.hardware import detect
from drivetrain.hardware.catalogue import Machine, machine_named, machine_of_memory
from drivetrain.plan.plan import Plan
from drivetrain.plan.tune import Measurement, Way
from drivetrain.planning import plan
from drivetrain.recipes import with_job
from drivetrain.run.elsewhere import plan_elsewhere

EXAMPLES = (
    "drivetrain plan digits                          by rule, at once",
    "drivetrain plan train.py --measure              tries ways of running the script's own job",
    "drivetrain plan digits --measure --out p.yaml   keeps it: `train digits --plan p.yaml` pins it",
    "drivetrain plan train.py --for 4xL4             for a machine that is not here, without measuring",
)


class Options(BaseModel):
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


def run(options: Options, resolved: Resolved) -> int:
    console = Console(highlight=False, quiet=options.as_json)
    found = _planned(options, resolved.config, console)
    if options.out is not None:
        options.out.write_text(found.to_yaml(), encoding="utf-8")
    if options.as_json:
        print(found.to_json())
        return 0
    _show(found, console)
    if options.out is not None:
        console.print(f"written to {options.out}")
    return 0


def _planned(options: Options, config: Config, console: Console) -> Plan:
    def say(way: Way, found: Measurement) -> None:
        if found.problem or not found.is_brief:
            console.print(f"  tried {way}: {found.problem or f'{1 / found.sample_seconds:,.0f} samples/s'}")

    machine = _elsewhere(options)
    if machine is not None:
        here = detect(config.run.output_dir)
        return with_job(options.target, config, lambda job: plan_elsewhere(job, config, machine, here))
    return with_job(
        options.target,
        config,
        lambda job: plan(job, config, measure=options.measure, on_probe=say),
    )


def _elsewhere(options: Options) -> Machine | None:
    """The machine to plan for, where it is another one."""
    if options.machine is None and options.gpus is None and options.gpu_memory is None:
        return None
    if options.measure:
        raise ConfigError([
            Problem("--measure", "nothing can be measured on a machine that is not here", remedy="leave it out")
        ])  # fmt: skip
    if options.machine is not None:
        if options.gpus is not None or options.gpu_memory is not None:
            raise ConfigError([Problem("--for", "it says already how many GPUs of which kind", remedy="--for 4xL4")])
        return machine_named(options.machine)
    if options.gpu_memory is None:
        raise ConfigError([Problem("--gpus", "how much memory each has is missing", remedy="--gpus 8 --gpu-memory 24")])
    return machine_of_memory(options.gpus or 1, options.gpu_memory)


def _show(found: Plan, console: Console) -> None:
    table = Table(
        title=f"The plan for {found.job}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in ("setting", "value", "why", "else"):
        table.add_column(column, overflow="fold")
    for name, choice in found.choices.items():
        value = "auto" if choice.value is None else str(choice.value)
        table.add_row(name, value, choice.reason, "; ".join(choice.alternatives))
    console.print(table)
    forecast, memory = found.forecast, found.forecast.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "workspace": memory.workspace,
    }
    told = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in parts.items() if size)
    console.print(f"\nmemory: {told}" + ("" if memory.total is None else f"; {memory.total / 1e6:,.1f} MB in all"))
    if forecast.step_seconds is not None:
        whole = "" if forecast.job_seconds is None else f"; the whole job {forecast.job_seconds:,.1f} s"
        console.print(f"time:   {forecast.step_seconds * 1e3:,.2f} ms per step of {found.global_batch} samples{whole}")
    for note in found.notes if found.measured or found.machine else ():
        console.print(note)
    if not found.measured and not found.machine:
        console.print("By rule: nothing was measured. --measure tries what is faster on this very model.")

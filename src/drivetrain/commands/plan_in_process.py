"""`drivetrain plan TARGET`: shows how a job would be run here, and why. Nothing is trained."""

from rich.console import Console
from rich.table import Table

from drivetrain.api.measuring import plan
from drivetrain.commands.plan import PlanOptions
from drivetrain.commands.targets import with_job
from drivetrain.config import Config, Resolved
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.launchers import find_place
from drivetrain.hardware import detect
from drivetrain.hardware.catalogue import Machine, machine_named, machine_of_memory
from drivetrain.plan.plan import Plan
from drivetrain.planning.other_machine import plan_elsewhere
from drivetrain.planning.planner import PlanningProgress

UNITS = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def run(options: PlanOptions, resolved: Resolved) -> int:
    is_main = find_place().rank == 0
    console = Console(highlight=False, quiet=options.as_json or not is_main)
    found = _planned(options, resolved.config, console)
    if not is_main:
        return 0
    if options.out is not None:
        options.out.write_text(found.to_yaml(), encoding="utf-8")
    if options.as_json:
        print(found.to_json())
        return 0
    _show(found, console)
    if options.out is not None:
        console.print(f"written to {options.out}")
    return 0


def _pace_in_words(best: float, worst: float, found: Plan) -> str:
    """Return `120 to 400 samples/s; the whole job 1.2 to 3.6 days`."""
    words = f"{1 / worst:,.0f} to {1 / best:,.0f} samples/s"
    num_samples = found.forecast.num_samples
    if num_samples is None:
        return words
    seconds = num_samples * worst
    unit, size = next((unit, size) for unit, size in UNITS if seconds >= size or size == 1)
    return f"{words}; {num_samples:,} samples in {num_samples * best / size:,.2g} to {seconds / size:,.2g} {unit}"


def _planned(options: PlanOptions, config: Config, console: Console) -> Plan:
    machine = _elsewhere(options)
    if machine is not None:
        here = detect(config.run.output_dir)
        return with_job(
            options.target, config, lambda job: plan_elsewhere(job, config, machine, here), options.arguments
        )
    with PlanningProgress(quiet=console.quiet, after_seconds=0, heading="", console=console) as progress:
        return with_job(
            options.target,
            config,
            lambda job: plan(job, config, measure=options.measure, on_probe=progress),
            options.arguments,
        )


def _elsewhere(options: PlanOptions) -> Machine | None:
    """Return the machine to plan for, where it is another one."""
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
        if forecast.validation_seconds is not None:
            whole += f", some {forecast.validation_seconds:,.1f} s of it validation (estimated)"
        console.print(f"time:   {forecast.step_seconds * 1e3:,.2f} ms per step of {found.global_batch} samples{whole}")
    if forecast.sample_seconds_range is not None:
        console.print(f"time:   {_pace_in_words(*forecast.sample_seconds_range, found)}")
    for note in found.notes if found.measured or found.machine else ():
        console.print(note)
    if not found.measured and not found.machine:
        console.print("By rule: nothing was measured. --measure tries what is faster on this very model.")

"""`drivetrain plan TARGET`: shows how a job would be run here, and why. Nothing is trained."""

from rich.console import Console
from rich.table import Table

from drivetrain.api.measuring import plan
from drivetrain.commands.plan import PlanOptions, planned_machine
from drivetrain.commands.targets import with_job
from drivetrain.config import Config, Resolved
from drivetrain.core.launchers import find_place
from drivetrain.core.run_folder import find_run
from drivetrain.core.value import format_duration
from drivetrain.hardware import Hardware, detect
from drivetrain.job import Job
from drivetrain.plan.plan import Plan
from drivetrain.plan.scaling import TimeForecast
from drivetrain.planning.other_machine import MeasuredStep, plan_elsewhere
from drivetrain.planning.planner import PlanningProgress

BASIS = {
    "measured": "from a step measured on one GPU here",
    "recorded": "from a recorded run on one GPU",
    "counted": "from counted FLOPs: no step was measured",
}


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


def _planned(options: PlanOptions, config: Config, console: Console) -> Plan:
    machine = planned_machine(options.machine, options.gpus, options.gpu_memory)
    if machine is not None:
        here = detect(config.run.output_dir)
        recorded = None
        if options.from_run is not None:
            recorded = MeasuredStep.of_run(find_run(options.from_run, config.run.output_dir))

        def there(job: Job) -> Plan:
            step = _measured_here(job, config, here, console) if options.measure else recorded
            with console.status("counting the memory and the FLOPs of a step, on shapes alone"):
                return plan_elsewhere(job, config, machine, here, step, options.mfu)

        return with_job(options.target, config, there, options.arguments)
    with PlanningProgress(quiet=console.quiet, after_seconds=0, heading="", console=console) as progress:
        return with_job(
            options.target,
            config,
            lambda job: plan(job, config, measure=options.measure, on_probe=progress),
            options.arguments,
        )


def _measured_here(job: Job, config: Config, here: Hardware, console: Console) -> MeasuredStep:
    """Measure a step of the job on the GPU here."""
    if not here.gpus:
        raise MeasuredStep.no_gpu()
    with PlanningProgress(quiet=console.quiet, after_seconds=0, heading="", console=console) as progress:
        return MeasuredStep.of_plan(plan(job, config, measure=True, on_probe=progress), here)


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
    if forecast.time is not None:
        _show_time(forecast.time, found, console)
    for note in found.notes if found.measured or found.machine else ():
        console.print(note)
    if not found.measured and not found.machine:
        console.print("By rule: nothing was measured. --measure tries what is faster on this very model.")


def _show_time(time: TimeForecast, found: Plan, console: Console) -> None:
    """Show the forecast by number of GPUs, the parts of a step, and what is assumed."""
    console.print(f"\nForecast of the time, {BASIS[time.basis]}; steps of {found.global_batch:,} samples")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("GPUs", "step", "samples/s", "speedup", "efficiency", "whole job", "best to worst"):
        table.add_column(column, justify="right")
    for row in time.rows:
        best, worst = row.step_seconds_range if row.job_seconds_range is None else row.job_seconds_range
        table.add_row(
            str(row.num_devices),
            format_duration(row.step_seconds),
            f"{row.samples_per_second:,.0f}",
            f"{row.speedup:.2f} ×",
            f"{row.efficiency:.0%}",
            "not known" if row.job_seconds is None else format_duration(row.job_seconds),
            f"{format_duration(best)} to {format_duration(worst)}",
        )
    console.print(table)
    row = time.row
    if row.num_devices > 1:
        console.print(
            f"a step on {row.num_devices}: {format_duration(row.compute_seconds)} of computing; each GPU sends "
            f"{time.sent_bytes / 1e6:,.1f} MB in {format_duration(row.exchange_seconds)}, of which "
            f"{format_duration(row.exposed_seconds)} are waited for"
        )
    if time.why_no_job_time:
        console.print(f"{time.why_no_job_time}; --epochs or --max-steps says it")
    console.print("It assumes:")
    for each in time.assumes:
        console.print(f"- {each}")

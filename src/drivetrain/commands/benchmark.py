"""`drivetrain benchmark TARGET`: measures what a step of a job takes here, and its phases. Nothing is trained."""

from typing import Annotated

from pydantic import Field
from rich.console import Console
from rich.table import Table

from drivetrain.api.measuring import Performance, benchmark_performance
from drivetrain.commands.command import Command, ForScript
from drivetrain.commands.targets import with_job
from drivetrain.config import Flag, Positional, Resolved

COMMAND = Command(
    summary="What a step of a job takes here: forward, backward, optimizer, memory, MFU. Trains nothing.",
    all_but=("watch", "checkpoint", "validation", "plan", "batch"),
    obeys=("batch.size", "batch.accumulation"),
)
EXAMPLES = (
    "drivetrain benchmark digits                     forward, backward, optimizer, memory, MFU",
    "drivetrain benchmark train.py --precision bf16  the job of a script, with other settings",
    "drivetrain benchmark digits --json              for a program to read",
)


class BenchmarkOptions(ForScript):
    target: Annotated[str, Positional()] = Field(description="a recipe, `module:function` or a script, as for `train`")
    iterations: Annotated[int, Flag("iterations")] = Field(20, ge=1, description="how many steps are measured")
    as_json: Annotated[bool, Flag("json")] = Field(False, description="all figures as JSON")


def run(options: BenchmarkOptions, resolved: Resolved) -> int:
    config = resolved.config
    found = with_job(
        options.target,
        config,
        lambda job: benchmark_performance(job, config, num_iterations=options.iterations),
        options.arguments,
    )
    if options.as_json:
        print(found.model_dump_json(indent=2))
    else:
        show(found, Console(highlight=False))
    return 0


def show(found: Performance, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    table.title = f"A step of {found.job}: {found.global_batch} samples on {found.device} in {found.precision}"
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    phases = {
        "forward": found.forward_seconds,
        "backward": found.backward_seconds,
        "communication": found.communication_seconds,
        "optimizer": found.optimizer_seconds,
        "between them": found.other_seconds,
        "whole step": found.step_seconds,
    }
    for name, seconds in phases.items():
        if seconds:
            table.add_row(name, f"{1e3 * seconds:,.3f}", f"{seconds / found.step_seconds:.0%}")
    console.print(table)
    console.print(f"\nsamples per second  {found.samples_per_second:,.1f}")
    if found.items_per_second != found.samples_per_second:
        console.print(f"{f'{found.items} per second':<19} {found.items_per_second:,.0f}")
    if found.peak_memory_bytes is not None:
        console.print(f"peak memory         {found.peak_memory_bytes / 1e6:,.1f} MB")
    if found.mfu is not None:
        console.print(f"MFU                 {found.mfu:.1%} ({found.peak_source})")
    else:
        console.print("MFU                 unknown: drivetrain verify --save measures this device's peak")
    console.print(
        f"mean of {found.num_steps} steps of {found.micro_batch} × {found.accumulation} accumulated × "
        f"{found.num_devices} devices; data was on the device already, and nothing was trained"
    )

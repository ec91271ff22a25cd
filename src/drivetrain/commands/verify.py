"""`drivetrain verify`: does real work on every part of this machine and prints a checklist.

Nothing here loads torch: a torch that is broken has to become a row of the checklist, too.
"""

import datetime
import sys
import time
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from drivetrain.commands.command import Command
from drivetrain.config import Flag, Resolved
from drivetrain.hardware import detect
from drivetrain.verify.checklist import (
    PlainProgress,
    choose,
    chosen_gpus,
    console_for,
    progress,
    save_rates,
    show_checklist,
    show_saving,
    show_summary,
)
from drivetrain.verify.probe import Report
from drivetrain.verify.runner import PRELOAD, run_probes

COMMAND = Command(
    summary="Does real work on every part of this machine and prints a checklist; exits 0 only if nothing failed.",
    obeys=("run.output_dir", "device.mode", "device.device", "device.ids"),
)
EXAMPLES = (
    "drivetrain verify",
    "drivetrain verify --quick",
    "drivetrain verify --save",
    "drivetrain verify --only matmul,disk --output-dir /data/runs",
)


class VerifyOptions(BaseModel):
    """The options of `drivetrain verify`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quick: bool = Field(False, description="smaller work and rougher figures, in a fraction of the time")
    save: bool = Field(False, description="keep the measured rates; plans and `drivetrain check` use them from then on")
    json_output: Annotated[bool, Flag("json")] = Field(False, description="print one JSON document and nothing else")
    only: tuple[str, ...] = Field((), description="names of the probes to run; matmul means all of them (default: all)")
    time_limit_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="limit of each probe (auto: each its own, 60 or 180)"
    )


def run(options: VerifyOptions, resolved: Resolved) -> int:
    """Run the command. Returns 0 if nothing failed, 1 otherwise."""
    config = resolved.config
    probes = choose(options.only)
    if options.time_limit_seconds is not None:
        limits = {"time_limit_seconds": options.time_limit_seconds, "quick_limit_seconds": None}
        probes = tuple(probe.model_copy(update=limits) for probe in probes)
    started, date = time.monotonic(), datetime.datetime.now().astimezone()
    hardware = detect(config.run.output_dir)
    gpu_indices = chosen_gpus(hardware, config)
    stdout, stderr = console_for(sys.stdout), console_for(sys.stderr)
    with progress(stderr, len(probes), None if options.json_output else stdout) as watcher:
        results = run_probes(
            probes,
            hardware=hardware,
            gpu_indices=gpu_indices,
            run_folder=config.run.output_dir,
            quick=options.quick,
            # One at a time tells what each takes; `--quick` is for those who wait.
            num_at_once=min(2, hardware.cpu.num_usable) if options.quick else 1,
            watcher=watcher,
            preload=PRELOAD,
        )
    saved_to = save_rates(hardware, results, quick=options.quick) if options.save else None
    report = Report(
        date=date.isoformat(timespec="seconds"),
        total_seconds=round(time.monotonic() - started, 3),
        quick=options.quick,
        succeeded=all(result.status != "failed" for result in results),
        accelerator=hardware.accelerator if gpu_indices else "cpu",
        devices=tuple(f"cuda:{index}" for index in gpu_indices) or ("cpu",),
        software=hardware.software,
        results=results,
        saved_to=str(saved_to) if saved_to is not None else None,
    )
    if options.json_output:
        print(report.to_json())
    else:
        if not isinstance(watcher, PlainProgress):  # it has printed each row
            show_checklist(results, stdout)
        if options.save:
            show_saving(report, stdout)
        show_summary(report, stdout)
    return 0 if report.succeeded else 1

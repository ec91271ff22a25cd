"""`drivetrain status`: shows the state of runs, and of jobs that were submitted to SLURM."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from drivetrain.commands.command import Command
from drivetrain.config import Flag, Positional, Resolved
from drivetrain.core.errors import DrivetrainError
from drivetrain.launch.run_states import RunState, runs_in, state_of
from drivetrain.launch.slurm import SlurmJob, jobs_of

COMMAND = Command(
    summary="How runs stand: running, finished, stopped or crashed and why; and jobs submitted to SLURM.",
    obeys=("run.output_dir",),
)
EXAMPLES = (
    "drivetrain status                      every run below runs/, the latest last",
    "drivetrain status runs/digits          one of them",
    "drivetrain status --output-dir other   those below another folder",
    "drivetrain status --slurm              jobs of `drivetrain launch --slurm --submit`, too",
    "drivetrain status --json               for a script: every field, null where it is not known",
)


class Options(BaseModel):
    run: Annotated[Path | None, Positional()] = Field(
        None, description="the folder of a run (default: all runs below --output-dir)"
    )
    slurm: bool = Field(False, description="also the jobs submitted from here, and what squeue and sacct say of them")
    as_json: Annotated[bool, Flag("json")] = Field(False, description="one line of JSON")


def run(options: Options, resolved: Resolved) -> int:
    output_dir = resolved.config.run.output_dir
    runs = runs_in(output_dir) if options.run is None else [_one(options.run, output_dir)]
    jobs, why_not = jobs_of(output_dir) if options.slurm else ([], "")
    if options.as_json:
        slurm = {"jobs": [asdict(job) for job in jobs], "note": why_not} if options.slurm else None
        print(json.dumps({"runs": [asdict(one) for one in runs], "slurm": slurm}))
        return 0
    print("\n".join(in_words(one) for one in runs) or f"no runs below {output_dir}")
    if options.slurm:
        print("\n".join(["", *_jobs_in_words(jobs, output_dir), *([why_not] if why_not else [])]))
    return 0


def _one(folder: Path, output_dir: Path) -> RunState:
    for path in (folder, output_dir / folder):
        if (path / "job.yaml").exists():
            return state_of(path)
    known = ", ".join(str(path.parent) for path in sorted(output_dir.glob("*/job.yaml"))[:5])
    raise DrivetrainError(
        f"{folder} is no folder of a run",
        remedy=f"name one of {known}" if known else f"`drivetrain status` shows those below {output_dir}",
    )


def _rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"


def in_words(one: RunState) -> str:
    """Return a line of facts, and one of the cause where there is one."""
    of = "" if one.num_steps is None else f" of {one.num_steps}"
    facts = [f"step {one.step}{of}"]
    facts += [] if one.epoch is None else [f"epoch {one.epoch + 1}"]
    facts += [] if one.loss is None else [f"loss {one.loss:.4g}"]
    facts += [] if one.samples_per_second is None else [f"{_rate(one.samples_per_second)} samples/s"]
    facts.append("no checkpoint" if one.checkpoint is None else f"checkpoint {one.checkpoint}")
    facts += [] if one.seconds_left is None else [f"{timedelta(seconds=round(one.seconds_left))} left"]
    line = f"{one.state:<9} {one.folder}: {', '.join(facts)}"
    return f"{line}\n          {one.cause}" if one.cause else line


def _jobs_in_words(jobs: Sequence[SlurmJob], output_dir: Path) -> list[str]:
    if not jobs:
        return [f"no SLURM jobs were submitted into {output_dir}"]
    return [
        f"{job.state or 'unknown':<9} job {job.job} ({job.name}), submitted {job.submitted}"
        + (f", {job.elapsed} so far" if job.elapsed else "")
        + (f", {job.reason}" if job.reason else "")
        + f"; its output: {job.output}"
        for job in jobs
    ]

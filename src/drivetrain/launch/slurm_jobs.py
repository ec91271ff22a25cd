"""Lists the SLURM jobs that were submitted from here: recorded at submission, with what SLURM says of them now."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from drivetrain.core.run_folder import read_rows

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

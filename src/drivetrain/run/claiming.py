"""Claims the folder of a run, and notes in its events that a start has begun, and why it did not come to a step."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.files import steps_in
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.goodput import stamp
from drivetrain.core.log import notice
from drivetrain.core.run_folder import (
    CHECKPOINTS,
    Extension,
    JsonLines,
    RunFolder,
    has_steps,
    read_extensions,
    read_job,
)
from drivetrain.job import Job
from drivetrain.run.extending import settle_extension

REQUEUES = "requeues.json"
REQUEUES_AT_MOST = 3


def claim_folder(job: Job, config: Config, name: str, *, quiet: bool) -> tuple[RunFolder, list[Extension]]:
    """Claim the folder of a job's run; return it with how the run was made longer, now and before."""
    # A checkpoint brings its own experts, whatever number is asked for.
    experts = {} if config.moe.experts is None else {"experts": config.moe.experts}
    identity, output_dir, start = job.identity() | experts, config.run.output_dir, config.checkpoint
    if job.source.sizes_vary:  # what a step was taken to need is not what it is
        recorded = read_job(output_dir / name) if has_steps(output_dir / name) else {}
        identity |= {"global_batch": recorded.get("global_batch", job.global_batch)}
    folder = RunFolder.claim(output_dir, name, identity, fresh=start.fresh, extend=start.extends)
    if folder.moved_to is not None and not quiet:
        notice(f"the run that was {folder.path} is {folder.moved_to} now")
    extensions = read_extensions(folder.path)
    try:
        count_requeue(folder)
        if folder.extension is not None:
            folder.extension = settle_extension(job, extensions, folder.extension, config.checkpoint.extend_schedule)
            extensions.append(folder.extension)
    except DrivetrainError:
        folder.close()
        raise
    if folder.is_resumed:  # how an earlier start ended, such as by a refusal, is no longer the news
        _note(folder, {"event": "claim"})
    return folder, extensions


def count_requeue(folder: RunFolder, environ: Mapping[str, str] = os.environ) -> None:
    """Count in the folder how often SLURM requeued the job in vain, without a checkpoint in between, and refuse then.

    A job whose time is up before its first checkpoint would otherwise be requeued for ever.
    """
    job, start = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    if not job or not start.isdecimal():
        return
    path = folder.path / REQUEUES
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    checkpoints = folder.path / CHECKPOINTS
    step = max(steps_in(checkpoints), default=0) if checkpoints.is_dir() else 0
    in_vain = 0
    if before.get("job") == job and before["start"] == int(start):
        return  # the supervisor started the workers again
    if before.get("job") == job and step <= before["step"]:
        in_vain = before["in_vain"] + 1
    with suppress(OSError):  # a full disk: what follows is the news
        folder.write(REQUEUES, json.dumps({"job": job, "start": int(start), "step": step, "in_vain": in_vain}) + "\n")
    if in_vain >= REQUEUES_AT_MOST:
        since = f"the checkpoint of step {step}" if step else "its beginning"
        raise DrivetrainError(
            f"SLURM requeued job {job} {in_vain} times since {since}, and no checkpoint was written in between",
            remedy="a longer --time-limit, a signal earlier before it (--signal-seconds), or more frequent saves "
            "(--checkpoint-every); then submit it again: it goes on from there",
        )


def note_failure(folder: RunFolder, error: BaseException) -> None:
    """Note why a run did not begin."""
    facts: dict[str, Any] = {"event": "stopped by an error", "error": f"{type(error).__name__}: {error}"}
    if isinstance(error, DrivetrainError):
        facts = {"event": "refused", "error": error.message, "remedy": error.remedy}
    elif isinstance(error, KeyboardInterrupt):
        facts = {"event": "stop", "because": "Ctrl-C before it began; the same command begins it"}
    _note(folder, facts)


def note_over(path: Path) -> None:
    """Note that all of a run is done, its report included."""
    _append(path, {"event": "end", **stamp()})


def _note(folder: RunFolder, facts: dict[str, Any]) -> None:
    _append(folder.path, {**facts, "time": datetime.now(UTC).isoformat()})


def _append(path: Path, row: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk: what follows is the news
        log = JsonLines(path / "events.jsonl")
        log.append(row)
        log.close()

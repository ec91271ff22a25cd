"""Forks a run: a new folder that begins with a checkpoint of another run, and its records up to there.

Trained without a change, a fork does the steps that the other run did, to the bit. A job that differs may take it: with
another learning rate, for instance, its optimizer has the new one and the moments of before.
"""

import json
import os
import shutil
from pathlib import Path

from drivetrain.checkpoint.files import shared_in, step_name, steps_in
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import CHECKPOINTS, FORK, Fork, JsonLines, read_job, write_atomically, yaml_text

RECORDS = ("steps.jsonl", "metrics.jsonl", "speed.jsonl", "gpu.jsonl")


def fork_run(source: Path, target: Path, step: int | None = None) -> int:
    """Make the folder of a run that goes on from a checkpoint of another one, and return the step.

    Files of checkpoints are linked, not copied, where the file system can: they are never changed.

    Args:
        source: The folder of the run that has the checkpoint.
        target: The folder to make.
        step: The step of the checkpoint. Default: the newest.
    """
    there = steps_in(source / CHECKPOINTS) if (source / CHECKPOINTS).is_dir() else []
    if not there or (step is not None and step not in there):
        known = f"it has those of steps {', '.join(map(str, sorted(there)))}" if there else "it has none"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise DrivetrainError(f"{source} has {wanted} to fork from", remedy=f"{known}; train it first, or name another")
    if target.exists():
        raise DrivetrainError(f"{target} is there already", remedy="choose another name for the fork")
    step = max(there) if step is None else step
    draft = target.with_name(f".{target.name}.fork")  # a crash leaves no half of a fork under its name
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    checkpoints = source / CHECKPOINTS
    for name in (*(step_name(number) for number in there if number <= step), *shared_in(checkpoints)):
        shutil.copytree(checkpoints / name, draft / CHECKPOINTS / name, copy_function=_link)
    for name in RECORDS:
        if (source / name).exists():
            shutil.copyfile(source / name, draft / name)
            log = JsonLines(draft / name)
            log.keep_up_to(step)
            log.close()
    events = JsonLines(draft / "events.jsonl")
    events.append({"event": "fork", "words": f"from step {step} of {source}", "step": step})
    events.close()
    write_atomically(draft / "job.yaml", yaml_text(read_job(source)))
    write_atomically(draft / FORK, json.dumps(Fork(str(source), step)._asdict()) + "\n")
    draft.rename(target)
    return step


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)

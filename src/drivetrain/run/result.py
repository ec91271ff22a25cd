"""The result of a run when it is over: where its files are, and its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.files import step_name
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.records import StepRecord

CHECKPOINTS = "checkpoints"
Which = Literal["last", "best"]


@dataclass(frozen=True)
class Result:
    """Holds where a run's files are, and how it ended."""

    folder: Path
    steps: int  # optimizer steps done over the whole life of the run
    resumed_from: int  # the step this call went on from; 0 for a new run
    finished: bool  # false if it was asked to stop before the job's end
    last: StepRecord | None  # None if there was nothing left to do
    compilation: str = "not asked for"
    is_main: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last validation
    best_step: int | None = None


def checkpoint_of(run: Path | str | Result, which: Which) -> Checkpoint:
    """Return the newest checkpoint of a run, or the best one. Changes nothing, so a run may go on at the same time."""
    if which not in get_args(Which):
        raise ConfigError(
            [Problem("which", f"got {which!r}", allowed=" or ".join(map(repr, get_args(Which))), remedy="which='last'")]
        )
    folder = run.folder if isinstance(run, Result) else Path(run)
    if not (folder / CHECKPOINTS).is_dir():
        raise DrivetrainError(f"{folder} holds no checkpoints", remedy="give the folder of a run, such as runs/digits")
    newest = Checkpoint.latest_in(folder / CHECKPOINTS)
    if newest is None:
        raise DrivetrainError(f"{folder} holds no checkpoint that is whole", remedy="train on under the same name")
    if which == "last":
        return newest
    step = (newest.meta.get("validation") or {}).get("best_step")
    if step is None:
        raise DrivetrainError(
            f"{folder} holds a run that was never validated, so none of it is known to be best",
            remedy="give the job a validation set, or take the last instead of the best",
        )
    return newest if step == newest.step else Checkpoint.open(newest.path.with_name(step_name(step)))

"""Refuses what can be known to be wrong before planning, which may measure for a minute."""

import math
from pathlib import Path

from torch import nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.weights import read_weights
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.schedules import is_factor
from drivetrain.job import Job
from drivetrain.run.session import Session
from drivetrain.strategies.compiling import modules_named


def refuse_before_planning(run: Session, model: nn.Module, checkpoint: Checkpoint | None) -> None:
    """Raise, on all ranks alike, for settings that would only be used after planning.

    Args:
        run: The run, whose folder is claimed.
        model: The model as the user made it.
        checkpoint: The one that the run goes on from; None for a new run.
    """
    for name in run.config.compile.only:
        modules_named(model, name)
    _refuse_schedule(run.job)
    source = run.job.init_from
    if checkpoint is None and source is not None:
        run.world.main_does(lambda: _refuse_weights(Path(source)))


def _refuse_weights(source: Path) -> None:
    try:
        read_weights(source)
    except DrivetrainError as error:
        raise DrivetrainError(f"init_from: {error.message}", remedy=error.remedy) from None


def _refuse_schedule(job: Job) -> None:
    """Raise if the first or the last step has no learning rate; a schedule of the user's own may also raise itself."""
    for name in job.optims:
        _refuse_schedule(job.with_one(name))
    if not is_factor(job.schedule):
        return
    num_steps = job.num_steps
    for step in {0, (num_steps or 1) - 1}:
        factor = job.lr_factor(step, num_steps)
        if not math.isfinite(factor):
            raise DrivetrainError(
                f"Job.schedule returned {factor} for step {step + 1}", remedy="return a finite number for every step"
            )

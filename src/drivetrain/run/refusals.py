"""Refuses what can be known to be wrong before planning, which may measure for a minute."""

import math
from pathlib import Path

from torch import nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.weights import read_weights
from drivetrain.core.averaging import SWA
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.fp8 import LEAST_FEATURES, MULTIPLE, fits
from drivetrain.core.schedules import is_factor
from drivetrain.job import Job
from drivetrain.run.session import Session
from drivetrain.strategies.compiling import modules_named
from drivetrain.strategies.ema import batch_norms
from drivetrain.strategies.layers import repeated_blocks


def refuse_before_planning(run: Session, model: nn.Module, checkpoint: Checkpoint | None) -> None:
    """Raise, on all ranks alike, for settings that would only be used after planning.

    Args:
        run: The run, whose folder is claimed.
        model: The model as the user made it.
        checkpoint: The one that the run goes on from; None for a new run.
    """
    for name in run.config.compile.only:
        modules_named(model, name)
    if run.precision.fp8 is not None:
        _refuse_fp8(run.precision.name, model)
    _refuse_schedule(run.job)
    if run.job.swa is not None:
        _refuse_averaging(run.job, run.job.swa, model)
    source = run.job.init_from
    if checkpoint is None and source is not None:
        run.world.main_does(lambda: _refuse_weights(Path(source)))


def _refuse_fp8(precision: str, model: nn.Module) -> None:
    if not any(fits(layer) for block in repeated_blocks(model).values() for layer in block.modules()):
        raise DrivetrainError(
            f"--precision {precision}: the model's repeated blocks have no linear layer that it would speed up, of at "
            f"least {LEAST_FEATURES} features in and out, and multiples of {MULTIPLE}",
            remedy="use --precision bf16",
        )


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


def _refuse_averaging(job: Job, swa: SWA, model: nn.Module) -> None:
    """Raise where no weights would be averaged, or where the statistics of batch-norm layers cannot be computed."""
    num_steps = job.num_steps
    if num_steps is None and not isinstance(swa.start, int):
        raise DrivetrainError(
            f"Job.swa: start={swa.start} is a fraction of the steps, and their number is not known beforehand",
            remedy="give max_steps, or start as a number of steps: dt.SWA(start=1000)",
        )
    if num_steps is not None:
        per_epoch = job.steps_per_epoch
        period = per_epoch if swa.every == "epoch" else swa.every
        last = num_steps if period is None else num_steps // period * period
        first = swa.first_step(num_steps)
        if last < first:
            raise DrivetrainError(
                f"Job.swa: {swa} averages nothing: it begins after {first} of {num_steps} steps, and no multiple of "
                f"{period} steps follows",
                remedy="an earlier start, or every=1",
            )
    if batch_norms(model) and job.source.is_iterable:
        raise DrivetrainError(
            "Job.swa: the averaged weights need new batch-norm statistics, and the data can only be iterated",
            remedy="give a data set with a length and items, or use ema=0.999, which keeps the statistics of training",
        )

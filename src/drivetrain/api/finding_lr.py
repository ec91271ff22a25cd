"""`dt.find_lr(job)`: a range test of the learning rate, in memory, on a model that is thrown away."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import nn

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import untouched
from drivetrain.core.value import Value
from drivetrain.job import Job
from drivetrain.loop.read_back import Reading
from drivetrain.run import Session
from drivetrain.run.assemble import assemble, division_of, make_loader, make_stepper, trial_of
from drivetrain.run.command_context import given_on_command_line
from drivetrain.run.loss_weighting import settle_weighting
from drivetrain.run.model_factory import build_model, prepare_model
from drivetrain.run.optimizer_settings import ConfiguredOptimizer, with_optimizer_settings

_SMOOTHING_STEPS = 2.0  # standard deviation of the average
_FEW = 5  # steps
_FAR_ABOVE = 4.0


class LrFinding(Value):
    """The loss of each step of a range test, with the learning rates that follow from it."""

    job: str
    rates: tuple[float, ...]  # of each step, in rising order
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]  # a centered average of the losses
    steepest: float | None  # where the smoothed loss falls fastest; None: it does not fall
    diverged_at: float | None  # where, after its lowest, it is above the first again, or not finite; None: nowhere
    suggestion: float | None  # the lower of `steepest` and a tenth of `diverged_at`


def find_lr(
    job: Job, config: Config | None = None, *, lowest: float = 1e-7, highest: float = 10.0, num_steps: int = 100
) -> LrFinding:
    """Train some steps with an exponentially rising learning rate, and suggest one from where the loss falls.

    A model of its own is trained, in memory: nothing is written, and a run of the same name is not touched. Schedule,
    moving average, validation and hooks of the job are left out. Where the optimizer's groups have different rates, the
    rate is the highest, as with `--lr`. Under a launcher all processes take part, and all get the same figures.

    Args:
        job: What to train.
        config: How to run it, from `configure`. Default: the command line's, else the defaults.
        lowest: The rate of the first step.
        highest: The rate of the last step; the test ends before it where the loss diverges.
        num_steps: How many steps to train.

    Returns:
        The rates, the losses and the suggestion.

    Example:
        >>> rate = dt.find_lr(job, num_steps=20).suggestion  # doctest: +SKIP
    """
    if not 0 < lowest < highest < math.inf or num_steps < 2 * _FEW:
        raise DrivetrainError(
            f"no range test: rates from {lowest} to {highest} in {num_steps} steps",
            remedy=f"a lowest rate above 0, a highest above that, and {2 * _FEW} steps at least",
        )
    if job.num_samples is None:
        raise DrivetrainError(
            "data that can only be iterated cannot be tried: its items would be used up",
            remedy="give the job some of its items as a list",
        )
    config = config or given_on_command_line() or Config()
    session = Session.join(_of_test(job, config, num_steps), _without_rate(config), quiet=True)
    rates = [lowest * (highest / lowest) ** (step / (num_steps - 1)) for step in range(num_steps)]
    try:
        with untouched(session.world.device), session.numerics():
            losses = list(_losses(session, rates))
        return _found(session.name, rates, losses)
    finally:
        session.close_loaders()
        session.close()


def _of_test(job: Job, config: Config, num_steps: int) -> Job:
    """Return the job with an optimizer at rate 1, and without all that follows a step."""
    if job.optims:
        raise DrivetrainError(
            f"the job has several optimizers ({', '.join(job.optims)}), and a range test looks for one rate",
            remedy="try a job with one optimizer, and give the others rates in proportion",
        )
    given = _without_rate(config)
    job = with_optimizer_settings(job, given)
    return replace(
        job,
        model=copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model,
        optimizer=ConfiguredOptimizer(job.optimizer, 1.0, None),
        schedule=_one,
        max_steps=num_steps,
        epochs=None,
        valid=None,
        valid_every=None,
        valid_batch=None,
        metrics={},
        early_stopping=None,
        ema=None,
        swa=None,
        hooks=(),
        length_is_read=True,
    )


def _without_rate(config: Config) -> Config:
    optimizer = config.optimizer.model_copy(update={"learning_rate": None, "warmup_steps": None, "ema": None})
    return config.model_copy(update={"optimizer": optimizer})


def _one(step: int) -> float:
    return 1.0


def _losses(session: Session, rates: list[float]) -> Iterator[float]:
    """Train with these rates, and yield the loss of each step, over all ranks; ends with the one that diverges."""
    session.follow(session.planned.but(capture=False))
    job, model, loss_parts = session.job, build_model(session), session.loss_parts
    settle_weighting(session, model, None)
    division = division_of(session, model)
    loader = make_loader(session, division, job.source, shuffle=job.shuffle)
    first = loader.first(len(rates), None)
    trial = trial_of(session, first.batch, first.num_samples)
    parts = assemble(session, prepare_model(session, model), trial, division, takes_weights=True)
    stepper = make_stepper(session, parts, loader=loader)
    seen: list[float] = []
    for place, micro_batches in loader.batches(0, len(rates)):
        for group in parts.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rates[place.step]
        if loss_parts.has_schedule:
            loss_parts.set_weights(place.step)
        if loader.count_ahead is not None:
            loss_parts.begin(place.step)
        reading = Reading(stepper.run(place, micro_batches, False), session.world.device)
        loss, _ = reading.values().loss(place.step)  # the host waits for each step here
        yield loss
        seen.append(loss)
        if _is_over(seen):
            break
    parts.strategy.close()


def _is_over(losses: list[float]) -> bool:
    """Return whether the last losses are so far above the lowest that higher rates tell nothing."""
    if not math.isfinite(losses[-1]):
        return True
    lowest = min(losses)
    span = max(losses[0] - lowest, abs(lowest))  # a loss may be below 0
    return len(losses) > _FEW and min(losses[-_FEW:]) > lowest + _FAR_ABOVE * span


def _found(name: str, rates: list[float], losses: list[float]) -> LrFinding:
    is_finite = math.isfinite(losses[-1])
    kept = len(losses) if is_finite else len(losses) - 1
    smoothed = _smoothed(losses[:kept])
    lowest_at = int(np.argmin(smoothed)) if kept else 0
    worse = [rates[step] for step in range(lowest_at, kept) if smoothed[step] > smoothed[0]]
    diverged_at = worse[0] if worse else None if is_finite else rates[kept]
    steepest = _steepest(rates[: lowest_at + 1], smoothed[: lowest_at + 1])
    tenth = None if diverged_at is None else diverged_at / 10
    return LrFinding(
        job=name,
        rates=tuple(rates[:kept]),
        losses=tuple(losses[:kept]),
        smoothed=tuple(smoothed),
        steepest=steepest,
        diverged_at=diverged_at,
        suggestion=None if steepest is None else min(steepest, tenth or steepest),
    )


def _smoothed(losses: list[float]) -> list[float]:
    """Return a centered average, by Gaussian weights: an average of the steps before would lag behind the rate.

    Losses that are far above the first one count as if they were less: a single one would hide all others.
    """
    if not losses:
        return []
    highest = losses[0] + max(losses[0] - min(losses), abs(losses[0]) * 0.1)
    numbers, capped = np.arange(len(losses)), np.minimum(losses, highest)
    weights = np.exp(-0.5 * ((numbers[:, None] - numbers[None, :]) / _SMOOTHING_STEPS) ** 2)
    return [float(loss) for loss in (weights * capped).sum(1) / weights.sum(1)]


def _steepest(rates: list[float], smoothed: list[float]) -> float | None:
    """Return the rate at which the smoothed loss falls fastest by the logarithm of the rate."""
    if len(rates) < _FEW:
        return None
    slopes = np.gradient(smoothed, np.log(rates))
    return rates[int(np.argmin(slopes))] if slopes.min() < 0 else None

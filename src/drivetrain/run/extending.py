"""Makes a run longer than it was begun: `--extend`, with the learning rate as `--extend-schedule` says.

A schedule that does not depend on the number of steps goes on by itself: the run is then the one that would have come
of the longer job, to the bit. For any other, the steps done had a learning rate that the longer job would not have
given them, and how to go on is the user's decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import Extension
from drivetrain.core.schedules import FactorSchedule, is_factor
from drivetrain.job import Job

WAYS = {
    "floor": "keeps the rate at which the schedule ended",
    "stretch": "follows the schedule of the longer job from here on",
    "rewarm": "begins the schedule again for the steps that are added",
}
_MOST_COMPARED = 1000  # steps: those of a long run are compared at equal distances


@dataclass(frozen=True)
class ExtendedSchedule:
    """The factor of the learning rate over a run that was made longer, once or several times."""

    base: Any  # a schedule with `factor(step, num_steps)`
    extensions: tuple[Extension, ...]

    def __call__(self, step: int) -> float:
        return self._factor(step, len(self.extensions))

    def at_seam(self, step: int) -> tuple[float, float]:
        """Return the factors of the last of `step` steps that were done before the last extension, and of the next."""
        return self._factor(step - 1, len(self.extensions) - 1), self(step)

    def _factor(self, step: int, number: int) -> float:
        """Return the factor by the first `number` extensions."""
        if number == 0:
            return float(self.base.factor(step, self.extensions[0].before))
        last = self.extensions[number - 1]
        before, after = last.before or 0, last.after or 0
        if last.schedule in ("", "stretch"):
            return float(self.base.factor(step, after))
        if step < before:
            return self._factor(step, number - 1)
        if last.schedule == "floor":
            return self._factor(before, number - 1)
        return float(self.base.factor(step - before, after - before))


def depends_on_length(job: Job, extension: Extension) -> bool:
    """Return whether the longer job has another learning rate in a step that the shorter one has, too."""
    if job.optims:
        return any(depends_on_length(job.with_one(name), extension) for name in job.optims)
    before, after = extension.before, extension.after
    if before is None or after is None or not is_factor(job.schedule):
        return False  # a torch scheduler is not told the number of steps, nor is a plateau
    return any(
        job.lr_factor(step, before) != job.lr_factor(step, after)
        for step in {*range(0, before, max(1, before // _MOST_COMPARED)), before - 1}
    )


def settle_extension(job: Job, earlier: Sequence[Extension], new: Extension, way: str | None) -> Extension:
    """Return the extension with how its learning rate goes on; raise where that has to be asked for.

    Args:
        job: The longer job, with its own schedule.
        earlier: How the run was made longer before.
        new: How it is made longer now.
        way: One of `WAYS`, where the user chose.
    """
    if not depends_on_length(job, new) and not any(it.schedule for it in earlier):
        return new
    if way is None:
        raise DrivetrainError(
            f"the schedule ({job.identity()['schedule']}) depends on the number of steps, {new.before} until now and "
            f"{new.after} with --extend: what the learning rate does is not known",
            remedy="add --extend-schedule: " + "; ".join(f"{name} {words}" for name, words in WAYS.items()),
        )
    settled = replace(new, schedule=way)
    if way == "floor" and not any(
        ExtendedSchedule(schedule, (*earlier, settled))(new.before or 0) for schedule in _factors_of(job)
    ):
        raise DrivetrainError(
            "the schedule ends with a learning rate of 0, and --extend-schedule floor would keep it: it learns nothing",
            remedy="--extend-schedule stretch or rewarm; or a schedule with a floor in a new run",
        )
    return settled


def extended(job: Job, extensions: Sequence[Extension]) -> Job:
    """Return the job with the learning rate of a run that was made longer."""
    if not any(it.schedule for it in extensions):
        return job

    def longer(schedule: Any) -> Any:
        return ExtendedSchedule(schedule, tuple(extensions)) if isinstance(schedule, FactorSchedule) else schedule

    optimizer: Any = job.optimizer
    if job.optims:
        optimizer = {name: replace(optim, schedule=longer(optim.schedule)) for name, optim in job.optims.items()}
    return replace(job, schedule=longer(job.schedule), optimizer=optimizer)


def _factors_of(job: Job) -> list[FactorSchedule]:
    """Return the schedules that are a factor of the step: the job's, or those of its optimizers."""
    schedules = [job.settled_optim(name).schedule for name in job.optims] or [job.schedule]
    return [schedule for schedule in schedules if isinstance(schedule, FactorSchedule)]

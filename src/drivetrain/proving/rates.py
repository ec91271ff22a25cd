"""The learning rates of the plain loop by step: those of a factor, or those that the job's torch scheduler sets.

A torch scheduler is stepped on the plain loop's own optimizer, once for every step. What it sets is kept in a table, so
that a loop with a planted bug can ask for another step than the one that it is in. A plateau is left out: see
`without_plateaus`.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.core.schedules import Constant, OnPlateau, is_factor
from drivetrain.job import Job
from drivetrain.proving.case import Case, build_model, schedule_of

PLATEAU_NOTE = (
    "validation is left out, so a schedule that reduces the rate on a plateau (OnPlateau, ReduceLROnPlateau) never "
    "does: the rate is constant here, after its warm-up"
)


class RateTable:
    """What the groups of an optimizer are set to in each step: rates, and whatever else a torch scheduler changes."""

    def __init__(self, case: Case, name: str, optimizer: Optimizer) -> None:
        self._case, self._name, self._optimizer = case, name, optimizer
        self._scheduler: LRScheduler | None = None
        first = self._settings()
        if not is_factor(schedule_of(case.job, name)):
            self._scheduler = case.scheduler(optimizer, name)
            self._rows = [self._settings()]
            return
        self._rows = []
        self._bases = [float(group["lr"]) for group in first]

    def set(self, step: int) -> None:
        """Set the groups for the step that follows `step` steps."""
        for group, settings in zip(self._optimizer.param_groups, self._row(step), strict=True):
            group.update(settings)

    def rates(self, step: int) -> tuple[float, ...]:
        """Return the rates of the groups in the step that follows `step` steps."""
        return tuple(float(group["lr"]) for group in self._row(step))

    def _row(self, step: int) -> list[dict[str, Any]]:
        if self._scheduler is None:
            factor = self._case.lr_factor(step, self._name)
            return [{"lr": base * factor} for base in self._bases]
        while len(self._rows) <= step:
            for group, settings in zip(self._optimizer.param_groups, self._rows[-1], strict=True):
                group.update(settings)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer was not stepped between
                self._scheduler.step()
            self._rows.append(self._settings())
        return self._rows[step]

    def _settings(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
            for group in self._optimizer.param_groups
        ]


def without_plateaus(job: Job, apart: Callable[[Callable[[], list[str]]], list[str]]) -> Job:
    """Return the job with a constant rate, after its warm-up, where only validations would reduce it.

    Args:
        job: the job.
        apart: runs a function in a separate process: what a function of the user's returns is only seen by calling it.
    """
    job = _with_constant(job, ())
    if all(is_factor(schedule_of(job, name)) for name in job.optims or ("",)):
        return job
    case = Case("schedules", job, seed=job.seed)
    return _with_constant(job, apart(lambda: _plateaus_of(case)))


def _plateaus_of(case: Case) -> list[str]:
    """Return the names of the optimizers whose torch scheduler looks at validations."""
    model = build_model(case.job, case.seed, case.dtype)
    return [
        name
        for name, optimizer in case.optimizers(model).items()
        if not is_factor(schedule_of(case.job, name)) and isinstance(case.scheduler(optimizer, name), ReduceLROnPlateau)
    ]


def _with_constant(job: Job, found: Sequence[str]) -> Job:
    """Return the job with a constant rate for `OnPlateau`, and for the schedules of the optimizers in `found`."""

    def constant(schedule: Any, name: str) -> Any:
        if isinstance(schedule, OnPlateau):
            return Constant(warmup_steps=schedule.warmup_steps)
        return Constant() if name in found else schedule

    own = {name: (schedule_of(job, name), constant(schedule_of(job, name), name)) for name in job.optims or ("",)}
    if all(before is after for before, after in own.values()):
        return job
    several = {name: replace(optim, schedule=own[name][1]) for name, optim in job.optims.items()}
    return replace(job, schedule=constant(job.schedule, ""), optimizer=several or job.optimizer)

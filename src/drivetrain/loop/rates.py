"""Sets the learning rate of each step, by the job's schedule.

A torch scheduler never sees the run's optimizer: it steps a stand-in with the same groups and settings, from the job's
first step, and what it sets there is copied. So it is a function of the step: a resumed run steps it anew to where it
was, and a checkpoint needs nothing of it. Only `ReduceLROnPlateau` has a state to save: it looks at validations.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.optimizers import JointOptimizer
from drivetrain.core.schedules import OnPlateau, is_factor, warmup_factor
from drivetrain.job import Job
from drivetrain.strategies.optimizer_state import ON_HOST, are_rounded, rounded, set_rate

_WITHOUT_VALIDATION = (
    "ReduceLROnPlateau looks at validations, and there are none",
    "give valid=…, or use a scheduler that counts steps",
)


class LearningRates:
    """Sets the rates of an optimizer's groups before each step, and whatever else a torch scheduler changes."""

    def __init__(self, job: Job, optimizer: Optimizer) -> None:
        self._job, self._optimizer = job, optimizer
        self._rounds = are_rounded(optimizer)
        self._scheduled: _TorchSchedule | None = None
        self.plateau: Plateau | None = None
        schedule: Any = job.schedule
        if isinstance(schedule, OnPlateau):
            scheduler = job.settled(schedule).make(_StandIn(optimizer))
            self.plateau = Plateau(scheduler, schedule.metric, schedule.warmup_steps)
        elif not is_factor(schedule):
            scheduled = _TorchSchedule(job, optimizer)
            if isinstance(scheduled.scheduler, ReduceLROnPlateau):
                if job.valid is None:
                    raise DrivetrainError(_WITHOUT_VALIDATION[0], remedy=_WITHOUT_VALIDATION[1])
                self.plateau = Plateau(scheduled.scheduler, "valid_loss")
            else:
                self._scheduled = scheduled
        self._names = [str(group.get("name", number)) for number, group in enumerate(optimizer.param_groups)]
        self._differ = len({group["initial_lr"] for group in optimizer.param_groups}) > 1
        # By step, the rates of the groups after the first, where they differ: until the step's record is built.
        self._others: dict[int, dict[str, float]] = {}

    @property
    def plateaus(self) -> dict[str, "Plateau"]:
        """The plateau, where the schedule is one, under an empty name; those of several optimizers have theirs."""
        return {} if self.plateau is None else {"": self.plateau}

    @property
    def why_not_captured(self) -> str:
        """Why a captured step would not follow the schedule; empty if it does."""
        return self._scheduled.why_not_captured if self._scheduled is not None else ""

    @property
    def sets_own(self) -> str:
        """The name of a torch scheduler whose rates are not those of the optimizer; empty for other schedules."""
        scheduled = self._scheduled
        return type(scheduled.scheduler).__name__ if scheduled is not None and scheduled.sets_own else ""

    def set(self, step: int, num_steps: int | None) -> float:
        """Set the rates for the step that follows `step` steps. Return that of the first group."""
        groups = self._optimizer.param_groups
        if self._scheduled is None and self.plateau is None:
            factor = self._job.lr_factor(step, num_steps)
            rates = [group["initial_lr"] * factor for group in groups]
        elif self._scheduled is not None:
            rates = self._scheduled.at(step, groups)
        else:
            assert self.plateau is not None
            rates = self.plateau.rates(step)
        if not math.isfinite(sum(rates)):
            raise self._refused(step, rates)
        for group, rate in zip(groups, rates, strict=True):
            set_rate(group, rounded(rate) if self._rounds else rate)
        if len(rates) > 1 and (self._differ or rates.count(rates[0]) != len(rates)):
            self._differ = True
            others = zip(self._names[1:], rates[1:], strict=True)
            self._others[step] = {f"lr_{name}": float(rate) for name, rate in others}
        return float(rates[0])

    def _refused(self, step: int, rates: list[float]) -> DrivetrainError:
        schedule = self._scheduled.scheduler if self._scheduled is not None else self._job.schedule
        name = getattr(schedule, "__name__", type(schedule).__name__)
        rate = next(rate for rate in rates if not math.isfinite(rate))
        return DrivetrainError(
            f"the schedule {'(a lambda)' if name == '<lambda>' else name} gives {rate} as the learning rate of step "
            f"{step + 1}, which would spoil the weights",
            remedy="look for a division by zero, a logarithm or a power in it; the same command goes on from the last "
            "checkpoint",
        )

    def take_others(self, step: int) -> dict[str, float] | None:
        """Return the rates of the other groups in the step that followed `step` steps, by name; None if all are equal.

        They can be taken once.
        """
        return self._others.pop(step, None) if self._others else None


class JointRates:
    """Sets the rates of several optimizers, each by its own schedule."""

    def __init__(self, job: Job, optimizer: JointOptimizer) -> None:
        self._rates = {name: LearningRates(job.with_one(name), one) for name, one in optimizer.members.items()}
        self.plateaus = {name: rates.plateau for name, rates in self._rates.items() if rates.plateau is not None}
        self._others: dict[int, dict[str, float]] = {}

    @property
    def why_not_captured(self) -> str:
        """Why a captured step would not follow one of the schedules; empty if it does."""
        return next((rates.why_not_captured for rates in self._rates.values() if rates.why_not_captured), "")

    @property
    def sets_own(self) -> str:
        """The name of a torch scheduler whose rates are not those of its optimizer; empty if there is none."""
        return next((rates.sets_own for rates in self._rates.values() if rates.sets_own), "")

    def set(self, step: int, num_steps: int | None) -> float:
        """Set the rates for the step that follows `step` steps. Return that of the first optimizer."""
        others: dict[str, float] = {}
        for name, rates in self._rates.items():
            others[f"lr_{name}"] = rates.set(step, num_steps)
            of_groups = rates.take_others(step) or {}
            others |= {f"lr_{name}_{group.removeprefix('lr_')}": rate for group, rate in of_groups.items()}
        self._others[step] = others
        return next(iter(others.values()))

    def take_others(self, step: int) -> dict[str, float] | None:
        """Return the rates of all optimizers in the step that followed `step` steps, by name. They are taken once."""
        return self._others.pop(step, None)


Rates = LearningRates | JointRates


def rates_of(job: Job, optimizer: Optimizer) -> Rates:
    """Return what sets the rates of the job's optimizer or optimizers."""
    if isinstance(optimizer, JointOptimizer):
        return JointRates(job, optimizer)
    return LearningRates(job, optimizer)


class _StandIn(Optimizer):
    """An optimizer with the groups and settings of another one, and an empty parameter in each group."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [
            {
                **{name: value for name, value in group.items() if name not in ("initial_lr", ON_HOST)},
                "params": [nn.Parameter(torch.zeros(0))],
                "lr": group["initial_lr"],
            }
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: torch's schedulers warn if the optimizer was not stepped before them."""


class _TorchSchedule:
    """A torch scheduler of the job's, on a stand-in for the optimizer."""

    def __init__(self, job: Job, optimizer: Optimizer) -> None:
        self._job, num_steps = job, job.num_steps
        self._made_of, self._num_done = _StandIn(optimizer), 0
        self._made_with = [dict(group) for group in self._made_of.param_groups]
        self.scheduler = self._made()
        self._changed = set[str]()  # settings besides the rate that it was seen to change
        self._look()
        kinds = list(_inner(self.scheduler))
        foreign = [type(each).__name__ for each in kinds if not type(each).__module__.startswith("torch.optim.")]
        cycling = [type(each).__name__ for each in kinds if getattr(each, "cycle_momentum", False)]
        self.why_not_captured = ""
        if cycling or self._changed:
            kind, names = (cycling or [type(self.scheduler).__name__])[0], ", ".join(sorted(self._changed))
            self.why_not_captured = f"{kind} changes {names or 'momentum'}, which a replay would not"
        elif foreign:
            self.why_not_captured = f"{foreign[0]} is not torch's own, and may change more than the learning rate"
        total = getattr(self.scheduler, "total_steps", None)
        if isinstance(total, int) and num_steps is not None and total < num_steps:
            raise DrivetrainError(
                f"{type(self.scheduler).__name__} was made for {total} steps, and the job has {num_steps}",
                remedy=f"total_steps={num_steps}; it is stepped once per optimizer step, not per epoch",
            )

    @property
    def sets_own(self) -> bool:
        """Whether it began with other rates than the optimizer was made with, as `OneCycleLR` does with its max_lr."""
        pairs = zip(self._made_of.param_groups, self._made_with, strict=True)
        return any(group.get("initial_lr", made_with["lr"]) != made_with["lr"] for group, made_with in pairs)

    def at(self, step: int, groups: list[dict[str, Any]]) -> list[float]:
        """Return the rates of the step that follows `step` steps, and copy other settings to the groups."""
        try:
            while self._num_done < step:
                self.scheduler.step()
                self._num_done += 1
                if self.why_not_captured:
                    self._look()
        except Exception as error:
            raise DrivetrainError(
                f"{type(self.scheduler).__name__} failed at step {self._num_done + 1}: {error}",
                remedy="look at what it was made with: it is stepped once per optimizer step, not per epoch",
            ) from error
        assert self._num_done == step, "steps only go forward"
        if self.why_not_captured:
            self._copy(groups)
        return [float(group["lr"]) for group in self._made_of.param_groups]

    def _made(self) -> LRScheduler:
        """Call the job's function. What it returns is a scheduler of the stand-in, or it is refused."""
        schedule: Any = self._job.schedule
        try:
            made = schedule(self._made_of)
        except Exception as error:
            raise DrivetrainError(
                "Job.schedule returns no number for step 0, and called with the optimizer it raised "
                f"{type(error).__name__}: {error}",
                remedy="a function from the step to a factor, such as lambda step: 0.99**step, or one from the "
                "optimizer to a torch scheduler, such as lambda optimizer: StepLR(optimizer, 30)",
            ) from error
        if not isinstance(made, LRScheduler):
            raise DrivetrainError(
                f"Job.schedule returned {type(made).__name__}, called with the optimizer",
                remedy="return a number for a step, or a torch scheduler for an optimizer: a class of "
                "torch.optim.lr_scheduler or one derived from LRScheduler",
            )
        if made.optimizer is not self._made_of:
            raise DrivetrainError(
                f"the {type(made).__name__} of Job.schedule was made with another optimizer than the job's",
                remedy="make it with the optimizer that the function gets: schedule=lambda optimizer: "
                f"{type(made).__name__}(optimizer, …)",
            )
        self._made_of.step()
        return made

    def _look(self) -> None:
        """Find which settings besides the rate are no longer those that the optimizer was made with."""
        for group, made_with in zip(self._made_of.param_groups, self._made_with, strict=True):
            for name, value in made_with.items():
                if name not in ("params", "lr", "initial_lr") and group[name] is not value and group[name] != value:
                    self._changed.add(name)

    def _copy(self, groups: list[dict[str, Any]]) -> None:
        for group, ours in zip(groups, self._made_of.param_groups, strict=True):
            group.update({name: ours[name] for name in self._changed if name in group})


class Plateau:
    """A `ReduceLROnPlateau` that is stepped with each validation, and the rates that it has come to."""

    def __init__(self, scheduler: ReduceLROnPlateau, metric: str, warmup_steps: int = 0) -> None:
        self._scheduler, self.metric, self._warmup_steps = scheduler, metric, warmup_steps

    def rates(self, step: int) -> list[float]:
        """Return the rates of the groups in the step that follows `step` steps."""
        warmup = warmup_factor(step, self._warmup_steps)
        return [rate * warmup for rate in self._now()]

    def observe(self, value: float) -> str:
        """Take a validation's value of the metric into account. Return what was reduced in words; empty if nothing."""
        before, waited = self._now(), self._scheduler.num_bad_epochs + 1
        self._scheduler.step(value)
        now = self._now()
        if now == before:
            return ""
        return (
            f"{self.metric} has not improved on {self._scheduler.best:.6g} in {waited} validations: learning rate "
            f"{before[0]:.3g} → {now[0]:.3g}"
        )

    def state_dict(self) -> dict[str, Any]:
        found = self._scheduler
        return {
            "best": found.best if math.isfinite(found.best) else None,
            "num_bad": found.num_bad_epochs,
            "cooldown": found.cooldown_counter,
            "num_seen": found.last_epoch,
            "rates": self._now(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = self._scheduler
        found.best = found.mode_worse if state["best"] is None else state["best"]
        found.num_bad_epochs, found.cooldown_counter = state["num_bad"], state["cooldown"]
        found.last_epoch = state["num_seen"]
        for group, rate in zip(found.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]


def _inner(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and, of one that combines others, those."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _inner(each)

"""What is due at which step: the learning rate of each, by the job's schedule, and its checkpoints."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice
from drivetrain.core.optimizers import JointOptimizer
from drivetrain.core.schedules import FactorSchedule, OnPlateau, is_factor, warmup_factor
from drivetrain.core.value import format_duration
from drivetrain.data.division import Place
from drivetrain.job import Job
from drivetrain.strategies.optimizer_state import ON_HOST, are_rounded, rounded, set_rate

# ----------------------------------------------------------------------------------------------------------------------
# Sets the learning rate of each step, by the job's schedule.
#
# A torch scheduler never sees the run's optimizer: it steps a stand-in with the same groups and settings, from the
# job's first step, and what it sets there is copied. So it is a function of the step: a resumed run steps it anew to
# where it was, and a checkpoint needs nothing of it. Only `ReduceLROnPlateau` has a state to save: it looks at
# validations.

_WITHOUT_VALIDATION = (
    "ReduceLROnPlateau looks at validations, and there are none",
    "give valid=…, or use a scheduler that counts steps",
)


_ROUNDING = 1e-12  # how far below 0 a rate may be that is meant to be 0


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
        if not self.sets_own and all(group["initial_lr"] == 0 for group in optimizer.param_groups):
            notice("the learning rate of the optimizer is 0 for every weight: no step changes any")
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
            if len(groups) == 1 and not self._rounds and 0 <= (rate := groups[0]["initial_lr"] * factor) < math.inf:
                set_rate(groups[0], rate)  # as in most jobs, without the calls of the general way
                return float(rate)
            rates = [group["initial_lr"] * factor for group in groups]
        elif self._scheduled is not None:
            rates = self._scheduled.at(step, groups)
        else:
            assert self.plateau is not None
            rates = self.plateau.rates(step)
        if not math.isfinite(sum(rates)) or min(rates) < -_ROUNDING:
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
        rate = next(rate for rate in rates if not -_ROUNDING <= rate < math.inf)
        where = "a division by zero, a logarithm or a power in it"
        if -math.inf < rate < 0:
            where = "a line that goes on below 0 after its end: max(0.0, …)"
        return DrivetrainError(
            f"the schedule {'(a lambda)' if name == '<lambda>' else name} gives {rate} as the learning rate of step "
            f"{step + 1}, which would spoil the weights",
            remedy=f"look for {where}; the same command goes on from the last checkpoint",
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


_COUNTING = ("StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "LambdaLR", "MultiplicativeLR")
_MOST_STEPS = 2000  # that are looked at
_MOST_AT_ZERO = 100  # steps at the beginning that may well have a rate of 0


def schedule_mistake(job: Job, optimizer: Optimizer) -> str:
    """Return what is wrong with a schedule, in words: it begins with 0, or counts epochs; empty if nothing is."""
    if isinstance(job.schedule, OnPlateau) or isinstance(optimizer, JointOptimizer):
        return ""
    per_epoch = job.steps_per_epoch or 0
    counts_steps = isinstance(job.schedule, FactorSchedule) or per_epoch < 2 or (job.num_epochs or 0) < 3
    most = min(max(_MOST_AT_ZERO, 0 if counts_steps else per_epoch), _MOST_STEPS, job.num_steps or _MOST_STEPS)
    if isinstance(job.schedule, FactorSchedule) or is_factor(job.schedule):
        rates = [job.lr_factor(step, job.num_steps) for step in range(most)]
    else:
        scheduled = _TorchSchedule(job, optimizer)
        if scheduled.why_not_captured or type(scheduled.scheduler).__name__ not in _COUNTING:
            return ""
        rates = [max(scheduled.at(step, [])) for step in range(most)]
    if not any(rates[:_MOST_AT_ZERO]):
        return (
            f"the learning rate is 0 in each of the first {len(rates[:_MOST_AT_ZERO])} steps, which change no weight. "
            "A schedule returns a factor of the optimizer's rate for the number of a step; step // 1000 is 0 for long"
        )
    return "" if counts_steps else _over_in_first_epoch(rates[:per_epoch], per_epoch, job.num_epochs)


def _over_in_first_epoch(rates: Sequence[float], per_epoch: int, num_epochs: int | None) -> str:
    """Return in words that a schedule ends in the first epoch, as one does that counts epochs; empty if it does not."""
    highest = 0.0
    for step, rate in enumerate(rates):
        highest = max(highest, rate)
        if rate < highest / 100:
            return (
                f"the learning rate falls to a hundredth within {step} steps, in the first of {num_epochs} epochs. A "
                f"schedule is stepped once per optimizer step, {per_epoch} times per epoch: one that is meant for "
                f"epochs takes {per_epoch} times its step_size, milestones or T_max, or is lambda step: factor(step // "
                f"{per_epoch})"
            )
    return ""


def wrong_length(job: Job, place: Place) -> str:
    """Return in words that an epoch ends before or after the length of its data says; empty if it does not."""
    steps, said = place.step + 1, (place.epoch + 1) * (job.steps_per_epoch or 0)
    if steps == said or job.epochs is None or job.num_steps is None:
        return ""
    ends = f"epoch {place.epoch + 1} ends" if place.epoch == 0 else f"{place.epoch + 1} epochs end"
    return (
        f"{ends} with step {steps}, and len() of {job.source.order_name} says {said}: the schedule and whatever else "
        f"depends on the length of the job take it for {job.num_steps} steps. Correct its __len__, or give max_steps "
        "in place of epochs"
    )


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


# ----------------------------------------------------------------------------------------------------------------------
# Decides when checkpoints are due: by what a save costs and how often runs fail, or as the user pinned it.
#
# A save costs the time that it holds training up; a failure costs the steps since the last one. The sum is least at an
# interval of sqrt(2 x cost x mean time between failures). Rank 0's clock decides. Its wish travels with the stop flags
# that ranks exchange in every step, so that all ranks save at the same step, and no rank waits for another to agree.

# Rank 0's wish, added to the number of ranks that want to stop. A strategy may add it up over micro-batches.
SAVE_FLAG = 2.0**-20
WRITES_APART = 10.0  # times a background write: it takes cores and the disk from training
MOST_SHARE = 0.02  # of the time may go into saves
DEFAULT_MTBF_HOURS = 4.0
# What a save is taken to cost before one was measured, and per byte of the state of rank 0.
FIRST_BLOCK_SECONDS, BLOCK_BYTES_PER_SECOND = 0.05, 4e9
FIRST_WRITE_SECONDS, WRITE_BYTES_PER_SECOND = 0.2, 5e8
NUM_MEASURED = 5  # saves whose median counts


class SaveSchedule:
    """Says after which steps to save. Made by all ranks alike; only rank 0 looks at its clock.

    Args:
        every: The pinned steps between saves, or `epoch`; None: by time.
        seconds: The pinned seconds between saves; None: by what they cost.
        mtbf_seconds: The mean time between failures.
        mtbf_is_observed: Whether that was observed in this run, and not only stated.
        is_main: Whether this is rank 0.

    Example:
        >>> schedule = SaveSchedule(mtbf_seconds=3600.0)
        >>> schedule.learn(blocked_seconds=0.5, write_seconds=2.0)
        >>> round(schedule.interval_seconds)
        60
    """

    def __init__(
        self,
        every: int | Literal["epoch"] | None = None,
        *,
        seconds: float | None = None,
        mtbf_seconds: float = 3600 * DEFAULT_MTBF_HOURS,
        mtbf_is_observed: bool = False,
        is_main: bool = True,
    ) -> None:
        self.every, self._pinned_seconds, self._is_main = (None if seconds else every), seconds, is_main
        self._mtbf_seconds, self._mtbf_is_observed = mtbf_seconds, mtbf_is_observed
        self._blocked: deque[float] = deque(maxlen=NUM_MEASURED)
        self._written: deque[float] = deque(maxlen=NUM_MEASURED)
        self._guessed = FIRST_BLOCK_SECONDS, FIRST_WRITE_SECONDS
        self._began_at, self._began_step = time.monotonic(), 0
        self._is_asked = False
        self._due_at = math.inf
        self._settle()

    @property
    def by_time(self) -> bool:
        """Whether a clock decides, and not the number of a step."""
        return self.every is None

    def is_due(self, place: Place) -> bool:
        """Return whether a save is due after a step by its number."""
        if self.every is None:
            return False
        return place.ends_epoch if self.every == "epoch" else (place.step + 1) % self.every == 0

    def request(self) -> float:
        """Return rank 0's wish to save, which is added to the stop flag of a step."""
        return SAVE_FLAG if self._is_main and self.every is None and time.monotonic() >= self._due_at else 0.0

    def hear(self, flags: float, step: int) -> bool:
        """Take the flags of all ranks that came with a step, counted from 1. Return whether a rank wants to stop."""
        if flags and SAVE_FLAG / 2 < flags % 1.0 < 0.5 and step > self._began_step + 1:
            self._is_asked = True  # flags that were sent before the last save began were meant for that one
        return flags > 0.5

    def take(self) -> bool:
        """Return whether rank 0 has asked for a save since the last call."""
        is_asked, self._is_asked = self._is_asked, False
        return is_asked

    def begun(self, step: int) -> None:
        """Note that a save of a step has begun, due or not."""
        self._began_at, self._began_step, self._is_asked = time.monotonic(), step, False
        self._settle()

    def expect(self, num_bytes: int) -> None:
        """Guess the cost of the first save from the bytes of this rank's state."""
        self._guessed = (
            FIRST_BLOCK_SECONDS + num_bytes / BLOCK_BYTES_PER_SECOND,
            FIRST_WRITE_SECONDS + num_bytes / WRITE_BYTES_PER_SECOND,
        )
        self._settle()

    def learn(self, blocked_seconds: float, write_seconds: float) -> None:
        """Take the cost of a save: how long training was held up, and how long it took until it was on the disk."""
        self._blocked.append(blocked_seconds)
        self._written.append(write_seconds)
        self._settle()

    @property
    def is_measured(self) -> bool:
        return bool(self._blocked)

    @property
    def interval_seconds(self) -> float:
        """The seconds between two saves."""
        return self._pinned_seconds or max(self._bounds().values())

    def _settle(self) -> None:
        if self.every is None:
            self._due_at = self._began_at + self.interval_seconds

    @property
    def _cost(self) -> tuple[float, float]:
        if not self._blocked:
            return self._guessed
        return statistics.median(self._blocked), statistics.median(self._written)

    def _bounds(self) -> dict[str, float]:
        blocked, written = self._cost
        return {
            "saves and failures cost least": math.sqrt(2 * blocked * self._mtbf_seconds),
            f"it is {WRITES_APART:.0f} times as long as a write takes": WRITES_APART * written,
            f"saves take {MOST_SHARE:.0%} of the time": blocked / MOST_SHARE,
        }

    def in_words(self) -> str:
        """Return how often is saved, and why."""
        if self.every is not None:
            return (
                "at the end of each epoch (pinned)" if self.every == "epoch" else f"every {self.every} steps (pinned)"
            )
        if self._pinned_seconds:
            return f"every {format_duration(self._pinned_seconds)} (pinned)"
        bounds = self._bounds()
        why = max(bounds, key=lambda name: bounds[name])
        kind = "observed" if self._mtbf_is_observed else "stated"
        blocked, written = self._cost
        return (
            f"about every {format_duration(bounds[why])}, at which {why}: one holds training up for "
            f"{format_duration(blocked)} and is written in {format_duration(written)}; mean time between failures "
            f"{format_duration(self._mtbf_seconds)} ({kind})"
        )


def observed_mtbf(stated_seconds: float, run_seconds: float, num_failures: int) -> float:
    """Return the mean time between failures, where what was stated counts as much as one failure that was seen.

    Args:
        stated_seconds: What was stated.
        run_seconds: How long the run has taken so far, over all of its starts.
        num_failures: How often it was interrupted in that time.

    Example:
        >>> observed_mtbf(14400.0, run_seconds=3600.0, num_failures=5)
        3000.0
    """
    return (stated_seconds + run_seconds) / (1 + num_failures)

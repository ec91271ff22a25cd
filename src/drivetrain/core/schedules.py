"""What changes over the steps of a job, as the job asks for it: learning rates, and averages of the weights."""

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.hook import PERIODS, is_period

# ----------------------------------------------------------------------------------------------------------------------
# Learning-rate schedules: values that say which factor of the optimizer's rate each step of a job has.


class FactorSchedule:
    """A schedule that gives the factor of the learning rate from the number of the step."""

    needs_last_step: ClassVar[bool] = False  # a job whose number of steps is not known cannot have it

    @abstractmethod
    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor of the step that follows `step` steps, in a job of `num_steps`."""


@dataclass(frozen=True)
class _WarmupAndDown(FactorSchedule):
    """A factor that rises over `warmup_steps`, and then falls from 1 to `floor` at the job's last step."""

    warmup_steps: int = 0
    floor: float = 0.0
    needs_last_step: ClassVar[bool] = True

    def factor(self, step: int, num_steps: int) -> float:
        if step < self.warmup_steps:
            return warmup_factor(step, self.warmup_steps)
        return self._after(min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)))

    @abstractmethod
    def _after(self, way: float) -> float:
        """Return the factor after a part of the way from the warm-up to the last step, from 0 to 1."""


class WarmupCosine(_WarmupAndDown):
    """A learning-rate factor: up over `warmup_steps`, then down along a cosine to `floor` at the job's last step.

    Args:
        warmup_steps: Steps over which the factor rises to 1.
        floor: The factor at the last step.

    Example:
        >>> dt.WarmupCosine(warmup_steps=10).factor(4, num_steps=100)
        0.5
    """

    def _after(self, way: float) -> float:
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * way))


class WarmupLinear(_WarmupAndDown):
    """A learning-rate factor: up over `warmup_steps`, then down along a line to `floor` at the job's last step.

    Args:
        warmup_steps: Steps over which the factor rises to 1.
        floor: The factor at the last step.

    Example:
        >>> dt.WarmupLinear(warmup_steps=10).factor(55, num_steps=100)
        0.5
    """

    def _after(self, way: float) -> float:
        return 1 - (1 - self.floor) * way


@dataclass(frozen=True)
class Constant(FactorSchedule):
    """A constant factor: the learning rate as the optimizer has it, after `warmup_steps`.

    Args:
        warmup_steps: Steps over which the factor rises to 1.

    Example:
        >>> dt.Constant(warmup_steps=10).factor(50, num_steps=100)
        1.0
    """

    warmup_steps: int = 0

    def factor(self, step: int, num_steps: int) -> float:
        return warmup_factor(step, self.warmup_steps)


@dataclass(frozen=True)
class StepDecay(FactorSchedule):
    """A learning-rate factor that is multiplied by `gamma` every so many steps, as torch's `StepLR`.

    Args:
        every: Optimizer steps, not epochs, between two reductions.
        gamma: The factor of each reduction.
        warmup_steps: Steps of a warm-up before; the reductions count from the job's first step all the same.

    Example:
        >>> dt.StepDecay(every=1000, gamma=0.5).factor(2500, num_steps=5000)
        0.25
    """

    every: int
    gamma: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not _is_count(self.every, least=1):
            raise _refused(self, "every", "a whole number from 1", "every=1000")
        if not self.gamma > 0:
            raise _refused(self, "gamma", "a number above 0", "gamma=0.1")

    def factor(self, step: int, num_steps: int) -> float:
        return float(self.gamma ** (step // self.every)) * warmup_factor(step, self.warmup_steps)


@dataclass(frozen=True)
class MultiStep(FactorSchedule):
    """A learning-rate factor that is multiplied by `gamma` at each milestone, as torch's `MultiStepLR`.

    Args:
        milestones: Numbers of optimizer steps, not epochs, after which the rate is reduced, in rising order.
        gamma: The factor of each reduction.
        warmup_steps: Steps of a warm-up before.

    Example:
        >>> dt.MultiStep(milestones=(3000, 4000)).factor(3500, num_steps=5000)
        0.1
    """

    milestones: Sequence[int]
    gamma: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if not all(_is_count(step) for step in self.milestones) or list(self.milestones) != sorted(self.milestones):
            raise _refused(self, "milestones", "whole numbers in rising order", "milestones=(3000, 4000)")
        if not self.gamma > 0:
            raise _refused(self, "gamma", "a number above 0", "gamma=0.1")

    def factor(self, step: int, num_steps: int) -> float:
        return float(self.gamma ** bisect_right(self.milestones, step)) * warmup_factor(step, self.warmup_steps)


@dataclass(frozen=True)
class OneCycle(FactorSchedule):
    """One cycle over the whole job: up to the optimizer's rate, then far below where it began, as `OneCycleLR`.

    Momentum and betas stay as they are: torch's own `OneCycleLR` cycles them, too, if the job is given that.

    Args:
        pct_start: The part of the job's steps in which the rate rises.
        div_factor: The first rate is the optimizer's divided by this.
        final_div_factor: The last rate is the first divided by this.
        anneal_strategy: The shape of rise and fall: "cos" or "linear".
        three_phase: Whether the rate falls as it rose, and then to its end in a third phase.

    Example:
        >>> dt.OneCycle(pct_start=0.2).factor(19, num_steps=100)
        1.0
    """

    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    anneal_strategy: Literal["cos", "linear"] = "cos"
    three_phase: bool = False
    needs_last_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.pct_start <= (0.5 if self.three_phase else 1):
            raise _refused(self, "pct_start", "a number from 0 to 1 (0.5 with three phases)", "pct_start=0.3")
        if self.anneal_strategy not in ("cos", "linear"):
            raise _refused(self, "anneal_strategy", "cos, linear", 'anneal_strategy="cos"')

    def factor(self, step: int, num_steps: int) -> float:
        first, top_at, end = 1 / self.div_factor, self.pct_start * num_steps - 1, float(num_steps - 1)
        last = first / self.final_div_factor
        if step <= top_at or top_at >= end:
            return self._between(first, 1.0, step, 0.0, top_at)
        if not self.three_phase:
            return self._between(1.0, last, step, top_at, end)
        if step <= 2 * top_at:
            return self._between(1.0, first, step, top_at, 2 * top_at)
        return self._between(first, last, step, 2 * top_at, end)

    def _between(self, before: float, after: float, step: int, begin: float, end: float) -> float:
        way = min(1.0, (step - begin) / ((end - begin) or 1.0))
        if self.anneal_strategy == "cos":
            return after + (before - after) / 2.0 * (1 + math.cos(math.pi * way))
        return before + (after - before) * way


DecayShape = Literal["linear", "cosine", "sqrt"]


@dataclass(frozen=True)
class WarmupStableDecay(FactorSchedule):
    """A learning-rate factor for pre-training (WSD): a warm-up, a long constant part, a decay over the last part.

    Args:
        warmup_steps: Steps over which the factor rises to 1.
        decay: The part of the job's steps, at its end, over which the rate falls.
        floor: The factor at the end of the job.
        shape: The fall: "linear", "cosine", or "sqrt", which is 1 - sqrt(part of the decay that is done).

    Example:
        >>> dt.WarmupStableDecay(warmup_steps=10, decay=0.2).factor(90, num_steps=100)
        0.5
    """

    warmup_steps: int = 0
    decay: float = 0.2
    floor: float = 0.0
    shape: DecayShape = "linear"
    needs_last_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise _refused(self, "decay", "a part from 0 to 1", "decay=0.2")
        if self.shape not in get_args(DecayShape):
            raise _refused(self, "shape", ", ".join(get_args(DecayShape)), 'shape="linear"')

    def factor(self, step: int, num_steps: int) -> float:
        num_decay = round(self.decay * num_steps)
        way = min(1.0, max(0.0, (step - (num_steps - num_decay)) / max(1, num_decay)))
        left = {"linear": 1 - way, "cosine": 0.5 * (1 + math.cos(math.pi * way)), "sqrt": 1 - math.sqrt(way)}
        return (self.floor + (1 - self.floor) * left[self.shape]) * warmup_factor(step, self.warmup_steps)


@dataclass(frozen=True)
class OnPlateau:
    """Reduces the learning rate when a validation metric has stopped improving, as torch's `ReduceLROnPlateau`.

    It looks at each validation; the reduced rate is that of the next step, on all ranks, also after a resume.

    Args:
        factor: The factor of each reduction.
        patience: How many validations without an improvement are let pass: the rate is reduced at the next one.
        metric: The metric to look at, such as "valid_loss" or "valid_accuracy".
        mode: "min" or "max", whichever is better. By default names like accuracy, f1 or auc are better when higher.
        threshold: How much better counts as an improvement.
        threshold_mode: "rel" for a part of the best value, "abs" for a difference.
        cooldown: Validations after a reduction that are not counted.
        min_lr: The lowest rate, of all groups.
        warmup_steps: Steps of a warm-up at the beginning.

    Example:
        >>> schedule = dt.OnPlateau(factor=0.5, patience=2, metric="valid_accuracy")
    """

    factor: float = 0.1
    patience: int = 10
    metric: str = "valid_loss"
    mode: Literal["auto", "min", "max"] = "auto"
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise _refused(self, "factor", "a number between 0 and 1", "factor=0.1")
        for name in ("patience", "cooldown"):
            if not _is_count(getattr(self, name)):
                raise _refused(self, name, "a whole number from 0", f"{name}=2")
        if self.threshold_mode not in ("rel", "abs"):
            raise _refused(self, "threshold_mode", "rel, abs", 'threshold_mode="rel"')

    def make(self, optimizer: Optimizer) -> ReduceLROnPlateau:
        """Return torch's scheduler with these settings; `mode` is settled."""
        return ReduceLROnPlateau(
            optimizer,
            mode="max" if self.mode == "max" else "min",
            factor=self.factor,
            patience=self.patience,
            threshold=self.threshold,
            threshold_mode=self.threshold_mode,
            cooldown=self.cooldown,
            min_lr=self.min_lr,
        )


SchedulerFactory = Callable[[Optimizer], LRScheduler]
Schedule = FactorSchedule | OnPlateau | Callable[[int], float] | SchedulerFactory


def is_factor(schedule: Any) -> bool:
    """Return whether a schedule is a factor of the step's number, and neither `OnPlateau` nor a torch scheduler.

    A function is called with 0, which is no optimizer: torch's schedulers raise then, and no scheduler is a number.
    """
    if isinstance(schedule, (FactorSchedule, OnPlateau)):
        return isinstance(schedule, FactorSchedule)
    try:
        float(schedule(0))
    except Exception:  # noqa: BLE001  (of a function of the user's)
        return False
    return True


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the factor of the step that follows `step` steps in a warm-up, and 1 after it."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _refused(schedule: object, name: str, allowed: str, remedy: str) -> ConfigError:
    value = getattr(schedule, name)
    return ConfigError(
        [Problem(f"{type(schedule).__name__}.{name}", f"got {value!r}", value, "Python", allowed, remedy)]
    )


# ----------------------------------------------------------------------------------------------------------------------
# Stochastic weight averaging (SWA), as a job asks for it: from which step, and how often.


@dataclass(frozen=True)
class SWA:
    """Stochastic weight averaging: the plain mean of the weights that the last part of a run goes through.

    Training goes on with the weights themselves. Once averaging has begun, the mean is what is validated, tested and
    exported, and what `Result.model` has. The learning rate is the schedule's: a constant or cyclic one is usual.

    Args:
        start: When averaging begins: a fraction of the job's steps, or a number of steps.
        every: How often the weights are added to the mean: a number of steps, or `epoch`.
        batch_norm_samples: How many training samples the statistics of batch-norm layers are computed anew from,
            since those of the weights are not those of their mean. That is done before a validation and at the end.
            Default: all samples.

    Example:
        >>> swa = dt.SWA(start=0.75, every="epoch")
        >>> swa.first_step(num_steps=100)
        75
    """

    start: float | int = 0.75
    every: int | Literal["epoch"] = "epoch"
    batch_norm_samples: int | None = None

    def first_step(self, num_steps: int | None) -> int:
        """Return how many steps are done when the weights may first be taken.

        Raises:
            ValueError: If a fraction was given, and the number of steps is not known.
        """
        if isinstance(self.start, int):
            return max(1, self.start)
        if num_steps is None:
            raise ValueError("the number of steps is not known beforehand")
        return max(1, math.ceil(self.start * num_steps))

    def problems(self) -> Iterator[tuple[str, object, str]]:
        """Yield what is wrong: the name of the argument, its value, and what is allowed."""
        start: object = self.start
        is_steps = isinstance(start, int) and not isinstance(start, bool) and start >= 0
        if not is_steps and not (isinstance(start, float) and 0 <= start < 1):
            yield "start", start, "a fraction from 0 to below 1, such as 0.75, or a whole number of steps"
        if not is_period(self.every):
            yield "every", self.every, PERIODS
        samples: object = self.batch_norm_samples
        if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < 2):
            yield "batch_norm_samples", samples, "a whole number from 2, or None for all"

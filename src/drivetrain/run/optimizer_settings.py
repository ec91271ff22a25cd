"""Applies the everyday settings of a configuration to a job: learning rate, weight decay, clipping, warm-up."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch.optim import Optimizer

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.job import Job


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """The job's function that makes the optimizer, with a learning rate or a weight decay that the run was given."""

    make: Any
    learning_rate: float | None
    weight_decay: float | None

    def __call__(self, parameters: Any) -> Any:
        optimizer = self.make(parameters)
        if isinstance(optimizer, Optimizer):
            self._check_decay(optimizer)
            self._set_rate(optimizer)
        return optimizer

    @property
    def takes_closure(self) -> bool:
        """Whether the optimizer is that of a loop of the user's own, which may step it with a closure."""
        return getattr(self.make, "takes_closure", False)

    @property
    def is_given(self) -> bool:
        """Whether it was made before, with the parameters as the user's model has them."""
        return getattr(self.make, "is_given", False)

    def _set_rate(self, optimizer: Optimizer) -> None:
        """Set the highest rate; those of other groups keep their ratio to it."""
        highest = max(float(group["lr"]) for group in optimizer.param_groups)
        if self.learning_rate is None or highest == self.learning_rate:
            return
        if not highest:
            raise DrivetrainError(
                f"{type(optimizer).__name__} was made with a learning rate of 0, which --lr cannot scale",
                remedy="make the optimizer with a rate above 0",
            )
        for group in optimizer.param_groups:
            is_highest = float(group["lr"]) == highest
            group["lr"] = self.learning_rate * (1.0 if is_highest else float(group["lr"]) / highest)

    def _check_decay(self, optimizer: Optimizer) -> None:
        """Raise where the job's groups, which hold the weight decay, did not get into the optimizer."""
        if self.weight_decay is None:
            return
        kind = type(optimizer).__name__
        if "weight_decay" not in optimizer.defaults:
            raise DrivetrainError(f"{kind} has no weight decay for --weight-decay to set", remedy="leave it out")
        if all(group["weight_decay"] != self.weight_decay for group in optimizer.param_groups):
            raise DrivetrainError(
                f"--weight-decay {self.weight_decay:g} has no effect: {kind} is not made of the parameter groups that "
                "the optimizer function gets, which hold it",
                remedy="leave it out, and set weight_decay where the optimizer is made",
            )


def with_optimizer_settings(job: Job, config: Config) -> Job:
    """Return the job with what the configuration says of its optimizer, where it says something."""
    rate, decay, warmup = config.optimizer.learning_rate, config.optimizer.weight_decay, config.optimizer.warmup_steps
    _refuse_for_several(job, config)
    has_optimizer = rate is not None or decay is not None
    return replace(
        job,
        optimizer=ConfiguredOptimizer(job.optimizer, rate, decay) if has_optimizer else job.optimizer,
        schedule=job.schedule if warmup is None else _with_warmup(job.schedule, warmup),
        clip_norm=config.optimizer.clip_norm or job.clip_norm,
        weight_decay=job.weight_decay if decay is None else decay,
        ema=config.optimizer.ema or job.ema,
    )


def _refuse_for_several(job: Job, config: Config) -> None:
    """Raise for settings of one optimizer, where a job has several."""
    given = {
        "--lr": config.optimizer.learning_rate,
        "--weight-decay": config.optimizer.weight_decay,
        "--warmup-steps": config.optimizer.warmup_steps,
    }
    names = ", ".join(job.optims)
    problems = [
        Problem(flag, f"the job has several optimizers ({names})", value, remedy="set it in dt.Optim(…), for each")
        for flag, value in given.items()
        if job.optims and value is not None
    ]
    if problems:
        raise ConfigError(problems)


def _with_warmup(schedule: Any, warmup_steps: int) -> Any:
    if is_dataclass(schedule) and "warmup_steps" in {field.name for field in fields(schedule)}:
        return replace(schedule, warmup_steps=warmup_steps)  # type: ignore[type-var]
    kind = type(schedule).__name__
    what = "a function of the job's own" if callable(schedule) else kind
    raise ConfigError([
        Problem(
            "--warmup-steps",
            f"the job's schedule is {what}, which has no warm-up to set",
            warmup_steps,
            remedy="leave it out; or use a schedule with a warm-up in the job, such as dt.WarmupCosine",
        )
    ])  # fmt: skip

"""What the user wants: a model, data, a loss, an optimizer, how much of it. Nothing about devices."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.hook import Hook
from drivetrain.core.loss import LossSum
from drivetrain.core.metrics import MetricFunction, MetricObject

LossFunction = Callable[[nn.Module, Any], Tensor | LossSum]
ParameterGroups = Iterable[dict[str, Any]]


@dataclass(frozen=True)
class WarmupCosine:
    """Learning rate as a factor: up over `warmup_steps`, then down along a cosine to `floor` at the job's last step."""

    warmup_steps: int = 0
    floor: float = 0.0

    def factor(self, step: int, num_steps: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        span = max(1, num_steps - self.warmup_steps)
        way = min(1.0, (step - self.warmup_steps) / span)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * way))


@dataclass(frozen=True)
class Constant:
    """The learning rate as the optimizer has it, after `warmup_steps`."""

    warmup_steps: int = 0

    def factor(self, step: int, num_steps: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0


Schedule = WarmupCosine | Constant | Callable[[int], float]

Mode = Literal["auto", "min", "max"]
_MORE_IS_BETTER = ("acc", "f1", "auc", "precision", "recall", "iou", "dice", "bleu", "rouge", "r2", "psnr", "score")


@dataclass(frozen=True)
class Aim:
    """A metric, and which way is better. `auto` takes names like accuracy, f1 or auc as better when higher."""

    metric: str = "valid_loss"
    mode: Mode = "auto"

    @property
    def wants_more(self) -> bool:
        return self.mode == "max" or (self.mode == "auto" and any(word in self.metric for word in _MORE_IS_BETTER))

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether it is, by more than `by`. Anything is better than nothing (nan), and nan is never better."""
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        return value > than + by if self.wants_more else value < than - by


@dataclass(frozen=True)
class EarlyStopping:
    """Stop after `patience` validations in a row that did not improve the metric by more than `min_delta`."""

    patience: int = 3
    min_delta: float = 0.0
    metric: str = "valid_loss"
    mode: Mode = "auto"


@dataclass(frozen=True)
class Job:
    """Everything that determines what is learnt. The same job means the same on any number of devices.

    `model` is a factory, so that it can be built where it is needed; an instance is taken as it is. `loss` returns a
    mean over its batch's samples, or a `LossSum`. `optimizer` gets the parameters that train, in groups.
    """

    name: str
    model: Callable[[], nn.Module] | nn.Module
    data: Dataset[Any]
    loss: LossFunction
    optimizer: Callable[[ParameterGroups], torch.optim.Optimizer]
    global_batch: int | None = None  # samples per optimizer step, over all devices; None: by batch size and devices
    epochs: int | None = None
    max_steps: int | None = None
    seed: int = 0
    schedule: Schedule = Constant()
    clip_norm: float | None = None
    weight_decay: float | None = None  # for weights of two dimensions and more; biases and norms get none
    collate: Callable[[list[Any]], Any] = default_collate
    shuffle: bool = True
    valid: Dataset[Any] | None = None
    valid_every: int | None = None  # in steps; default: at the end of each epoch
    # By name: functions (output, batch) -> a mean, a `LossSum` or an entry per item; or torchmetrics objects.
    metrics: Mapping[str, MetricFunction | MetricObject] = field(default_factory=dict)
    best: Aim = Aim()  # which checkpoint is kept as the best; needs `valid`
    early_stopping: EarlyStopping | None = None
    ema: float | None = None  # decay of a moving average of the weights, for example 0.999; it is what is validated
    hooks: Sequence[Hook] = ()
    checkpoint_every: int | None = None  # in steps; default: at the end of each epoch
    keep_last: int = 3

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    @property
    def num_samples(self) -> int:
        return len(cast(Sized, self.data))

    @property
    def steps_per_epoch(self) -> int:
        assert self.global_batch is not None, "the global batch is settled before anything counts steps"
        return -(-self.num_samples // self.global_batch)

    @property
    def num_steps(self) -> int:
        by_epochs = self.epochs * self.steps_per_epoch if self.epochs is not None else None
        return min(limit for limit in (by_epochs, self.max_steps) if limit is not None)

    @property
    def save_every(self) -> int:
        return self.checkpoint_every or self.steps_per_epoch

    @property
    def validate_every(self) -> int:
        return self.valid_every or self.steps_per_epoch

    def lr_factor(self, step: int, num_steps: int) -> float:
        schedule = self.schedule
        if isinstance(schedule, (WarmupCosine, Constant)):
            return schedule.factor(step, num_steps)
        return float(schedule(step))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The user's optimizer over the parameters that train; fused where it can be, unless the user said how."""
        optimizer = self.optimizer(self._groups(model))
        if isinstance(optimizer, (list, tuple, dict)):
            raise DrivetrainError(
                f"the optimizer function returned {len(optimizer)} optimizers, and a job has one",
                remedy="give each kind of parameter a group of its own in one optimizer, or train two jobs",
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise DrivetrainError(
                f"the optimizer function returned {type(optimizer).__name__}",
                remedy="return a torch.optim.Optimizer made from the parameters it gets",
            )
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])  # what the schedule's factor is of; torch's own name for it
            chosen = group.get("foreach") or group.get("differentiable") or group.get("capturable")
            if "fused" in group and group["fused"] is None and not chosen and all(map(_can_be_fused, group["params"])):
                group["fused"] = True
        # What torch sets on optimizers that were made fused: they skip a step on the device, without asking the host.
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        return optimizer

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise DrivetrainError("no parameter of the model is trained", remedy="set requires_grad on those to train")
        if self.weight_decay is None:
            return [{"params": trained}]
        decayed = [parameter for parameter in trained if parameter.dim() >= 2]
        others = [parameter for parameter in trained if parameter.dim() < 2]
        groups = [(decayed, self.weight_decay), (others, 0.0)]
        return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be continued."""
        return {
            "name": self.name,
            "num_samples": self.num_samples,
            "global_batch": self.global_batch,
            "num_steps": self.num_steps,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "clip_norm": self.clip_norm,
            "weight_decay": self.weight_decay,
            "ema": self.ema,
            "schedule": repr(self.schedule) if isinstance(self.schedule, WarmupCosine | Constant) else "a function",
        }

    def _problems(self) -> Iterable[Problem]:
        def problem(name: str, value: object, message: str, remedy: str, allowed: str = "") -> Problem:
            return Problem(f"Job.{name}", message, value, "Python", allowed, remedy)

        for name, least in (
            ("global_batch", 1),
            ("epochs", 1),
            ("max_steps", 1),
            ("checkpoint_every", 1),
            ("valid_every", 1),
            ("keep_last", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                yield problem(
                    name, value, f"got {value!r}", f"for example {name}={least}", f"a whole number from {least}"
                )
        if self.epochs is None and self.max_steps is None:
            yield problem("epochs", None, "nothing says when to stop", "give epochs or max_steps")
        if not hasattr(self.data, "__getitem__") or not hasattr(self.data, "__len__"):
            kind = type(self.data).__name__
            yield problem(
                "data", kind, f"{kind} has no length or no items", "give a map-style data set: __len__, __getitem__"
            )
        elif self.num_samples == 0:
            yield problem("data", 0, "the data set is empty", "check the path or the filter it was made with")
        elif isinstance(self.global_batch, int) and self.global_batch > self.num_samples:
            yield problem(
                "global_batch",
                self.global_batch,
                f"{self.global_batch} samples are asked for per step, and the data set has {self.num_samples}",
                f"global_batch={self.num_samples} or less",
            )
        for name in ("model", "loss", "optimizer", "collate"):
            if not callable(getattr(self, name)):
                yield problem(name, getattr(self, name), "it cannot be called", "give a function")
        yield from self._validation_problems(problem)
        if self.clip_norm is not None and not self.clip_norm > 0:
            yield problem("clip_norm", self.clip_norm, f"got {self.clip_norm!r}", "clip_norm=1.0", "a number above 0")

    def _validation_problems(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        if self.valid is None:
            for name in ("valid_every", "metrics", "early_stopping"):
                if getattr(self, name):
                    yield problem(
                        name, getattr(self, name), "there is no validation set", "give valid=…, or leave it out"
                    )
        elif not hasattr(self.valid, "__getitem__") or not hasattr(self.valid, "__len__"):
            kind = type(self.valid).__name__
            yield problem("valid", kind, f"{kind} has no length or no items", "give a map-style data set")
        elif len(cast(Sized, self.valid)) == 0:
            yield problem("valid", 0, "the validation set is empty", "check the path or the filter it was made with")
        for name, metric in cast(Mapping[str, Any], self.metrics).items():
            if not callable(metric) and not isinstance(metric, MetricObject):
                yield problem("metrics", name, f"{name!r} cannot be called", "a function of (output, batch)")
            if name == "loss":
                yield problem("metrics", name, "the loss is measured anyway", "choose another name")
        stopping = self.early_stopping
        if stopping is not None and (stopping.patience < 1 or stopping.min_delta < 0):
            yield problem("early_stopping", stopping, f"got {stopping}", "patience from 1, min_delta from 0")
        for name, aim in (("best", self.best), ("early_stopping", stopping)):
            if aim is not None and not (isinstance(aim.metric, str) and aim.mode in ("auto", "min", "max")):
                yield problem(name, aim, f"got {aim}", "a metric's name, and auto, min or max")
        if self.ema is not None and not 0 < self.ema < 1:
            yield problem("ema", self.ema, f"got {self.ema!r}", "for example ema=0.999", "a number between 0 and 1")


def _can_be_fused(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and not parameter.is_complex() and parameter.device.type in ("cpu", "cuda")

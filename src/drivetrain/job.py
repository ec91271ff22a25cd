"""The job as the user defines it: model, data, loss, optimizer and length. Nothing about devices."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from drivetrain.core.arguments import call_problem, returned, suggesting_keywords
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.hook import PERIODS, Hook, is_period
from drivetrain.core.metrics import CountFunction, LossSum, LossWeight, MetricFunction, MetricObject, NamedLosses
from drivetrain.core.optimizers import closure_error, needs_closure, use_fused
from drivetrain.core.run_folder import ALLOWED_NAMES, problem_with_name
from drivetrain.core.schedules import Constant, FactorSchedule, OnPlateau, Schedule
from drivetrain.data.external_order import is_iterator
from drivetrain.data.held_out import metric_names, sets_of
from drivetrain.data.source import Source, source_of

LossFunction = Callable[[nn.Module, Any], Tensor | LossSum | NamedLosses]
ParameterGroups = Iterable[dict[str, Any]]


Mode = Literal["auto", "min", "max"]
_MORE_IS_BETTER = ("acc", "f1", "auc", "precision", "recall", "iou", "dice", "bleu", "rouge", "r2", "psnr", "score")
_MORE_IF_A_WORD = ("top", "hits", "ndcg", "map", "mrr", "reward", "return", "kappa", "corr", "ssim", "exact")
_LESS_IS_BETTER = (
    "loss",
    "err",
    "mae",
    "mse",
    "rmse",
    "perplexity",
    "ppl",
    "wer",
    "cer",
    "fid",
    "nll",
    "bits",
    "distance",
)


@dataclass(frozen=True)
class Aim:
    """A metric, and its better direction.

    Args:
        metric: The name of the metric, such as `valid_accuracy`.
        mode: Whether less (`min`) or more (`max`) is better. `auto` takes names like accuracy, f1 or auc as better when
            higher, and losses and errors as better when lower. A name that says neither needs `min` or `max`.

    Example:
        >>> dt.Aim("valid_accuracy").is_better(0.9, than=0.8)
        True
    """

    metric: str = "valid_loss"
    mode: Mode = "auto"

    @property
    def wants_more(self) -> bool:
        if self.mode != "auto":
            return self.mode == "max"
        words = self.metric.removeprefix("valid_").split("_")
        is_loss = "loss" in (words[0], words[-1])  # such as that of a part, `valid_loss_dice`, or of a set
        return not is_loss and (
            any(word in self.metric for word in _MORE_IS_BETTER)
            or any(word.startswith(_MORE_IF_A_WORD) for word in words)
        )

    @property
    def is_clear(self) -> bool:
        """Whether the better direction is given, or known from the name."""
        return self.mode != "auto" or self.wants_more or any(word in self.metric for word in _LESS_IS_BETTER)

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return whether `value` is better by more than `by`.

        Any number is better than nan, and nan is never better.
        """
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        return value > than + by if self.wants_more else value < than - by


@dataclass(frozen=True)
class EarlyStopping:
    """Stop after `patience` validations in a row that did not improve the metric by more than `min_delta`.

    Args:
        patience: How many validations in a row may be without improvement.
        min_delta: The least change that counts as one.
        metric: The name of the metric, such as `valid_accuracy`.
        mode: Whether less (`min`) or more (`max`) is better; `auto` goes by the name.

    Example:
        >>> dt.EarlyStopping(patience=5, metric="valid_accuracy").patience
        5
    """

    patience: int = 3
    min_delta: float = 0.0
    metric: str = "valid_loss"
    mode: Mode = "auto"


AimKind = TypeVar("AimKind", Aim, EarlyStopping, OnPlateau)
_SET_KINDS = {"valid": "validation", "test": "test"}


OTHER_NAMES = {
    "dataset": "data",
    "train_data": "data",
    "train_dataset": "data",
    "train_set": "data",
    "train_loader": "data",
    "train_dataloader": "data",
    "val": "valid",
    "val_data": "valid",
    "val_dataset": "valid",
    "val_loader": "valid",
    "validation": "valid",
    "validation_data": "valid",
    "validation_set": "valid",
    "valid_set": "valid",
    "valid_dataset": "valid",
    "eval_dataset": "valid",
    "test_data": "test",
    "test_dataset": "test",
    "test_set": "test",
    "test_loader": "test",
    "criterion": "loss",
    "batch": "global_batch",
    "batch_size": "global_batch",
    "max_epochs": "epochs",
    "num_steps": "max_steps",
    "gradient_clip_val": "clip_norm",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "callbacks": "hooks",
    "wd": "weight_decay",
    "lr": (_IN_OPTIMIZER := "the optimizer has it: optimizer=lambda params: torch.optim.AdamW(params, lr=…)"),
    "learning_rate": _IN_OPTIMIZER,
}
_NUMBERS: tuple[tuple[str, float, str, Callable[[Any], bool]], ...] = (
    ("clip_norm", 1.0, "a number above 0", lambda value: value > 0),
    ("weight_decay", 0.01, "a number", lambda value: True),
    ("ema", 0.999, "a number between 0 and 1", lambda value: 0 < value < 1),
)
_OF_THE_RUN = "settings of the run are not part of a job: dt.train(job, dt.configure(precision=…, num_workers=…))"
_NO_CALL = {
    "model": "model=lambda: MyModel(…), a function that makes the model; or the module itself, model=MyModel(…)",
    "loss": "loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])",
    "optimizer": "optimizer=lambda params: torch.optim.AdamW(params, lr=…)",
    "collate": "collate=lambda items: …, which makes a batch of a list of items",
    "schedule": "schedule=dt.WarmupCosine(warmup_steps=100), a function of the step that returns a factor, or one of "
    "the optimizer that returns a torch scheduler: lambda optimizer: StepLR(optimizer, 30)",
}


@suggesting_keywords("Job", OTHER_NAMES, _OF_THE_RUN)
@dataclass(frozen=True)
class Job:
    """Everything that determines what is learned. The same job means the same on any number of devices.

    Args:
        name: Name of the run, and of its folder.
        model: A function that builds the model, so that it can be built where it is needed; or the model itself.
        data: A data set, a list of items, a dictionary of tensors, something to iterate, or a `DataLoader`.
        loss: A function of (model, batch). It returns a scalar, whose kind (a mean over samples or over tokens, a sum)
            is measured before the first step; or a `LossSum`; or a dictionary of named parts, each of them a scalar or
            a `LossSum`, whose weighted sum is trained.
        optimizer: A function of the parameters that train, in groups, that returns the optimizer.
        global_batch: Samples per optimizer step, over all devices. None: the batch size times the devices.
        epochs: How often to go through the data.
        max_steps: How many optimizer steps to do at most.
        seed: Seed of weights, sample order and whatever a step draws at random.
        schedule: The learning rate over the steps. As a factor of the optimizer's: `WarmupCosine`, `WarmupLinear`,
            `Constant`, `StepDecay`, `MultiStep`, `OneCycle`, `WarmupStableDecay`, or a function of the step. By
            validations: `OnPlateau`. Or a function of the optimizer that returns a torch scheduler, which is stepped
            once per optimizer step.
        clip_norm: The gradient norm to clip to.
        weight_decay: Weight decay for weights of two dimensions and more; biases and norms get none.
        collate: Makes a batch of a list of items.
        shuffle: Whether to draw samples in a new order in each epoch.
        valid: The validation set, like `data`, but not something that can only be iterated. It is read in its own
            order, whatever a `DataLoader` says. Or several sets by name, as in `{"clean": dataset, "noisy": other}`:
            metrics are then called `valid_clean_loss`, and `valid_loss` is that of the first set.
        test: The test set, or several by name, like `valid`. It is measured once, when the job is done, with the best
            weights, or the last ones where nothing was validated: `test_loss` and so on in `Result.test`.
        valid_every: Steps between validations. Default: at the end of each epoch.
        valid_batch: Samples per device in each forward of a validation. Default: the micro-batch.
        metrics: By name: functions of (output, batch) that return a mean, a `LossSum` or an entry per item; or
            torchmetrics objects.
        best: Which checkpoint is kept as the best; needs `valid`.
        early_stopping: When to stop because validation no longer improves.
        ema: Decay of a moving average of the weights, for example 0.999. The average is what is validated.
        loss_weights: The weight of each named part of the loss: a number, or a function of the steps done. Default: 1.
        count: For named parts of the loss that are a mean over something other than samples: a function of a batch that
            returns their number of items, `{"name": count}`. It gets the batch as the loss does, or before it is
            copied to the device.
        items: What a `LossSum` counts, for reports of throughput, such as `tokens`.
        hooks: Code to call between steps.
        checkpoint_every: Steps between checkpoints. Default: at the end of each epoch.
        keep_last: How many checkpoints to keep; the best is kept besides.
        init_from: Weights that a new run starts with: a .safetensors file, the folder of a run, or one of its
            checkpoints. Names and shapes that fit are taken, the rest is reported.
        length_is_read: Whether the job was made from a run's configuration, as recipes are. Otherwise `epochs` and
            `max_steps` of the configuration override the job's.
        default_batch: For recipes: samples per device and micro-step where `global_batch` is None and the configuration
            only says how many micro-steps are accumulated.

    Example:
        >>> inputs = torch.linspace(0, 1, 64).unsqueeze(1)
        >>> job = dt.Job(
        ...     name="line",
        ...     model=lambda: torch.nn.Linear(1, 1),
        ...     data=torch.utils.data.TensorDataset(inputs, 2 * inputs + 1),
        ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        ...     global_batch=16,
        ...     epochs=3,
        ... )
        >>> job.num_steps
        12
    """

    name: str
    model: Callable[[], nn.Module] | nn.Module
    data: Any
    loss: LossFunction
    optimizer: Callable[[ParameterGroups], torch.optim.Optimizer]
    global_batch: int | None = None
    epochs: int | None = None
    max_steps: int | None = None
    seed: int = 0
    schedule: Schedule = Constant()  # noqa: RUF009  (frozen)
    clip_norm: float | None = None
    weight_decay: float | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    shuffle: bool = True
    valid: Any = None
    test: Any = None
    valid_every: int | None = None
    valid_batch: int | None = None
    metrics: Mapping[str, MetricFunction | MetricObject] = field(default_factory=dict)
    best: Aim = Aim()
    early_stopping: EarlyStopping | None = None
    ema: float | None = None
    loss_weights: Mapping[str, LossWeight] | None = None
    count: CountFunction | None = None
    items: str = "items"
    hooks: Sequence[Hook] = ()
    checkpoint_every: int | None = None
    keep_last: int = 3
    init_from: str | Path | None = None
    length_is_read: bool = False
    default_batch: int | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "seed", operator.index(self.seed))  # numpy's, too, is plain from here on
        self._take_from_data()

    def _take_from_data(self) -> None:
        """Take settings from a DataLoader where the job does not set them."""
        source = self.source
        taken: dict[str, Any] = {}
        if self.global_batch is None:
            taken["global_batch"] = source.global_batch
        if source.shuffle is False:
            taken["shuffle"] = False
        if source.collate is not None and self.collate is default_collate:
            taken["collate"] = source.collate
        for name, value in taken.items():
            object.__setattr__(self, name, value)

    @cached_property
    def source(self) -> Source:
        """The source of samples that the job's data amounts to."""
        return source_of(self.data)

    @cached_property
    def valid_sets(self) -> dict[str, Source]:
        """The validation sets by name; a single one has no name, and without validation there is none."""
        return {} if self.valid is None else sets_of(self.valid)

    @cached_property
    def test_sets(self) -> dict[str, Source]:
        """The test sets by name, as `valid_sets`."""
        return {} if self.test is None else sets_of(self.test)

    @property
    def num_samples(self) -> int | None:
        """The number of samples of an epoch; None if it is not known beforehand."""
        return self.source.samples_per_epoch(self.global_batch)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps of an epoch; None if it is not known beforehand.

        Epochs end where the data does: each step's `Place` says so.
        """
        assert self.global_batch is not None, "the global batch is settled before anything counts steps"
        return self.source.steps_per_epoch(self.global_batch)

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the job; None if it is not known beforehand.

        The job ends by `epochs` or `max_steps`, not by this.
        """
        per_epoch = self.steps_per_epoch
        by_epochs = self.epochs * per_epoch if self.epochs is not None and per_epoch is not None else None
        return min((limit for limit in (by_epochs, self.max_steps) if limit is not None), default=None)

    @property
    def save_every(self) -> int | Literal["epoch"]:
        return self.checkpoint_every or "epoch"

    @property
    def validate_every(self) -> int | Literal["epoch"]:
        return self.valid_every or "epoch"

    def lr_factor(self, step: int, num_steps: int | None) -> float:
        """Return the factor of the learning rate, for a schedule that is one: see `loop/rates.py` for the others."""
        schedule: Any = self.schedule
        if isinstance(schedule, FactorSchedule):
            return schedule.factor(step, num_steps or 0)  # 0 is never asked for: such a job is refused
        return float(schedule(step))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the user's optimizer over the parameters that train; fused where possible, unless the user chose."""
        try:
            optimizer = self.optimizer(self._groups(model))
        except AttributeError as error:
            if isinstance(error.obj, list) and error.name in ("parameters", "named_parameters"):
                message = "the optimizer function is called with the parameters, not with the model"
                raise DrivetrainError(message, remedy=_NO_CALL["optimizer"]) from error
            raise
        if isinstance(optimizer, (list, tuple, dict)):
            raise DrivetrainError(
                f"the optimizer function returned {len(optimizer)} optimizers, and a job has one",
                remedy="give each kind of parameter a group of its own in one optimizer, or train two jobs",
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise DrivetrainError(
                f"the optimizer function {returned(optimizer)}",
                remedy="return a torch.optim.Optimizer made from the parameters it gets",
            )
        if needs_closure(optimizer):
            raise closure_error(optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])  # the base of the schedule's factor; torch's name for it
        use_fused(optimizer, model)
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
        """Return the values that must be equal for a run to be continued."""
        others_order = {} if self.source.is_keyed else {"order": self.source.order_name, "epochs": self.epochs}
        weights = {name: "a function" if callable(it) else it for name, it in (self.loss_weights or {}).items()}
        return {
            **others_order,
            **({"loss_weights": weights} if weights else {}),
            "name": self.name,
            "num_samples": self.num_samples,
            "global_batch": self.global_batch,
            "num_steps": self.num_steps,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "clip_norm": self.clip_norm,
            "weight_decay": self.weight_decay,
            "ema": self.ema,
            "init_from": None if self.init_from is None else str(self.init_from),
            "schedule": repr(self.schedule) if isinstance(self.schedule, (FactorSchedule, OnPlateau)) else "a function",
        }

    def _problems(self) -> Iterable[Problem]:
        def problem(name: str, value: object, message: str, remedy: str, allowed: str = "") -> Problem:
            return Problem(f"Job.{name}", message, value, "Python", allowed, remedy)

        if not hasattr(self.seed, "__index__") or not -(2**63) <= operator.index(self.seed) < 2**64:
            yield problem("seed", self.seed, f"got {self.seed!r}", "for example seed=1", "a whole number of 64 bits")
        wrong_name = problem_with_name(self.name)
        if wrong_name:
            yield problem("name", self.name, f"{self.name!r}: {wrong_name}", 'for example name="mine"', ALLOWED_NAMES)
        for name, least in (
            ("global_batch", 1),
            ("default_batch", 1),
            ("epochs", 1),
            ("max_steps", 1),
            ("checkpoint_every", 1),
            ("valid_every", 1),
            ("valid_batch", 1),
            ("keep_last", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                yield problem(
                    name, value, f"got {value!r}", f"for example {name}={least}", f"a whole number from {least}"
                )
        if self.epochs is None and self.max_steps is None:
            yield problem("epochs", None, "nothing says when to stop", "give epochs or max_steps")
        yield from self._data_problems(problem)
        yield from self._function_problems(problem)
        yield from self._part_problems(problem)
        yield from self._validation_problems(problem)
        yield from self._schedule_problems(problem)
        yield from self._hook_problems(problem)
        for name, example, allowed, is_allowed in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and is_allowed(value)):
                yield problem(name, value, f"got {value!r}", f"for example {name}={example}", allowed)

    def _function_problems(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        """Find functions that cannot be called as they will be."""
        given_ready: dict[str, Any] = {"model": nn.Module, "schedule": (FactorSchedule, OnPlateau, LRScheduler)}
        called_with = {
            "model": (),
            "loss": ("model", "batch"),
            "optimizer": ("params",),
            "collate": ("items",),
            "schedule": ("step",),
        }
        for name, arguments in called_with.items():
            value = getattr(self, name)
            if isinstance(value, given_ready.get(name, ())):
                continue
            kind = type(value).__name__
            message = call_problem(value, *arguments)
            if isinstance(value, torch.optim.Optimizer):
                message = f"got an optimizer ({kind}), expected a function that makes one"
            elif not callable(value):
                message = f"got {kind}, expected a function"
            elif name == "loss" and _is_criterion(value):
                message = f"it is called with (model, batch), and {_named(value)} takes (output, target)"
            if message:
                remedy = _NO_CALL[name].replace("MyModel", value.__name__ if isinstance(value, type) else "MyModel")
                yield problem(name, value, message, remedy)

    def _hook_problems(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        hooks: Any = self.hooks
        if not isinstance(hooks, Iterable):
            kind = type(hooks).__name__
            yield problem("hooks", hooks, f"got {kind}, expected a list", "hooks=[dt.every(100, function)]")
            return
        for hook in hooks:
            every = getattr(hook, "every", None)
            if not is_period(every):
                message, remedy = f"{type(hook).__name__}.every is {every!r}", "for example every=100"
                if every is None and callable(hook):
                    message, remedy = f"{_named(hook)} has no `every`", "hooks=[dt.every(100, function)]"
                yield problem("hooks", every, message, remedy, PERIODS)

    def _part_problems(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        counter: Any = self.count
        if counter is not None and not callable(counter):
            yield problem("count", counter, "it cannot be called", "give a function of a batch")
        weights: Any = {} if self.loss_weights is None else self.loss_weights
        if not isinstance(weights, Mapping) or (self.loss_weights is not None and not weights):
            yield problem("loss_weights", weights, f"got {weights!r}", 'for example loss_weights={"name": 0.5}')
            return
        for name, weight in weights.items():
            is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight)
            if not isinstance(name, str) or not (callable(weight) or is_number):
                said = f"{name!r} has the weight {weight!r}"
                yield problem(
                    "loss_weights", weight, said, f'"{name}": 0.5', "a number, or a function of the steps done"
                )

    def check_aims(self, of_loss: Iterable[str]) -> None:
        """Raise if `best`, `early_stopping` or `schedule` names a metric that no validation measures.

        Args:
            of_loss: What the loss was seen to add to the metrics, in a trial: its named parts, and what it logs.
        """
        if self.valid is None or any(isinstance(metric, MetricObject) for metric in self.metrics.values()):
            return  # how many values a metric object has, and their names, is known when it was computed once
        known = metric_names(self.valid_sets, ("loss", *self.metrics, *of_loss), "valid_")
        problems = [
            Problem(
                f"Job.{name}",
                f"{aim.metric!r} is none of the metrics that are measured",
                aim.metric,
                allowed=", ".join(known),
                remedy="name one of them",
            )
            for name, aim in (("best", self.best), ("early_stopping", self.early_stopping), ("schedule", self.schedule))
            if isinstance(aim, (Aim, EarlyStopping, OnPlateau)) and aim.metric not in known
        ]
        problems += [
            Problem(
                f"Job.{name}",
                f"the name {aim.metric!r} does not say whether more or less of it is better",
                aim.metric,
                remedy='add mode="max" or mode="min"',
            )
            for name, aim in (("best", self.best), ("early_stopping", self.early_stopping))
            if aim is not None and aim.metric in known and not Aim(aim.metric, aim.mode).is_clear
        ]
        if problems:
            raise ConfigError(problems)

    def settled(self, aim: AimKind) -> AimKind:
        """Return an aim with its better direction settled by the metric's own name, without that of its set."""
        of = next((of for of in self.valid_sets if of and aim.metric.startswith(f"valid_{of}_")), None)
        name = aim.metric if of is None else aim.metric.removeprefix(f"valid_{of}_")
        return replace(aim, mode="max" if Aim(name, aim.mode).wants_more else "min")

    def _schedule_problems(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        schedule: Any = self.schedule
        kind = type(schedule).__name__
        if isinstance(schedule, LRScheduler):
            yield problem(
                "schedule",
                kind,
                f"this {kind} was made with another optimizer than the one that the job makes",
                f"a function that gets the optimizer: schedule=lambda optimizer: {kind}(optimizer, …)",
            )
        elif isinstance(schedule, OnPlateau) and self.valid is None:
            remedy = "give valid=…, or a schedule that needs no validation"
            yield problem("schedule", kind, "OnPlateau looks at validations, and there is no validation set", remedy)

    def _set_problems(self, name: str, problem: Callable[..., Problem]) -> Iterable[Problem]:
        try:
            sets: dict[str, Source] = getattr(self, f"{name}_sets")
        except DrivetrainError as error:
            yield problem(name, type(getattr(self, name)).__name__, error.message, error.remedy)
            return
        for of, source in sets.items():
            kind, where = type(source.dataset).__name__, f"{name}[{of!r}]" if of else name
            if source.is_iterable:
                yield problem(where, kind, f"{kind} has no length or no items", "give a map-style data set, or a list")
            elif len(source.dataset) == 0:
                message = f"the {_SET_KINDS[name]} set is empty"
                yield problem(where, 0, message, "check the path or the filter it was made with")
        if isinstance(self.metrics, Mapping):
            over_sets = {f"{of}_{metric}" for of in sets if of for metric in ("loss", *self.metrics)}
            for metric in over_sets & set(self.metrics):
                message = f"{metric!r} is also the name of a metric over one of the {_SET_KINDS[name]} sets"
                yield problem("metrics", metric, message, "choose another name for the metric or the set")

    def _data_problems(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        try:
            source = self.source
        except DrivetrainError as error:
            yield problem("data", type(self.data).__name__, error.message, error.remedy)
            return
        length = source.samples_per_epoch(None)
        if length == 0:
            yield problem("data", 0, "the data set is empty", "check the path or the filter it was made with")
        elif source.is_keyed and length and isinstance(self.global_batch, int) and self.global_batch > length:
            yield problem(
                "global_batch",
                self.global_batch,
                f"{self.global_batch} samples are asked for per step, and the data set has {length}",
                f"global_batch={length} or less",
            )
        elif source.is_keyed and length and self.global_batch is None and length < (source.global_batch or 1):
            said = f"the DataLoader's batch size is {source.global_batch}, and the data set has {length} samples"
            yield problem("data", length, said, f"a batch size of {length} or less")
        its_own = source.global_batch if source.batch_sampler is not None else None
        if its_own is not None and self.global_batch not in (None, its_own):
            yield problem(
                "global_batch",
                self.global_batch,
                "the batches of the DataLoader's batch_sampler are the global batches",
                "leave global_batch out, or give the DataLoader a sampler and a batch size",
            )
        if is_iterator(source.dataset) and self.epochs is not None and self.epochs > 1:
            yield problem(
                "epochs",
                self.epochs,
                f"{type(source.dataset).__name__} can be read only once",
                "epochs=1, or data whose __iter__ begins anew: a class with __iter__, not a generator",
            )
        needs_end = isinstance(self.schedule, FactorSchedule) and self.schedule.needs_last_step
        if source.steps_per_epoch(1) is None and self.max_steps is None and needs_end:
            yield problem(
                "schedule",
                type(self.schedule).__name__,
                "it has to know the last step, and the number of steps in an epoch is not known beforehand",
                "give max_steps, or schedule=Constant(warmup_steps=...)",
            )

    def _validation_problems(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        if self.test is not None:
            yield from self._set_problems("test", problem)
        if self.valid is None:
            others = () if self.test is not None else ("valid_batch", "metrics")
            for name in ("valid_every", *others, "early_stopping"):
                if getattr(self, name):
                    yield problem(
                        name, getattr(self, name), "there is no validation set", "give valid=…, or leave it out"
                    )
        else:
            yield from self._set_problems("valid", problem)
        wrong_kinds = list(self._validation_kinds(problem))
        if wrong_kinds:
            yield from wrong_kinds
            return
        for name, metric in self.metrics.items():
            if not isinstance(metric, MetricObject):
                message = call_problem(metric, "output", "batch") if callable(metric) else "it cannot be called"
                if message:
                    yield problem("metrics", name, f"{name!r}: {message}", "give a function of (output, batch)")
            if name == "loss":
                yield problem("metrics", name, "the loss is measured anyway", "choose another name")
        stopping = self.early_stopping
        if stopping is not None and (stopping.patience < 1 or stopping.min_delta < 0):
            yield problem("early_stopping", stopping, f"got {stopping}", "patience from 1, min_delta from 0")
        plateau = self.schedule if isinstance(self.schedule, OnPlateau) else None
        for name, aim in (("best", self.best), ("early_stopping", stopping), ("schedule", plateau)):
            if aim is not None and not (isinstance(aim.metric, str) and aim.mode in ("auto", "min", "max")):
                yield problem(name, aim, f"got {aim}", "a metric's name, and auto, min or max")

    def _validation_kinds(self, problem: Callable[..., Problem]) -> Iterable[Problem]:
        kinds: tuple[tuple[str, type, str], ...] = (
            ("metrics", Mapping, 'metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]}'),
            ("best", Aim, 'best=dt.Aim("valid_accuracy")'),
            ("early_stopping", EarlyStopping, "early_stopping=dt.EarlyStopping(patience=3)"),
        )
        for name, kind, example in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "early_stopping" and value is None):
                expected = "a dictionary" if kind is Mapping else kind.__name__
                message = f"got {type(value).__name__}, expected {expected}"
                yield problem(name, value, message, example)


def _is_criterion(loss: Any) -> bool:
    """Return whether it is one of torch's losses, which take (output, target): an instance, a class or a function."""
    is_class = isinstance(loss, type) and issubclass(loss, nn.Module)
    is_torch = getattr(loss, "__module__", "") in ("torch.nn.functional", "torch.nn.modules.loss")
    return is_class or is_torch


def _named(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "the function" if name == "<lambda>" else str(name)

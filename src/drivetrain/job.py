"""The job as the user defines it: model, data, loss, optimizer and length. Nothing about devices."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from drivetrain.core.aims import (
    Aim,
    BatchSizes,
    EarlyStopping,
    GlobalBatch,
    batch_sizes_of,
    in_words,
    largest_batch,
    samples_between,
)
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem, nothing_trains, returned, suggesting_keywords
from drivetrain.core.hook import Hook
from drivetrain.core.metrics import CountFunction, LossSum, LossWeight, MetricFunction, MetricObject, NamedLosses
from drivetrain.core.optimizers import (
    JointOptimizer,
    LossByTurn,
    Optim,
    Turn,
    chosen_parameters,
    closure_error,
    keep_rates_plain,
    needs_closure,
    turns_of,
    use_fused,
)
from drivetrain.core.schedules import SWA, Constant, FactorSchedule, OnPlateau, Schedule
from drivetrain.data.division import Division
from drivetrain.data.keyed_items import Collate
from drivetrain.data.source import Source, sets_of, source_of
from drivetrain.job_checks import EXAMPLES, problems_of

LossFunction = Callable[[nn.Module, Any], Tensor | LossSum | NamedLosses]
ParameterGroups = Iterable[dict[str, Any]]
AimKind = TypeVar("AimKind", Aim, EarlyStopping, OnPlateau)

_IN_OPTIMIZER = "the optimizer has it: optimizer=lambda params: torch.optim.AdamW(params, lr=…)"
_PER_DEVICE = (
    "global_batch=… is the samples of an optimizer step, over all devices; dt.configure(batch_size=…) is how many of "
    "them a device takes at a time, and the rest is accumulated"
)
_RESUMES = "leave it out: an interrupted run of the same name continues by itself; init_from=… begins with its weights"
_OUTPUT_DIR = "it is a setting of the run: dt.configure(output_dir=…)"
_PATIENCE = "early_stopping=dt.EarlyStopping(patience=…)"
_WARMUP = "schedule=dt.WarmupCosine(warmup_steps=…)"
# What other trainers call a parameter: its name here, or a sentence.
OTHER_NAMES = {
    **dict.fromkeys(
        ("dataset", "train_data", "train_dataset", "train_set", "train_loader", "train_dataloader"), "data"
    ),
    **dict.fromkeys(("dataloader", "train_dataloaders", "loader"), "data"),
    **dict.fromkeys(("val", "val_data", "val_dataset", "val_loader", "val_dataloaders", "val_dataloader"), "valid"),
    **dict.fromkeys(("validation", "validation_data", "validation_set", "valid_set", "valid_dataset"), "valid"),
    **dict.fromkeys(("eval_dataset", "eval_data", "eval_dataloader"), "valid"),
    **dict.fromkeys(("test_data", "test_dataset", "test_set", "test_loader"), "test"),
    **dict.fromkeys(("batch", "batch_size", "train_batch_size"), "global_batch"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "total_steps"), "max_steps"),
    **dict.fromkeys(("gradient_clip_val", "grad_clip", "max_grad_norm"), "clip_norm"),
    **dict.fromkeys(("val_check_interval", "eval_steps", "eval_every"), "valid_every"),
    **dict.fromkeys(("save_steps", "save_every", "save_strategy"), "checkpoint_every"),
    "save_total_limit": "keep_last",
    "criterion": "loss",
    "net": "model",
    "opt": "optimizer",
    "callbacks": "hooks",
    "wd": "weight_decay",
    **dict.fromkeys(("lr", "learning_rate"), _IN_OPTIMIZER),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "micro_batch_size"), _PER_DEVICE),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"), _PER_DEVICE),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "ckpt_path"), _RESUMES),
    **dict.fromkeys(("output_dir", "default_root_dir", "save_dir"), _OUTPUT_DIR),
    **dict.fromkeys(("patience", "early_stopping_patience"), _PATIENCE),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps", "warmup"), _WARMUP),
    "sampler": "a DataLoader brings it: data=DataLoader(dataset, batch_size=…, sampler=…)",
    "load_best_model_at_end": "leave it out: the best weights are kept, and dt.train(job).model has them",
}
_OF_THE_RUN = "settings of the run are not part of a job: dt.train(job, dt.configure(precision=…, num_workers=…))"


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
            Or several losses by name, each trained in a turn of its own by the optimizers that name it.
        optimizer: A function of the parameters that train, in groups, that returns the optimizer. Or several by name,
            each a `dt.Optim` that says which parameters it trains.
        global_batch: Samples per optimizer step, over all devices. None: the batch size times the devices. A batch that
            grows is given by the steps done, as in `{0: 256, 1000: 512}`: the order of the samples stays, and is cut
            into steps of 512 samples after 1,000 steps.
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
        valid: The validation set, like `data`, but not something that can only be iterated. Of a `DataLoader`, its
            collate function and the samples that its sampler chooses are used, in the order of the data set. Or several
            sets by name, as in `{"clean": dataset, "noisy": other}`: metrics are then called `valid_clean_loss`, and
            `valid_loss` is that of the first set.
        test: The test set, or several by name, like `valid`. It is measured once, when the job is done, with the best
            weights, or the last ones where nothing was validated: `test_loss` and so on in `Result.test`.
        valid_every: Steps between validations. Default: at the end of each epoch.
        valid_batch: Samples per device in each forward of a validation. Default: the micro-batch.
        metrics: By name: functions of (output, batch) that return a mean, a `LossSum` or an entry per item; or
            torchmetrics objects.
        best: Which checkpoint is kept as the best; needs `valid`.
        early_stopping: When to stop because validation no longer improves.
        ema: Decay of a moving average of the weights, for example 0.999. The average is what is validated.
        swa: Stochastic weight averaging, as in `dt.SWA(start=0.75)`: the mean of the weights of the last part of the
            run. Once it has begun, the mean is what is validated. Not together with `ema`.
        loss_weights: The weight of each named part of the loss: a number, or a function of the steps done. Default: 1.
        count: For named parts of the loss that are a mean over something other than samples: a function of a batch that
            returns their number of items, `{"name": count}`. It gets the batch as the loss does, or before it is
            copied to the device.
        items: What a `LossSum` counts, for reports of throughput, such as `tokens`.
        hooks: Code to call between steps.
        checkpoint_every: Steps between checkpoints, or `"epoch"`. Default: by what a save costs, and at the end.
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
    loss: LossFunction | Mapping[str, LossFunction]
    optimizer: Callable[[ParameterGroups], torch.optim.Optimizer] | Mapping[str, Optim]
    global_batch: GlobalBatch | None = None
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
    best: Aim = Aim()  # noqa: RUF009  (frozen)
    early_stopping: EarlyStopping | None = None
    ema: float | None = None
    swa: SWA | None = None
    loss_weights: Mapping[str, LossWeight] | None = None
    count: CountFunction | None = None
    items: str = "items"
    hooks: Sequence[Hook] = ()
    checkpoint_every: int | Literal["epoch"] | None = None
    keep_last: int = 3
    init_from: str | Path | None = None
    length_is_read: bool = False
    default_batch: int | None = None

    def __post_init__(self) -> None:
        problems = list(problems_of(self))
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

    def collate_of(self, held_out: Source) -> Collate:
        """Return what makes batches of a validation or test set: the function of its own `DataLoader`, or the job's.

        That of a `DataLoader` which was given none is torch's; one that the job names itself wins over that.
        """
        own, is_named = held_out.collate, self.collate is not self.source.collate
        return self.collate if own is None or (own is default_collate and is_named) else own

    @property
    def num_samples(self) -> int | None:
        """The number of samples of an epoch; None if it is not known beforehand."""
        return self.source.samples_per_epoch(None if self.batch_sizes else self.largest_batch)

    @property
    def largest_batch(self) -> int | None:
        """The samples of a step; of the largest, where the global batch changes."""
        return largest_batch(self.global_batch)

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        """The samples of a step, by the steps done before; empty where the global batch does not change."""
        return batch_sizes_of(self.global_batch)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps of an epoch; None if it is not known beforehand, or not the same in each.

        Epochs end where the data does: each step's `Place` says so.
        """
        assert self.largest_batch is not None, "the global batch is settled before anything counts steps"
        return None if self.batch_sizes else self.source.steps_per_epoch(self.largest_batch)

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the job; None if it is not known beforehand.

        The job ends by `epochs` or `max_steps`, not by this.
        """
        per_epoch, by_epochs = self.steps_per_epoch, None
        if self.epochs is not None and self.batch_sizes:
            by_epochs = self.divided(1, 1).first_step_of(self.epochs)
        elif self.epochs is not None and per_epoch is not None:
            by_epochs = self.epochs * per_epoch
        return min((limit for limit in (by_epochs, self.max_steps) if limit is not None), default=None)

    def divided(self, micro_batch: int, world_size: int, *, least: int = 1, is_fixed: bool = False) -> Division:
        """Return how the samples are divided into steps, and steps over ranks and micro-steps."""
        return Division(
            self.num_samples or 0,
            self.largest_batch or 0,
            micro_batch,
            world_size,
            least,
            is_fixed,
            self.batch_sizes,
            self.source.drop_last,
        )

    def samples_between(self, first_step: int, last_step: int) -> int:
        """Return the samples of some steps, as if no step ended an epoch: such a one may have fewer."""
        return samples_between(self.batch_sizes or ((0, self.largest_batch or 0),), first_step, last_step)

    def samples_in_words(self, default: int = 0) -> str:
        """Return how many samples a step has, such as `64 samples per step`; as many as the default if none is set."""
        sizes = self.batch_sizes
        return f"steps of {in_words(sizes)}" if sizes else f"{self.largest_batch or default} samples per step"

    @property
    def num_epochs(self) -> int | None:
        """The epochs that the job's steps begin; None if that is not known beforehand."""
        per_epoch, num_steps = self.steps_per_epoch, self.num_steps
        if self.batch_sizes and num_steps is not None:
            return self.divided(1, 1).place(num_steps - 1).epoch + 1
        return None if num_steps is None or per_epoch is None else -(-num_steps // per_epoch)

    @property
    def validate_every(self) -> int | Literal["epoch"]:
        return self.valid_every or "epoch"

    def lr_factor(self, step: int, num_steps: int | None) -> float:
        """Return the factor of the learning rate, for a schedule that is one: see `loop/schedule.py` for the others."""
        schedule: Any = self.schedule
        if isinstance(schedule, FactorSchedule):
            return schedule.factor(step, num_steps or 0)  # 0 is never asked for: such a job is refused
        return float(schedule(step))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the user's optimizer over the parameters that train; fused where possible, unless the user chose."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise nothing_trains(len(list(model.parameters())))
        if not isinstance(self.optimizer, Mapping):
            return self._made(self.optimizer, _groups(trained, self.weight_decay), model)
        chosen = chosen_parameters(model, self.optims)
        return JointOptimizer({
            name: self._made(optim.make, _groups(chosen[name], self.settled_optim(name).weight_decay), model)
            for name, optim in self.optims.items()
        })  # fmt: skip

    def _made(
        self,
        make: Callable[[ParameterGroups], torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        model: nn.Module,
    ) -> torch.optim.Optimizer:
        """Make one optimizer of the groups, or raise what is wrong with the function that makes it."""
        try:
            optimizer = make(groups)
        except AttributeError as error:
            if isinstance(error.obj, list) and error.name in ("parameters", "named_parameters"):
                message = "the optimizer function is called with the parameters, not with the model"
                by_name = 'groups by name are dt.Optim(…, params="blocks.*") in a dictionary; dt.drive takes any'
                raise DrivetrainError(message, remedy=f"{EXAMPLES['optimizer']}; {by_name} optimizer") from error
            if isinstance(error.obj, dict) and error.name and hasattr(Tensor, error.name):
                raise DrivetrainError(
                    f"the optimizer function asks a group of parameters for {error.name}: it gets groups, as torch's "
                    "optimizers take them, not parameters",
                    remedy="Job(weight_decay=…) decays weights of two dimensions and more; other groups are "
                    'dt.Optim(…, params="blocks.*") in a dictionary, where params may be a function of (name, '
                    "parameter); dt.drive takes any optimizer",
                ) from error
            raise
        if isinstance(optimizer, (list, tuple, dict)):
            raise DrivetrainError(
                f"the optimizer function returned {len(optimizer)} optimizers, expected one",
                remedy='name each: optimizer={"matrices": dt.Optim(lambda params: Muon(params), params="blocks.*"), …}',
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise DrivetrainError(
                f"the optimizer function {returned(optimizer)}",
                remedy="return a torch.optim.Optimizer made from the parameters it gets",
            )
        _check_made(optimizer)
        if not getattr(make, "is_given", False):
            _check_parameters(optimizer, groups, model)
        if needs_closure(optimizer) and not getattr(make, "takes_closure", False):
            raise closure_error(optimizer)
        keep_rates_plain(optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])  # the base of the schedule's factor; torch's name for it
        use_fused(optimizer, model)
        return optimizer

    @property
    def optims(self) -> Mapping[str, Optim]:
        """The optimizers of a job that has several; empty for a job with one."""
        return self.optimizer if isinstance(self.optimizer, Mapping) else {}

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of a step, for a job with several losses; empty for a job with one."""
        return turns_of(self.loss, self.optims) if isinstance(self.loss, Mapping) else ()

    @property
    def losses(self) -> list[LossFunction]:
        """The loss functions as the user gave them."""
        return list(self.loss.values()) if isinstance(self.loss, Mapping) else [self.loss]

    @cached_property
    def loss_function(self) -> LossFunction:
        """The loss as one function. Of several losses it returns all, as named parts."""
        return LossByTurn(self.loss) if isinstance(self.loss, Mapping) else self.loss

    @property
    def step_parts(self) -> list[object]:
        """The objects that define what a step computes; a job with another model, loss or data set has others."""
        return [self.model, *self.losses, self.source.dataset]

    @property
    def clips(self) -> bool:
        """Whether the norm of any gradients is clipped."""
        return self.clip_norm is not None or any(optim.clip_norm is not None for optim in self.optims.values())

    def of_turn(self, turn: Turn) -> "Job":
        """Return the job with the loss of one turn alone."""
        return replace(self, loss=turn.loss, optimizer=self.optims[turn.optimizers[0]].make)

    def settled_optim(self, name: str) -> Optim:
        """Return one of several optimizers, with the job's settings where it has none of its own."""
        optim = self.optims[name]
        return replace(
            optim,
            schedule=self.schedule if optim.schedule is None else optim.schedule,
            clip_norm=self.clip_norm if optim.clip_norm is None else optim.clip_norm,
            weight_decay=self.weight_decay if optim.weight_decay is None else optim.weight_decay,
        )

    def with_one(self, name: str) -> "Job":
        """Return the job with one of its optimizers alone, for what depends on its schedule."""
        optim = self.settled_optim(name)
        assert optim.schedule is not None, "the job has one"
        return replace(self, loss=self.loss_function, optimizer=optim.make, schedule=optim.schedule)

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for a run to be continued."""
        others_order = {} if self.source.is_keyed else {"order": self.source.order_name, "epochs": self.epochs}
        grouping = self.source.grouping
        weights = {name: "a function" if callable(it) else it for name, it in (self.loss_weights or {}).items()}
        return {
            **others_order,
            **({"grouped by length": grouping} if grouping else {}),
            **({"loss_weights": weights} if weights else {}),
            "name": self.name,
            "num_samples": self.num_samples,
            "global_batch": {str(steps): size for steps, size in self.batch_sizes} or self.largest_batch,
            "num_steps": self.num_steps,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "clip_norm": self.clip_norm,
            "weight_decay": self.weight_decay,
            "ema": self.ema,
            **({"swa": repr(self.swa)} if self.swa is not None else {}),
            "init_from": None if self.init_from is None else str(self.init_from),
            "schedule": _as_text(self.schedule),
            **({"optimizers": {name: self._identity_of(name) for name in self.optims}} if self.optims else {}),
        }

    def _identity_of(self, name: str) -> dict[str, Any]:
        optim = self.optims[name]
        own = {field: getattr(optim, field) for field in ("loss", "every", "clip_norm", "weight_decay")}
        return own | {"schedule": None if optim.schedule is None else _as_text(optim.schedule)}

    def settled(self, aim: AimKind) -> AimKind:
        """Return an aim with its better direction settled by the metric's own name, without that of its set."""
        of = next((of for of in self.valid_sets if of and aim.metric.startswith(f"valid_{of}_")), None)
        name = aim.metric if of is None else aim.metric.removeprefix(f"valid_{of}_")
        return replace(aim, mode="max" if Aim(name, aim.mode).wants_more else "min")


def _check_made(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would fail at the first save, or whose rates somebody else sets."""
    # A class that wraps another optimizer may not call `super().__init__()`. Without what that sets, the state could be
    # saved and not be loaded. (`Optimizer.__setstate__` would set it, too, and change the class for other instances.)
    for name, value in vars(torch.optim.SGD([torch.zeros(0, requires_grad=True)])).items():
        if isinstance(value, OrderedDict) and not hasattr(optimizer, name):
            setattr(optimizer, name, OrderedDict())
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise DrivetrainError(
            "the optimizer has a torch scheduler, which would be neither stepped nor saved",
            remedy="return the optimizer alone, and give the job the scheduler: "
            "Job(schedule=lambda optimizer: StepLR(optimizer, 30)), or dt.drive(…, schedule=…); it is stepped once "
            "per optimizer step",
        )


def _check_parameters(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], model: nn.Module) -> None:
    """Refuse an optimizer with parameters of something else than the model."""
    known = {id(parameter) for group in groups for parameter in group["params"]}
    known |= set(map(id, model.parameters()))
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in known:
            raise DrivetrainError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have",
                remedy="make it a part of the model, self.weights = nn.Parameter(…), which the loss function gets: "
                "checkpoints, other ranks and moving averages have it then, too",
            )


def _groups(trained: list[nn.Parameter], weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the groups that an optimizer is made of: without weight decay one, else those with and without it."""
    if weight_decay is None:
        return [{"params": trained}]
    decayed = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


def _as_text(schedule: Schedule) -> str:
    return repr(schedule) if isinstance(schedule, (FactorSchedule, OnPlateau)) else "a function"


_OF_JOB = {it.name: f"it is part of the job: dt.Job({it.name}=…)" for it in fields(Job)}
_OVERRIDDEN = "it is part of the job: dt.Job(epochs=…); dt.configure(epochs=…) overrides it"
# What other trainers give to `train`, and where it belongs here.
NAMES_FOR_TRAIN = {
    **{name: _OF_JOB.get(meant, meant) for name, meant in OTHER_NAMES.items()},
    **_OF_JOB,
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs"), _OVERRIDDEN),
}


def refuse_no_job(given: Any) -> None:
    """Raise where `dt.train` gets something else than a job, such as the model."""
    if not isinstance(given, Job):
        message = f"expected a dt.Job, got {type(given).__name__}"
        remedy = "dt.train(dt.Job(name=…, model=…, data=…, loss=…, optimizer=…, global_batch=…, epochs=…))"
        raise ConfigError([Problem("dt.train: job", message, remedy=remedy)])

"""One configuration in which a trainer is run: the interface to any trainer under test, and its learning rates."""

import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from drivetrain.core.aims import BatchSizes
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.optimizers import Turn
from drivetrain.core.precision import cast_model
from drivetrain.core.schedules import Constant, FactorSchedule, OnPlateau, Schedule, is_factor
from drivetrain.job import Job
from drivetrain.proving.loss import (
    KeyedDraws,
    dropout_off,
    generators_kept,
    part_means,
    seed_generators,
    turn_dropout_off,
    weighted_sum,
)
from drivetrain.proving.recorder import Kill, Recorder

# ----------------------------------------------------------------------------------------------------------------------
# One configuration in which a trainer is run: the interface between the prover and any trainer under test.
#
# A trainer is a function `run(case)`. It is called in each of `case.world_size` fresh processes, with RANK, WORLD_SIZE,
# LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and trains `case.num_steps` optimizer steps of
# `case.model()` on `case.data` with `case.loss` and `case.optimizer`. It may return the trained model or its weights.
#
# A job with several losses has several updates in a step, one for each turn that is due. What is recorded and compared
# is a list of updates; with one loss, an update is a step.

Trainer = Callable[["Case"], Any]
Randomness = Literal["off", "own"]
_BATCH, _TAGS = "batch", "tags"
CHANGES_EVERY = 4  # steps, where the job's global batch changes over its run


class Update(NamedTuple):
    """One update of weights: a step of the job, or one turn of a step where the job has several losses."""

    step: int  # from 0
    turn: str = ""

    def __str__(self) -> str:
        return f"step {self.step + 1}" + (f", turn {self.turn!r}" if self.turn else "")


@dataclass(frozen=True)
class Case:
    """The task of a trainer. The fields are the task; the methods make its parts.

    Attributes:
        name: what is varied, in words.
        job: the user's job as it was written.
        world_size: how many processes train together.
        num_steps: optimizer steps.
        global_batch: samples of an optimizer step over all processes; the last step of an epoch may have fewer.
        micro_batch: samples of one forward at most, on one process; what does not divide evenly is uneven.
        num_samples: samples of an epoch.
        num_workers: loader processes of each process.
        clip_norm: the norm that the gradient of a whole step is clipped to; None: not clipped.
        clip_norms: the same for each of several optimizers, by name; `clip_norm` is not used then.
        seed: seed of weights and order.
        folder: where checkpoints may be written; empty at the first start, as it was left at the next.
        save_every: optimizer steps between checkpoints; None: none is needed. A trainer that finds a checkpoint in
            the folder continues from it.
        strategy: how processes share the work (`ddp`, `fsdp`, …), for trainers that know several.
        device: `cpu` or `cuda`.
        order: sample numbers by step, for trainers that take an order; those with an order of their own ignore it.
        dtype: what the model is cast to; None: as the user made it.
        changes_batch: whether steps have the samples of `batch_sizes`; `global_batch` is the largest then.
        randomness: `off`: dropout is off and other draws are keyed by sample; `own`: as the trainer does it.
    """

    name: str
    job: Job
    world_size: int = 1
    num_steps: int = 20
    global_batch: int = 8
    micro_batch: int = 8
    num_samples: int = 0
    num_workers: int = 0
    clip_norm: float | None = None
    clip_norms: Mapping[str, float | None] = field(default_factory=dict)
    seed: int = 0
    folder: Path = Path()
    save_every: int | None = None
    strategy: str = "auto"
    device: str = "cpu"
    order: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = torch.float64
    changes_batch: bool = False
    randomness: Randomness = "off"
    keys_draws: bool = False  # whether the loss draws besides dropout, so that its draws must be keyed
    keep_gradients: int = 2
    digests: bool = False
    observed: bool = True  # false: the job's own data and loss, as they are; only what the optimizer sees is recorded
    kill: Kill | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the trainer under test
    recorder: Recorder = field(init=False, repr=False, compare=False)

    @property
    def batch_sizes(self) -> BatchSizes:
        """The samples of a step by the steps done, where they change: soon here, and as they do in the job."""
        sizes, largest = self.job.batch_sizes if self.changes_batch else (), self.job.largest_batch or 1
        return tuple(
            (CHANGES_EVERY * number, max(2, self.global_batch * size // largest))
            for number, (_, size) in enumerate(sizes)
        )

    def samples_of(self, step: int) -> int:
        """Return the samples of a step, from 0, that does not end an epoch."""
        return next((size for begin, size in reversed(self.batch_sizes) if begin <= step), self.global_batch)

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    def attach(self, recorder: Recorder) -> "Case":
        """Give the case its recorder, in the process that trains."""
        object.__setattr__(self, "recorder", recorder)
        return self

    # Parts for the trainer

    def model(self) -> nn.Module:
        """Build the model: the same weights in every process and every case."""
        model = build_model(self.job, self.seed, self.dtype)
        if self.randomness == "off":
            turn_dropout_off(model)
        turn_of = {of: optim.loss or of for of, optim in self.job.optims.items()} if self.job.turns else {}
        own = parameters_of(self.job, model) if turn_of else {}
        return self.recorder.built(model, {name: turn_of[of] for of, named in own.items() for name in named})

    @property
    def data(self) -> Any:
        """The data set: map-style, `num_samples` long. Its items are collated by `collate`."""
        return TaggedData(self) if self.observed else self.job.source.dataset

    def collate(self, items: list[Any]) -> Any:
        """Make a batch of items, for a DataLoader's `collate_fn`. The batch goes to `loss` as it is."""
        return collated(self.job, items) if self.observed else self.job.collate(items)

    def batch(self, numbers: Sequence[int]) -> Any:
        """Return the batch of these samples, for loops that take their samples from `order`."""
        data = self.data
        return self.collate([data[number] for number in numbers])

    def micro_batches(self, step: int) -> list[tuple[int, ...]]:
        """Return this rank's samples of a step of `order`, cut into micro-batches; at least one, which may be empty."""
        numbers = self.order[step]
        rank, world, size = self.rank, self.world_size, self.micro_batch
        own = numbers[len(numbers) * rank // world : len(numbers) * (rank + 1) // world]
        return [own[start : start + size] for start in range(0, len(own), size)] or [()]

    def loss(self, model: Any, batch: Any, *, is_training: bool = True, turn: str = "") -> Any:
        """Return the user's loss as the user's function returns it: a scalar, a `LossSum`, or a dict of named parts.

        What it is called with and for is recorded. A trainer that also tries the loss between steps says so with
        `is_training=False`. Of several losses, `turn` names the one to compute.
        """
        if self.job.turns and not turn:
            names = ", ".join(each.name for each in self.job.turns)
            raise DrivetrainError(f"the job has several losses ({names})", remedy="case.loss(model, batch, turn=name)")
        self.recorder.last_turn = turn
        if not self.observed:
            result = _function_of(self.job, turn)(model, batch)
            if self.digests and is_training:
                self.recorder.watch_loss((), result, turn=turn)
            return result
        tags, inner = batch[_TAGS], batch[_BATCH]
        numbers, content = tags[:, 0].tolist(), tags[:, 1].tolist()
        result = loss_of(self, model, inner, numbers, turn)
        if is_training:
            is_empty = self._is_empty(result, inner)
            self.recorder.watch_loss(numbers, result, content, is_empty=is_empty, turn=turn)
        return result

    def _is_empty(self, result: Any, batch: Any) -> bool:
        """Return whether no part has an item in this batch, so that a gradient of zero says nothing."""
        if not isinstance(result, Mapping):
            return False
        return all(part.count == 0 for part in part_means(self.job, result, batch).values())

    def scalar_loss(self, model: Any, batch: Any, step: int = 0) -> Tensor:
        """Return the user's loss as one scalar, for trainers that know nothing else.

        A `LossSum` is divided by its count in this batch; named parts are the means over their items in this batch,
        with the weights of step `step`, from 0.
        """
        result = self.loss(model, batch)
        return weighted_sum(self.job, part_means(self.job, result, batch[_BATCH] if self.observed else batch), step)

    def count(self, batch: Any) -> Mapping[str, Any]:
        """Return what `Job.count` counts in a batch, by part; empty where the job counts nothing."""
        if self.job.count is None:
            return {}
        return self.job.count(batch[_BATCH] if self.observed else batch)

    def optimizer(self, parameters: nn.Module | Iterable[Any]) -> Optimizer:
        """Make the user's optimizer over a model, in the job's parameter groups, or over the given groups."""
        if self.job.optims:
            raise DrivetrainError(
                f"the job has several optimizers ({', '.join(self.job.optims)})", remedy="use case.optimizers(model)"
            )
        if isinstance(parameters, nn.Module):
            (own,) = parameters_of(self.job, parameters).values()
            parameters = parameter_groups(own.values(), self.job.weight_decay)
        make: Any = self.job.optimizer
        made: Optimizer = make(parameters)
        return made

    def optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        """Make the user's optimizers over a model, by name; the only one of a job has an empty name."""
        if not self.job.optims:
            return {"": self.optimizer(model)}
        return {
            name: self.job.optims[name].make(parameter_groups(own.values(), decay_of(self.job, name)))
            for name, own in parameters_of(self.job, model).items()
        }

    def lr_factor(self, step: int, name: str = "") -> float:
        """Return the factor of the learning rate in step `step`, from 0; of several optimizers, of the named one."""
        schedule: Any = schedule_of(self.job, name)
        if not is_factor(schedule):
            raise DrivetrainError(
                "the schedule of the job is a torch scheduler, and no factor of the step",
                remedy="use case.scheduler(optimizer)",
            )
        return schedule.factor(step, self.num_steps) if isinstance(schedule, FactorSchedule) else float(schedule(step))

    def scheduler(self, optimizer: Optimizer, name: str = "") -> LRScheduler:
        """Return the schedule as torch's own class; call its `step()` once after every step.

        Of several optimizers, it is that of the named one. All schedules count steps, and not the turns of a loss.
        """
        schedule: Any = schedule_of(self.job, name)
        if is_factor(schedule):
            return LambdaLR(optimizer, lambda step: self.lr_factor(step, name))
        made: LRScheduler = schedule(optimizer)
        return made

    # Updates

    def due(self, step: int) -> tuple[Turn, ...]:
        """Return the turns of a step, from 0, for a job with several losses; none for a job with one."""
        return tuple(turn for turn in self.job.turns if step % turn.every == 0)

    def update(self, number: int) -> Update:
        """Return which update comes after so many."""
        return next(islice(self._updates(), number, None))

    def num_updates(self, num_steps: int) -> int:
        """Return the number of updates in so many steps."""
        return sum(max(1, len(self.due(step))) for step in range(num_steps))

    def by_update(self, by_step: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the samples of every update, from those of every step."""
        return [by_step[update.step] for update in islice(self._updates(), self.num_updates(len(by_step)))]

    def _updates(self) -> Iterator[Update]:
        for step in count():
            names = [turn.name for turn in self.due(step)] or [""]
            yield from (Update(step, name) for name in names)

    def of_turn(self, name: str) -> "Case":
        """Return the case with one of several losses alone, and its optimizers; a case with one loss as it is."""
        if not name:
            return self
        optims = self.job.optims
        named = [optim for optim in optims.values() if optim.params is not None]

        def is_left(of: str, parameter: nn.Parameter) -> bool:
            return not any(optim.selects(of, parameter) for optim in named)

        own = {
            of: replace(optim, loss=None, every=1, params=is_left if optim.params is None else optim.params)
            for of, optim in optims.items()
            if (optim.loss or of) == name
        }
        return replace(self, job=replace(self.job, loss=_function_of(self.job, name), optimizer=own))

    def clip_of(self, name: str) -> float | None:
        """Return what the gradient of an optimizer is clipped to; the only one of a job has an empty name."""
        return self.clip_norms[name] if self.job.optims else self.clip_norm

    @property
    def clips(self) -> bool:
        """Return whether any gradient is clipped."""
        return any(self.clip_of(name) is not None for name in self.job.optims or ("",))

    def without_clipping(self) -> "Case":
        """Return the case with nothing clipped."""
        return replace(self, clip_norm=None, clip_norms=dict.fromkeys(self.clip_norms))


def build_model(job: Job, seed: int, dtype: torch.dtype | None) -> nn.Module:
    with generators_kept():
        torch.manual_seed(seed)
        model = deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model()
    if dtype is not None:
        model = cast_model(model, dtype)
    return model.train()


def parameters_of(job: Job, model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each optimizer by name; the only optimizer of a job has an empty name."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not job.optims:
        return {"": trained}
    found = {
        of: {name: parameter for name, parameter in trained.items() if optim.selects(name, parameter)}
        for of, optim in job.optims.items()
    }
    taken = {name for own in found.values() for name in own}
    for of, optim in job.optims.items():
        if optim.params is None:
            found[of] = {name: parameter for name, parameter in trained.items() if name not in taken}
    return found


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the parameters as one group; in two groups where a weight decay is set."""
    trained = list(parameters)
    if weight_decay is None:
        return [{"params": trained}]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decay_of(job: Job, name: str) -> float | None:
    """Return the weight decay of an optimizer; the only one of a job has an empty name."""
    own = job.optims[name].weight_decay if name else None
    return job.weight_decay if own is None else own


def schedule_of(job: Job, name: str) -> Schedule:
    """Return the schedule of an optimizer; the only one of a job has an empty name."""
    own = job.optims[name].schedule if name else None
    return job.schedule if own is None else own


def clip_norms_of(job: Job) -> dict[str, float | None]:
    """Return what the gradients of several optimizers are clipped to, by name; empty for a job with one."""
    return {name: job.clip_norm if it.clip_norm is None else it.clip_norm for name, it in job.optims.items()}


def _function_of(job: Job, turn: str) -> Any:
    """Return the loss of a turn; without one, that of the job."""
    return next(it.loss for it in job.turns if it.name == turn) if turn else job.loss_function


def loss_of(case: Case, model: Any, batch: Any, numbers: Sequence[int], turn: str = "") -> Any:
    """Return the user's loss on a plain batch, with the case's numbers and randomness."""
    batch = cast_floats(batch, case.dtype, case.device)
    with ExitStack() as stack:
        if case.randomness == "off":
            stack.enter_context(dropout_off())
            if case.keys_draws:
                stack.enter_context(generators_kept())
                stack.enter_context(KeyedDraws(numbers, case.seed))
        return _function_of(case.job, turn)(model, batch)


def cast_floats(value: Any, dtype: torch.dtype | None, device: str = "cpu") -> Any:
    """Cast floating-point tensors of a batch to this type, on this device; containers are rebuilt, the rest is kept."""
    if dtype is None and device == "cpu":
        return value
    if isinstance(value, Tensor):
        moved = value if value.device.type == device else value.to(device)
        if dtype is not None and moved.is_complex():
            return moved.to(dtype.to_complex())
        return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(part, dtype, device) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_floats(part, dtype, device) for part in value)
    if type(value) is dict:
        return {name: cast_floats(part, dtype, device) for name, part in value.items()}
    if isinstance(value, Mapping) and hasattr(value, "data") and isinstance(value.data, dict):  # a BatchEncoding
        changed = deepcopy(value)
        changed.data.update({name: cast_floats(part, dtype, device) for name, part in value.items()})
        return changed
    return value


class TaggedData(Dataset[Any]):
    """The user's items, each with its number, and a digest of its content where that is recorded.

    With randomness off, what an item draws is keyed by its number, so that it is the same in every process that reads
    it.
    """

    def __init__(self, case: Case) -> None:
        self._items = case.job.source.dataset
        self._length = case.num_samples or len(self._items)
        self._keyed, self._digests, self._seed = case.randomness == "off", case.digests, case.seed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[int, int, Any]:
        return self.items([number])[0]

    def items(self, numbers: Sequence[int]) -> list[tuple[int, int, Any]]:
        """Return several items. The global generators are saved once for all: that takes longer than most items."""
        with generators_kept() if self._keyed else nullcontext():
            return [self._item(number) for number in numbers]

    def _item(self, number: int) -> tuple[int, int, Any]:
        if self._keyed:
            seed_generators(self._seed * 1_000_003 + number)
        item = self._read(number)
        return number, digest_of(item) if self._digests and not self._keyed else 0, item

    def _read(self, number: int) -> Any:
        many: Callable[[list[int]], list[Any]] | None = getattr(self._items, "__getitems__", None)
        return self._items[number] if many is None else many([number])[0]


def collated(job: Job, items: Sequence[tuple[int, int, Any]]) -> dict[str, Any]:
    tags = torch.tensor([[number, digest] for number, digest, _ in items], dtype=torch.int64)
    return {_TAGS: tags, _BATCH: job.collate([item for _, _, item in items])}


def plain_batch(case: Case, numbers: Sequence[int]) -> Any:
    """Return the batch of these samples as the user's own loss takes it."""
    return collated(case.job, TaggedData(case).items(numbers))[_BATCH]


def digest_of(value: Any) -> int:
    """Return a number that two items share only if their content is the same."""
    if isinstance(value, Tensor):
        own = value.detach().contiguous().cpu()
        return zlib.crc32(own.reshape(-1).view(torch.uint8).numpy().tobytes()) if own.numel() else 0
    if isinstance(value, Mapping):
        return hash(tuple(digest_of(part) for part in value.values())) & 0x7FFFFFFF
    if isinstance(value, (list, tuple)):
        return hash(tuple(digest_of(part) for part in value)) & 0x7FFFFFFF
    return zlib.crc32(repr(value).encode())


@dataclass(frozen=True)
class Subject:
    """A trainer under test, and what it can do.

    Attributes:
        run: the function that trains a case.
        name: what the certificate calls it.
        strategies: ways of sharing work over several processes; each is tried.
        max_world: the most processes it takes.
        resumes: whether it saves to `case.folder` and continues from there; otherwise kills are not tried.
        workers: whether it uses `case.num_workers`.
        micro_batches: whether it uses `case.micro_batch`; otherwise batches are only divided over processes.
        changes_world: whether a run may be continued by another number of processes.
        device: where it trains, and the plain loop with it: `cpu` or `cuda`.
        runs_as_it_is: whether it also trains with `case.observed` false: the job's own data and loss, untouched.
        double: whether it trains models in float64; otherwise all is compared in the model's own type.
        even_divisions: whether its steps are micro-batch × accumulation steps × processes samples, so that only
            divisors of the global batch can be tried; the last step of an epoch may still have fewer.
        counts_beforehand: whether a named part that is a `LossSum` takes `Job.count` where a process has several
            micro-batches in a step; without it, such jobs are tried with one per process.
        several_optimizers: whether it trains jobs with several optimizers and several losses.
        changes_batch: whether the global batch may change over a run: it uses `case.batch_sizes`.
    """

    run: Trainer
    name: str = "trainer"
    strategies: tuple[str, ...] = ("ddp",)
    max_world: int = 3
    resumes: bool = True
    workers: bool = True
    micro_batches: bool = True
    changes_world: bool = False
    device: str = "cpu"
    runs_as_it_is: bool = False
    double: bool = True
    even_divisions: bool = False
    counts_beforehand: bool = False
    several_optimizers: bool = True
    changes_batch: bool = False


# ----------------------------------------------------------------------------------------------------------------------
# The learning rates of the plain loop by step: those of a factor, or those that the job's torch scheduler sets.
#
# A torch scheduler is stepped on the plain loop's own optimizer, once for every step. What it sets is kept in a table,
# so that a loop with a planted bug can ask for another step than the one that it is in. A plateau is left out: see
# `without_plateaus`.

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

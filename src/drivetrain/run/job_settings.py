"""Settles a job by what the configuration says: its batch, its length, its optimizer, when it saves and validates."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset, TensorDataset

from drivetrain.config import Config
from drivetrain.core.aims import EarlyStopping, GlobalBatch, recorded_batch
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.core.run_folder import has_steps, is_finished, read_job
from drivetrain.core.world import World
from drivetrain.data.keyed_items import Columns
from drivetrain.job import Job
from drivetrain.plan import Choice, Settings
from drivetrain.plan.fitting import Held, forecast_held, num_bytes
from drivetrain.plan.rules import choose_strategy
from drivetrain.strategies.spec import refuse_without_package, strategy_spec

# ----------------------------------------------------------------------------------------------------------------------
# Applies the everyday settings of a configuration to a job: learning rate, weight decay, clipping, warm-up.


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


# ----------------------------------------------------------------------------------------------------------------------
# Settles a job by what the configuration says: its global batch, its length, when it saves, validates and stops.
#
# `--debug` makes it the same job on little data, so that the whole path of a run is tried in seconds. The strategy is
# settled here too: the one that fits the processes, the devices and the model.

_FLAG = "--parallel-strategy"
_PLENTY = 10  # × its weights: more than any optimizer of torch keeps for a model, with its gradients
_LEAVE_OUT = f"leave {_FLAG} out"
DEBUG_SAMPLES = 100  # of the training set, and of the validation set
DEBUG_SAMPLES_PER_DEVICE = 4
DEBUG_STEPS = DEBUG_SAMPLES // DEBUG_SAMPLES_PER_DEVICE  # if the length of an epoch is not known


def refuse_strategy(config: Config, world: World, devices: Sequence[torch.device]) -> None:
    """Raise if a strategy contradicts the launcher or the machine. `auto` never does."""
    asked = config.distributed.strategy
    if asked == "auto":
        return
    spec = strategy_spec(asked)
    refuse_without_package(asked, spec)
    if world.size > 1 and spec.processes == "one":
        message = f"{asked} runs in one process, and a launcher started {world.size}"
        raise _problem(config, message, _others("one"), "use ddp, or start the script with plain python")
    if world.size == 1 and spec.processes == "several":
        message = f"{asked} needs several processes, and this is the only one"
        remedy = (
            "start several: drivetrain train TARGET --num-processes 2 (and --cpu where there is no GPU), torchrun or "
            f"srun; or {_LEAVE_OUT}"
        )
        raise _problem(config, message, _others("several"), remedy)
    if spec.devices == "several" and len(devices) < 2:
        message = f"{asked} shares batches between GPUs, and there is only {devices[0]} to use"
        raise _problem(config, message, "auto, single here", _LEAVE_OUT)


def _others(processes: str) -> str:
    """Name the strategies that are not bound to this number of processes."""
    return (
        ", ".join(["auto", *(name for name in STRATEGIES.names() if strategy_facts(name).processes != processes)])
        + " here"
    )


def given_strategy(asked: str, num_processes: int) -> Choice[str]:
    """Return the strategy asked for; else the one by the number of processes, for a model that is not known yet."""
    if asked != "auto":
        return Choice(value=asked, reason="asked for", pinned=True)
    return choose_strategy(None, 0, num_processes)


def strategy_for(asked: str, model: nn.Module, job: Job, world: World) -> Choice[str]:
    """Return the strategy asked for; else by what model and optimizer take, and the least that is free on any rank."""
    if asked != "auto" or world.device.type != "cuda":
        return given_strategy(asked, world.size)
    free = min(world.gather(torch.cuda.mem_get_info(world.device)[0]))
    if world.size == 1 and _PLENTY * num_bytes(model.parameters()) < free:
        return choose_strategy(None, 0, world.size)
    offloaded: int | None = None
    try:
        held = _held(model, job)
        if held is not None and importlib.util.find_spec("deepspeed") is not None:
            offloaded = held.buffers + (held.parameters + held.gradients) // world.size
    except _NotMadeError:  # a user's own loop, whose forward DeepSpeed cannot take over
        held = _as_adam(model)
    return choose_strategy(None if held is None else held.total, free, world.size, offloaded)


class _NotMadeError(Exception):
    """Raised if the job's optimizer existed before, so that it cannot be tried on other parameters."""


def _held(model: nn.Module, job: Job) -> Held | None:
    """Return the bytes of weights, buffers, gradients and optimizer; None where that is not known."""

    def make(ghost: nn.Module) -> Optimizer:
        optimizer, own = job.make_optimizer(ghost), set(ghost.parameters())
        if any(parameter not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise _NotMadeError
        return optimizer

    return forecast_held(model, make)


def _as_adam(model: nn.Module) -> Held:
    """Count what a model takes with an optimizer that keeps two numbers for each weight, as Adam does."""
    trained = num_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    weights, buffers = num_bytes(model.parameters()), num_bytes(model.buffers())
    return Held(parameters=weights, buffers=buffers, gradients=trained, optimizer=2 * trained)


def refuse_conflicts(config: Config, choice: Choice[str]) -> None:
    """Raise if settings contradict a strategy that `auto` has chosen; those of a named one are refused before.

    Args:
        config: The configuration, with what follows from the strategy.
        choice: The strategy, and why it was chosen.
    """
    spec, problems = strategy_spec(choice.value), list[Problem]()
    for conflict in spec.conflicts:
        if not conflict.is_met(config.value) or conflict.at == "distributed.strategy":  # which is auto
            continue
        asked = f"{choice.value}, which auto takes here ({choice.reason}),"
        if conflict.asked not in ("distributed.strategy", *spec.options):
            asked = f"{conflict.asked} {config.value(conflict.asked)}"
        remedy = f"leave {conflict.at} out, or name another strategy with {_FLAG}"
        message = conflict.message.replace("{asked}", asked)
        problems.append(Problem(conflict.at, message, config.value(conflict.at), remedy=remedy))
    if problems:
        raise ConfigError(problems)


def _problem(config: Config, message: str, allowed: str, remedy: str) -> ConfigError:
    name, asked = "distributed.strategy", config.distributed.strategy
    line = config.plan_pins.lines.get(name)
    if line is None:
        return ConfigError([Problem(_FLAG, message, asked, allowed=allowed, remedy=remedy)])
    remedy = remedy.replace(_LEAVE_OUT, f"take it out of the plan; or {plan_anew(config)}")
    return ConfigError([Problem(name, message, asked, line, allowed, remedy)])


def settled_job(
    job: Job, config: Config, settings: Settings, world: World, num_devices: int, folder: Path
) -> tuple[Job, bool]:
    """Return the job with its global batch and what the configuration says of its length, of saving and validating.

    Args:
        job: The job as the user gave it.
        config: The configuration of the run.
        settings: What the rules chose for this machine.
        world: The ranks, which agree on the global batch.
        num_devices: The devices of the whole run.
        folder: The run's folder, where an earlier start recorded the global batch.

    Returns:
        The job, and whether the samples of a step are by rule: neither given, asked for, nor recorded.
    """
    recorded = recorded_batch(read_job(folder).get("global_batch")) if _goes_on(folder, config) else None
    is_asked = config.batch_asked.is_set or config.plan_pins.global_batch is not None
    by_rule = bool(world.agree(job.global_batch is None and not recorded and not is_asked))
    global_batch = job.global_batch or world.agree(
        _global_batch(job, config, settings, num_devices, recorded) if world.is_main else None
    )
    job = replace(
        with_optimizer_settings(of_asked_length(job, config), config),
        seed=_seed(job, config),
        global_batch=global_batch,
        checkpoint_every=config.checkpoint.every or job.checkpoint_every,
        keep_last=config.checkpoint.keep_last or job.keep_last,
        init_from=config.checkpoint.init_from or job.init_from,
        valid_every=config.validation.every or job.valid_every,
        valid_batch=config.validation.batch_size or job.valid_batch,
        early_stopping=_early_stopping(job, config),
    )
    refuse_other_batch(config, job.largest_batch or 0)
    _refuse_small_product(config, job.largest_batch or 0, num_devices)
    return job, by_rule


def _seed(job: Job, config: Config) -> int:
    """Return the seed asked for, else the job's own. A recipe has read the configuration itself."""
    is_asked = "seed" in config.run.model_fields_set and not job.length_is_read
    return config.run.seed if is_asked else job.seed


def _goes_on(folder: Path, config: Config) -> bool:
    """Return whether this start continues the run in a folder, if it is of the same job."""
    checkpoint = config.checkpoint
    return has_steps(folder) and not checkpoint.fresh and (checkpoint.extends or not is_finished(folder))


def _refuse_small_product(config: Config, global_batch: int, num_devices: int) -> None:
    """Raise where micro-batch × accumulation × devices is less than a step of the job has."""
    size, accumulation = config.batch.size, config.batch.accumulation
    if config.batch.auto or not size or not accumulation or size * accumulation * num_devices >= global_batch:
        return
    source = config.plan_pins.lines.get("batch.size", "")
    remedy = "leave --accumulation-steps out: it follows from the others"
    if source:
        remedy = f"take batch.accumulation out: it follows from the others; or {plan_anew(config)}"
    raise ConfigError([
        Problem(
            "batch.size" if source else "--batch-size",
            f"{size} × {accumulation} × {num_devices} devices do not hold the {global_batch} samples "
            "that a step of this job has",
            size,
            source,
            remedy=remedy,
        )
    ])  # fmt: skip


def _early_stopping(job: Job, config: Config) -> EarlyStopping | None:
    patience = config.validation.patience
    if patience is None:
        return job.early_stopping
    return replace(job.early_stopping or EarlyStopping(metric=job.best.metric, mode=job.best.mode), patience=patience)


def _global_batch(
    job: Job, config: Config, settings: Settings, num_devices: int, recorded: GlobalBatch | None
) -> GlobalBatch:
    """Return the global batch recorded at the first start; else as asked for, as planned in a file, or by rule.

    Asked for and by rule, it is micro-batch × accumulation × devices.
    """
    if recorded:
        return recorded
    asked, planned = config.batch_asked, config.plan_pins.global_batch
    if planned is not None and not asked.is_set:
        return planned
    size, accumulation = asked.size or (job.default_batch if asked.is_set else None), asked.accumulation
    micro = size or settings.micro_batch.value
    product = micro * (accumulation or (1 if size else settings.accumulation.value)) * num_devices
    return min(product, job.num_samples or product) if size is None and accumulation is None else product


def of_asked_length(job: Job, config: Config) -> Job:
    """Return the job with the length of `epochs` and `max_steps`; where they are not set, the job's own."""
    budget = config.budget
    if job.length_is_read or not (budget.epochs or budget.max_steps):
        return job
    try:
        return replace(job, epochs=budget.epochs or job.epochs, max_steps=budget.max_steps or job.max_steps)
    except ConfigError as error:  # the job itself was all right
        names = {"Job.epochs": "budget.epochs", "Job.max_steps": "budget.max_steps"}
        raise ConfigError([
            replace(problem, key=names.get(problem.key, problem.key), source="the configuration of this run")
            for problem in error.problems
        ]) from None  # fmt: skip


def refuse_other_batch(config: Config, global_batch: int) -> None:
    """Raise where the plan was made for steps of another size: its choices say nothing of this job then."""
    planned, file = config.plan_pins.global_batch, config.plan.file
    if planned is not None and planned != global_batch:
        message = f"{file}: it is a plan for steps of {planned} samples, and a step of this job has {global_batch}"
        raise ConfigError([Problem("--plan", message, str(file), remedy=plan_anew(config))])


def plan_anew(config: Config) -> str:
    """Return a remedy that always helps."""
    return f"plan anew, with the flags of this run: `drivetrain plan TARGET --out {config.plan.file}`"


def debugged(job: Job, config: Config, num_devices: int) -> Job:
    """Return the job cut down for a trial, under its own name, with a note on the data that a run reports.

    The batch and the length of the configuration stay. Data whose order is not ours cannot be cut: only the number of
    steps is limited then.
    """
    source, batch, budget = job.source, config.batch_asked, config.budget
    changes: dict[str, Any] = {"name": f"{job.name}-debug"}
    length = job.num_samples if source.is_keyed else None
    if length is not None:
        size = (batch.size or DEBUG_SAMPLES_PER_DEVICE) * (batch.accumulation or 1) * num_devices
        kept = min(length, max(DEBUG_SAMPLES, size))
        changes["global_batch"] = min(size, kept)
        cut = f"{kept} of {length:,} samples, {changes['global_batch']} per step"
        source = replace(source, dataset=_first(source.dataset, kept), drop_last=False)
    else:
        cut = "the data has an order of its own and is not cut; only the number of steps is limited"
    for kind, sets in (("valid", job.valid_sets), ("test", job.test_sets)):
        if sets:
            cut_sets = {name: replace(it, dataset=_first(it.dataset, DEBUG_SAMPLES)) for name, it in sets.items()}
            changes[kind] = cut_sets.get("", cut_sets)
    if not (budget.epochs or budget.max_steps):
        changes["epochs"] = None if job.epochs is None else 1
        is_open = length is None or job.epochs is None
        changes["max_steps"] = min(DEBUG_STEPS, job.max_steps or DEBUG_STEPS) if is_open else job.max_steps
    note = f"--debug: {cut}; this tries the path out, its figures say nothing of the job"
    return replace(job, **changes, data=replace(source, notes=(note, *source.notes)))


def _first(dataset: Any, number: int) -> Any:
    """Return the first samples, as the same kind of data where the way it is read depends on that."""
    number = min(number, len(dataset))
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(tensor[:number] for tensor in dataset.tensors))
    if isinstance(dataset, Columns):
        return Columns({name: tensor[:number] for name, tensor in dataset.tensors.items()})
    if isinstance(dataset, (list, tuple, Tensor)):
        return dataset[:number]
    return Subset(dataset, range(number))

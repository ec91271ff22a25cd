"""Checks of a job: everything that is wrong with what the user gave, with its remedy.

The functions take a `Job` as `Any`: before it is checked, its fields may hold anything.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.core.aims import Aim, EarlyStopping, problem_of
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem, call_problem
from drivetrain.core.hook import PERIODS, Hook, is_period
from drivetrain.core.metrics import MetricObject
from drivetrain.core.optimizers import Optim, complaints
from drivetrain.core.run_folder import ALLOWED_NAMES, problem_with_name
from drivetrain.core.schedules import SWA, FactorSchedule, OnPlateau
from drivetrain.data.external_order import is_iterator
from drivetrain.data.source import Source, metric_names

_SET_KINDS = {"valid": "validation", "test": "test"}
_NUMBERS: tuple[tuple[str, float, str, Callable[[Any], bool]], ...] = (
    ("clip_norm", 1.0, "a number above 0", lambda value: value > 0),
    ("weight_decay", 0.01, "a number", lambda value: True),
    ("ema", 0.999, "a number between 0 and 1", lambda value: 0 < value < 1),
)
EXAMPLES = {
    "model": "model=lambda: MyModel(…), a function that makes the model; or the module itself, model=MyModel(…)",
    "loss": "loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])",
    "optimizer": "optimizer=lambda params: torch.optim.AdamW(params, lr=…)",
    "collate": "collate=lambda items: …, which makes a batch of a list of items",
    "schedule": "schedule=dt.WarmupCosine(warmup_steps=100), a function of the step that returns a factor, or one of "
    "the optimizer that returns a torch scheduler: lambda optimizer: StepLR(optimizer, 30)",
}


def problems_of(job: Any) -> Iterable[Problem]:
    """Yield everything that is wrong with a job."""
    if not hasattr(job.seed, "__index__") or not -(2**63) <= operator.index(job.seed) < 2**64:
        yield _problem("seed", job.seed, f"got {job.seed!r}", "for example seed=1", "a whole number of 64 bits")
    wrong_name = problem_with_name(job.name)
    if wrong_name:
        yield _problem("name", job.name, f"{job.name!r}: {wrong_name}", 'for example name="mine"', ALLOWED_NAMES)
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
        value = getattr(job, name)
        if (name == "checkpoint_every" and value == "epoch") or (name == "global_batch" and isinstance(value, Mapping)):
            continue
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            yield _problem(name, value, f"got {value!r}", f"for example {name}={least}", f"a whole number from {least}")
    if job.epochs is None and job.max_steps is None:
        yield _problem("epochs", None, "nothing says when to stop", "give epochs or max_steps")
    yield from _data_problems(job)
    yield from _function_problems(job)
    yield from _several_problems(job)
    yield from _part_problems(job)
    yield from _validation_problems(job)
    yield from _schedule_problems(job)
    yield from _hook_problems(job)
    yield from _average_problems(job)
    for name, example, allowed, is_allowed in _NUMBERS:
        value = getattr(job, name)
        if value is not None and not (isinstance(value, Real) and is_allowed(value)):
            yield _problem(name, value, f"got {value!r}", f"for example {name}={example}", allowed)


def _data_problems(job: Any) -> Iterable[Problem]:
    try:
        source = job.source
    except DrivetrainError as error:
        yield _problem("data", type(job.data).__name__, error.message, error.remedy)
        return
    length = source.samples_per_epoch(None)
    asked = job.global_batch
    if isinstance(asked, Mapping):
        problems = list(_changing_batch_problems(asked, source))
        yield from problems
        asked = None if problems else max(asked.values())
    if length == 0:
        yield _problem("data", 0, "the data set is empty", "check the path or the filter it was made with")
    elif source.is_keyed and length and isinstance(asked, int) and asked > length:
        yield _problem(
            "global_batch",
            asked,
            f"{asked} samples are asked for per step, and the data set has {length}",
            f"global_batch={length} or less",
        )
    elif source.is_keyed and length and job.global_batch is None and length < (source.global_batch or 1):
        said = f"the DataLoader's batch size is {source.global_batch}, and the data set has {length} samples"
        yield _problem("data", length, said, f"a batch size of {length} or less")
    its_own = source.global_batch if source.batch_sampler is not None else None
    if its_own is not None and asked not in (None, its_own):
        yield _problem(
            "global_batch",
            asked,
            "the batches of the DataLoader's batch_sampler are the global batches",
            "leave global_batch out, or give the DataLoader a sampler and a batch size",
        )
    if is_iterator(source.dataset) and job.epochs is not None and job.epochs > 1:
        yield _problem(
            "epochs",
            job.epochs,
            f"{type(source.dataset).__name__} can be read only once",
            "epochs=1, or data whose __iter__ begins anew: a class with __iter__, not a generator",
        )
    if source.lengths is not None and not job.shuffle:
        said = "shuffle=False keeps the data set's own order, and dt.by_length makes another"
        yield _problem("shuffle", False, said, "leave one of them out")
    needs_end = isinstance(job.schedule, FactorSchedule) and job.schedule.needs_last_step
    if source.steps_per_epoch(1) is None and job.max_steps is None and needs_end:
        yield _problem(
            "schedule",
            type(job.schedule).__name__,
            "it has to know the last step, and the number of steps in an epoch is not known beforehand",
            "give max_steps, or schedule=Constant(warmup_steps=...)",
        )


def _changing_batch_problems(asked: Mapping[Any, Any], source: Source) -> Iterable[Problem]:
    """Yield what is wrong with a global batch that changes: with its numbers, or with the data it is cut from."""
    shown, why_not = str(dict(asked)), ""
    wrong = problem_of(asked)
    if wrong:
        remedy = "for example global_batch={0: 256, 1000: 512}: 512 samples per step after 1,000 steps"
        yield _problem("global_batch", shown, f"{shown}: {wrong}", remedy, "samples per step by steps done, from 0 on")
    elif source.lengths is not None:
        why_not, remedy = "dt.by_length groups samples for batches of one size", "leave one of them out"
    elif source.batch_sampler is not None:
        why_not = "the batches of the DataLoader's batch_sampler are the global batches"
        remedy = "leave global_batch out, and let the batch_sampler's batches grow"
    elif not source.is_keyed:
        kind = "the DataLoader's sampler" if source.sampler is not None else "data that can only be iterated"
        why_not, remedy = f"it needs samples by number, and {kind} has none", "a data set with a length and items"
    if why_not:
        yield _problem("global_batch", shown, f"the batch cannot change over the run: {why_not}", remedy)


def _function_problems(job: Any) -> Iterable[Problem]:
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
        value = getattr(job, name)
        if isinstance(value, given_ready.get(name, ())) or (
            name in ("loss", "optimizer") and isinstance(value, Mapping)
        ):
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
            remedy = EXAMPLES[name].replace("MyModel", value.__name__ if isinstance(value, type) else "MyModel")
            yield _problem(name, value, message, remedy)


def _several_problems(job: Any) -> Iterable[Problem]:
    """Find what is wrong with several losses or optimizers."""
    for field, value, message, remedy in complaints(job.loss, job.optimizer):
        yield _problem(field, value, message, remedy)
    if isinstance(job.loss, Mapping):
        for name in ("loss_weights", "count"):
            if getattr(job, name) is not None:
                message = "it is for the parts of one loss, and the job has several losses"
                yield _problem(name, getattr(job, name), message, "weigh or count inside the functions: dt.LossSum")


def _part_problems(job: Any) -> Iterable[Problem]:
    counter: Any = job.count
    if counter is not None and not callable(counter):
        yield _problem("count", counter, "it cannot be called", "give a function of a batch")
    weights: Any = {} if job.loss_weights is None else job.loss_weights
    if not isinstance(weights, Mapping) or (job.loss_weights is not None and not weights):
        yield _problem("loss_weights", weights, f"got {weights!r}", 'for example loss_weights={"name": 0.5}')
        return
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight)
        if not isinstance(name, str) or not (callable(weight) or is_number):
            said = f"{name!r} has the weight {weight!r}"
            yield _problem("loss_weights", weight, said, f'"{name}": 0.5', "a number, or a function of the steps done")


def _set_problems(job: Any, name: str) -> Iterable[Problem]:
    try:
        sets: dict[str, Source] = getattr(job, f"{name}_sets")
    except DrivetrainError as error:
        yield _problem(name, type(getattr(job, name)).__name__, error.message, error.remedy)
        return
    for of, source in sets.items():
        kind, where = type(source.dataset).__name__, f"{name}[{of!r}]" if of else name
        if source.is_iterable:
            yield _problem(where, kind, f"{kind} has no length or no items", "give a map-style data set, or a list")
        elif len(source.dataset) == 0:
            message = f"the {_SET_KINDS[name]} set is empty"
            yield _problem(where, 0, message, "check the path or the filter it was made with")
    if isinstance(job.metrics, Mapping):
        over_sets = {f"{of}_{metric}" for of in sets if of for metric in ("loss", *job.metrics)}
        for metric in over_sets & set(job.metrics):
            message = f"{metric!r} is also the name of a metric over one of the {_SET_KINDS[name]} sets"
            yield _problem("metrics", metric, message, "choose another name for the metric or the set")


def _validation_problems(job: Any) -> Iterable[Problem]:
    if job.test is not None:
        yield from _set_problems(job, "test")
    if job.valid is None:
        others = () if job.test is not None else ("valid_batch", "metrics")
        for name in ("valid_every", *others, "early_stopping"):
            if getattr(job, name):
                yield _problem(name, getattr(job, name), "there is no validation set", "give valid=…, or leave it out")
    else:
        yield from _set_problems(job, "valid")
    wrong_kinds = list(_validation_kinds(job))
    if wrong_kinds:
        yield from wrong_kinds
        return
    for name, metric in job.metrics.items():
        if not isinstance(metric, MetricObject):
            message = call_problem(metric, "output", "batch") if callable(metric) else "it cannot be called"
            if message:
                yield _problem("metrics", name, f"{name!r}: {message}", "give a function of (output, batch)")
        if name == "loss":
            yield _problem("metrics", name, "the loss is measured anyway", "choose another name")
    stopping = job.early_stopping
    if stopping is not None and (stopping.patience < 1 or stopping.min_delta < 0):
        yield _problem("early_stopping", stopping, f"got {stopping}", "patience from 1, min_delta from 0")
    plateau = job.schedule if isinstance(job.schedule, OnPlateau) else None
    for name, aim in (("best", job.best), ("early_stopping", stopping), ("schedule", plateau)):
        if aim is not None and not (isinstance(aim.metric, str) and aim.mode in ("auto", "min", "max")):
            yield _problem(name, aim, f"got {aim}", "a metric's name, and auto, min or max")


def _validation_kinds(job: Any) -> Iterable[Problem]:
    kinds: tuple[tuple[str, type, str], ...] = (
        ("metrics", Mapping, 'metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]}'),
        ("best", Aim, 'best=dt.Aim("valid_accuracy")'),
        ("early_stopping", EarlyStopping, "early_stopping=dt.EarlyStopping(patience=3)"),
    )
    for name, kind, example in kinds:
        value = getattr(job, name)
        if not isinstance(value, kind) and not (name == "early_stopping" and value is None):
            expected = "a dictionary" if kind is Mapping else kind.__name__
            message = f"got {type(value).__name__}, expected {expected}"
            yield _problem(name, value, message, example)


def _schedule_problems(job: Any) -> Iterable[Problem]:
    schedules = {"schedule": job.schedule}
    if isinstance(job.optimizer, Mapping):
        optims = {name: optim for name, optim in job.optimizer.items() if isinstance(optim, Optim)}
        schedules |= {f"optimizer[{name!r}].schedule": optim.schedule for name, optim in optims.items()}
    for where, schedule in schedules.items():
        kind = type(schedule).__name__
        if isinstance(schedule, LRScheduler):
            yield _problem(
                where,
                kind,
                f"this {kind} was made with another optimizer than the one that the job makes",
                f"a function that gets the optimizer: schedule=lambda optimizer: {kind}(optimizer, …)",
            )
        elif isinstance(schedule, OnPlateau) and job.valid is None:
            remedy = "give valid=…, or a schedule that needs no validation"
            yield _problem(where, kind, "OnPlateau looks at validations, and there is no validation set", remedy)


def _average_problems(job: Any) -> Iterable[Problem]:
    swa: Any = job.swa
    if swa is None:
        return
    if not isinstance(swa, SWA):
        yield _problem("swa", swa, f"got {type(swa).__name__}, expected dt.SWA", "swa=dt.SWA(start=0.75)")
        return
    for name, value, allowed in swa.problems():
        yield _problem(f"swa.{name}", value, f"got {value!r}", "swa=dt.SWA(start=0.75, every=100)", allowed)
    if job.ema is not None:
        message = "a run keeps one average of the weights, and both ema and swa are given"
        yield _problem("swa", swa, message, "leave out one of them (--ema sets the first)")


def _hook_problems(job: Any) -> Iterable[Problem]:
    hooks: Any = job.hooks
    if not isinstance(hooks, Iterable):
        kind = type(hooks).__name__
        yield _problem("hooks", hooks, f"got {kind}, expected a list", "hooks=[dt.every(100, function)]")
        return
    yield from filter(None, map(_hook_problem, hooks))


def _hook_problem(hook: Any) -> Problem | None:
    """Return what is wrong with a hook: it has no period, or nothing would be called."""
    kind, every = type(hook).__name__, getattr(hook, "every", None)
    if isinstance(hook, type):
        return _problem("hooks", hook, f"got the class {hook.__name__}, expected an instance", f"{hook.__name__}()")
    for field, its_class in {"early_stopping": EarlyStopping, "swa": SWA, "schedule": OnPlateau}.items():
        if isinstance(hook, its_class):
            return _problem("hooks", hook, f"{kind} is no hook: it has a field of its own", f"{field}=dt.{kind}(…)")
    moments = [name for name in dir(hook) if name.startswith("on_")]  # as other trainers call them
    remedy = "def __call__(self, context): …, and every = 1 for each step"
    if moments:
        remedy += f", in place of {', '.join(moments[:3])}{', …' if len(moments) > 3 else ''}"
    if not callable(hook):
        return _problem("hooks", hook, f"{kind} is no hook of Drivetrain: it has no __call__", remedy)
    if type(hook).__call__ is Hook.__call__:
        return _problem("hooks", hook, f"{kind} has no __call__ of its own, so it would do nothing", remedy)
    if is_period(every):
        return None
    message, remedy = f"{kind}.every is {every!r}", "for example every=100"
    if every is None:
        message, remedy = f"{_named(hook)} has no `every`", "hooks=[dt.every(100, function)]"
    return _problem("hooks", every, message, remedy, PERIODS)


def check_aims(job: Any, of_loss: Iterable[str]) -> None:
    """Raise if `best`, `early_stopping` or `schedule` names a metric that no validation measures.

    Args:
        of_loss: What the loss was seen to add to the metrics, in a trial: its named parts, and what it logs.
    """
    if job.valid is None or any(isinstance(metric, MetricObject) for metric in job.metrics.values()):
        return  # how many values a metric object has, and their names, is known when it was computed once
    known = metric_names(job.valid_sets, ("loss", *job.metrics, *of_loss), "valid_")
    problems = [
        Problem(
            f"Job.{name}",
            f"{aim.metric!r} is none of the metrics that are measured",
            aim.metric,
            allowed=", ".join(known),
            remedy="name one of them",
        )
        for name, aim in (("best", job.best), ("early_stopping", job.early_stopping), ("schedule", job.schedule))
        if isinstance(aim, (Aim, EarlyStopping, OnPlateau)) and aim.metric not in known
    ]
    problems += [
        Problem(
            f"Job.{name}",
            f"the name {aim.metric!r} does not say whether more or less of it is better",
            aim.metric,
            remedy='add mode="max" or mode="min"',
        )
        for name, aim in (("best", job.best), ("early_stopping", job.early_stopping))
        if aim is not None and aim.metric in known and not Aim(aim.metric, aim.mode).is_clear
    ]
    if problems:
        raise ConfigError(problems)


def _problem(name: str, value: object, message: str, remedy: str, allowed: str = "") -> Problem:
    return Problem(f"Job.{name}", message, value, "Python", allowed, remedy)


def _is_criterion(loss: Any) -> bool:
    """Return whether it is one of torch's losses, which take (output, target): an instance, a class or a function."""
    is_class = isinstance(loss, type) and issubclass(loss, nn.Module)
    is_torch = getattr(loss, "__module__", "") in ("torch.nn.functional", "torch.nn.modules.loss")
    return is_class or is_torch


def _named(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "the function" if name == "<lambda>" else str(name)

"""What is done with a job without training it: measured, evaluated, predicted with, its learning rate found."""

import copy
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.isolation import draws_kept, untouched
from drivetrain.core.precision import numerics
from drivetrain.core.run_folder import write_atomically
from drivetrain.core.value import Value
from drivetrain.core.world import synchronize
from drivetrain.data.batch import MicroBatch, to_device
from drivetrain.data.division import Division, Place
from drivetrain.data.loader import Loader
from drivetrain.data.source import Source, source_of
from drivetrain.job import Job
from drivetrain.loop.prediction import ForwardFunction, forward_of, predict_rows, tensors_by_name
from drivetrain.loop.read_back import Reading
from drivetrain.monitor.phases import make_clock, peak_rate
from drivetrain.plan.plan import Plan
from drivetrain.planning.description import described
from drivetrain.planning.planner import OnProbe, measured
from drivetrain.planning.trials import settle_global_batch, with_micro_batch
from drivetrain.run import Result, Session, Which, best_or_last, checkpoint_of, folder_of, load_whole
from drivetrain.run.assemble import (
    RunParts,
    assemble,
    division_of,
    make_loader,
    make_stepper,
    make_validator,
    trial_of,
    whole_set_loader,
)
from drivetrain.run.job_settings import ConfiguredOptimizer, with_optimizer_settings
from drivetrain.run.loss_weighting import recorded_weighting, settle_weighting
from drivetrain.run.memory import peak_meter
from drivetrain.run.model_factory import build_model, callable_model, prepare_model
from drivetrain.run.session import given_on_command_line
from drivetrain.strategies import Trial
from drivetrain.strategies.loss_parts import LossParts

# ----------------------------------------------------------------------------------------------------------------------
# What is measured of a job without training it: `dt.benchmark_performance`, `dt.evaluate`, and `drivetrain plan`.
#
# `dt.benchmark_performance(job)` measures the time of a job's step and of its phases. Steps run as in training, on a
# separate model, again and again on the batches of the first step, which are on the device already: the step is
# measured, not the data. `dt.evaluate(job, run)` computes the job's loss and metrics over its validation set, with the
# weights of a run. `plan` says what would be done with a job here and why, by rule or by measuring. Nothing is trained.

WARM_STEPS = 3


class Performance(Value):
    """Means over the measured steps; the phases are those of the main process."""

    job: str
    device: str
    precision: str
    num_devices: int
    global_batch: int
    micro_batch: int
    accumulation: int
    num_steps: int
    step_seconds: float  # by a clock around all of them
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float  # not overlapped with backward
    optimizer_seconds: float
    samples_per_second: float
    items: str  # what the loss is over: `tokens`, where the job says so
    items_per_second: float
    peak_memory_bytes: int | None = None  # model and optimizer included; on a CPU good to some ten megabytes
    flops_per_sample: float | None = None
    mfu: float | None = None
    peak_source: str = ""

    @property
    def other_seconds(self) -> float:
        """The seconds per step outside the phases: reading outcomes, setting generators."""
        phases = self.forward_seconds + self.backward_seconds + self.communication_seconds + self.optimizer_seconds
        return max(0.0, self.step_seconds - phases)


def benchmark_performance(job: Job, config: Config | None = None, *, num_iterations: int = 20) -> Performance:
    """Measure the mean time of a job's step over `num_iterations` steps.

    Under a launcher all processes take part, and all get the main one's figures.

    Args:
        job: What to measure; it is not trained.
        config: How to run it, from `configure`.
        num_iterations: How many steps to time.

    Returns:
        The times and rates.

    Example:
        >>> dt.benchmark_performance(job, num_iterations=5)  # doctest: +SKIP
    """
    if num_iterations < 1:
        raise DrivetrainError(f"num_iterations is {num_iterations}", remedy="measure one step at least")
    if isinstance(job.model, nn.Module):
        job = replace(job, model=copy.deepcopy(job.model))
    session = Session.join(job, config, quiet=True)
    try:
        if job.num_samples is None:
            raise DrivetrainError(
                "data that can only be iterated cannot be measured: its items would be used up",
                remedy="give the job a few of its items as a list",
            )
        with untouched(session.world.device), session.numerics():
            found = _measured(session, num_iterations)
        return Performance.model_validate(session.world.agree(found.model_dump(mode="json")))
    finally:
        session.close_loaders()
        session.close()


def _measured(session: Session, num_iterations: int) -> Performance:
    session.follow(session.planned.but(capture=False))  # a CUDA graph would hide the phases of a step
    job, world, device = session.job, session.world, session.world.device
    division = Division(job.num_samples or 1, job.largest_batch or 1, session.way.micro_batch, world.size)
    loader = make_loader(session, division, job.source, shuffle=job.shuffle)
    place = division.place(0)
    batches = list(_on_device(session, loader, place))
    meter = peak_meter(device)
    meter.reset()
    parts = assemble(
        session,
        prepare_model(session, build_model(session)),
        Trial(batches[0].batch, batches[0].num_samples),
        division,
        loss_parts=LossParts(job.loss_weights, job.count, world, alone=True),
        counts_flops=True,
    )
    clock = make_clock(device)
    stepper = make_stepper(session, parts, clock=clock)

    def run(num_steps: int) -> float:
        """Run steps as the loop does, reading each outcome while the next step is in flight.

        Returns the number of items that the last step counted.
        """
        ahead, items = None, 0.0
        for _ in range(num_steps):
            reading = Reading(stepper.run(place, batches, False), device)
            items = items if ahead is None else ahead.values()[1]
            ahead = reading
            clock.next_step()
        return items if ahead is None else ahead.values()[1]

    run(WARM_STEPS)
    synchronize(device)
    clock.finish()
    clock.take()
    began = time.perf_counter()
    clock.start()
    items = run(num_iterations)
    synchronize(device)
    seconds = (time.perf_counter() - began) / num_iterations
    clock.finish()
    phases = clock.take().per_step()
    peak_bytes = meter.peak_bytes()
    parts.strategy.close()
    return _performance(session, division, len(batches), num_iterations, seconds, items, phases, peak_bytes, parts)


def _performance(
    session: Session,
    division: Division,
    num_batches: int,
    num_iterations: int,
    seconds: float,
    items: float,
    phases: Mapping[str, float],
    peak_bytes: int,
    parts: RunParts,
) -> Performance:
    """Return the figures of steps that took `seconds` and counted `items` each."""
    job, device, precision, flops = session.job, session.world.device, session.precision, parts.flops_per_sample
    rate = peak_rate(session.hardware, device, precision.name)
    samples_per_second = division.place(0).num_samples / seconds
    return Performance(
        job=session.name,
        device=str(device),
        precision=precision.name,
        num_devices=session.num_devices,
        global_batch=division.global_batch,
        micro_batch=division.micro_batch,
        accumulation=num_batches,
        num_steps=num_iterations,
        step_seconds=seconds,
        forward_seconds=phases.get("forward", 0.0),
        backward_seconds=phases.get("backward", 0.0),
        communication_seconds=phases.get("communication", 0.0),
        optimizer_seconds=phases.get("optimizer", 0.0),
        samples_per_second=samples_per_second,
        items=job.items,
        items_per_second=items / seconds,
        peak_memory_bytes=peak_bytes or None,
        flops_per_sample=flops or None,
        mfu=None
        if rate is None or not flops
        else flops * samples_per_second / (rate.value * 1e12 * session.num_devices),
        peak_source="" if rate is None else f"{rate.origin}: {rate.source}",
    )


def _on_device(session: Session, loader: Loader, place: Place) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of a step.

    Only the last may differ from the first in size: no others are fetched.
    """
    count = len(loader.division.micro_steps(place, loader.rank))
    first = _moved(loader.micro_batch(place, 0), session)
    for number in range(count - 1):
        yield first._replace(number=number)
    yield first if count == 1 else _moved(loader.micro_batch(place, count - 1), session)


def _moved(micro: MicroBatch, session: Session) -> MicroBatch:
    return micro._replace(batch=to_device(micro.batch, session.world.device, channels_last=session.way.channels_last))


@draws_kept()
def evaluate(
    job: Job | Result,
    run: Path | str | Result | None = None,
    config: Config | None = None,
    *,
    data: Any = None,
    which: Which = "last",
) -> dict[str, float]:
    """Compute loss and metrics of a run's checkpoint on the job's validation set, or on other data.

    Changes nothing in the run folder, so the run may go on beside it. Under a launcher processes share the work.

    Args:
        job: The job that the run trained; or what `train` returned, which is job and run in one.
        run: The run's folder, or what `train` returned.
        config: How to run it, from `configure`.
        data: What to evaluate on, like `Job.valid`: a data set, or several by name. Default: the job's `valid`.
        which: `last`, the newest checkpoint, or `best`, the one that validated best.

    Returns:
        The values by name: `valid_loss`, and `valid_…` for each metric. They are the same names on any data.

    Example:
        >>> inputs = torch.linspace(1, 2, 8).unsqueeze(1)
        >>> values = dt.evaluate(dt.train(job, quiet=True), data=list(zip(inputs, 2 * inputs + 1)))
        >>> list(values)
        ['valid_loss']
    """
    job, run = job_and_run(job, run)
    if data is not None:
        job = replace(job, valid=data)
    if job.valid is None:
        raise DrivetrainError("the job has no validation set", remedy="give one: data=…, or Job(valid=…)")
    with loaded_model(job, run, config, which) as (session, model, called):
        return make_validator(session, session.way.micro_batch).measure(model, called)


def job_and_run(job: Job | Result | None, run: Path | str | Result | None) -> tuple[Job, Path | str | Result]:
    """Return a job and its run, of which a result is both."""
    if isinstance(job, Result):
        if run is None:
            run = job
        job = job.job
    elif job is None and isinstance(run, Result):
        job = run.job
    if run is None:
        raise DrivetrainError(
            "no run is given", remedy='give its folder, as in "runs/digits", or what dt.train returned'
        )
    if not isinstance(job, Job):
        raise DrivetrainError(
            f"expected a Job, got {type(job).__name__}: the folder of a run does not have the model and the loss",
            remedy="give the job that was trained: dt.evaluate(job, run), dt.predict(run, data, job=job)",
        )
    return job, run


@contextmanager
def loaded_model(
    job: Job, run: Path | str | Result, config: Config | None, which: Which
) -> Iterator[tuple[Session, nn.Module, Callable[..., Any] | None]]:
    """Join as a run does, and load its weights. Yields the session, the model, and what to call if it is compiled."""
    checkpoint = checkpoint_of(run, which)
    session = Session.join(job, config, quiet=True)
    try:
        session.weighting = recorded_weighting(checkpoint)
        recorded = session.recorded_way(checkpoint)
        if recorded is not None:  # what was validated while it was trained is computed alike
            session.follow(session.planned.but(precision=recorded.precision, channels_last=recorded.channels_last))
        with numerics(session.precision, deterministic=session.config.kernels.deterministic, cudnn_benchmark=False):
            session.loss_parts.step = max(0, checkpoint.step - 1)  # whose weights the loss had
            model, _, called = callable_model(session)
            source = checkpoint if session.experts is None else session.experts.seen(checkpoint)
            load_whole(model, source, checkpoint.path)
            yield session, model, called
    finally:
        session.close_loaders()
        session.close()


@draws_kept()
def plan(job: Job, config: Config | None = None, *, measure: bool = False, on_probe: OnProbe | None = None) -> Plan:
    """The plan for a job. With `measure`, ways of running its step are tried on a throw-away copy of the model."""
    run = Session.join(job, config, quiet=True)
    try:
        model = (settle_global_batch(run) if measure else None) or build_model(run)
        if not measure:
            why = "not measured: --measure does it" if run.config.batch.auto else ""
            return described(run, model, replace(run.planned, batch_size_found=why), None)
        settle_weighting(run, model, None)
        found = measured(run, model, with_micro_batch(run, model, run.planned), on_probe=on_probe).plan
        assert found is not None
        return found
    finally:
        run.close_loaders()
        run.close()


# ----------------------------------------------------------------------------------------------------------------------
# `dt.predict(run, data)`: what a trained model returns for each sample of a data set.

_SUFFIXES = (".pt", ".pth", ".parquet")


@draws_kept()
def predict(
    run: Path | str | Result,
    data: Any,
    path: Path | str | None = None,
    *,
    job: Job | None = None,
    forward: ForwardFunction | None = None,
    which: Which | None = None,
    config: Config | None = None,
) -> Any:
    """Return the model's outputs for all samples of a data set, a row for each, in the order of the data set.

    The model is in evaluation mode and in the run's precision. Under a launcher processes share the work, and all of
    them get all rows. Nothing in the run folder is changed, so the run may go on beside it.

    Args:
        run: What `train` returned, or a run's folder; then `job` has to be given, too.
        data: The data set, like `Job.valid`; a single one.
        path: A file to write the outputs to, instead of returning them: `.pt` or `.pth` by `torch.save`, or `.parquet`
            with a column for each tensor, which needs pyarrow.
        job: The job that was trained, where `run` is a folder.
        forward: A function of (model, batch) that returns tensors with a row per sample, in any nesting. Default: what
            the model returns where the job's loss function calls it, which needs data with labels like the job's.
        which: `last`, the newest checkpoint, or `best`, the one that validated best. Default: the best, or the last of
            a run that was not validated.
        config: How to run it, from `configure`.

    Returns:
        The outputs in the host's memory: a tensor, or dictionaries, lists and tuples of tensors as the model returns
        them; with `path`, the path.

    Example:
        >>> result = dt.train(job, quiet=True)
        >>> dt.predict(result, torch.zeros(10, 1), forward=lambda model, batch: model(batch)).shape
        torch.Size([10, 1])
    """
    target = None if path is None else Path(path)
    if target is not None:
        _check_target(target)
    given, _ = job_and_run(job, run)
    source = _checked_source(data)
    folder = folder_of(run)
    # One that packs several samples into a row says how to make a row per sample.
    collate = getattr(given.collate, "by_sample", given.collate)
    with loaded_model(
        replace(given, valid=source, collate=collate), folder, config, which or best_or_last(folder)
    ) as loaded:
        session, model, called = loaded
        size = session.way.micro_batch
        if session.job.valid_batch is not None:
            size = session.job.valid_batch * len(session.devices)
        outputs = predict_rows(
            model,
            model if called is None else called,
            whole_set_loader(session, session.job.valid_sets[""], size),
            session.precision,
            session.world,
            forward or forward_of(given.loss_function),
            given.seed,
        )
        if target is None:
            return outputs
        session.world.main_does(lambda: str(_write(target, outputs)))
        return target


def _checked_source(data: Any) -> Source:
    """Return the data as a source of samples that have numbers."""
    source = source_of(data)
    kind = type(source.dataset).__name__
    if source.is_iterable:
        message = f"{kind} has no length or no items, so its rows have no order"
        raise ConfigError([Problem("data", message, kind, remedy="give a map-style data set, or a list")])
    if len(source.dataset) == 0:
        raise ConfigError([Problem("data", "the data set is empty", 0, remedy="check the path or the filter")])
    return source


def _check_target(path: Path) -> None:
    """Raise before anything is computed if the outputs could not be written."""
    if path.suffix.lower() not in _SUFFIXES:
        raise DrivetrainError(
            f"{path} ends in {path.suffix!r}", remedy=f"end its name in one of {', '.join(_SUFFIXES)}"
        )
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet, if they are installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DrivetrainError(
            f"a .parquet file needs pyarrow, which cannot be imported: {error}",
            remedy="pip install pyarrow, or give a path that ends in .pt",
        ) from None
    return pyarrow, pyarrow.parquet


def _write(path: Path, outputs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    if path.suffix.lower() == ".parquet":
        arrow, parquet = _pyarrow()
        columns = {name: _column(arrow, tensor) for name, tensor in tensors_by_name(outputs)}
        parquet.write_table(arrow.table(columns), buffer)
    else:
        torch.save(outputs, buffer)
    return write_atomically(path, buffer.getvalue())


def _column(arrow: Any, tensor: Tensor) -> Any:
    """Return a tensor as a column: numbers, or for each row a list of them in the order of its elements."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()  # Parquet has no such type, and float32 holds every value of it
    flat = arrow.array(tensor.contiguous().reshape(-1).numpy())
    if tensor.dim() == 1:
        return flat
    return arrow.FixedSizeListArray.from_arrays(flat, tensor[0].numel())


# ----------------------------------------------------------------------------------------------------------------------
# `dt.find_lr(job)`: a range test of the learning rate, in memory, on a model that is thrown away.

_SMOOTHING_STEPS = 2.0  # standard deviation of the average
_FEW = 5  # steps
_FAR_ABOVE = 4.0


class LrFinding(Value):
    """The loss of each step of a range test, with the learning rates that follow from it."""

    job: str
    rates: tuple[float, ...]  # of each step, in rising order
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]  # a centered average of the losses
    steepest: float | None  # where the smoothed loss falls fastest; None: it does not fall
    diverged_at: float | None  # where, after its lowest, it is above the first again, or not finite; None: nowhere
    suggestion: float | None  # the lower of `steepest` and a tenth of `diverged_at`


def find_lr(
    job: Job, config: Config | None = None, *, lowest: float = 1e-7, highest: float = 10.0, num_steps: int = 100
) -> LrFinding:
    """Train some steps with an exponentially rising learning rate, and suggest one from where the loss falls.

    A model of its own is trained, in memory: nothing is written, and a run of the same name is not touched. Schedule,
    moving average, validation and hooks of the job are left out. Where the optimizer's groups have different rates, the
    rate is the highest, as with `--lr`. Under a launcher all processes take part, and all get the same figures.

    Args:
        job: What to train.
        config: How to run it, from `configure`. Default: the command line's, else the defaults.
        lowest: The rate of the first step.
        highest: The rate of the last step; the test ends before it where the loss diverges.
        num_steps: How many steps to train.

    Returns:
        The rates, the losses and the suggestion.

    Example:
        >>> rate = dt.find_lr(job, num_steps=20).suggestion  # doctest: +SKIP
    """
    if not 0 < lowest < highest < math.inf or num_steps < 2 * _FEW:
        raise DrivetrainError(
            f"no range test: rates from {lowest} to {highest} in {num_steps} steps",
            remedy=f"a lowest rate above 0, a highest above that, and {2 * _FEW} steps at least",
        )
    if job.num_samples is None:
        raise DrivetrainError(
            "data that can only be iterated cannot be tried: its items would be used up",
            remedy="give the job some of its items as a list",
        )
    config = config or given_on_command_line() or Config()
    session = Session.join(_of_test(job, config, num_steps), _without_rate(config), quiet=True)
    rates = [lowest * (highest / lowest) ** (step / (num_steps - 1)) for step in range(num_steps)]
    try:
        with untouched(session.world.device), session.numerics():
            losses = list(_losses(session, rates))
        return _found(session.name, rates, losses)
    finally:
        session.close_loaders()
        session.close()


def _of_test(job: Job, config: Config, num_steps: int) -> Job:
    """Return the job with an optimizer at rate 1, and without all that follows a step."""
    if job.optims:
        raise DrivetrainError(
            f"the job has several optimizers ({', '.join(job.optims)}), and a range test looks for one rate",
            remedy="try a job with one optimizer, and give the others rates in proportion",
        )
    given = _without_rate(config)
    job = with_optimizer_settings(job, given)
    return replace(
        job,
        model=copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model,
        optimizer=ConfiguredOptimizer(job.optimizer, 1.0, None),
        schedule=_one,
        max_steps=num_steps,
        epochs=None,
        valid=None,
        valid_every=None,
        valid_batch=None,
        metrics={},
        early_stopping=None,
        ema=None,
        swa=None,
        hooks=(),
        length_is_read=True,
    )


def _without_rate(config: Config) -> Config:
    optimizer = config.optimizer.model_copy(update={"learning_rate": None, "warmup_steps": None, "ema": None})
    return config.model_copy(update={"optimizer": optimizer})


def _one(step: int) -> float:
    return 1.0


def _losses(session: Session, rates: list[float]) -> Iterator[float]:
    """Train with these rates, and yield the loss of each step, over all ranks; ends with the one that diverges."""
    session.follow(session.planned.but(capture=False))
    job, model, loss_parts = session.job, build_model(session), session.loss_parts
    settle_weighting(session, model, None)
    division = division_of(session, model)
    loader = make_loader(session, division, job.source, shuffle=job.shuffle)
    first = loader.first(len(rates), None)
    trial = trial_of(session, first.batch, first.num_samples)
    parts = assemble(session, prepare_model(session, model), trial, division, takes_weights=True)
    stepper = make_stepper(session, parts, loader=loader)
    seen: list[float] = []
    for place, micro_batches in loader.batches(0, len(rates)):
        for group in parts.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rates[place.step]
        if loss_parts.has_schedule:
            loss_parts.set_weights(place.step)
        if loader.count_ahead is not None:
            loss_parts.begin(place.step)
        reading = Reading(stepper.run(place, micro_batches, False), session.world.device)
        loss, _ = reading.values().loss(place.step)  # the host waits for each step here
        yield loss
        seen.append(loss)
        if _is_over(seen):
            break
    parts.strategy.close()


def _is_over(losses: list[float]) -> bool:
    """Return whether the last losses are so far above the lowest that higher rates tell nothing."""
    if not math.isfinite(losses[-1]):
        return True
    lowest = min(losses)
    span = max(losses[0] - lowest, abs(lowest))  # a loss may be below 0
    return len(losses) > _FEW and min(losses[-_FEW:]) > lowest + _FAR_ABOVE * span


def _found(name: str, rates: list[float], losses: list[float]) -> LrFinding:
    is_finite = math.isfinite(losses[-1])
    kept = len(losses) if is_finite else len(losses) - 1
    smoothed = _smoothed(losses[:kept])
    lowest_at = int(np.argmin(smoothed)) if kept else 0
    worse = [rates[step] for step in range(lowest_at, kept) if smoothed[step] > smoothed[0]]
    diverged_at = worse[0] if worse else None if is_finite else rates[kept]
    steepest = _steepest(rates[: lowest_at + 1], smoothed[: lowest_at + 1])
    tenth = None if diverged_at is None else diverged_at / 10
    return LrFinding(
        job=name,
        rates=tuple(rates[:kept]),
        losses=tuple(losses[:kept]),
        smoothed=tuple(smoothed),
        steepest=steepest,
        diverged_at=diverged_at,
        suggestion=None if steepest is None else min(steepest, tenth or steepest),
    )


def _smoothed(losses: list[float]) -> list[float]:
    """Return a centered average, by Gaussian weights: an average of the steps before would lag behind the rate.

    Losses that are far above the first one count as if they were less: a single one would hide all others.
    """
    if not losses:
        return []
    highest = losses[0] + max(losses[0] - min(losses), abs(losses[0]) * 0.1)
    numbers, capped = np.arange(len(losses)), np.minimum(losses, highest)
    weights = np.exp(-0.5 * ((numbers[:, None] - numbers[None, :]) / _SMOOTHING_STEPS) ** 2)
    return [float(loss) for loss in (weights * capped).sum(1) / weights.sum(1)]


def _steepest(rates: list[float], smoothed: list[float]) -> float | None:
    """Return the rate at which the smoothed loss falls fastest by the logarithm of the rate."""
    if len(rates) < _FEW:
        return None
    slopes = np.gradient(smoothed, np.log(rates))
    return rates[int(np.argmin(slopes))] if slopes.min() < 0 else None

"""What is measured of a job without training it: `dt.benchmark_performance`, `dt.evaluate`, and `drivetrain plan`.

`dt.benchmark_performance(job)` measures the time of a job's step and of its phases. Steps run as in training, on a
separate model, again and again on the batches of the first step, which are on the device already: the step is measured,
not the data. `dt.evaluate(job, run)` computes the job's loss and metrics over its validation set, with the weights of a
run. `plan` says what would be done with a job here and why, by rule or by measuring. Nothing is trained.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import untouched
from drivetrain.core.precision import numerics
from drivetrain.core.value import Value
from drivetrain.core.world import synchronize
from drivetrain.data.batch import MicroBatch, to_device
from drivetrain.data.division import Division, Place
from drivetrain.data.loader import Loader
from drivetrain.job import Job
from drivetrain.loop.read_back import Reading
from drivetrain.monitor.phases import make_clock
from drivetrain.monitor.profiler import peak_rate
from drivetrain.plan.plan import Plan
from drivetrain.planning.batch_size import settle_global_batch, with_micro_batch
from drivetrain.planning.description import described
from drivetrain.planning.planner import OnProbe, measured
from drivetrain.run import Result, Session, Which, checkpoint_of, load_whole
from drivetrain.run.assemble import RunParts, assemble, make_loader, make_stepper, make_validator
from drivetrain.run.loss_weighting import recorded_weighting, settle_weighting
from drivetrain.run.memory import peak_meter
from drivetrain.run.model_factory import build_model, callable_model, prepare_model
from drivetrain.strategies import Trial
from drivetrain.strategies.loss_parts import LossParts

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

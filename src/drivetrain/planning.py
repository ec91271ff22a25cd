"""`drivetrain plan`: what would be done with a job here and why, by rule or by measuring; nothing is trained."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.data.division import Division
from drivetrain.job import Job
from drivetrain.plan import Choice
from drivetrain.plan.plan import Forecast, MemoryForecast, Plan
from drivetrain.plan.tune import DoesNotFitError, Measurement, Scope, Tuned, UnusableError, Way, tune
from drivetrain.run import Setup
from drivetrain.run.measure import Journal, Probe, couples_samples, has_convolutions

MEMORY_FRACTION = 0.9  # of what is free on the device


def plan(
    job: Job,
    config: Config | None = None,
    *,
    measure: bool = False,
    budget_seconds: float = 60.0,
    on_probe: Callable[[Way, Measurement], None] | None = None,
) -> Plan:
    """The plan for a job. With `measure`, ways of running its step are tried on a throw-away copy of the model."""
    setup = Setup.join(job, config, quiet=True)
    try:
        model, _, _ = setup.model()
        tuned = None
        if measure:
            tuned = _tuned(setup, model, budget_seconds, on_probe)
        return _plan(setup, model, tuned)
    finally:
        setup.close_loaders()
        setup.world.close()


def _tuned(
    setup: Setup, model: nn.Module, budget_seconds: float, on_probe: Callable[[Way, Measurement], None] | None
) -> Tuned:
    job, world = setup.job, setup.world
    if job.num_samples is None:
        raise DrivetrainError(
            "data that can only be iterated cannot be measured: its items would be used up",
            remedy="leave --measure out",
        )
    probe = Probe(
        job, model, world, lambda division: setup.loader(division, job.source, shuffle=job.shuffle), Journal(None)
    )

    def measured(way: Way) -> Measurement:
        found = probe(way)
        if on_probe is not None:
            on_probe(way, found)
        return found

    start = _start(setup)
    try:
        return tune(start, _scope(setup, model, budget_seconds), measured, time.monotonic)
    except DoesNotFitError as error:
        raise _does_not_fit(setup, model) from error
    except UnusableError as error:
        raise DrivetrainError(
            f"a step of this job cannot be run: {error}", remedy="`drivetrain train` shows where, with the traceback"
        ) from None


def _start(setup: Setup) -> Way:
    return Way(
        micro_batch=setup.micro_batch(None),
        precision=setup.settings.precision.value,
        compile_mode=setup.config.compile.mode if setup.config.compile.enabled else None,
        channels_last=setup.channels_last,
        recompute=setup.settings.activations.value == "recompute",
    )


def _scope(setup: Setup, model: nn.Module, budget_seconds: float) -> Scope:
    job, config, device = setup.job, setup.config, setup.world.device
    share = -(-(job.global_batch or 1) // setup.world.size)
    num_steps = job.num_steps or 0
    pinned = bool(config.batch.size or config.batch.accumulation)
    if device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[0] * MEMORY_FRACTION
    else:
        limit = setup.hardware.memory.free_bytes * MEMORY_FRACTION
    return Scope(
        rank_samples=share,
        remaining_samples=share * num_steps,
        memory_limit_bytes=limit,
        fixed_micro_batch=_why_fixed(pinned, model, device),
        compile_modes=() if config.compile.enabled or len(setup.devices) > 1 else ("default",),
        may_use_channels_last=has_convolutions(model) and config.data.channels_last == "auto",
        compile_cost_seconds=15.0,
        budget_seconds=budget_seconds,
    )


def _why_fixed(pinned: bool, model: nn.Module, device: torch.device) -> str:
    """Empty if the micro-batch is free to be tuned."""
    if pinned:
        return "asked for"
    if couples_samples(model):
        return "samples of a batch influence each other (batch normalisation): its size is part of what is learnt"
    return "a rank's whole share: on a CPU smaller parts gain nothing" if device.type == "cpu" else ""


def _plan(setup: Setup, model: nn.Module, tuned: Tuned | None) -> Plan:
    job, settings = setup.job, setup.settings
    way = tuned.way if tuned else _start(setup)
    reasons = tuned.reasons if tuned else {}
    by_rule = "by rule: nothing was measured"
    share = -(-(job.global_batch or 1) // setup.world.size)
    division = Division(job.num_samples or 1, job.global_batch or 1, way.micro_batch, setup.world.size)
    choices: dict[str, Choice[Any]] = {
        "distributed.strategy": Choice(
            value=setup.make_strategy().name,
            reason=settings.strategy.reason,
            alternatives=settings.strategy.alternatives,
        ),
        "precision.dtype": settings.precision,
        "batch.size": Choice(
            value=way.micro_batch,
            reason=reasons.get("micro_batch", "a rank's whole share of the global batch at once"),
            alternatives=_alternatives(tuned, lambda tried: f"{tried.micro_batch}"),
        ),
        "batch.accumulation": Choice(
            value=-(-share // way.micro_batch),
            reason=f"follows: {division.global_batch} samples per step on {setup.num_devices} device(s)",
        ),
        "compile.enabled": Choice(
            value=way.compile_mode is not None, reason=reasons.get("compile", by_rule if tuned is None else "as set")
        ),
        "data.channels_last": Choice(
            value="on" if way.channels_last else "off",
            reason=reasons.get(
                "memory_format", by_rule if has_convolutions(model) else "the model has no convolutions"
            ),
        ),
        "memory.activations": settings.activations,
        "data.num_workers": settings.num_workers,
        "data.prefetch_factor": Choice(
            value=settings.prefetch_factor.value or None, reason=settings.prefetch_factor.reason
        ),
    }
    measured = tuned.chosen if tuned else None
    step_seconds = measured.sample_seconds * share if measured else None
    return Plan(
        job=setup.name,
        global_batch=job.global_batch or 0,
        num_steps=job.num_steps,
        choices=choices,
        forecast=Forecast(
            memory=_memory(model, tuned, way),
            step_seconds=step_seconds,
            job_seconds=None if step_seconds is None or job.num_steps is None else step_seconds * job.num_steps,
        ),
        tried=tuned.tried if tuned else (),
        measured=tuned is not None,
    )


def _alternatives(tuned: Tuned | None, name: Callable[[Way], str]) -> tuple[str, ...]:
    if tuned is None:
        return ()
    base = tuned.way.model_copy(update={"micro_batch": 0})
    return tuple(
        f"{name(tried.way)}: {1 / tried.measurement.sample_seconds:,.0f} samples/s"
        for tried in tuned.tried
        if tried.way.model_copy(update={"micro_batch": 0}) == base
        and tried.way != tuned.way
        and not tried.measurement.problem
    )


def _memory(model: nn.Module, tuned: Tuned | None, way: Way) -> MemoryForecast:
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    parameters += sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if tuned is None or tuned.memory is None:
        return MemoryForecast(parameters=parameters, gradients=gradients)
    fixed = round(tuned.memory.fixed_bytes)
    return MemoryForecast(
        parameters=parameters,
        gradients=gradients,
        optimizer=max(0, fixed - parameters - gradients),
        activations=round(tuned.memory.sample_bytes * way.micro_batch),
        workspace=0,
    )


def _does_not_fit(setup: Setup, model: nn.Module) -> DrivetrainError:
    """What takes how much, and the ways out."""
    sizes = {
        name or type(model).__name__: sum(p.numel() * p.element_size() for p in module.parameters())
        for name, module in model.named_children()
    }
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    told = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in largest)
    return DrivetrainError(
        f"not even one sample at a time fits on {setup.world.device}: weights take {parameters / 1e9:.2f} GB ({told}), "
        f"gradients as much again, and AdamW twice as much on top",
        remedy="--activations recompute or offload, shorter sequences, or several GPUs",
    )

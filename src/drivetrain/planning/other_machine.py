"""Plans for a machine that is not here: by the rules and the memory of a simulated step, without measuring."""

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.value import PrecisionName, format_bytes
from drivetrain.hardware import Hardware
from drivetrain.hardware.catalogue import Machine
from drivetrain.job import Job
from drivetrain.plan import Choice, Pins, Settings, choose_settings
from drivetrain.plan.fitting import (
    LEAST_OF_PEAK,
    MOST_OF_PEAK,
    MemoryLayout,
    Needs,
    does_not_fit,
    first_that_fits,
    layouts,
    sample_seconds,
)
from drivetrain.plan.plan import Forecast, Plan
from drivetrain.run.job_settings import of_asked_length, refuse_other_batch
from drivetrain.run.memory import needs_of
from drivetrain.run.model_factory import checked, couples_samples, make_model, refuse_lazy

ACCURACY = (
    "memory is that of an eager step, by counting its tensors on shapes alone; compiled steps take less, and what "
    "kernels take inside themselves is left to the part of the memory that is not used"
)

PACE = (
    f"Time is by FLOPs, at {LEAST_OF_PEAK:.0%} to {MOST_OF_PEAK:.0%} of the data sheet's rate, which ResNet-50 and "
    "GPT-2 reach on an H200; reading data and validation are not in it."
)
NO_PACE = "No time is forecast: a step computes for less than a millisecond, and launching kernels takes most of it."
NO_RATE = "No time is forecast: the rate of such a GPU is not known."


def plan_elsewhere(job: Job, config: Config, machine: Machine, here: Hardware) -> Plan:
    """Return how the job would be run on so many GPUs of a kind, each choice with its reason."""
    job = of_asked_length(job, config)
    if job.num_samples is None:
        raise DrivetrainError(
            "data that can only be iterated cannot be planned for: its items would be used up",
            remedy="give data with a length and items by number",
        )
    settings = _settings(config, machine, here)
    num_gpus = len(settings.devices.value)
    strategy = settings.strategy
    if strategy.pinned and strategy.value not in {layout.strategy for layout in layouts(num_gpus)}:
        raise DrivetrainError(
            f"{strategy.value} on {machine} is not planned for another machine: no memory model knows it",
            remedy="leave --parallel-strategy out, or plan on that machine",
        )
    planned = None if config.batch_asked.is_set else config.plan_pins.global_batch
    by_rule = min(settings.effective_batch, job.num_samples)
    if config.batch_asked.is_set and job.default_batch is not None:
        asked = config.batch_asked
        by_rule = (asked.size or job.default_batch) * (asked.accumulation or 1) * num_gpus
    global_batch = job.largest_batch or planned or by_rule
    refuse_other_batch(config, global_batch)
    share, step_samples = -(-global_batch // num_gpus), job.samples_in_words(global_batch)
    fraction = config.memory.gpu_fraction
    limit = machine.gpus()[0].memory_free_bytes * fraction
    model, needs = _model_and_needs(job, here, settings.precision.value, share, limit)
    layout, micro_batch, why = _laid_out(needs, limit, num_gpus, share, settings, config, model)
    if layout is None:
        free = machine.gpus()[0].memory_free_bytes
        how_much = f"{format_bytes(limit)} to use ({format_bytes(free)} × {fraction:g})"
        raise does_not_fit(needs, limit, str(machine), how_much, num_gpus)
    peaks: dict[Any, Any] = machine.gpus()[0].peaks  # of FP8 none is tabled
    peak = peaks.get(settings.precision.value)
    pace = sample_seconds(
        needs.flops,
        0.0 if peak is None else peak.value * 1e12,
        num_gpus,
        global_batch,
        needs.held.gradients,
        recomputes=layout.recomputes,
    )
    return Plan(
        job=config.run.name or job.name,
        global_batch=global_batch,
        num_steps=job.num_steps if job.largest_batch else None,
        choices=_choices(settings, layout, micro_batch, why, share, step_samples, limit),
        machine=str(machine),
        forecast=Forecast(
            memory=layout.forecast(needs, micro_batch),
            sample_seconds_range=pace,
            num_samples=_samples_of(job, global_batch),
        ),
        notes=(
            f"For {machine}, by rule and memory model; nothing was measured there.",
            PACE if pace else NO_PACE if peak else NO_RATE,
            f"{ACCURACY[0].upper()}{ACCURACY[1:]}.",
            *needs.notes,
        ),
    )


def _samples_of(job: Job, global_batch: int) -> int | None:
    """Return how many samples the whole job trains on; None if that is not known."""
    if job.num_samples is None:
        return None
    by_epochs = None if job.epochs is None else job.epochs * job.num_samples
    by_steps = None
    if job.max_steps is not None and job.batch_sizes:
        by_steps = job.samples_between(0, job.max_steps)
    elif job.max_steps is not None:
        num_epochs, num_steps = divmod(job.max_steps, -(-job.num_samples // global_batch))
        by_steps = num_epochs * job.num_samples + num_steps * global_batch  # an epoch's last step may be smaller
    return min((each for each in (by_epochs, by_steps) if each is not None), default=None)


def _settings(config: Config, machine: Machine, here: Hardware) -> Settings:
    """Choose the settings of that machine by rule, regardless of which devices may be used on this one."""
    there = here.model_copy(update={"accelerator": "cuda", "gpus": machine.gpus(), "links": ()})
    pins = {**config.pins(), "gpu_mode": "auto", "device": "auto", "device_ids": None}
    return choose_settings(there, Pins(**pins))


def _model_and_needs(
    job: Job, here: Hardware, precision: PrecisionName, at_most: int, limit_bytes: float
) -> tuple[nn.Module, Needs]:
    """Make the model and simulate what a step needs.

    The model is made on the meta device if that works: it may be too large for this machine.
    """
    made = job.model
    if not isinstance(made, nn.Module):
        with suppress(Exception):  # whatever it is that looks at values
            with torch.device("meta"):
                model = checked(made()).train()
            return model, needs_of(job, model, precision, at_most, limit_bytes)
        torch.manual_seed(job.seed)
        made = make_model(made, here.memory.total_bytes)
    refuse_lazy(made)
    model = made.train()
    return model, needs_of(job, model, precision, at_most, limit_bytes)


def _laid_out(
    needs: Needs, limit: float, num_gpus: int, share: int, settings: Settings, config: Config, model: nn.Module
) -> tuple[MemoryLayout | None, int, str]:
    """Return the layout, the micro-batch, and the reason for them."""
    pinned = config.batch.size or (-(-share // config.batch.accumulation) if config.batch.accumulation else None)
    allowed = [layout for layout in layouts(num_gpus) if _is_allowed(layout, settings)]
    if pinned is not None:
        size = min(pinned, share)
        fitting = [layout for layout in allowed if layout.largest(needs, limit, size) >= size]
        return (fitting[0] if fitting else None), size, "asked for"
    if couples_samples(model):
        whole = first_that_fits(needs, limit, num_gpus, share)
        if whole is not None and whole in allowed:
            why = (
                "a rank's whole share: samples of a batch influence each other, so its size is part of what is learned"
            )
            return whole, share, why
    for layout in allowed:
        largest = layout.largest(needs, limit, share)
        if largest:
            # As equal as can be, in as few parts as fit.
            size = -(-share // -(-share // largest))
            return layout, size, f"the memory model lets up to {largest} of a rank's {share} fit"
    return None, 0, ""


def _is_allowed(layout: MemoryLayout, settings: Settings) -> bool:
    """Return whether a layout agrees with what the user pinned."""
    if settings.strategy.pinned and layout.strategy != settings.strategy.value:
        return False
    return not settings.activations.pinned or layout.recomputes == (settings.activations.value == "recompute")


def _choices(
    settings: Settings, layout: MemoryLayout, micro_batch: int, why: str, share: int, step_samples: str, limit: float
) -> dict[str, Choice[Any]]:
    num_gpus = len(settings.devices.value)
    is_whole = layout.is_whole
    strategy_reason = settings.strategy.reason if is_whole else f"whole copies do not fit: {layout}"
    if settings.strategy.pinned:
        strategy_reason = f"asked for: {layout}"
    recompute_reason = "the cheapest way that fits" if layout.recomputes else f"they fit in {format_bytes(limit)}"
    choices: dict[str, Choice[Any]] = {
        "distributed.strategy": Choice(
            value=layout.strategy,
            reason=strategy_reason,
            alternatives=settings.strategy.alternatives if is_whole else (),
            pinned=settings.strategy.pinned,
        ),
        "precision.dtype": settings.precision,
        "batch.size": Choice(value=micro_batch, reason=why, pinned=why == "asked for"),
        "batch.accumulation": Choice(
            value=-(-share // micro_batch), reason=f"follows: {step_samples} on {num_gpus} GPU(s)"
        ),
        "memory.activations": Choice(
            value="recompute" if layout.recomputes else "keep",
            reason="asked for" if settings.activations.pinned else recompute_reason,
            pinned=settings.activations.pinned,
        ),
    }
    if layout.offloads_optimizer:
        choices["deepspeed.offload_optimizer"] = Choice(value=True, reason="it does not fit on the GPUs")
    return choices

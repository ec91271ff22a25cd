"""Puts the plan of a run into words: each choice with its reason, what else was measured, and a forecast."""

from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.staging import has_room
from drivetrain.loop import why_not_here
from drivetrain.plan import Choice
from drivetrain.plan.fitting import num_bytes
from drivetrain.plan.forecast import FORWARD_SHARE
from drivetrain.plan.knobs import KNOBS, REMEDIES, KnobFacts, PlanningOutcome, StepWay, choices_of, settled_choices
from drivetrain.plan.plan import Forecast, LossPlan, MemoryForecast, Plan, PlannedRun
from drivetrain.plan.rules import DataPath
from drivetrain.plan.tune import IN_WORDS, Measurement, Tuned, plainest
from drivetrain.run.assemble import workers_by_rule
from drivetrain.run.model_factory import has_convolutions
from drivetrain.run.session import Session
from drivetrain.strategies.sharding import ROOT, forecast_local, layout_of


def facts_of(run: Session, model: nn.Module, planned: PlannedRun) -> KnobFacts:
    """Return what the table of planned choices may ask for."""
    return KnobFacts(
        way=planned.way,
        pinned=frozenset(run.pinned()),
        settings=run.settings,
        rank_samples=run.rank_samples,
        step_samples=run.job.samples_in_words(),
        num_devices=run.num_devices,
        num_devices_here=len(run.devices),
        world_size=run.world.size,
        on_gpu=run.world.device.type == "cuda",
        cpu_precisions=tuple(run.hardware.cpu.precisions),
        num_threads=torch.get_num_threads(),
        has_convolutions=has_convolutions(model),
        why_not_captured=why_not_here(
            run.world,
            asserts=run.config.device.assertions,
            is_asked_for=planned.way.capture or "capture" in run.pinned(),  # by an earlier start, or now
        ),
        why_micro_batch=planned.why_capped or planned.batch_size_found,
        num_units=_num_units(run, model),
    )


def _num_units(run: Session, model: nn.Module) -> int:
    """Return how many blocks a sharded model is gathered in."""
    if not run.shards:
        return 0
    return sum(unit.name != ROOT for unit in layout_of(model, shares_experts=run.experts is not None).units)


def described(
    run: Session,
    model: nn.Module,
    planned: PlannedRun,
    tuned: Tuned | None,
    why: str = "by rule: nothing was measured",
    data: Choice[DataPath] | None = None,
    *,
    is_closed: bool = False,
    notes: tuple[str, ...] = (),
    seconds: float = 0.0,
) -> Plan:
    """Return the plan of a run in words, each choice with its reason.

    `is_closed`: though nothing was measured now, it is known that nothing else would pay. `seconds`: what measuring
    took.
    """
    job, facts = run.job, facts_of(run, model, planned)
    outcome = PlanningOutcome(
        facts,
        is_measured=tuned is not None,
        why=why,
        reasons={**tuned.reasons, "repeat": planned.repeatability.reason} if tuned else {},
        alternatives={
            **{knob.field: _alternatives(tuned, knob.field) for knob in KNOBS},
            "repeat": _repeat_costs(planned),
        },
    )
    sharded_rest: Choice[Any] = Choice(value="fsdp", reason="asked for", pinned=True)
    choices = choices_of(
        outcome,
        before={"distributed.strategy": _strategy(run, model, planned.way)},
        after={
            **_data_choices(run, planned, data),
            **({} if run.experts is None else {"distributed.expert_rest": sharded_rest}),
        },
    )
    workers: Choice[Any] | None = choices.get("data.num_workers") if data is None else data
    plan = Plan(
        job=run.name,
        global_batch=job.largest_batch or 0,
        num_steps=job.num_steps,
        choices=choices,
        forecast=_forecast(run, model, planned, tuned),
        tried=tuned.tried if tuned else (),
        measured=tuned is not None,
        notes=notes if tuned else (why,),
        seconds=seconds,
        loss=_loss(run),
        repeatable=planned.repeatability,
        settled={each.setting: why for each in REMEDIES} if is_closed else settled_choices(outcome, workers),
    )
    is_in_vain = planned.way.capture and facts.why_not_captured
    return plan.not_captured(facts.why_not_captured) if is_in_vain else plan


def _forecast(run: Session, model: nn.Module, planned: PlannedRun, tuned: Tuned | None) -> Forecast:
    """Forecast memory and time from what was measured."""
    chosen, num_steps = tuned.chosen if tuned else None, run.job.num_steps
    step_seconds = chosen.sample_seconds * run.rank_samples if chosen and not chosen.problem else None
    job_seconds = None
    if step_seconds is not None and num_steps is not None:
        job_seconds = step_seconds * run.job.samples_between(0, num_steps) / (run.job.largest_batch or 1)
    validation_seconds = None if job_seconds is None else _validation_seconds(run, tuned)
    is_held_known = chosen is not None and chosen.parameter_bytes > 0
    return Forecast(
        memory=_memory_of_shards(run, model)
        if run.shards and not is_held_known
        else _memory(model, tuned, planned.way),
        peak_bytes=(tuned.forecast_bytes or None) if tuned else None,
        measured_peak_bytes=_verified(tuned),
        run_peak_bytes=_run_peak(run, chosen),
        step_seconds=step_seconds,
        job_seconds=None if job_seconds is None else job_seconds + (validation_seconds or 0.0),
        validation_seconds=validation_seconds,
    )


def _loss(run: Session) -> LossPlan | None:
    """Return how losses are weighted, where that was examined."""
    found = run.weighting
    if not found.reason:
        return None
    return LossPlan(weighting=str(found), why=found.reason, division_is_kept_because=found.holds_division)


def _repeat_costs(planned: PlannedRun) -> tuple[str, ...]:
    """Return what other kernels would cost, where that was measured."""
    return tuple(
        f"{IN_WORDS[trial.way.repeat]}: {100 * trial.cost:+.1f} %"
        for trial in planned.repeatability.trials
        if trial.cost is not None and trial.way != planned.way
    )


def _validation_seconds(run: Session, tuned: Tuned | None) -> float | None:
    """Estimate the seconds of all validations of the job: they are neither compiled nor captured, as steps may be."""
    job = run.job
    num_validations = job.num_epochs
    if job.valid_every is not None and job.num_steps is not None:
        num_validations = -(-job.num_steps // job.valid_every)  # the end is always validated
    if tuned is None or job.valid is None or num_validations is None:
        return None
    eager = tuned.measurement_of(tuned.way.but(compile_mode=None, capture=False))
    measured = tuned.chosen if eager is None or eager.problem else eager
    if measured is None or measured.problem:
        return None
    samples = sum(-(-len(source.dataset) // run.world.size) for source in job.valid_sets.values())
    return measured.sample_seconds * FORWARD_SHARE * samples * num_validations


def _data_choices(run: Session, planned: PlannedRun, data: Choice[DataPath] | None) -> dict[str, Choice[Any]]:
    """Return how samples reach the device: as measured, else as it is now, else by rule."""
    if data is not None and data.value.resident:
        return {"data.resident": Choice(value="on", reason=data.reason, alternatives=data.alternatives)}
    if data is None and (run.residency.num_bytes or _will_be_resident(run, planned)):
        is_asked = run.config.data.resident == "on"
        reason = "asked for" if is_asked else "it is in memory already, and fits on the device"
        return {"data.resident": Choice(value="on", reason=reason, pinned=is_asked)}
    workers, ahead, wishes = run.settings.num_workers, run.settings.prefetch_factor, run.job.source.wishes
    if data is None and run.config.data.num_workers < 0:
        workers = workers_by_rule(run, run.job.source)
        if workers.value and wishes.num_workers is not None and run.config.data.prefetch_factor is None:
            own = wishes.prefetch_factor
            ahead = Choice(value=own or ahead.value or 2, reason="the DataLoader's own" if own else "as torch does")
    if data is not None:
        workers = Choice(value=data.value.num_workers, reason=data.reason, alternatives=data.alternatives)
        ahead = Choice(value=data.value.prefetch_factor, reason="by how evenly batches are read")
    return {
        "data.num_workers": workers,
        "data.prefetch_factor": Choice(value=ahead.value or None, reason=ahead.reason),
    }


def _will_be_resident(run: Session, planned: PlannedRun) -> bool:
    path = None if planned.data_path is None else planned.data_path.resident
    job, channels_last = run.job, planned.way.channels_last
    return run.residency.is_expected(job.source, job.collate, channels_last=channels_last, planned=path)


def _strategy(run: Session, model: nn.Module, way: StepWay) -> Choice[str]:
    if run.shards:
        layout = layout_of(model, shares_experts=run.experts is not None, unit_blocks=way.unit_blocks)
        reason = f"{run.strategy_choice.reason}; {layout.in_words()}"
        return run.strategy_choice.model_copy(update={"reason": reason})
    if not run.is_whole:
        return run.strategy_choice
    name, by_rule = run.strategy_choice.value, run.settings.strategy
    # The rule counts GPUs; what counts in the end is how many processes there are.
    chosen = by_rule if run.world.size == 1 and name == by_rule.value else run.strategy_choice
    return Choice(value=name, reason=chosen.reason, alternatives=chosen.alternatives)


def _alternatives(tuned: Tuned | None, field: str) -> tuple[str, ...]:
    """Return what was measured that differs from the chosen way in this field alone."""
    if tuned is None:
        return ()
    return tuple(
        f"{_value_in_words(getattr(tried.way, field))}: {1 / tried.measurement.sample_seconds:,.0f} samples/s"
        for tried in tuned.tried
        if tried.way != tuned.way
        and tried.way.but(**{field: getattr(tuned.way, field)}) == tuned.way
        and not tried.measurement.problem
        and not tried.measurement.is_brief
    )


def _value_in_words(value: Any) -> str:
    """Return a value of a field as its setting has it: a choice of True and False is on or off."""
    return "on" if value is True else str(value or "off")


def _memory_of_shards(run: Session, model: nn.Module) -> MemoryForecast:
    """Forecast the memory of rank 0, whose shard is never the smaller one, with as many experts as any rank has.

    Blocks that are gathered in turn count as workspace.
    """
    rows = None if run.experts is None else run.experts.num_rows(run.experts.fullest_rank)
    num_ranks = run.world.size // run.config.distributed.fsdp_replicas  # that share a copy
    held = forecast_local(model, run.job.make_optimizer, max(1, num_ranks), 0, rows)
    if held is None:
        return MemoryForecast(parameters=0, gradients=0)
    return MemoryForecast(parameters=held.parameters + held.buffers, gradients=held.gradients, optimizer=held.optimizer)


def _verified(tuned: Tuned | None) -> int | None:
    """Return the measured peak of the step whose memory was forecast."""
    if tuned is None or not tuned.forecast_bytes:
        return None
    plain = tuned.measurement_of(plainest(tuned.way))
    return None if plain is None else plain.peak_bytes or None


def _run_peak(run: Session, chosen: Measurement | None) -> int | None:
    """Return the peak of the run, with the copy that background saves make of the state if there is room for it."""
    if chosen is None or not chosen.peak_bytes:
        return None
    beside = run.residency.num_bytes
    state = chosen.parameter_bytes + chosen.optimizer_bytes
    if run.config.checkpoint.async_save and has_room(run.world.device, state + chosen.peak_bytes + beside):
        beside += state
    return chosen.peak_bytes + beside


def _memory(model: nn.Module, tuned: Tuned | None, way: StepWay) -> MemoryForecast:
    chosen = tuned.chosen if tuned else None
    if chosen is None or not chosen.parameter_bytes:
        return MemoryForecast(
            parameters=num_bytes([*model.parameters(), *model.buffers()]),
            gradients=num_bytes(parameter for parameter in model.parameters() if parameter.requires_grad),
        )
    fixed = chosen.parameter_bytes + chosen.gradient_bytes + chosen.optimizer_bytes
    line = tuned.memory if tuned else None
    activations = None if line is None else round(line.sample_bytes * way.micro_batch)
    return MemoryForecast(
        parameters=chosen.parameter_bytes,
        gradients=chosen.gradient_bytes,
        optimizer=chosen.optimizer_bytes,
        activations=activations,
        workspace=None if activations is None else max(0, chosen.peak_bytes - fixed - activations),
    )

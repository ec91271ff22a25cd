"""A plan: how a job would be run here, each choice with its reason and what else was measured, and what it would take.

As text it is YAML, in a run's folder and from `drivetrain plan --out`; `drivetrain train X --plan FILE` pins all of it.

What was measured of a job on this machine is cached for its next start. Measurements are kept, not the decision: a
longer job, or a device with less free memory, decides again from the same figures, and only what is missing is
measured. A file belongs to a key of all that the figures depend on.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from drivetrain.core.run_folder import write_atomically, yaml_text
from drivetrain.core.value import Value
from drivetrain.plan.forecast import TimeForecast
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.rules import Choice, DataPath
from drivetrain.plan.tune import Repeatability, Tried

NOT_MEASURED = Repeatability(reason="nothing was measured")


class MemoryForecast(Value):
    """The forecast memory in bytes, on the device that holds the most. What is not known is None."""

    parameters: int
    gradients: int
    optimizer: int | None = None
    activations: int | None = None
    workspace: int | None = None

    @property
    def total(self) -> int | None:
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.workspace)
        return None if None in parts else sum(part for part in parts if part is not None)


class Forecast(Value):
    memory: MemoryForecast
    peak_bytes: int | None = None  # of a step, from smaller ones, before one of this size was run; uncompiled
    measured_peak_bytes: int | None = None  # what it then took
    run_peak_bytes: int | None = None  # of the whole run: the chosen step, and what is kept beside it
    step_seconds: float | None = None  # None: nothing was measured
    job_seconds: float | None = None  # of the whole job: its steps and validations, without its hooks
    time: TimeForecast | None = None  # of a machine that is not here
    num_samples: int | None = None  # of the whole job, for a machine that is not here
    validation_seconds: float | None = None  # of these: an estimate, by what part of a step a forward is; None: none


class LossPlan(Value):
    """The way scalar losses of micro-batches are combined: reported here, but decided by the job, not by the plan."""

    weighting: str
    why: str
    division_is_kept_because: str = ""


class Plan(Value):
    job: str
    global_batch: int
    num_steps: int | None
    choices: dict[str, Choice[Any]]  # by the name of the setting that pins it
    forecast: Forecast
    tried: tuple[Tried, ...] = ()  # what was measured, in that order
    measured: bool = False
    machine: str = ""  # that it is for, where that is not this one: by rule and memory model
    seconds: float = 0.0  # what planning took
    notes: tuple[str, ...] = ()
    loss: LossPlan | None = None
    repeatable: Repeatability = NOT_MEASURED  # whether steps repeat to the bit
    settled: dict[str, str] = Field(default_factory=dict)  # why a remedy is not to be advised, by its setting

    def as_plain(self) -> dict[str, Any]:
        """Return the plan as it is written: values with their reasons, and each way that was tried in a line."""
        return {
            "planned": self._how(),
            "planning_seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "choices": {
                name: {
                    "value": "auto" if choice.value is None else choice.value,
                    "why": choice.reason,
                    **({"else": list(choice.alternatives)} if choice.alternatives else {}),
                }
                for name, choice in self.choices.items()
            },
            **({} if self.loss is None else {"loss": self.loss.model_dump(mode="json", exclude_defaults=True)}),
            "repeatable": self.repeatable.as_plain(),
            "forecast": self.forecast.model_dump(mode="json", exclude_none=True),
            "tried": [
                {
                    "way": str(tried.way),
                    **tried.measurement.model_dump(mode="json", exclude_defaults=True),
                }
                for tried in self.tried
            ],
        }

    def not_captured(self, why: str) -> Self:
        """Return the same plan, where it turned out that steps cannot be captured."""
        name = "kernels.capture"
        asked = self.choices[name]
        if asked.value == "off":
            return self
        choice = asked.model_copy(update={"value": "off", "reason": f"{asked.reason}, but {why}"})
        changes = {"choices": {**self.choices, name: choice}, "settled": {**self.settled, name: why}}
        return self.model_copy(update=changes)

    def capped(self, micro_batch: int, accumulation: int, why: str) -> Self:
        """Return the same plan with smaller micro-batches, since larger ones ran out of memory."""
        values = {"batch.size": micro_batch, "batch.accumulation": accumulation}
        changed = {
            name: self.choices[name].model_copy(update={"value": value, "reason": why})
            for name, value in values.items()
            if name in self.choices
        }
        settled = {**self.settled, "batch.size": why}
        return self.model_copy(update={"choices": {**self.choices, **changed}, "settled": settled})

    def not_compiled(self, why: str) -> Self:
        """Return the same plan, where it turned out that nothing can be compiled here."""
        choices = {
            name: choice for name, choice in self.choices.items() if name not in ("compile.mode", "compile.scope")
        }
        asked = choices["compile.enabled"]
        choices["compile.enabled"] = asked.model_copy(
            update={"value": False, "reason": f"{asked.reason}, but nothing can be compiled here: {why}"}
        )
        settled = {**self.settled, "compile.enabled": f"nothing can be compiled here: {why}"}
        return self.model_copy(update={"choices": choices, "settled": settled})

    def compiled_from(self, num_steps: int, why: str) -> Self:
        """Return the same plan, where it is settled after how many eager steps compiled ones follow."""
        name = "compile.from_step"
        if name not in self.choices:
            return self
        choice = self.choices[name].model_copy(update={"value": num_steps, "reason": why})
        return self.model_copy(update={"choices": {**self.choices, name: choice}})

    def _how(self) -> str:
        if self.machine:
            return f"for {self.machine}, by rule and memory model; nothing was measured there"
        return "measured on this machine" if self.measured else "by rule"

    def to_yaml(self) -> str:
        head = f"# The plan for {self.job}. `drivetrain train … --plan` takes this file.\n"
        facts = {"job": self.job, "global_batch": self.global_batch, "num_steps": self.num_steps}
        return head + yaml_text({**facts, **self.as_plain()}, width=120, explicit_end=True)


@dataclass(frozen=True)
class PlannedRun:
    """What a run follows: how its steps are run, how its samples are fetched, and what was found out about both.

    Until there is a plan it holds what follows by rule. Planning returns another one and changes nothing.
    """

    way: StepWay
    data_path: DataPath | None = None  # by measuring; None: by rule
    repeatability: Repeatability = NOT_MEASURED  # whether steps repeat to the bit
    batch_size_found: str = ""  # what --auto-batch-size measured, in words
    keeps_micro_batch: bool = False  # whether the division of a checkpoint is kept, in another world
    why_capped: str = ""  # why micro-batches are smaller than planned: an earlier start was out of memory
    why_not_compiled: str = ""  # why nothing is compiled though it was asked for
    plan: Plan | None = None  # all of it with the reasons; None before planning, and for loops that plan nothing

    def but(self, **changes: Any) -> "PlannedRun":
        """Return a copy in which some fields of the way differ."""
        return replace(self, way=self.way.but(**changes))

    def compiled_from(self, num_steps: int, why: str) -> "PlannedRun":
        """Return a copy in which it is settled after how many eager steps compiled ones follow."""
        plan = None if self.plan is None else self.plan.compiled_from(num_steps, why)
        return replace(self.but(compiled_from=num_steps), plan=plan)

    def not_captured(self, why: str) -> "PlannedRun":
        """Return a copy for steps that turned out not to be capturable."""
        return replace(self.but(capture=False), plan=None if self.plan is None else self.plan.not_captured(why))

    def not_compiled(self, why: str) -> "PlannedRun":
        """Return a copy for a machine on which nothing can be compiled."""
        plan = None if self.plan is None else self.plan.not_compiled(why)
        return replace(self.but(compile_mode=None), why_not_compiled=why, plan=plan)


_SAME_STEP = ("world_size", "num_devices", "micro_batch", "global_batch", "strategy", "precision", "device", "way")


def with_earlier_reasons(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resumed run's plan with the reasons, measurements and forecast of the plan that it keeps.

    Nothing is measured when a run goes on: of a choice it only knows that it is as in the checkpoint, which its notes
    say, too.

    Args:
        now: The plan of this start, as `plan.yaml` has it.
        before: That of the start before; empty for a new run.
    """
    told, notes, earlier = dict(now), now.get("notes") or (), before.get("choices")
    if isinstance(earlier, dict) and "choices" in now:
        told["choices"] = {
            name: old
            if choice["why"] in notes and isinstance(old := earlier.get(name), dict) and old["value"] == choice["value"]
            else choice
            for name, choice in now["choices"].items()
        }
    if before.get("tried") and not now.get("tried") and all(now.get(it) == before.get(it) for it in _SAME_STEP):
        told |= {name: before[name] for name in ("planned", "planning_seconds", "forecast", "tried") if name in before}
    return told


class Repeated(Value):
    """The result of testing whether a way repeats: the way that was followed then, and why."""

    chosen: StepWay
    followed: StepWay
    found: Repeatability


class _File(Value):
    format: int = 1
    tried: tuple[Tried, ...] = ()
    repeats: tuple[Repeated, ...] = ()


def key_of_facts(facts: Mapping[str, Any]) -> str:
    """Return a short name for everything that the figures depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


class PlanCache:
    """One cache file. A folder that cannot be written, or a file that cannot be read, is the same as an empty one."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / f"{key}.json"
        self.journal = folder / f"{key}.probes.jsonl"

    def read(self) -> tuple[Tried, ...]:
        return self._read().tried

    def repeated(self, chosen: StepWay) -> Repeated | None:
        """Return what was found about this way at an earlier start."""
        return next((each for each in self._read().repeats if each.chosen == chosen), None)

    def _read(self) -> _File:
        try:
            found = _File.from_json(self.path.read_bytes())
        except (OSError, ValueError):
            return _File()
        return found if found.format == 1 else _File()

    def write(self, tried: Iterable[Tried]) -> None:
        """Write the file whole or not at all. Ways that ran out of memory are kept, too: they are not tried again."""
        self._write(_File(tried=tuple(tried), repeats=self._read().repeats))

    def write_repeated(self, repeated: Repeated) -> None:
        before = self._read()
        others = tuple(each for each in before.repeats if each.chosen != repeated.chosen)
        self._write(before.model_copy(update={"repeats": (*others, repeated)}))

    def _write(self, file: _File) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, file.to_json(), f".{os.getpid()}")

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

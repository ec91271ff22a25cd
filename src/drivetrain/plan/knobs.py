"""The table of planned choices ("knobs"): a row for each part of how a step is run, which the planner decides.

A row says which settings pin the choice, what it is by rule, which values are worth measuring, and how a plan tells it.
Everything else loops over the table. Rows name settings by their dotted names and get their values through `Read`,
since `plan` and `config` do not know each other. CONTRIBUTING.md shows how to add a row.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from drivetrain.core.value import PrecisionName, Value, format_count
from drivetrain.plan.rules import Choice, Settings

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
# What is compiled as one: the whole loss function with the model inside, or each of the blocks that a model repeats.
# Blocks of a kind share their kernels, so the compiler is done many times sooner.
CompileScope = Literal["loss", "blocks", "both"]  # both: block by block, and the loss function around them
# Which kernels may be used: `off` any, the fastest; `fixed` none that is chosen by timing, and of cuDNN only
# deterministic ones; `strict` torch's deterministic algorithms, and recurrent dropout outside cuDNN.
Repeat = Literal["off", "fixed", "strict"]

LEAST_GAIN = 0.03  # below this a difference is noise, or not worth a change
LEAST_GAIN_OF_BF16 = 0.2  # on a CPU, against fp32, which rounds less
ASKED_FOR = "asked for"


class StepWay(Value):
    """The way in which the work of a step is done. It does not change what is learned, rounding aside.

    Each field has a row in `KNOBS`.
    """

    micro_batch: int
    precision: PrecisionName = "fp32"
    compile_mode: CompileMode | None = None
    compile_scope: CompileScope = "loss"
    channels_last: bool = False
    recompute: bool = False
    capture: bool = False
    num_threads: int | None = None  # on a CPU; None: as torch has it
    repeat: Repeat = "off"
    reshard: bool = True  # whether a sharded unit's weights are freed between its forward and its backward
    unit_blocks: int = 1  # of a sharded model, that are gathered together
    gather_ahead: int = 0  # units of a sharded model, while another one computes; 0: as torch does it
    compiled_from: int | None = 0  # the number of steps that run eagerly before compiled ones; None: until it is ready

    def __str__(self) -> str:
        return ", ".join(filter(None, (knob.in_words(getattr(self, knob.field)) for knob in KNOBS)))

    @property
    def splits_recurrent_dropout(self) -> bool:
        """Whether dropout between recurrent layers is computed outside cuDNN, whose own waits for the device."""
        return self.capture or self.repeat == "strict"

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss function is compiled, with the model or with what is around its blocks."""
        return self.compile_mode is not None and self.compile_scope != "blocks"

    @property
    def compiles_blocks(self) -> bool:
        """Whether each repeated block of the model is compiled by itself."""
        return self.compile_mode is not None and self.compile_scope != "loss"

    @property
    def draws_as_eager(self) -> bool:
        """Whether compiled code has to draw the random numbers that eager code draws: a run has steps of both."""
        return self.compiled_from != 0

    @model_validator(mode="before")
    @classmethod
    def _without_compiling(cls, values: Any) -> Any:
        """Drop what only compiled steps have, where steps are not compiled."""
        if isinstance(values, dict) and values.get("compile_mode") is None:
            return {**values, "compile_scope": "loss", "compiled_from": 0}
        return values

    def but(self, **changes: object) -> "StepWay":
        return StepWay.model_validate({**self.model_dump(), **changes})


Read = Callable[[str], Any]  # returns the value of a setting by its dotted name, such as `kernels.capture`


@dataclass(frozen=True)
class Asked:
    """What a way by rule follows from: the configuration, and what the rules made of it."""

    read: Read
    settings: Settings
    rank_samples: int  # of each step, on the rank that has the most
    num_devices: int  # of this process


@dataclass(frozen=True)
class KnobFacts:
    """What is known of a run, its model and its machine when ways of running a step are compared and told."""

    way: StepWay  # that is followed
    pinned: frozenset[str]  # fields of a way that the user fixed
    settings: Settings
    rank_samples: int  # of each step, on the rank that has the most
    step_samples: str  # of each step over all devices, in words
    num_devices: int  # of the whole run
    num_devices_here: int  # of this process
    world_size: int
    on_gpu: bool
    cpu_precisions: tuple[str, ...]
    num_threads: int  # that torch uses by itself
    has_convolutions: bool
    why_not_captured: str  # empty: nothing here prevents a CUDA graph
    why_micro_batch: str  # that --auto-batch-size found, or that ran out of memory; empty: neither
    num_units: int = 0  # blocks that are gathered in turn; 0: the model is not sharded, or has no blocks


class Others(Value):
    """The values of a choice to measure, besides the one to start with."""

    values: tuple[Any, ...] = ()
    why_none: str = ""  # where there are none, and that is told
    least_gain: float = LEAST_GAIN  # for which one is taken


@dataclass(frozen=True)
class PlanningOutcome:
    """How planning went, for the words of a plan."""

    facts: KnobFacts
    is_measured: bool
    why: str  # nothing was measured
    reasons: Mapping[str, str]  # what measuring decided, by field
    alternatives: Mapping[str, tuple[str, ...]]  # what else was measured, by field

    @property
    def way(self) -> StepWay:
        return self.facts.way

    def reason(self, field: str, otherwise: str = "as set") -> str:
        """Return why a field has its value; `otherwise` where other fields were measured and this one was not."""
        if field in self.facts.pinned:
            return ASKED_FOR
        return self.reasons.get(field, otherwise if self.is_measured else self.why)


@dataclass(frozen=True)
class PlanLine:
    """A line of `choices` in plan.yaml: the setting that pins it, and its value with the reason; None: no line."""

    setting: str
    choice: Callable[[PlanningOutcome], Choice[Any] | None]


# When a choice is decided, in this order: by memory; by comparing, always or if steps are short; CUDA graphs;
# compiling; what repeats to the bit. `compare` needs a row and nothing else; `tune` and `repeat` know the others.
Stage = Literal["fit", "compare", "compare_short", "capture", "compile", "repeat"]


def _nothing(facts: KnobFacts) -> Others:
    return Others()


@dataclass(frozen=True)
class Knob:
    """A planned choice: one part of how a step is run. What a row leaves out suits a choice of auto, on and off."""

    field: str  # of `StepWay`
    settings: tuple[str, ...]  # that pin it, by dotted name; advice names the first
    words: str  # its name in messages
    in_words: Callable[[Any], str]  # a value in the description of a way; empty: not mentioned
    by_rule: Callable[[Asked], Any] | None = None  # its value where nothing is measured; None: on if the setting is
    stage: Stage = "compare"
    others: Callable[[KnobFacts], Others] = _nothing  # what to measure, where it is not pinned
    pinned_by: Callable[[Read], bool] | None = None  # None: where one of its settings is neither `auto` nor None
    told: tuple[PlanLine, ...] = ()  # its lines in plan.yaml; empty: on or off, under its setting
    changes_memory: bool = True

    def rule(self, asked: Asked) -> Any:
        """Return the value where nothing is measured."""
        return asked.read(self.settings[0]) == "on" if self.by_rule is None else self.by_rule(asked)

    def is_pinned(self, read: Read) -> bool:
        """Return whether the user fixed this choice."""
        if self.pinned_by is not None:
            return self.pinned_by(read)
        return any(read(name) not in (None, "auto") for name in self.settings)

    @property
    def lines(self) -> tuple[PlanLine, ...]:
        """The lines in plan.yaml."""
        return self.told or (PlanLine(self.settings[0], self._tell),)

    def _tell(self, outcome: PlanningOutcome) -> Choice[Any]:
        return Choice(
            value="on" if getattr(outcome.way, self.field) else "off",
            reason=outcome.reason(self.field, self.others(outcome.facts).why_none or "as set"),
            alternatives=outcome.alternatives[self.field],
        )


# Micro-batch


def _micro_batch(asked: Asked) -> int:
    """Return the user's micro-batch, else a rank's whole share at once."""
    share, size, accumulation = asked.rank_samples, asked.read("batch.size"), asked.read("batch.accumulation")
    if asked.read("batch.auto"):
        return share
    if size:
        return int(min(size * asked.num_devices, share))
    if accumulation:
        return int(-(-share // accumulation))
    return share


def _tell_micro_batch(outcome: PlanningOutcome) -> Choice[int]:
    facts, whole = outcome.facts, "a rank's whole share of the global batch at once"
    return Choice(
        value=outcome.way.micro_batch // facts.num_devices_here or 1,
        reason=facts.why_micro_batch or outcome.reason("micro_batch", whole),
        alternatives=outcome.alternatives["micro_batch"],
    )


def _tell_accumulation(outcome: PlanningOutcome) -> Choice[int]:
    facts = outcome.facts
    return Choice(
        value=-(-facts.rank_samples // outcome.way.micro_batch),
        reason=f"follows: {facts.step_samples} on {facts.num_devices} device(s)",
    )


# Precision


def _other_precisions(facts: KnobFacts) -> Others:
    """Return the precisions that may beat the rule's: casting costs small models more than it gains, on a GPU too."""
    now = facts.way.precision
    if facts.way.repeat == "strict":
        return Others()
    if facts.on_gpu:
        return Others(values=() if now in ("fp32", "tf32") else ("tf32",))
    is_free = now == "fp32" and "bf16" in facts.cpu_precisions
    return Others(values=("bf16",) if is_free else (), least_gain=LEAST_GAIN_OF_BF16)


def _tell_precision(outcome: PlanningOutcome) -> Choice[str]:
    by_rule, tried = outcome.facts.settings.precision, outcome.reasons.get("precision", "")
    reason = by_rule.reason
    if outcome.way.precision != by_rule.value:
        reason = tried if outcome.is_measured else outcome.why
    elif tried and not tried.startswith("not tried"):
        reason = f"{by_rule.reason}; {tried}"
    return Choice(
        value=outcome.way.precision,
        reason=_asked(by_rule) if "precision" in outcome.facts.pinned else reason,
        alternatives=outcome.alternatives["precision"] or by_rule.alternatives,
    )


def _asked(by_rule: Choice[Any]) -> str:
    """Return the reason of what the user fixed, with what the rule says of it."""
    return by_rule.reason if by_rule.reason.startswith(ASKED_FOR) else ASKED_FOR


# Compiling


def _tell_compiling(outcome: PlanningOutcome) -> Choice[bool]:
    return Choice(
        value=outcome.way.compile_mode is not None,
        reason=outcome.reason("compile_mode"),
        alternatives=outcome.alternatives["compile_mode"],
    )


def _tell_compile_mode(outcome: PlanningOutcome) -> Choice[str] | None:
    mode = outcome.way.compile_mode
    return None if mode is None else Choice(value=mode, reason="how it is compiled")


_COMPILED_AS_ONE: dict[CompileScope, str] = {
    "loss": "the loss function with the model inside",
    "blocks": "each repeated block by itself",
    "both": "each repeated block by itself, and the loss function around them",
}


def _tell_compile_scope(outcome: PlanningOutcome) -> Choice[str] | None:
    if outcome.way.compile_mode is None:
        return None
    is_sharded = outcome.facts.num_units > 0  # gathering stays outside of what is compiled
    what = _COMPILED_AS_ONE["blocks" if is_sharded else outcome.way.compile_scope]
    asked = ASKED_FOR if "compile_scope" in outcome.facts.pinned else outcome.reasons.get("compile_scope", "")
    return Choice(value=outcome.way.compile_scope, reason=f"{what}{f'; {asked}' if asked else ''}")


def _compiled_from(asked: Asked) -> int | None:
    step = asked.read("compile.from_step")
    return None if step == "ready" else int(step or 0)


def _tell_compiled_from(outcome: PlanningOutcome) -> Choice[Any] | None:
    step = outcome.way.compiled_from
    if step == 0:
        return None
    if step is None:
        return Choice(value="ready", reason=f"{ASKED_FOR}: steps are eager until another process has compiled them")
    return Choice(value=step, reason=f"the first {step:,} steps are eager, and those after them compiled")


# CUDA graphs


def _whether_to_capture(facts: KnobFacts) -> Others:
    return Others(values=() if facts.why_not_captured else (True,), why_none=facts.why_not_captured)


# Memory format


def _tell_channels_last(outcome: PlanningOutcome) -> Choice[str]:
    has_any = outcome.facts.has_convolutions
    return Choice(
        value="on" if outcome.way.channels_last else "off",
        reason=outcome.reason("channels_last") if has_any else "the model has no convolutions",
    )


# Activations


def _tell_activations(outcome: PlanningOutcome) -> Choice[str]:
    by_rule = outcome.facts.settings.activations
    return Choice(
        value="recompute" if outcome.way.recompute else by_rule.value,
        reason=outcome.reasons.get("recompute", by_rule.reason),
        alternatives=by_rule.alternatives,
    )


# Threads


def _other_thread_counts(facts: KnobFacts) -> Others:
    """Return the thread counts to try: small layers lose more by sharing their work than they gain."""
    is_free = not facts.on_gpu and facts.world_size == 1 and facts.num_threads > 1
    return Others(values=(1,) if is_free else ())


def _tell_threads(outcome: PlanningOutcome) -> Choice[int] | None:
    number = outcome.way.num_threads
    if outcome.facts.on_gpu or (number is None and "num_threads" not in outcome.reasons):
        return None
    return Choice(value=number or outcome.facts.num_threads, reason=outcome.reason("num_threads", "as torch has it"))


# Kernels that repeat


def _repeat_asked(read: Read) -> Repeat | None:
    """Return which kernels the user asked for; None where that is to be measured."""
    if read("kernels.deterministic"):
        return "strict"
    asked: Repeat | Literal["auto"] = read("kernels.repeatable")
    return None if asked == "auto" else asked


def _tell_repeat(outcome: PlanningOutcome) -> Choice[str]:
    found = outcome.reasons["repeat"] if outcome.is_measured else outcome.why
    return Choice(
        value=outcome.way.repeat,
        reason=f"{ASKED_FOR}; {found}" if "repeat" in outcome.facts.pinned else found,
        alternatives=outcome.alternatives["repeat"],
    )


# Sharded models


def _of_units(*values: Any) -> Callable[[KnobFacts], Others]:
    """Return what to measure of a choice that only a model of several sharded blocks has."""
    return lambda facts: Others(values=values if facts.num_units > 1 and facts.world_size > 1 else ())


def _tell_units(field: str) -> Callable[[PlanningOutcome], Choice[Any] | None]:
    def tell(outcome: PlanningOutcome) -> Choice[Any] | None:
        if not outcome.facts.num_units:
            return None
        value = getattr(outcome.way, field)
        value = ("on" if value else "off") if isinstance(value, bool) else value
        return Choice(value=value, reason=outcome.reason(field), alternatives=outcome.alternatives[field])

    return tell


# In the order in which a way is described.
KNOBS: tuple[Knob, ...] = (
    Knob(
        field="precision",
        settings=("precision.dtype", "precision.mixed"),
        words="precision",
        in_words=str,
        by_rule=lambda asked: asked.settings.precision.value,
        stage="compare_short",
        others=_other_precisions,
        told=(PlanLine("precision.dtype", _tell_precision),),
    ),
    Knob(
        field="micro_batch",
        settings=("batch.size", "batch.accumulation"),
        words="micro-batch",
        in_words=lambda size: f"micro-batch {size}",
        by_rule=_micro_batch,
        stage="fit",
        pinned_by=lambda read: bool(read("batch.size") or read("batch.accumulation")) and not read("batch.auto"),
        told=(PlanLine("batch.size", _tell_micro_batch), PlanLine("batch.accumulation", _tell_accumulation)),
    ),
    Knob(
        field="compile_mode",
        settings=("compile.enabled", "compile.mode"),
        words="compiling",
        in_words=lambda mode: f"compiled ({mode})" if mode else "eager",
        by_rule=lambda asked: asked.read("compile.mode") if asked.read("compile.enabled") else None,
        stage="compile",
        others=lambda facts: Others(values=("default",)),
        pinned_by=lambda read: read("compile.enabled") is not None,
        told=(PlanLine("compile.enabled", _tell_compiling), PlanLine("compile.mode", _tell_compile_mode)),
    ),
    Knob(
        field="compile_scope",
        settings=("compile.scope",),
        words="what is compiled as one",
        in_words=lambda scope: {"blocks": "block by block", "both": "blocks and the rest"}.get(scope, ""),
        by_rule=lambda asked: "loss" if asked.read("compile.scope") == "auto" else asked.read("compile.scope"),
        stage="compile",
        told=(PlanLine("compile.scope", _tell_compile_scope),),
    ),
    Knob(
        field="compiled_from",
        settings=("compile.from_step",),
        words="the step from which compiled code is used",
        in_words=lambda step: {None: "from when it is ready", 0: ""}.get(step, f"from step {(step or 0) + 1}"),
        by_rule=_compiled_from,
        stage="compile",
        told=(PlanLine("compile.from_step", _tell_compiled_from),),
    ),
    Knob(
        field="capture",
        settings=("kernels.capture",),
        words="capturing",
        in_words=lambda is_on: "captured" if is_on else "",
        stage="capture",
        others=_whether_to_capture,
    ),
    Knob(
        field="channels_last",
        settings=("data.channels_last",),
        words="memory format",
        in_words=lambda is_on: "channels-last" if is_on else "",
        others=lambda facts: Others(values=(True,) if facts.has_convolutions else ()),
        told=(PlanLine("data.channels_last", _tell_channels_last),),
    ),
    Knob(
        field="recompute",
        settings=("memory.activations",),
        words="activations",
        in_words=lambda is_on: "activations recomputed" if is_on else "",
        by_rule=lambda asked: asked.settings.activations.value == "recompute",
        stage="fit",
        others=lambda facts: Others(values=(True,)),
        told=(PlanLine("memory.activations", _tell_activations),),
    ),
    Knob(
        field="num_threads",
        settings=("kernels.num_threads",),
        words="threads",
        in_words=lambda number: format_count(number, "thread") if number else "",
        by_rule=lambda asked: asked.read("kernels.num_threads"),
        others=_other_thread_counts,
        told=(PlanLine("kernels.num_threads", _tell_threads),),
        changes_memory=False,
    ),
    Knob(
        field="repeat",
        settings=("kernels.repeatable", "kernels.deterministic"),
        words="repeatable kernels",
        in_words=lambda level: {"off": "", "fixed": "fixed kernels", "strict": "deterministic kernels"}[level],
        by_rule=lambda asked: _repeat_asked(asked.read) or "off",
        stage="repeat",
        pinned_by=lambda read: _repeat_asked(read) is not None,
        told=(PlanLine("kernels.repeatable", _tell_repeat),),
    ),
    Knob(
        field="reshard",
        settings=("distributed.fsdp_reshard",),
        words="resharding after forward",
        in_words=lambda is_on: "" if is_on else "weights kept after forward",
        by_rule=lambda asked: asked.read("distributed.fsdp_reshard") != "off",
        others=_of_units(False),
        told=(PlanLine("distributed.fsdp_reshard", _tell_units("reshard")),),
    ),
    Knob(
        field="unit_blocks",
        settings=("distributed.fsdp_unit_blocks",),
        words="blocks that are gathered together",
        in_words=lambda number: f"{number} blocks gathered at once" if number > 1 else "",
        by_rule=lambda asked: asked.read("distributed.fsdp_unit_blocks") or 1,
        others=_of_units(2, 4),
        told=(PlanLine("distributed.fsdp_unit_blocks", _tell_units("unit_blocks")),),
    ),
    Knob(
        field="gather_ahead",
        settings=("distributed.fsdp_gather_ahead",),
        words="units that are gathered ahead",
        in_words=lambda number: f"{number} units gathered ahead" if number else "",
        by_rule=lambda asked: asked.read("distributed.fsdp_gather_ahead") or 0,
        others=_of_units(1, 2),
        told=(PlanLine("distributed.fsdp_gather_ahead", _tell_units("gather_ahead")),),
    ),
)
BY_FIELD = {knob.field: knob for knob in KNOBS}


@dataclass(frozen=True)
class Remedy:
    """A setting that may relieve what slows a run down.

    The planner takes it by itself where that pays, or says why not (`Plan.settled`). Where it may not, since the user
    fixed the setting or nothing is measured, the doctor advises it.
    """

    setting: str
    flag: str  # as it is advised
    relieves: tuple[str, ...]  # kinds of symptoms that the doctor finds
    words: str


# In the order in which they are advised.
REMEDIES = (
    Remedy("batch.size", "--batch-size", ("launch-bound",), "a larger micro-batch"),
    Remedy("kernels.capture", "--capture on", ("launch-bound",), "capturing"),
    Remedy("precision.dtype", "--precision bf16", ("compute-bound", "bandwidth-bound"), "another precision"),
    Remedy("compile.enabled", "--compile", ("launch-bound", "compute-bound", "bandwidth-bound"), "compiling"),
    Remedy("data.num_workers", "--num-workers", ("input-bound", "copy-bound"), "other loader workers"),
)


def settled_choices(outcome: PlanningOutcome, workers: Choice[Any] | None) -> dict[str, str]:
    """Return why each remedy is not left to the user, by its setting: it was measured, or cannot be used here.

    Args:
        outcome: How planning went.
        workers: How many loader workers there are, as the planner decided; None if it did not.
    """
    facts, found = outcome.facts, dict[str, str]()
    for knob in KNOBS:
        why_none = knob.others(facts).why_none
        if why_none:
            found[knob.settings[0]] = why_none
        elif outcome.is_measured and knob.field not in facts.pinned:
            found[knob.settings[0]] = outcome.reason(knob.field)
    if outcome.is_measured and workers is not None and not workers.pinned:
        found["data.num_workers"] = workers.reason
    return {remedy.setting: found[remedy.setting] for remedy in REMEDIES if remedy.setting in found}


# Choices that come after all others in a plan, in this order.
_AT_THE_END = ("kernels.num_threads", "distributed.expert_rest", "compile.mode", "compile.scope", "compile.from_step")


def knobs_of(*stages: Stage) -> Iterator[Knob]:
    return (knob for knob in KNOBS if knob.stage in stages)


def way_by_rule(asked: Asked) -> StepWay:
    """Return how a step is run where nothing was measured."""
    return StepWay(**{knob.field: knob.rule(asked) for knob in KNOBS})


def pinned_fields(read: Read) -> set[str]:
    """Return the fields of a way that the user fixed."""
    return {knob.field for knob in KNOBS if knob.is_pinned(read)}


def others_of(facts: KnobFacts) -> dict[str, Others]:
    """Return what to measure, by field."""
    pinned = Others(why_none=ASKED_FOR)
    return {knob.field: pinned if knob.field in facts.pinned else knob.others(facts) for knob in KNOBS}


def choices_of(
    outcome: PlanningOutcome, before: Mapping[str, Choice[Any]], after: Mapping[str, Choice[Any]]
) -> dict[str, Choice[Any]]:
    """Return the choices of a plan, by the setting that pins each, between those that are not part of a way."""
    told = {told.setting: told.choice(outcome) for knob in KNOBS for told in knob.lines}
    found = {**before, **{name: choice for name, choice in told.items() if choice is not None}, **after}
    last = {name: found.pop(name) for name in _AT_THE_END if name in found}
    return {**found, **last}

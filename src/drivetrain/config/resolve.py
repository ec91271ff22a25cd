"""Resolves all sources to one checked `Config`: flags over YAML over defaults, every problem at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.contradictions import find_contradictions
from drivetrain.config.schema import Config, PlanPins
from drivetrain.config.settings import BY_DOTTED, SETTINGS, Given, Setting, nearest
from drivetrain.config.sources import from_plan, from_values, from_yaml
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.hardware import Hardware, detect

_DIVIDE_A_STEP = {"batch.size", "batch.accumulation"}


@dataclass(frozen=True)
class Resolved:
    """The configuration, and the origin of each field that was set."""

    config: Config
    origins: Mapping[str, Given]
    notes: tuple[str, ...] = ()  # what the lines of a file for another trainer became

    def source(self, name: str) -> str:
        given = self.origins.get(name)
        return f"{given.source} ({given.spelled})" if given else "default"


def configure(file: Path | str | None = None, /, hardware: Hardware | None = None, **values: Any) -> Config:
    """Make a configuration from a YAML file and values by any of their names: `configure("train.yaml", batch_size=64)`.

    Values win over the file. Raises `ConfigError` with every problem at once. With `hardware`, settings that this
    machine cannot fulfil are problems too.
    """
    from_file, problems = from_yaml(Path(file)) if file is not None else ([], [])
    from_python, more = from_values(values)
    found = resolve([from_file, from_python], [*problems, *more], None if hardware is None else lambda: hardware)
    return found.config.with_notes(found.notes)


def resolve(
    sources: Sequence[Sequence[Given]],
    problems: Sequence[Problem] = (),
    hardware: Callable[[], Hardware] | None = None,
) -> Resolved:
    """Merge the sources (the later wins), check each value and then their combinations; raise all problems together.

    `hardware` is called only where a value that was set can contradict the machine.
    """
    found = list(problems)
    origins: dict[str, Given] = {}
    checked: dict[str, Any] = {}
    unusable: set[str] = set()
    plan = next((given.value for source in reversed(sources) for given in source if given.name == "plan.file"), None)
    pinned: list[Given] = []
    global_batch = None
    if isinstance(plan, (str, Path)) and str(plan) != "auto":
        pinned, more, global_batch = from_plan(Path(plan))
        names = {given.name for source in sources for given in source}
        if names & _DIVIDE_A_STEP:  # one of them says all that the plan says with both
            names |= _DIVIDE_A_STEP
        pinned = [given for given in pinned if given.name not in names]
        sources, found = [pinned, *sources], [*found, *more]
    sources, notes = _without_gpu(sources, hardware)
    sources = _without_options_of_others(sources, notes)
    for source in sources:
        found += _same_field_twice(source)
        for given in source:
            origins[given.name] = given
    for name, given in origins.items():
        try:
            checked[name] = BY_DOTTED[name].parse(given.value)
        except ValueError as error:
            unusable.add(name)
            found.append(value_problem(BY_DOTTED[name], given, str(error)))

    lines = {given.name: given.source for given in pinned}
    foreign = frozenset(name for name, given in origins.items() if given.is_foreign)
    config = _build(checked).with_plan_pins(PlanPins(lines, global_batch)).with_foreign(foreign)
    usable = {name: given for name, given in origins.items() if name not in unusable}
    found += find_contradictions(config, usable, unusable, hardware)
    if found:
        raise ConfigError(found)
    return Resolved(config, origins, tuple(notes))


def _without_gpu(
    sources: Sequence[Sequence[Given]], hardware: Callable[[], Hardware] | None
) -> tuple[list[list[Given]], list[str]]:
    """Return the lines that set something, without those that need a GPU where none is used; and the notes on all."""
    everything = [given for source in sources for given in source]
    asked = {given.name: given.value for given in everything}
    has_gpu = not any(given.needs_gpu for given in everything) or (
        asked.get("device.mode") != "cpu" and asked.get("device.device") != "cpu" and bool((hardware or detect)().gpus)
    )
    notes = []
    for given in everything:
        if given.note and given.needs_gpu and not has_gpu:
            notes.append(f"{given.source}: {given.spelled}: {given.value} is left out: no GPU is used here")
        elif given.note:
            notes.append(given.note)
    return [[given for given in each if given.name and (has_gpu or not given.needs_gpu)] for each in sources], notes


def _without_options_of_others(sources: Sequence[Sequence[Given]], notes: list[str]) -> list[list[Given]]:
    """Return the sources without what another trainer's file has for a strategy that is not the chosen one.

    Such files hold DeepSpeed's options beside a switch (`deepspeed.enabled`), and a flag may choose otherwise.
    """
    strategy = next(
        (given.value for source in reversed(sources) for given in source if given.name == "distributed.strategy"),
        "auto",
    )
    others = [strategy_facts(name) for name in STRATEGIES.names() if name != strategy]
    left_out = {option for facts in others if facts.options_by_name for option in facts.options}
    kept: list[list[Given]] = []
    for source in sources:
        kept.append([])
        for given in source:
            if given.is_foreign and given.name in left_out:
                told = f"{given.source}: {given.spelled}: {given.value} is left out: the strategy is {strategy}"
                notes[:] = [told if note == given.note else note for note in notes]
            else:
                kept[-1].append(given)
    return kept


def value_problem(setting: Setting, given: Given, why: str) -> Problem:
    """Return the problem of a value that does not fit its field."""
    value = given.value
    wrong = setting.wrong_parts(value) if setting.choices else []
    meant = nearest(wrong[0], setting.choices) if wrong else None
    example = setting.choices[0] if setting.choices else setting.default
    if meant:
        remedy = f"did you mean `{meant}`?"
    elif setting.is_bool or setting.choices or example is None:
        remedy = f"write one of the allowed, or leave {given.spelled} out"
    else:
        shown = ",".join(map(str, example)) if isinstance(example, tuple) else example
        remedy = f"for example {given.spelled}{_sign(given)}{shown}"
    message = f"got {value!r}" + ("" if setting.choices or setting.is_bool else f": {_lower_first(why)}")
    return Problem(given.spelled, message, value, given.source, setting.allowed, remedy)


def _sign(given: Given) -> str:
    """Return the sign between a name and its value: on the command line, in Python, in a file."""
    return " " if given.spelled.startswith("-") else "=" if given.source == "Python" else ": "


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _same_field_twice(source: Sequence[Given]) -> list[Problem]:
    """Return a problem for each field that one source sets twice, to different values: it is ambiguous."""
    first: dict[str, Given] = {}
    problems = []
    for given in source:
        earlier = first.setdefault(given.name, given)
        if earlier is not given and earlier.value != given.value:
            names = given.spelled if given.spelled == earlier.spelled else f"{earlier.spelled} and {given.spelled}"
            message = f"set twice, to {earlier.value!r} and to {given.value!r}"
            problems.append(Problem(names, message, given.value, given.source, remedy="keep one of them"))
    return problems


def _build(checked: Mapping[str, Any]) -> Config:
    by_section: dict[str, dict[str, Any]] = {}
    for setting in SETTINGS:
        if setting.name in checked:
            by_section.setdefault(setting.section, {})[setting.field] = checked[setting.name]
    return Config.model_validate(by_section)

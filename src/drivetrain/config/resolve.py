"""Resolves all sources to one checked `Config`: flags over YAML over defaults, every problem at once.

The sources are YAML files, flags and Python. Each becomes a list of `Given`, spelled as the user did.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drivetrain.config.contradictions import find_contradictions
from drivetrain.config.schema import Config, PlanPins
from drivetrain.config.settings import (
    BY_DOTTED,
    BY_NAME,
    DEEPSPEED_MARKS,
    SECTIONS,
    SECTIONS_OF_OTHERS,
    SETTINGS,
    SWITCHES,
    Given,
    Line,
    Setting,
    nearest,
    normal,
    remedy_for_unknown,
    translate,
)
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.hardware import Hardware, detect

_CUT = "take a whole copy, or write it anew: `drivetrain plan TARGET --out plan.yaml`; if it is whole, add that line"
_DIVIDE_A_STEP = {"batch.size", "batch.accumulation"}


def from_values(values: Mapping[str, Any], source: str = "Python") -> tuple[list[Given], list[Problem]]:
    """Read values by any of their names, nested by section or not."""
    given: list[Given] = []
    problems: list[Problem] = []
    for key, value in values.items():
        if normal(key) in SECTIONS and isinstance(value, Mapping):
            for field, inner in value.items():
                _take(f"{key}.{field}", inner, source, given, problems)
        else:
            _take(key, value, source, given, problems)
    return given, problems


def from_yaml(path: Path) -> tuple[list[Given], list[Problem]]:
    """Read a YAML file, with the line of each key. One that cannot be read or parsed is a problem, not an exception."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], [_file_problem(path, "there is no such file", _nearest_file(path))]
    except IsADirectoryError:
        return [], [_file_problem(path, "this is a folder", "name the YAML file inside it")]
    except UnicodeDecodeError as error:
        return [], [_file_problem(path, f"this is not UTF-8 text (byte {error.start})", "save it as UTF-8")]
    except OSError as error:
        return [], [_file_problem(path, f"it cannot be read: {error.strerror}", f"ls -l {path}")]
    except ValueError:  # a zero byte in the name
        return [], [_file_problem(path, "not a valid path", "give the path of a YAML file")]

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return [], []
        if not isinstance(root, yaml.MappingNode):
            return [], [
                _file_problem(path, "it holds no keys", "write lines like `epochs: 3`", "keys and their values")
            ]
        if any(normal(str(key.value)) in DEEPSPEED_MARKS for key, _ in root.value):
            return _deepspeed_file(path), []
        return _walk(loader, root, path.name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = error.problem or error.context or "not understood"
        return [], [_file_problem(path, f"it does not parse as YAML: {where}{what}", "fix that line")]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return [], [_file_problem(path, f"it does not parse as YAML: {error}", "fix the file")]


def from_plan(path: Path) -> tuple[list[Given], list[Problem], int | None]:
    """Read the choices of a written plan, values without reasons; and its global batch, if the file has it.

    A plan written by a user needs only `choices`.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if _is_cut(text):
            return [], [_plan_problem(path, "it is cut off: it does not end with the line `...` any more", _CUT)], None
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        choices, batch_node = _below(loader, root, "choices"), _below(loader, root, "global_batch")
        entries = None if choices is None else _entries(loader, choices)
    except OSError as error:
        return [], [_plan_problem(path, error.strerror or "it cannot be read")], None
    except (yaml.YAMLError, ValueError, RecursionError):
        entries = batch_node = None
    if entries is None:
        return [], [_plan_problem(path, "it holds no plan")], None
    given: list[Given] = []
    problems: list[Problem] = []
    global_batch = None
    if batch_node is not None:
        if isinstance(batch_node, yaml.ScalarNode) and re.fullmatch("[1-9][0-9]*", batch_node.value):
            global_batch = int(batch_node.value)
        else:
            source = f"{path.name} line {batch_node.start_mark.line + 1}"
            allowed, remedy = "a whole number, at least 1", "take it out, or plan anew"
            problems.append(Problem("global_batch", "not a number of samples", None, source, allowed, remedy))
    for key_node, choice in entries:
        key, source = str(key_node.value), f"{path.name} line {key_node.start_mark.line + 1}"
        setting = BY_NAME.get(normal(key))
        if setting is not None and not setting.is_planned:  # it would change what the job means
            remedy = f"take it out, and give {setting.flag} to the run"
            problems.append(Problem(key, "this is not a choice of a plan", source=source, remedy=remedy))
            continue
        value_node = _below(loader, choice, "value")
        if value_node is None:
            remedy = "write `value: …` in a line below it, or take it out"
            problems.append(Problem(key, "it has no value", source=source, remedy=remedy))
            continue
        try:
            value = loader.construct_object(value_node, deep=True)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError):  # by what a tag makes of it
            value = value_node.value
        if value != "auto":
            _take(key, value, source, given, problems)
    return given, problems, global_batch


def _is_cut(text: str) -> bool:
    """Return whether a plan's file is truncated: generated ones begin with `planned:` and mark their end."""
    return bool(re.search(r"^planned:", text, re.MULTILINE)) and not text.rstrip().endswith("\n...")


def _entries(loader: yaml.SafeLoader, node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]] | None:
    """Return keys and values, merged ones too; None if it has none."""
    if not isinstance(node, yaml.MappingNode):
        return None
    with contextlib.suppress(yaml.YAMLError):  # what is merged holds no keys: then `<<` is one
        loader.flatten_mapping(node)
    return list(node.value)


def _below(loader: yaml.SafeLoader, node: yaml.Node | None, key: str) -> yaml.Node | None:
    entries = None if node is None else _entries(loader, node)
    return next((value for key_node, value in entries or () if key_node.value == key), None)


def _plan_problem(path: Path, message: str, remedy: str = "") -> Problem:
    remedy = remedy or "`drivetrain plan TARGET --out plan.yaml` writes one, and every run folder has one"
    return Problem("--plan", f"{path}: {message}", str(path), allowed="a plan.yaml", remedy=remedy)


def _walk(loader: yaml.SafeLoader, root: yaml.MappingNode, file: str) -> tuple[list[Given], list[Problem]]:
    given: list[Given] = []
    problems: list[Problem] = []

    def entries(node: yaml.MappingNode, prefix: str) -> list[tuple[str, yaml.Node, str]]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"the key stands twice, in lines {seen[key]} and {line}"
                problems.append(Problem(prefix + key, problem, source=f"{file} line {line}", remedy="keep one of them"))
            seen[key] = line
        loader.flatten_mapping(node)
        return [
            (str(key_node.value), value_node, f"{file} line {key_node.start_mark.line + 1}")
            for key_node, value_node in node.value
        ]

    lines: list[Line] = []
    for key, value_node, source in entries(root, ""):
        if (normal(key) in SECTIONS or normal(key) in SECTIONS_OF_OTHERS) and isinstance(value_node, yaml.MappingNode):
            for field, inner, inner_source in entries(value_node, f"{key}."):
                lines.append(Line(f"{key}.{field}", loader.construct_object(inner, deep=True), inner_source))
        else:
            lines.append(Line(key, loader.construct_object(value_node, deep=True), source))
    translated, more, own = translate(lines)
    given += translated
    problems += more
    for line in own:
        _take(line.key, line.value, line.source, given, problems)
    return given, problems


def _deepspeed_file(path: Path) -> list[Given]:
    """Return the settings for a DeepSpeed JSON given as the configuration: the strategy that reads it."""
    words = f"{path.name} is a DeepSpeed configuration: distributed.strategy: deepspeed, deepspeed.config: {path}"
    return [
        Given("distributed.strategy", "deepspeed", "--config", path.name, words),
        Given("deepspeed.config", path, "--config", path.name),
    ]


def _take(key: str, value: Any, source: str, given: list[Given], problems: list[Problem]) -> None:
    setting = BY_NAME.get(normal(key))
    if setting is not None:
        try:
            given.append(Given(setting.name, setting.as_text(value), key, source))
        except ValueError as error:
            remedy = "assign it to a name at the top level of a module"
            problems.append(Problem(key, str(error), value, source, setting.allowed, remedy))
        return
    switch = SWITCHES.get(normal(key))
    if switch is not None and isinstance(value, bool):
        if value:
            given.append(Given(switch.name, switch.switches[normal(key)], key, source))
        return
    if switch is not None and normal(key) not in SECTIONS:
        message = f"got {value!r}; it stands for {switch.name}: {switch.switches[normal(key)]}"
        problems.append(Problem(key, message, value, source, "true or false", f"{key}: true"))
        return
    if normal(key) in SECTIONS:
        fields = ", ".join(name for name in _dotted_names() if name.startswith(f"{normal(key)}."))
        problems.append(
            Problem(key, f"this is a section, and got {value!r}", value, source, f"keys below it: {fields}")
        )
        return

    def spelled(setting: str, implied: str) -> str:
        sign = f'="{implied}"' if source == "Python" else f": {implied}"
        return setting.replace("-", "_") + (sign if implied else "")

    meant = remedy_for_unknown(key, [*_dotted_names(), *BY_NAME, *SWITCHES], spelled)
    remedy = meant or "`drivetrain config` lists every key"
    problems.append(Problem(key, "there is no such key", value, source, remedy=remedy))


def _dotted_names() -> list[str]:
    return sorted({setting.name for setting in BY_NAME.values()})


def _file_problem(path: Path, message: str, remedy: str, allowed: str = "") -> Problem:
    return Problem("--config", f"{path}: {message}", str(path), allowed=allowed, remedy=remedy)


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return f"there is no folder {path.parent} either; give the path of a YAML file"
    meant = nearest(path.name, names)
    if meant:
        return f"did you mean `{path.parent / meant}`?"
    return f"YAML files there: {', '.join(sorted(names)[:5])}" if names else "give the path of a YAML file"


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

    Values win over the file. Raises `ConfigError` with every problem at once.

    Args:
        file: A YAML file with any of the keys of `drivetrain config`.
        hardware: The machine, from `detect`. With it, settings that the machine cannot fulfill are problems, too.
        values: Settings by any of their names: `batch_size=64`, or by section: `batch={"size": 64}`.

    Returns:
        The checked configuration, for `train`, `drive` and the others.

    Example:
        >>> dt.configure(batch_size=64, precision="fp32").batch.size
        64
    """
    from_file, problems = from_yaml(Path(file)) if file is not None else ([], [])
    from_python, more = from_values(values)
    found = resolve([from_file, from_python], [*problems, *more], None if hardware is None else lambda: hardware)
    return found.config.with_notes(found.notes)


def _without_waiting(sources: Sequence[Sequence[Given]], pinned: Sequence[Given]) -> Sequence[Sequence[Given]]:
    """Leave out `--compile-from ready` where a plan knows when it was: then its run is repeated, to the bit."""
    name = "compile.from_step"
    if not any(given.name == name for given in pinned):
        return sources
    return [[given for given in source if (given.name, given.value) != (name, "ready")] for source in sources]


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
        sources = _without_waiting(sources, pinned)
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
    if not any(given.is_foreign for source in sources for given in source):
        return [list(source) for source in sources]
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
    elif setting.is_bool or setting.choices or example in (None, ""):
        remedy = f"write one of the allowed, or leave {given.spelled} out"
    else:
        shown = ",".join(map(str, example)) if isinstance(example, tuple) else example
        remedy = f"for example {given.spelled}{_sign(given)}{shown}"
    reason = _lower_first(why.removeprefix("Value error, "))
    message = f"got {value!r}" + ("" if setting.choices or setting.is_bool else f": {reason}")
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

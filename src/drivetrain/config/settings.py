"""The settings by every name they have: those of our fields, and those in files of other trainers."""

import difflib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from drivetrain.config.schema import AfterDashes, Allowed, Choices, Config, Flag, Planned, Positional, Rest, Switch
from drivetrain.core.errors import Problem

# ----------------------------------------------------------------------------------------------------------------------
# The settings by every name they have: derived from the fields, so that the list cannot drift from them.

FOREIGN = "DRIVETRAIN_FOREIGN"  # the dotted names of a worker's flags that stem from another trainer's file


@dataclass(frozen=True)
class Given:
    """One value that a user set."""

    name: str  # the field's dotted name; empty if the line sets nothing, and the note says why
    value: Any
    spelled: str  # the key as the user wrote it
    source: str  # `command line`, `train.yaml line 3`, `Python`
    note: str = ""  # what a line of another trainer's file became
    needs_gpu: bool = False  # left out where no GPU is used
    is_foreign: bool = False  # of a file that was written for another trainer


def as_launched(given: Sequence[Given], environ: Mapping[str, str]) -> list[Given]:
    """Mark the flags that the launcher made of lines of another trainer's file; a worker does not read that file."""
    names = environ.get(FOREIGN, "").split(",")
    return [replace(each, is_foreign=True) if each.name in names else each for each in given]


def normal(name: str) -> str:
    """Return one spelling for a name: `--Batch_Size`, `batch_size` and `batch-size` are the same."""
    return name.strip().lstrip("-").replace("_", "-").lower()


@dataclass(frozen=True)
class Setting:
    """One field: its names, its type in words, and how to check a value for it."""

    name: str  # dotted, `batch.size`; for a command's own option just its flag
    section: str  # empty for a command's own option
    field: str
    info: FieldInfo
    aliases: tuple[str, ...]
    is_positional: bool = False
    is_rest: bool = False
    is_after_dashes: bool = False

    @property
    def flag(self) -> str:
        """The flag shown in messages and help."""
        return f"--{normal(self.aliases[0] if self.aliases else self.name)}"

    @property
    def names(self) -> tuple[str, ...]:
        return (normal(self.name), *(normal(alias) for alias in self.aliases))

    @property
    def switches(self) -> dict[str, str]:
        """The flags that take no value, each with the value that it stands for."""
        marks = [item for item in self.info.metadata if isinstance(item, Switch)]
        return {normal(name): mark.value for mark in marks for name in mark.names}

    @property
    def is_planned(self) -> bool:
        """Whether a plan decides this setting."""
        return any(isinstance(item, Planned) for item in self.info.metadata)

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def help(self) -> str:
        return self.info.description or ""

    @cached_property
    def _kinds(self) -> tuple[Any, ...]:
        """The field's type without `None` and `Annotated`, as a tuple of alternatives."""
        return tuple(kind for kind in _alternatives(self.info.annotation) if kind is not type(None))

    @property
    def is_bool(self) -> bool:
        return self._kinds == (bool,)

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) in (tuple, list) for kind in self._kinds)

    @cached_property
    def _found_choices(self) -> Choices | None:
        """The choices that are looked up when asked for; None if the field has none of that kind."""
        return next((item for item in self.info.metadata if isinstance(item, Choices)), None)

    @property
    def takes_own(self) -> bool:
        """Whether the setting takes `package.module:name` of an object of the user's own."""
        return self._found_choices is not None

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, alone or in a list."""
        if self._found_choices is not None:
            return self._found_choices.find()
        members = (get_args(kind)[0] if get_origin(kind) is tuple else kind for kind in self._kinds)
        return tuple(value for kind in members if get_origin(kind) is Literal for value in get_args(kind))

    @property
    def number_beside_choices(self) -> str:
        """The numbers that are allowed besides the words of `choices`; empty where there are none."""
        numbers = [part for part in get_args(self.info.annotation) if _alternatives(part) == (int,)]
        return f"a whole number{_limits(getattr(numbers[0], '__metadata__', ()))}" if self.choices and numbers else ""

    def as_text(self, value: Any) -> Any:
        """Return a value with the names of the objects that were given in place of names, where that is possible."""
        if self._found_choices is None or value is None:
            return value
        named = self._found_choices.plugins.named
        return [named(part) for part in value] if isinstance(value, (list, tuple)) else named(value)

    def wrong_parts(self, value: Any) -> list[str]:
        """Return the parts of a value that are none of the choices: the members of a list, or all of it."""
        parts = _split(value) if self.is_list and isinstance(value, str) else value
        found = [str(part) for part in (parts if isinstance(parts, (list, tuple)) else [parts])]
        return [part for part in found if part not in self.choices and not (self.takes_own and ":" in part)]

    @property
    def takes_auto(self) -> bool:
        """Whether `auto` may be written for "not set": wherever it cannot be taken for a text."""
        return type(None) in _alternatives(self.info.annotation) and str not in self._kinds

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        return self._allowed + (", or auto" if self.takes_auto else "")

    @property
    def _allowed(self) -> str:
        for item in self.info.metadata:
            if isinstance(item, Allowed):
                return item.words
        if self.is_bool:
            return "true or false"
        if self.choices:
            others = [] if self._found_choices is None else [f"or {self._found_choices.others}"]
            others += [f"or {self.number_beside_choices}"] if self.number_beside_choices else []
            return ", ".join([*self.choices, *others]) + (", separated by commas" if self.is_list else "")
        kind = self._kinds[0]
        if self.is_list:
            member = get_args(kind)[0]
            numbers = int in _alternatives(member)
            words = "whole numbers, separated by commas" if numbers else "names, separated by commas"
            return words + _limits(getattr(member, "__metadata__", ()))
        words = {int: "a whole number", float: "a number", Path: "a path"}.get(kind, "text")
        return words + _limits(self.info.metadata)

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        annotated: Any = Annotated[self.info.annotation, self, *self.info.metadata]
        return TypeAdapter(annotated)

    def parse(self, value: Any) -> Any:
        """Return the checked value. Raises `ValueError` with only the problem; the caller adds names and remedy."""
        if self.takes_auto and value == "auto":
            return None
        if self.is_list and isinstance(value, str):
            value = _split(value)
        elif self.is_list and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = [value]
        if _holds_bool(value) and not self.is_bool:
            raise ValueError("a boolean is not allowed here")  # pydantic would read True as 1
        try:
            found = self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from None
        if _is_misread(value, found):
            raise ValueError("input should be a valid integer, unable to parse string as an integer")
        return found


def _is_misread(given: Any, found: Any) -> bool:
    """Return whether a text is not the number it was read as: pydantic drops zeros at the front, so 0-1 becomes -1."""
    if isinstance(given, list) and isinstance(found, (list, tuple)):
        return any(map(_is_misread, given, found))
    return isinstance(given, str) and isinstance(found, int) and "-" in given.strip()[1:]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.strip("[]").split(",") if part.strip()]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if hasattr(annotation, "__metadata__"):
        return _alternatives(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in _alternatives(part))
    return (annotation,)


def _limits(metadata: Iterable[Any]) -> str:
    words = []
    for item in metadata:
        for part in (item, *getattr(item, "metadata", ())):
            if isinstance(part, annotated_types.Ge):
                words.append(f"at least {part.ge}")
            elif isinstance(part, annotated_types.Gt):
                words.append(f"more than {part.gt}")
            elif isinstance(part, annotated_types.Lt):
                words.append(f"less than {part.lt}")
            elif isinstance(part, annotated_types.Le):
                words.append(f"at most {part.le}")
    return "".join(f", {word}" for word in words)


def _holds_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, (list, tuple)) and any(map(_holds_bool, value)))


def settings_of(model: type[BaseModel], section: str = "") -> tuple[Setting, ...]:
    """Return the settings of one section, or of a command's options."""
    found = []
    for field, info in model.model_fields.items():
        aliases = tuple(name for item in info.metadata if isinstance(item, Flag) for name in item.names)
        own_name = f"{section}.{field}" if section else (aliases[0] if aliases else field)
        marks = (any(isinstance(item, mark) for item in info.metadata) for mark in (Positional, Rest, AfterDashes))
        found.append(Setting(own_name, section, field, info, aliases, *marks))
    return tuple(found)


SETTINGS: tuple[Setting, ...] = tuple(
    setting
    for section, info in Config.model_fields.items()
    for setting in settings_of(info.annotation, section)  # type: ignore[arg-type]
)
SECTIONS: dict[str, str] = {
    section: (info.annotation.__doc__ or "") for section, info in Config.model_fields.items() if info.annotation
}
BY_NAME: dict[str, Setting] = {name: setting for setting in SETTINGS for name in setting.names}
SWITCHES: dict[str, Setting] = {name: setting for setting in SETTINGS for name in setting.switches}
BY_DOTTED: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}


# What other trainers call a setting, with the flags that may be meant; the first that a command has is suggested.
_OTHER_NAMES = {
    "bs": ("batch-size",),
    "batch": ("batch-size",),
    "batchsize": ("batch-size",),
    "per-device-train-batch-size": ("batch-size",),
    "per-device-batch-size": ("batch-size",),
    "train-batch-size": ("batch-size",),
    "micro-batch": ("batch-size",),
    "micro-batch-size": ("batch-size",),
    "train-micro-batch-size-per-gpu": ("batch-size",),
    "max-epochs": ("epochs",),
    "num-train-epochs": ("epochs",),
    "grad-accum": ("accumulation-steps",),
    "accumulate-grad-batches": ("accumulation-steps",),
    "gradient-checkpointing": ("activations recompute",),
    "grad-checkpoint": ("activations recompute",),
    "activation-checkpointing": ("activations recompute",),
    "max-grad-norm": ("clip-norm",),
    "gradient-clip-val": ("clip-norm",),
    "grad-clip": ("clip-norm",),
    "wd": ("weight-decay",),
    "logging-steps": ("log-every",),
    "early-stopping": ("patience",),
    "dtype": ("precision",),
    "accelerator": ("device", "gpu-mode"),
    "num-nodes": ("nodes",),
    "experiment-name": ("name",),
    "gpu": ("gpu-ids", "device-ids"),
    "gpus": ("num-gpus", "device-ids"),
    "devices": ("num-gpus", "device-ids"),
    "nproc": ("num-processes",),
    "nproc-per-node": ("num-processes",),
    "nnodes": ("nodes",),
    "workers": ("num-workers",),
    "fp16": ("precision fp16",),
    "bf16": ("precision bf16",),
    "fp32": ("precision fp32",),
    "tf32": ("precision tf32",),
    "half": ("precision bf16",),
    "use-cpu": ("gpu-mode cpu",),
    "no-cuda": ("gpu-mode cpu",),
    "amp": ("mixed-precision",),
    "wandb": ("trackers wandb",),
    "tensorboard": ("trackers tensorboard",),
    "logger": ("trackers",),
    "report-to": ("trackers",),
    "ddp": ("parallel-strategy ddp",),
    "fsdp": ("parallel-strategy fsdp",),
    "out": ("output-dir",),
    "save-dir": ("output-dir",),
    "logdir": ("output-dir",),
    "logging-dir": ("output-dir",),
    "project-dir": ("output-dir",),
    "default-root-dir": ("output-dir",),
    "save-every": ("checkpoint-every",),
    "save-steps": ("checkpoint-every",),
    "eval-every": ("valid-every",),
    "eval-steps": ("valid-every",),
    "eval-interval": ("valid-every",),
    "eval-strategy": ("valid-every",),
    "evaluation-strategy": ("valid-every",),
    "optimizer.lr": ("learning-rate",),
    "optim-lr": ("learning-rate",),
    "val-check-interval": ("valid-every",),
    "save-total-limit": ("keep-last",),
    "keep-checkpoints": ("keep-last",),
    "ckpt": ("output-dir",),
    "checkpoint-dir": ("output-dir",),
    "load": ("init-from",),
    "load-from": ("init-from",),
    "pretrained": ("init-from",),
}

_RESUMES = (
    "leave it out: an interrupted run of the same name continues by itself; --init-from starts a new run with the "
    "weights of another"
)
_GLOBAL_BATCH = "it is part of the job: Job(global_batch=…); --batch-size sets how much of it a device takes at a time"
_SCHEDULE = "it is part of the job: Job(schedule=dt.WarmupCosine()), or any function of the step"
_LAUNCHED = "the launcher has it: drivetrain launch --num-processes … script.py"
_NOT_NEEDED = {
    "num-processes": _LAUNCHED,
    "num-machines": "the launcher has it: drivetrain launch --nodes … script.py",
    "local-rank": "leave it out: the launcher tells each process its rank",
    "resume": "leave it out: an interrupted run of the same name continues from its last checkpoint by itself",
    "resume-from-checkpoint": _RESUMES,
    "resume-from": _RESUMES,
    "ckpt-path": _RESUMES,
    "global-batch": _GLOBAL_BATCH,
    "global-batch-size": _GLOBAL_BATCH,
    "total-batch-size": _GLOBAL_BATCH,
    "lr-scheduler": _SCHEDULE,
    "lr-scheduler-type": _SCHEDULE,
    "scheduler": _SCHEDULE,
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a typo most likely meant. Dotted names are for those who write a dot."""
    found = list(known)
    by_normal = {normal(candidate): candidate for candidate in found if "." not in candidate} if "." not in name else {}
    by_normal = by_normal or {normal(candidate): candidate for candidate in found}
    close = difflib.get_close_matches(normal(name), by_normal, n=1, cutoff=0.7)
    return by_normal[close[0]] if close else None


def other_names(name: str) -> tuple[str, ...]:
    """Return the flags that another trainer's name of a setting may stand for."""
    return _OTHER_NAMES.get(normal(name), ())


def remedy_for_unknown(name: str, known: Collection[str], spelled: Callable[[str, str], str]) -> str | None:
    """Return what to do about a name that is none of the known ones; None if it resembles none.

    Args:
        name: The name as the user wrote it.
        known: The names that would be understood.
        spelled: Writes a name and a value, which may be empty, as the user would.
    """
    if normal(name) in _NOT_NEEDED:
        return _NOT_NEEDED[normal(name)]
    others = other_names(name)
    meant = nearest(name, known) if not others else next((it for it in others if it.split()[0] in known), None)
    if meant is None:
        return None
    setting, _, value = meant.partition(" ")
    return f"did you mean `{spelled(setting, value)}`?"


# ----------------------------------------------------------------------------------------------------------------------
# Configuration files that were written for other trainers: detects the dialect, and translates each line.
#
# The same key means different things in them: `train_batch_size` is per GPU beside Accelerate and global in DeepSpeed's
# JSON. So a file is read in one dialect, found from keys that only that one has, and two are never merged. A line with
# an equivalent sets it; one without is named, with the reason. Keys that no dialect knows are read as drivetrain's.


@dataclass(frozen=True)
class Line:
    """A key of a file, below its section if it has one, and its position."""

    key: str
    value: Any
    source: str

    @property
    def name(self) -> str:
        return ".".join(map(normal, self.key.split(".")))


@dataclass(frozen=True)
class Meaning:
    """The translation of a line.

    Attributes:
        settings: the fields that it sets, by dotted name.
        why: what the reader should know; if nothing is set, the reason.
        needs_gpu: it is left out where no GPU is used, instead of being refused.
    """

    settings: Mapping[str, Any]
    why: str = ""
    needs_gpu: bool = False


Rule = Callable[[Any], Meaning]


@dataclass(frozen=True)
class Dialect:
    """The rules for reading one trainer's files.

    Attributes:
        name: what messages call it.
        marks: keys that only its files have.
        rules: what its keys become; all others are drivetrain's.
    """

    name: str
    marks: frozenset[str]
    rules: Mapping[str, Rule]


def translate(lines: Sequence[Line]) -> tuple[list[Given], list[Problem], list[Line]]:
    """Translate a foreign file: the settings of its lines, their problems, and the lines that are drivetrain's."""
    marking = [(dialect, [line for line in lines if _marks(dialect, line)]) for dialect in DIALECTS]
    spoken = [(dialect, marks) for dialect, marks in marking if marks]
    if not spoken:
        return [], [], list(lines)
    if len(spoken) > 1:
        return [], [_two_dialects(spoken)], []
    dialect = spoken[0][0]
    given: list[Given] = []
    problems: list[Problem] = []
    own: list[Line] = []
    for line in lines:
        rule = dialect.rules.get(line.name)
        if rule is None:
            own.append(line)
            continue
        try:
            meaning = rule(line.value)
        except ValueError as error:
            message = f"got {line.value!r}, which {dialect.name} does not have"
            problems.append(Problem(line.key, message, line.value, line.source, str(error)))
            continue
        given += _given(line, meaning)
    return given, problems, own


def _given(line: Line, meaning: Meaning) -> list[Given]:
    became = ", ".join(f"{name}: {_shown(value)}" for name, value in meaning.settings.items())
    reason = f" ({meaning.why})" if became and meaning.why else meaning.why
    words = f"{line.source}: {line.key}: {_shown(line.value)} is {became or 'not used: '}{reason}"
    if not meaning.settings:
        return [Given("", line.value, line.key, line.source, words)]
    return [
        Given(name, value, line.key, line.source, words if number == 0 else "", meaning.needs_gpu, is_foreign=True)
        for number, (name, value) in enumerate(meaning.settings.items())
    ]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _marks(dialect: Dialect, line: Line) -> bool:
    if line.name == "mixed-precision" and "mixed-precision" in dialect.marks:
        return isinstance(line.value, str)  # our own is true or false
    return line.name in dialect.marks


def _two_dialects(spoken: Sequence[tuple[Dialect, Sequence[Line]]]) -> Problem:
    (one, [first, *_]), (other, [second, *_]) = spoken[:2]
    message = (
        f"{first.key} belongs to {one.name}, and {second.key} ({second.source}) to {other.name}; "
        "the same keys mean different things there"
    )
    return Problem(first.key, message, None, first.source, "the keys of one of them", "split the file")


# Rules


def _is(name: str, why: str = "", *, needs_gpu: bool = False) -> Rule:
    return lambda value: Meaning({name: value}, why, needs_gpu)


def _unused(why: str) -> Rule:
    return lambda value: Meaning({}, why)


def _choice(meanings: Mapping[Any, Meaning]) -> Rule:
    def rule(value: Any) -> Meaning:
        for known, meaning in meanings.items():
            if type(value) is type(known) and _shown(value).lower() == _shown(known):
                return meaning
        raise ValueError(", ".join(map(_shown, meanings)))

    return rule


def _switch(on: Meaning, off: Meaning) -> Rule:
    return _choice({True: on, False: off})


_DEFAULT = Meaning({}, "that is the default here")
_BY_LAUNCHER = "the launcher says it: drivetrain train --num-processes N, torchrun, srun"


def _place(value: Any) -> Meaning:
    return _DEFAULT if value == -1 else Meaning({}, _BY_LAUNCHER)


_FP16 = Meaning({"precision.dtype": "fp16"}, "with loss scaling", needs_gpu=True)
_BF16 = Meaning({"precision.dtype": "bf16"})
_FP32 = Meaning({"precision.dtype": "fp32"})

_GPU_TRAINING = Dialect(
    "the GPU training Config",
    frozenset({"enable-mixed-precision"}),
    {
        "enable-mixed-precision": _switch(
            Meaning({"precision.mixed": True}, "precision_type says which", needs_gpu=True),
            Meaning({"precision.mixed": False}),
        ),
        "precision-type": _choice({
            "auto": _DEFAULT,
            "fp16": Meaning({"precision.dtype": "fp16"}, needs_gpu=True),
            "bf16": Meaning({"precision.dtype": "bf16"}, needs_gpu=True),
        }),
        "parallel-strategy": _choice({
            "data_parallel": Meaning({}, "devices share each batch by default, in processes of their own (ddp)"),
            "expert_parallel": Meaning({"distributed.strategy": "expert_parallel"}),
        }),
        "pin-memory": _switch(
            Meaning({}, "that is the default where there is a GPU"), Meaning({"data.pin_memory": False})
        ),
    },
)  # fmt: skip

_MULTI_GPU = Dialect(
    "MultiGPUConfig",
    frozenset({
        "training-mode", "enable-distributed", "enable-data-parallel", "sync-bn", "enable-gradient-as-bucket-view",
        "enable-find-unused-parameters", "enable-gpu-monitoring",
    }),
    {
        "training-mode": _choice({
            "auto": _DEFAULT,
            "single_gpu": Meaning({"distributed.strategy": "single"}),
            "data_parallel": Meaning({"distributed.strategy": "data_parallel"}, needs_gpu=True),
            "distributed": Meaning({"distributed.strategy": "ddp"}),
        }),
        "enable-data-parallel": _unused("training_mode says how devices share a batch"),
        "enable-distributed": _unused("training_mode says how devices share a batch"),
        "device-ids": lambda value: Meaning({"device.ids": value}, needs_gpu=True) if value is not None else _DEFAULT,
        "backend": _choice({
            "nccl": Meaning({}, "that is the default where each process has a GPU"),
            "gloo": Meaning({"distributed.backend": "gloo"}),
        }),
        "init-method": lambda value: (
            _DEFAULT if value == "env://" else Meaning({"distributed.init_method": value})
        ),
        "world-size": _place,
        "rank": _place,
        "local-rank": _place,
        "enable-find-unused-parameters": _switch(Meaning({"distributed.find_unused_parameters": True}), _DEFAULT),
        "enable-gradient-as-bucket-view": _is("distributed.gradient_as_bucket_view"),
        "enable-gpu-monitoring": _is("watch.monitor_gpu"),
        "sync-bn": _switch(Meaning({"distributed.sync_batchnorm": True}, needs_gpu=True), _DEFAULT),
    },
)  # fmt: skip

_ACCELERATE = Dialect(
    "an Accelerate script's file",
    frozenset({"train-batch-size", "test-batch-size", "gradient-accumulation-steps", "mixed-precision"}),
    {
        "mixed-precision": _choice({"no": _FP32, "fp16": _FP16, "bf16": _BF16}),
        "train-batch-size": _is("batch.size", "samples per device and micro-step"),
        "test-batch-size": _is("validation.batch_size", "samples per device"),
        "gradient-accumulation-steps": _is("batch.accumulation"),
    },
)

_TRAINING_BLOCK = Dialect(
    "a file with a training block",
    frozenset({
        "training.batch-size-per-gpu", "training.gradient-accumulation-steps", "training.fp16", "training.bf16",
        "training.gradient-checkpointing", "training.dataloader-num-workers", "training.num-epochs",
        "training.learning-rate", "deepspeed.enabled",
    }),
    {
        "training.batch-size-per-gpu": _is("batch.size", "samples per device and micro-step"),
        "training.gradient-accumulation-steps": _is("batch.accumulation"),
        "training.fp16": _switch(_FP16, Meaning({}, "precision stays automatic")),
        "training.bf16": _switch(_BF16, Meaning({}, "precision stays automatic")),
        "training.gradient-checkpointing": _switch(
            Meaning({"memory.activations": "recompute"}), Meaning({"memory.activations": "keep"})
        ),
        "training.dataloader-num-workers": _is("data.total_workers", "of all processes on a machine together"),
        "training.prefetch-factor": _is("data.prefetch_factor"),
        "training.pin-memory": _switch(
            Meaning({}, "that is the default where there is a GPU"), Meaning({"data.pin_memory": False})
        ),
        "training.num-epochs": _is("budget.epochs"),
        "training.epochs": _is("budget.epochs"),
        "training.max-steps": _is("budget.max_steps"),
        "training.learning-rate": _is("optimizer.learning_rate"),
        "training.seed": _is("run.seed"),
        "training.output-dir": _is("run.output_dir"),
        "deepspeed.enabled": _switch(Meaning({"distributed.strategy": "deepspeed"}), _DEFAULT),
        "deepspeed.stage": _is("deepspeed.stage"),
        "deepspeed.config-file": _is("deepspeed.config"),
        "deepspeed.config-path": _is("deepspeed.config"),
    },
)  # fmt: skip

DIALECTS = (_GPU_TRAINING, _MULTI_GPU, _ACCELERATE, _TRAINING_BLOCK)
SECTIONS_OF_OTHERS = frozenset({"training"})
DEEPSPEED_MARKS = frozenset({"zero-optimization", "train-micro-batch-size-per-gpu", "zero-allow-untested-optimizer"})

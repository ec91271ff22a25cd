"""Configuration files that were written for other trainers: detects the dialect, and translates each line.

The same key means different things in them: `train_batch_size` is per GPU beside Accelerate and global in DeepSpeed's
JSON. So a file is read in one dialect, found from keys that only that one has, and two are never merged. A line with an
equivalent sets it; one without is named, with the reason. Keys that no dialect knows are read as drivetrain's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.config.settings import Given, normal
from drivetrain.core.errors import Problem


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

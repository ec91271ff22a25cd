"""Derives DeepSpeed's JSON from what is known of a run and of its settings, and merges a user's own file into it.

This is the only place that knows DeepSpeed's keys. It needs neither DeepSpeed nor a device.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem

DEFAULT_STAGE = 2
LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's own default, whose buffer a small model would never fill

_FLAG = "--deepspeed-config"
_NEVER = 2**31 - 1  # steps until a fixed scale grows
_JOBS_OWN = {
    "optimizer": ("the job has an optimizer of its own", "drop it, and say it in Job.optimizer"),
    "scheduler": ("the job has a schedule of its own", "drop it, and say it in Job.schedule"),
    "torch_autocast": ("the run's precision says what is cast", "drop it, and use --precision"),
    "amp": ("the run's precision says what is cast", "drop it, and use --precision"),
    "elasticity": ("the job's global batch does not depend on the world", "drop it"),
    "autotuning": ("DeepSpeed would end the run to tune it", "drop it, and use drivetrain plan --measure"),
    "curriculum_learning": ("it changes what a batch is, behind the job's back", "drop it, and say it in the data"),
    "data_efficiency": ("it changes what a batch is, behind the job's back", "drop it, and say it in the data"),
    "progressive_layer_drop": ("it changes the model, behind the job's back", "drop it, and say it in the model"),
}


@dataclass(frozen=True)
class ZeroFacts:
    """The facts of a run that go into the JSON."""

    precision: str
    world_size: int
    micro_batch: int
    accumulation: int
    global_batch: int
    clip_norm: float | None
    stage: int | None = None  # None: as the file says
    offload_optimizer: bool | None = None  # None: as the file says
    num_weights: int | None = None  # None: not known yet


def read_own(path: Path) -> dict[str, Any]:
    """Read a user's file. `auto`, which other trainers use for what follows from the run, counts as not set."""
    try:
        own: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad_file(path, f"it cannot be read: {error.strerror}", "name a file that is there") from None
    except ValueError as error:
        raise _bad_file(path, f"it is not JSON: {error}", "fix it, or leave it out") from None
    if not isinstance(own, dict):
        raise _bad_file(path, f"it holds a {type(own).__name__}, not an object", "write {…} around its settings")
    for section in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(own.get(section, {}), dict) and own[section] != "auto":
            raise _bad_file(path, f"{section} is {own[section]!r}, not an object", f'write "{section}": {{…}}')
    settings: dict[str, Any] = _without_auto(own)
    return settings


def stage_of(stage: int | None, own: Mapping[str, Any]) -> int:
    return stage or own.get("zero_optimization", {}).get("stage", DEFAULT_STAGE)


def keeps_bf16_weights(config: Mapping[str, Any]) -> bool:
    return bool(config.get("bf16", {}).get("enabled", False))


def asks_for_fp16(own: Mapping[str, Any]) -> bool:
    return "fp16" in own and _is_on(own["fp16"])


def scaler_state(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a file scales the loss in fp16, as the state of torch's GradScaler; empty where it does not say."""
    if not asks_for_fp16(own):
        return {}
    fp16 = own["fp16"]
    fixed = float(fp16.get("loss_scale", 0))  # 0: it follows the gradients
    return {
        "scale": fixed or 2.0 ** fp16.get("initial_scale_power", 16),
        "growth_factor": 2.0,
        "backoff_factor": 1.0 if fixed else 0.5,
        "growth_interval": _NEVER if fixed else fp16.get("loss_scale_window", 1000),
        "_growth_tracker": 0,
    }


def told_of_fp16(own: Mapping[str, Any], file: str) -> list[str]:
    """Return notes on how this runtime's fp16 differs from DeepSpeed's own."""
    if not asks_for_fp16(own):
        return []
    notes = [f"fp16 in {file}: weights stay float32 and operations are cast, as under every other strategy"]
    ignored = [key for key in ("hysteresis", "consecutive_hysteresis", "min_loss_scale") if key in own["fp16"]]
    if ignored:
        notes.append(
            f"fp16 in {file}: {' and '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect: the loss "
            "scale is halved after every step whose gradients are not finite"
        )
    return notes


def settings_in(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a file has for drivetrain's own settings, by their names."""
    said = {
        "batch.size": own.get("train_micro_batch_size_per_gpu"),
        "batch.accumulation": own.get("gradient_accumulation_steps"),
        "precision.dtype": "bf16" if keeps_bf16_weights(own) else "fp16" if asks_for_fp16(own) else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def derive(facts: ZeroFacts, own: Mapping[str, Any] | None = None, file: str = "") -> dict[str, Any]:
    """Return the JSON that DeepSpeed gets. The file's values hold; all that contradict the run are raised at once."""
    own = own or {}
    problems = [
        Problem(f"{file or 'deepspeed_config.json'}: {key}", message, value, remedy=remedy)
        for key, value, message, remedy in _contradictions(facts, own)
    ]
    if problems:
        raise ConfigError(problems)
    zero: dict[str, Any] = {
        "reduce_bucket_size": min(LARGEST_BUCKET, facts.num_weights or LARGEST_BUCKET),
        **own.get("zero_optimization", {}),
        "stage": stage_of(facts.stage, own),
    }
    if facts.offload_optimizer:
        zero.setdefault("offload_optimizer", {"device": "cpu", "pin_memory": True})
    elif facts.offload_optimizer is False:
        zero.pop("offload_optimizer", None)
    config = {
        # Ragged batches are no multiple of a batch size, and the strategy scales the loss itself.
        **{key: value for key, value in own.items() if key not in ("train_batch_size", "fp16")},
        "train_micro_batch_size_per_gpu": facts.micro_batch,
        "gradient_accumulation_steps": 1,  # the strategy says which micro-step is the last, and weighs each itself
        "gradient_clipping": facts.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the job's own optimizer steps, wherever its state is kept
        "zero_optimization": zero,
    }
    if keeps_bf16_weights(own):
        # Sums of many small numbers are what low precision is worst at; and a step that is not finite is skipped.
        config.setdefault("communication_data_type", "fp32")
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        config["bf16"] = {**own["bf16"], "check_grad_overflow": True}
    return config


def _contradictions(facts: ZeroFacts, own: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, str]]:
    """Yield contradictions as (key, its value, what it contradicts, remedy)."""
    for key, (message, remedy) in _JOBS_OWN.items():
        if _is_on(own.get(key)):
            yield key, own[key], message, remedy
    expected = {
        "train_batch_size": (facts.global_batch, "samples in a step of this job", "Job.global_batch, or --batch-size"),
        "train_micro_batch_size_per_gpu": (facts.micro_batch, "samples per device and micro-step", "--batch-size"),
        "gradient_accumulation_steps": (facts.accumulation, "micro-steps per step", "--accumulation-steps"),
        "gradient_clipping": (facts.clip_norm or 0.0, "is where this job clips (0: nowhere)", "Job.clip_norm"),
        "zero_allow_untested_optimizer": (True, "is what the job's own optimizer needs", "nothing"),
        "zero_force_ds_cpu_optimizer": (False, "is what the job's own optimizer needs", "nothing"),
    }
    for key, (value, what, instead) in expected.items():
        if key in own and own[key] != value:
            remedy = "drop it" if instead == "nothing" else f"drop it, or change {instead}"
            yield key, own[key], f"{own[key]} in the file, but {value} {what}", remedy
    if asks_for_fp16(own):
        if facts.precision != "fp16":
            message = f"asks for fp16, but this run computes in {facts.precision}"
            yield "fp16", own["fp16"], message, "use --precision fp16, or drop it"
        if own["fp16"].get("fp16_master_weights_and_grads"):
            message = "small steps would be lost in fp16 weights, and a checkpoint holds float32 ones"
            yield "fp16.fp16_master_weights_and_grads", True, message, "drop it"
    if keeps_bf16_weights(own) and facts.precision != "bf16":
        message = f"keeps weights in bf16, but this run computes in {facts.precision}"
        yield "bf16", own["bf16"], message, "use --precision bf16, or drop it"
    zero = own.get("zero_optimization", {})
    offloads = facts.offload_optimizer or (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if keeps_bf16_weights(own) and stage_of(facts.stage, own) == 1 and not offloads:
        message = (
            "in stage 1 DeepSpeed keeps bf16 weights in another kind of optimizer, which cannot be driven or saved"
        )
        yield "bf16", own["bf16"], message, "use --zero-stage 2, or --offload-optimizer, or drop it"
    yield from _in_zero(facts, own.get("zero_optimization", {}))


def _in_zero(facts: ZeroFacts, zero: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, str]]:
    stage = zero.get("stage")
    if stage is not None and stage not in (1, 2, 3):
        yield "zero_optimization.stage", stage, f"{stage} is not a stage that shards", "use 1, 2 or 3; for 0, use ddp"
    elif stage is not None and facts.stage not in (None, stage):
        message = f"{stage} in the file, but --zero-stage {facts.stage} is asked for"
        yield "zero_optimization.stage", stage, message, "drop one of the two"
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "cpu")
        if device == "nvme":
            message = "what is swapped to disk cannot be saved in drivetrain's checkpoints"
            yield f"zero_optimization.{key}.device", device, message, 'use "cpu"'
    for key, usual, why in (
        ("mics_shard_size", -1, "ranks would hold copies of each other's parts, and a checkpoint holds each part once"),
        ("zenflow", None, "steps would be taken late, and not all of them by the job's optimizer"),
    ):
        if zero.get(key, usual) != usual:
            yield f"zero_optimization.{key}", zero[key], why, "drop it"
    offloads = zero.get("offload_optimizer")
    if offloads and offloads.get("ratio", 1) != 1:
        message = "two optimizers would share the steps, and only the job's own is saved"
        yield "zero_optimization.offload_optimizer.ratio", offloads["ratio"], message, "drop it"
    if facts.offload_optimizer is False and offloads and offloads.get("device", "none") != "none":
        message = "offloads in the file, but --no-offload-optimizer is asked for"
        yield "zero_optimization.offload_optimizer", offloads, message, "drop one of the two"
    if facts.offload_optimizer and offloads and offloads.get("device") == "none":
        message = '"none" in the file, but --offload-optimizer is asked for'
        yield "zero_optimization.offload_optimizer", offloads, message, "drop one of the two"


def _is_on(section: Any) -> bool:
    return bool(section.get("enabled", True)) if isinstance(section, Mapping) else bool(section)


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(entry) for key, entry in value.items() if entry != "auto"}
    return value


def _bad_file(path: Path, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(f"{_FLAG} {path}", message, str(path), allowed="a JSON object", remedy=remedy)])


@dataclass(frozen=True)
class Zero:
    """Holds the ZeRO stage, and the user's file with its name; an empty one where there is none."""

    stage: int
    own: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    notes: tuple[str, ...] = ()  # what the file asks for and does not get

    @classmethod
    def of(cls, config: Config, *, on_gpu: bool = True) -> "Zero":
        """Read the DeepSpeed settings of a configuration.

        Without a GPU the file's fp16 is left out: it says how a GPU computes, not what the job means.
        """
        path = config.deepspeed.config
        own, file = ({}, "") if path is None else (read_own(path), path.name)
        notes = told_of_fp16(own, file)
        if asks_for_fp16(own) and not on_gpu:
            del own["fp16"]
            notes = [f"fp16 needs a GPU, and this run uses the CPU: fp16 in {file} is left out"]
        return cls(stage_of(config.deepspeed.stage, own), own, file, tuple(notes))

    def obeyed(self, config: Config) -> tuple[Config, list[str]]:
        """Return the configuration with the file's values in settings that nothing else set, and notes to report."""
        sections: dict[str, Any] = {}
        notes = list(self.notes)
        for name, value in settings_in(self.own).items():
            section, _, setting = name.partition(".")
            current = sections.get(section, getattr(config, section))
            is_free = getattr(current, setting) in (None, "auto") and getattr(current, "mixed", None) is None
            if is_free:
                sections[section] = current.model_copy(update={setting: value})
                notes.append(f"{name} is {value}, as {self.file} says")
        return config.model_copy(update=sections), notes

"""DeepSpeed's ZeRO, as its strategy needs it: DeepSpeed's JSON, and this rank's parts of model and optimizer.

The JSON is derived from what is known of a run and of its settings, and a user's own file is merged into it. This is
the only place that knows DeepSpeed's keys. It needs neither DeepSpeed nor a device.

DeepSpeed puts the weights of a group into one flat float32 tensor and cuts that between ranks, regardless of where
weights end; the optimizer knows only flat tensors. Nothing is gathered for a save: each rank writes its ranges, as
boxes. A range of a weight's elements, in row-major order, is the end of a row, some whole rows, and the start of
another; in more dimensions the same again inside a row.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.state import Shard, TensorSource
from drivetrain.strategies.base import StrategyParts
from drivetrain.strategies.optimizer_state import AVERAGE, Decoder, Encoder, cannot_save
from drivetrain.strategies.replicated import (
    MODEL,
    OPTIMIZER,
    as_taken_up,
    check_field,
    load_optimizer_meta,
    load_scaler,
    loaded_settings,
    optimizer_meta,
    refuse_another_job,
    saved_scaler,
)

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
Shape = tuple[int, ...]


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


def boxes_of(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the fewest boxes, as (offsets, shape), that hold the elements from `start` to before `stop`, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row_size = prod(shape[1:])
    row, column = divmod(start, row_size)
    last_row, last_column = divmod(stop, row_size)
    if column or row == last_row:
        end = row_size if row < last_row else last_column
        yield from (((row, *offsets), (1, *size)) for offsets, size in boxes_of(shape[1:], column, end))
        if row == last_row:
            return
        row += 1
    if row < last_row:
        yield (row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:])
    yield from (((last_row, *offsets), (1, *size)) for offsets, size in boxes_of(shape[1:], 0, last_column))


def shards_of(key: str, flat: Tensor, shape: Shape, start: int) -> list[Shard]:
    """Return a flat tensor, which holds the elements of a whole from `start` on, as shards that share its memory."""
    shards, taken = [], 0
    for offsets, size in boxes_of(shape, start, start + flat.numel()):
        part = flat[taken : taken + prod(size)].view(size)
        shards.append(Shard(key, part, shape, offsets, is_part=True))
        taken += part.numel()
    return shards


def read_flat(source: TensorSource, key: str, shape: Shape, start: int, stop: int) -> Tensor:
    """Read the elements from `start` to before `stop` of a stored tensor."""
    parts = [source.read(key, offsets, size).reshape(-1) for offsets, size in boxes_of(shape, start, stop)]
    return torch.cat(parts) if parts else torch.zeros(0)


@dataclass(frozen=True)
class ZeroPart:
    """The elements of a weight that this rank updates: `length` from `start` on, which are in `flat` at `offset`."""

    flat: Tensor
    offset: int
    start: int
    length: int

    def of(self, values: Tensor) -> Tensor:
        """Return the elements of this part from a tensor with the layout of the flat one."""
        return values.detach()[self.offset : self.offset + self.length]

    @property
    def stop(self) -> int:
        return self.start + self.length


class ZeroParts:
    """Made before DeepSpeed takes a model over, while names, shapes and groups are what the user made them."""

    def __init__(self, parts: StrategyParts, rank: int, is_main: bool, stage: int) -> None:
        self._parts, self._rank, self._is_main, self._stage = parts, rank, is_main, stage
        names = {parameter: name for name, parameter in parts.model.named_parameters()}
        self._shapes: dict[Tensor, Shape] = {parameter: tuple(parameter.shape) for parameter in names}
        self.groups = [  # names of what each group trains
            [names[p] for p in group["params"] if p.requires_grad] for group in parts.optimizer.param_groups
        ]
        self._trained = {
            names[p]: (p, number)
            for number, group in enumerate(parts.optimizer.param_groups)
            for p in group["params"]
            if p.requires_grad
        }
        self._found: dict[Tensor, ZeroPart] = {}

    def find(self, zero: Any) -> None:
        """Find where DeepSpeed has put everything."""
        self._zero = zero
        self._found = {
            parameter: self._in_third_stage(parameter) if self._stage == 3 else self._in_flat_group(parameter, group)
            for parameter, group in self._trained.values()
        }

    def _in_flat_group(self, parameter: Any, group: int) -> ZeroPart:
        flat, mapping = self._zero.single_partition_of_fp32_groups[group], parameter._hp_mapping
        if mapping is None:  # all of it is on other ranks
            return ZeroPart(flat, 0, 0, 0)
        inside, outside = mapping.hp_fragment_address, mapping.lp_fragment_address
        return ZeroPart(flat, inside.start, outside.start, inside.numel)

    def _in_third_stage(self, parameter: Any) -> ZeroPart:
        """Find a part in stage 3: every weight is cut into equally many elements per rank; the last are padding."""
        sub_group, offset, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
        start = self._rank * size
        length = max(0, min(size, parameter.ds_numel - start))
        return ZeroPart(self._zero.fp32_partitioned_groups_flat[sub_group], offset, start, length)

    def _in_its_own(self, parameter: Any) -> ZeroPart:
        """Find a weight that is not trained, in stage 3: in no flat tensor, but sharded all the same."""
        flat = parameter.ds_tensor
        start = self._rank * flat.numel()
        return ZeroPart(flat, 0, start, max(0, min(flat.numel(), parameter.ds_numel - start)))

    def _part_of(self, value: Tensor) -> ZeroPart | None:
        """Return this rank's part of a tensor; None if every rank has all of it."""
        if value in self._found:
            return self._found[value]
        return self._in_its_own(value) if self._stage == 3 and value in self._shapes else None

    def _state(self) -> Iterator[tuple[str, Tensor, ZeroPart | None]]:
        """Yield the model's state by its own names; tied weights under each of theirs."""
        for name, value in self._parts.model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise cannot_save(f"the model's state {name!r}", value)
            yield name, value, self._part_of(value)

    # Out

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        shards: list[Shard] = []
        for name, value, part in self._state():
            if part is not None:
                shards += shards_of(MODEL + name, part.of(part.flat), self._shapes[value], part.start)
            elif self._is_main:
                shards.append(Shard.whole(MODEL + name, value.detach()))
        average = self._parts.average
        if average is not None and self._is_main:
            shards += [Shard.whole(AVERAGE + name, value) for name, (value, _) in average.named().items()]
        scalars: dict[str, dict[str, Any]] = {}
        encoder = Encoder(None)  # tensors inside of other values would be of flat tensors, and are refused
        for name, (parameter, _) in self._trained.items():
            part = self._found[parameter]
            for entry, value in self._parts.optimizer.state.get(part.flat, {}).items():
                check_field(entry, name)
                key = f"{OPTIMIZER}{name}/{entry}"
                if isinstance(value, Tensor) and value.shape == part.flat.shape:
                    shards += shards_of(key, part.of(value), self._shapes[parameter], part.start)
                elif isinstance(value, Tensor):  # of all its elements, such as a count: the same on every rank
                    shards += [Shard.whole(key, value.detach())] if self._is_main else []
                else:
                    what = f"the optimizer's state {entry!r} of {name}"
                    scalars.setdefault(name, {})[entry] = encoder.encode(value, what, f"state/{name}/{entry}")
        flats = {part.flat: name for name, part in ((name, self._found[p]) for name, (p, _) in self._trained.items())}
        found, meta = optimizer_meta(self._parts, {**flats, **self._flat_groups()})
        shards += found if self._is_main else []
        groups = [{"params": names, **stored} for names, stored in zip(self.groups, meta.pop("groups"), strict=True)]
        return shards, {
            "optimizer_groups": groups,
            "optimizer_scalars": scalars,
            "scaler": saved_scaler(self._parts),
            "num_averaged": average.num_updates if average is not None else 0,
            **meta,
        }

    def _flat_groups(self) -> dict[Tensor, str]:
        """Return the tensors that the optimizer holds now, which nothing refers to by name."""
        return {flat: "" for group in self._parts.optimizer.param_groups for flat in group["params"]}

    # In

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Load a checkpoint. Everything is compared before anything is changed."""
        optimizer, average = self._parts.optimizer, self._parts.average
        source = as_taken_up(source, self.groups, optimizer)
        shapes = {name: self._shapes.get(value, tuple(value.shape)) for name, value, _ in self._state()}
        refuse_another_job(source, shapes, self.groups, optimizer)
        by_flat = self._fields_by_flat(source)
        for name, value, part in self._state():
            if part is None:
                value.copy_(source.read(MODEL + name))
            else:
                part.of(part.flat).copy_(read_flat(source, MODEL + name, shapes[name], part.start, part.stop))
        if average is not None:
            average.load(source)
        optimizer.state.clear()
        for flat, fields in by_flat.items():
            optimizer.state[flat] = self._state_of(flat, fields, source)
        for group, stored in zip(optimizer.param_groups, source.meta["optimizer_groups"], strict=True):
            group.update(loaded_settings(stored))
        load_optimizer_meta(self._parts, source, {})
        load_scaler(self._parts, source)

    def _fields_by_flat(self, source: TensorSource) -> dict[Tensor, list[str]]:
        """Return which state each flat tensor gets. DeepSpeed steps its weights as one: all must have the same."""
        fields: dict[str, set[str]] = {
            name: set(source.meta["optimizer_scalars"].get(name, ())) for name in self._trained
        }
        for key in source.keys:
            if key.startswith(OPTIMIZER):
                name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
                fields[name].add(entry)
        first: dict[Tensor, str] = {}
        for name, (parameter, _) in self._trained.items():
            before = first.setdefault(self._found[parameter].flat, name)
            if fields[before] != fields[name]:
                raise DrivetrainError(
                    f"the checkpoint's optimizer has stepped {before} and {name} unequally, and DeepSpeed steps them "
                    "as one",
                    remedy="go on with the strategy that wrote it, or with fsdp",
                )
        return {flat: sorted(fields[name]) for flat, name in first.items() if fields[name]}

    def _state_of(self, flat: Tensor, fields: list[str], source: TensorSource) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, (parameter, group) in self._trained.items():
            part = self._found[parameter]
            if part.flat is not flat:
                continue
            for entry in fields:
                key = f"{OPTIMIZER}{name}/{entry}"
                if key not in source.keys:
                    stored = source.meta["optimizer_scalars"][name][entry]
                    state[entry] = Decoder(source.read, flat.device).decode(stored)
                elif tuple(source.keys[key].shape) == self._shapes[parameter]:
                    values = state.setdefault(entry, torch.zeros_like(flat, requires_grad=False))
                    part.of(values).copy_(read_flat(source, key, self._shapes[parameter], part.start, part.stop))
                else:
                    self._take_whole(state, entry, source.read(key), name, flat, group)
        return state

    def _take_whole(
        self, state: dict[str, Any], entry: str, value: Tensor, name: str, flat: Tensor, group: int
    ) -> None:
        if entry in state and not torch.equal(state[entry].cpu(), value):
            raise DrivetrainError(
                f"the checkpoint's optimizer has another {entry!r} for {name} than for the weights before it, and "
                "DeepSpeed steps them as one",
                remedy="go on with the strategy that wrote it, or with fsdp",
            )
        settings = self._parts.optimizer.param_groups[group]
        on_device = entry != "step" or settings.get("fused") or settings.get("capturable")  # as torch's own loading
        state[entry] = value.to(flat.device) if on_device else value


def refuse_odd_weights(model: nn.Module) -> None:
    """Refuse weights that are not float32, as DeepSpeed's flat tensors are, and scalars: it sends weights as views."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise DrivetrainError(
                f"DeepSpeed does not take weights without dimensions, and {name} is one",
                remedy=f"give {name} the shape [1], or use fsdp or ddp",
            )
    others = [f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.dtype != torch.float32]
    if others:
        raise DrivetrainError(
            f"DeepSpeed keeps weights as float32, and of this model {others[0]}"
            + (f" (and {len(others) - 1} more)" if len(others) > 1 else ""),
            remedy="make the model with float32 weights (--precision says what it computes in), or use fsdp or ddp",
        )

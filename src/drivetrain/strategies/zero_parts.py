"""Saves and loads this rank's parts of model and optimizer, which are inside DeepSpeed's flat buffers.

DeepSpeed puts the weights of a group into one flat float32 tensor and cuts that between ranks, regardless of where
weights end; the optimizer knows only flat tensors. Nothing is gathered for a save: each rank writes its ranges, as
boxes.

A range of a weight's elements, in row-major order, is the end of a row, some whole rows, and the start of another; in
more dimensions the same again inside a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import Shard, TensorSource, read_for
from drivetrain.strategies.base import StrategyParts
from drivetrain.strategies.optimizer_state import Decoder, Encoder, cannot_save
from drivetrain.strategies.replicated import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    check_field,
    load_optimizer_meta,
    load_scaler,
    loaded_settings,
    optimizer_meta,
    refuse_another_job,
    saved_scaler,
)

Shape = tuple[int, ...]


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
            for field, value in self._parts.optimizer.state.get(part.flat, {}).items():
                check_field(field, name)
                key = f"{OPTIMIZER}{name}/{field}"
                if isinstance(value, Tensor) and value.shape == part.flat.shape:
                    shards += shards_of(key, part.of(value), self._shapes[parameter], part.start)
                elif isinstance(value, Tensor):  # of all its elements, such as a count: the same on every rank
                    shards += [Shard.whole(key, value.detach())] if self._is_main else []
                else:
                    what = f"the optimizer's state {field!r} of {name}"
                    scalars.setdefault(name, {})[field] = encoder.encode(value, what, f"state/{name}/{field}")
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
        shapes = {name: self._shapes.get(value, tuple(value.shape)) for name, value, _ in self._state()}
        refuse_another_job(source, shapes, self.groups, optimizer)
        by_flat = self._fields_by_flat(source)
        for name, value, part in self._state():
            if part is None:
                value.copy_(source.read(MODEL + name))
            else:
                part.of(part.flat).copy_(read_flat(source, MODEL + name, shapes[name], part.start, part.stop))
        if average is not None:
            for name, (averaged, of) in average.named().items():
                averaged.copy_(read_for(of, source, AVERAGE + name))
            average.num_updates = source.meta["num_averaged"]
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
                name, _, field = key.removeprefix(OPTIMIZER).rpartition("/")
                fields[name].add(field)
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
            for field in fields:
                key = f"{OPTIMIZER}{name}/{field}"
                if key not in source.keys:
                    stored = source.meta["optimizer_scalars"][name][field]
                    state[field] = Decoder(source.read, flat.device).decode(stored)
                elif tuple(source.keys[key].shape) == self._shapes[parameter]:
                    values = state.setdefault(field, torch.zeros_like(flat, requires_grad=False))
                    part.of(values).copy_(read_flat(source, key, self._shapes[parameter], part.start, part.stop))
                else:
                    self._take_whole(state, field, source.read(key), name, flat, group)
        return state

    def _take_whole(
        self, state: dict[str, Any], field: str, value: Tensor, name: str, flat: Tensor, group: int
    ) -> None:
        if field in state and not torch.equal(state[field].cpu(), value):
            raise DrivetrainError(
                f"the checkpoint's optimizer has another {field!r} for {name} than for the weights before it, and "
                "DeepSpeed steps them as one",
                remedy="go on with the strategy that wrote it, or with fsdp",
            )
        settings = self._parts.optimizer.param_groups[group]
        on_device = field != "step" or settings.get("fused") or settings.get("capturable")  # as torch's own loading
        state[field] = value.to(flat.device) if on_device else value


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

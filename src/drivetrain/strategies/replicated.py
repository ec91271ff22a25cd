"""The state of model and optimizer by name: saved, loaded, and frozen between steps."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.optimizers import as_parameters_lie
from drivetrain.core.state import Shard, TensorSource, local_part, read_for
from drivetrain.core.world import World
from drivetrain.strategies.base import StrategyParts
from drivetrain.strategies.optimizer_state import (
    AVERAGE,
    ON_HOST,
    Decoder,
    Encoder,
    attributes_of,
    cannot_save,
    encode_attributes,
    is_plain,
    is_wrapper,
    load_attributes,
    plain_attributes,
    plain_settings,
)

# ----------------------------------------------------------------------------------------------------------------------
# Saves and loads the state of model and optimizer by name: whole where every device has a copy, else in parts.

_HOW_IT_IS_DONE = {"fused", "foreach", "capturable"}  # settings of an optimizer that are no part of the job
MODEL, OPTIMIZER = "model/", "optimizer/"


def whole_state(parts: StrategyParts) -> tuple[list[Shard], dict[str, Any]]:
    """Return model and optimizer by name. Tensors as shards, the rest as JSON; anything else is refused by its name."""
    model, optimizer = parts.model, parts.optimizer
    shards = []
    untrained = _untrained(parts)
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise cannot_save(f"the model's state {name!r}", value)
        shard = Shard.of(MODEL + name, local_part(value), value)
        # A state_dict of the user's own may hold something else under the name of a parameter.
        is_itself = name in untrained and untrained[name].data_ptr() == shard.tensor.data_ptr()
        shards.append(replace(shard, is_untrained=True) if is_itself else shard)
    if parts.average is not None:
        shards += [Shard.of(AVERAGE + name, value, of) for name, (value, of) in parts.average.named().items()]
    names = parameter_names(model, optimizer, parts.owners)
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            continue  # a key of the optimizer's own: `optimizer_meta`
        name = names[parameter]

        def put(key: str, value: Tensor, parameter: Tensor = parameter) -> None:
            # What has a parameter's shape is of its elements; anything else, such as a count, of all of it.
            owner = parts.owners.get(parameter, value) if value.shape == parameter.shape else value
            shards.append(Shard.of(key, value, owner))

        encoder = Encoder(put, names)
        for field, value in state.items():
            check_field(field, name)
            if isinstance(value, Tensor) and not is_wrapper(value):
                put(f"{OPTIMIZER}{name}/{field}", value.detach())
            else:
                what = f"the optimizer's state {field!r} of {name}"
                scalars.setdefault(name, {})[field] = encoder.encode(value, what, f"state/{name}/{field}")
    found, meta = optimizer_meta(parts, names)
    num_averaged = parts.average.num_updates if parts.average is not None else 0
    if parts.frozen.names:
        meta["frozen"] = sorted(parts.frozen.names)
    groups = [
        {"params": [names[parameter] for parameter in group["params"]], **stored}
        for group, stored in zip(optimizer.param_groups, meta.pop("groups"), strict=True)
    ]
    return shards + found, {
        "optimizer_groups": groups,
        "optimizer_scalars": scalars,
        "scaler": saved_scaler(parts),
        "num_averaged": num_averaged,
        **meta,
    }


def _untrained(parts: StrategyParts) -> dict[str, Tensor]:
    """Return this rank's parts of the parameters that no optimizer holds, by all of their names."""
    held = (parameter for group in parts.optimizer.param_groups for parameter in group["params"])
    trained = {parts.owners.get(parameter, parameter) for parameter in held}
    named = parts.model.named_parameters(remove_duplicate=False)
    return {name: local_part(parameter) for name, parameter in named if parameter not in trained}


def check_field(field: object, name: str) -> None:
    if not isinstance(field, str) or "/" in field:
        raise DrivetrainError(
            f"the optimizer's state of {name} has the key {field!r}, which a checkpoint cannot name",
            remedy="use text without a slash as the key",
        )


def optimizer_meta(parts: StrategyParts, names: Mapping[Tensor, str]) -> tuple[list[Shard], dict[str, Any]]:
    """Return the optimizer's state that belongs to no single parameter: its groups' settings, attributes, other keys.

    Settings and attributes are also given as they were when the optimizer was made: a continued run compares with that.
    """
    shards: list[Shard] = []
    encoder = Encoder(lambda key, value: shards.append(Shard.whole(key, value)), names)
    optimizer = parts.optimizer
    kept: Mapping[Any, Any] = optimizer.state  # torch says that its keys are tensors
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        values, exact = settings_of(group), {}
        for name, value in group.items():
            if name in ("params", "lr", ON_HOST) or is_plain(value):
                continue
            exact[name] = encoder.encode(value, f"the optimizer's setting {name!r}", f"groups/{number}/{name}")
        groups.append({"values": values, **({"exact": exact} if exact else {})})
    own = {
        key: encoder.encode(value, f"the optimizer's state {key!r}", f"own/{key}")
        for key, value in kept.items()
        if isinstance(key, str)
    }
    others = [key for key in kept if key not in names and not isinstance(key, str)]
    if others:
        what = f"a tensor of shape {tuple(others[0].shape)}" if isinstance(others[0], Tensor) else repr(others[0])
        raise DrivetrainError(
            f"the optimizer keeps state for {what}, which is not a parameter of the model",
            remedy="keep it for a parameter, or under a key that is text",
        )
    meta: dict[str, Any] = {"groups": groups, "optimizer_made_with": parts.made_with}
    if own:
        meta["optimizer_own_state"] = own
    if attributes := encode_attributes(optimizer, encoder):
        meta["optimizer_attributes"] = attributes
    return shards, meta


def load_optimizer_meta(parts: StrategyParts, source: TensorSource, names: Mapping[Tensor, str]) -> None:
    """Load what `optimizer_meta` returned, after the state of the parameters was loaded."""
    optimizer, meta = parts.optimizer, source.meta
    device = next(parts.model.parameters()).device  # the third stage of ZeRO leaves the groups empty
    decoder = Decoder(source.read, device, names)
    for group, stored in zip(optimizer.param_groups, meta["optimizer_groups"], strict=True):
        group.update({name: decoder.decode(value) for name, value in stored.get("exact", {}).items()})
    for key, value in meta.get("optimizer_own_state", {}).items():
        optimizer.state[key] = decoder.decode(value)
    load_attributes(optimizer, meta.get("optimizer_attributes", {}), decoder)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's group that JSON can hold; for the others see `optimizer_meta`."""
    values = {name: value for name, value in group.items() if name not in ("params", ON_HOST)}
    if ON_HOST in group:
        values["lr"] = group[ON_HOST]  # to read it from the device would make the host wait
    for name, value in list(values.items()):
        if isinstance(value, Tensor) and value.numel() == 1:
            values[name] = value.item()
        elif not _is_json(value):
            del values[name]
    return values


def load_whole_state(parts: StrategyParts, source: TensorSource) -> None:
    """Load what `whole_state` returned. Everything is compared before anything is changed."""
    model, optimizer = parts.model, parts.optimizer
    shape_buffers(model, source)
    state = model.state_dict()
    names = parameter_names(model, optimizer, parts.owners)
    ours = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    source = as_taken_up(source, ours, optimizer)
    refuse_another_job(source, {name: tuple(value.shape) for name, value in state.items()}, ours, optimizer)
    groups = source.meta["optimizer_groups"]
    with torch.no_grad():
        for name, target in state.items():
            local_part(target).copy_(read_for(target, source, MODEL + name))
        if parts.average is not None:
            parts.average.load(source)

    owners = {names[parameter]: owner for parameter, owner in parts.owners.items() if parameter in names}
    numbers = {name: number for number, name in enumerate(name for group in ours for name in group)}
    by_number: dict[int, dict[str, Any]] = {}
    for key in source.keys:
        if key.startswith(OPTIMIZER):
            name, _, field = key.removeprefix(OPTIMIZER).rpartition("/")
            owner = owners.get(name)
            is_part = owner is not None and owner.shape == source.keys[key].shape
            value = read_for(owner, source, key) if is_part else source.read(key)
            by_number.setdefault(numbers[name], {})[field] = value
    scalars = _decoded_scalars(source, names, owners)
    for name, values in scalars.items():
        by_number.setdefault(numbers[name], {}).update(values)
    settings = [
        {
            **group,
            **loaded_settings(stored),
            "params": [numbers[name] for name in stored["params"]],
        }
        for group, stored in zip(optimizer.param_groups, groups, strict=True)
    ]
    optimizer.load_state_dict({"state": by_number, "param_groups": settings})
    _put_exactly(optimizer, by_number)
    as_parameters_lie(optimizer)
    load_optimizer_meta(parts, source, names)
    load_scaler(parts, source)
    set_frozen(parts, source.meta.get("frozen", ()), parts.owners)


def set_frozen(parts: StrategyParts, frozen: Iterable[str], owners: Mapping[Tensor, Tensor]) -> None:
    """Give the weights of these names no gradient from now on, and all others theirs."""
    names = parameter_names(parts.model, parts.optimizer, owners)
    parts.frozen.names = set(frozen)
    parts.frozen.tensors = [tensor for tensor, name in names.items() if name in parts.frozen.names]


def saved_scaler(parts: StrategyParts) -> dict[str, Any] | None:
    """Return the state of the gradient scaler in fp16, and None elsewhere."""
    return parts.scaler.state_dict() if parts.precision.scales_loss else None


def load_scaler(parts: StrategyParts, source: TensorSource) -> None:
    """Restore the scale of the loss in fp16, where the checkpoint's run had one."""
    if parts.precision.scales_loss and source.meta.get("scaler"):
        parts.scaler.load_state_dict(source.meta["scaler"])


def _decoded_scalars(
    source: TensorSource, names: Mapping[Tensor, str], owners: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return the parameters' state that is kept in other forms than one tensor for a field."""
    parameters = {name: parameter for parameter, name in names.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, values in source.meta["optimizer_scalars"].items():
        owner = owners.get(name)

        def get(key: str, owner: Tensor | None = owner) -> Tensor:
            is_part = owner is not None and owner.shape == source.keys[key].shape
            return read_for(owner, source, key) if is_part else source.read(key)

        decoder = Decoder(get, parameters[name].device, names)
        found[name] = {field: decoder.decode(value) for field, value in values.items()}
    return found


def _put_exactly(optimizer: Optimizer, by_number: Mapping[int, Mapping[str, Any]]) -> None:
    """Restore saved values exactly: torch makes generators of text, and gives tensors the type of their parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, fields in by_number.items():
        state = optimizer.state[parameters[number]]
        for field, value in fields.items():
            loaded = state.get(field)
            if not isinstance(value, Tensor):
                if not isinstance(loaded, Tensor):  # else the optimizer itself makes a tensor of it
                    state[field] = value
            elif isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                state[field] = value.to(loaded.device)


def shape_buffers(model: nn.Module, source: TensorSource) -> None:
    """Give buffers that get their shape in a forward, as observers of quantization do, the shape that was saved.

    Such a buffer has one number or none in a new model. All others have to fit.
    """
    for name, buffer in model.named_buffers():
        stored = source.keys.get(MODEL + name)
        if stored is not None and buffer.numel() <= 1 < math.prod(stored.shape):
            buffer.resize_(stored.shape)


def refuse_another_job(
    source: TensorSource, shapes: Mapping[str, tuple[int, ...]], names: list[list[str]], optimizer: Optimizer
) -> None:
    """Compare a checkpoint with the model's shapes, and with the optimizer's groups by the names in each."""
    stored = {key.removeprefix(MODEL): info for key, info in source.keys.items() if key.startswith(MODEL)}
    is_forked = source.meta.get(IS_FORKED)
    _check_keys(
        shapes, stored, _FORK_REMEDY if is_forked else "use the model that wrote it, or another --name for this one"
    )
    groups = source.meta["optimizer_groups"]
    made_with = source.meta.get("optimizer_made_with")
    if [group["params"] for group in groups] != names:
        raise DrivetrainError(
            "the checkpoint's optimizer trains other parameters, or in other groups",
            remedy="use the job that wrote it, or another --name for this one",
        )
    _check_settings(optimizer, groups if made_with is None else made_with["groups"])
    _check_attributes(optimizer, {} if made_with is None else made_with["attributes"])


def loaded_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored group that are part of the job."""
    return {name: value for name, value in stored["values"].items() if name not in _HOW_IT_IS_DONE}


def share_buffers(model: nn.Module, world: World) -> None:
    """Copy rank 0's buffers to all ranks, with one broadcast for each type of number."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        if buffer.layout is torch.strided:  # a sparse one is taken for a constant
            by_type.setdefault(buffer.dtype, []).append(buffer.detach())
    for buffers in by_type.values():
        together = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(together, 0, world.group)
        if not world.is_main:
            parts = torch.split(together, [buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])


def _check_attributes(optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    attributes = attributes_of(optimizer)
    differences = [
        f"{name} is {attributes[name]} now and was {value}"
        for name, value in stored.items()
        if name in attributes and _plain(attributes[name]) != value
    ]
    if differences:
        raise DrivetrainError(
            f"the checkpoint's optimizer was made with other attributes: {some_names(differences)}",
            remedy="make it with the same ones to go on with that run, or use another --name for this one",
        )


def _check_settings(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Compare the optimizer's settings, which are part of the job; implementation and schedule position are not.

    An optimizer may change its settings as it steps, so they are compared with those that it was made with.
    """
    differences = [
        f"{name} is {group[name]} now and was {stored['values'][name]}"
        for group, stored in zip(optimizer.param_groups, groups, strict=True)
        for name in sorted(group.keys() & stored["values"].keys() - {"lr", "params"} - _HOW_IT_IS_DONE)
        if _plain(group[name]) != _plain(stored["values"][name])
    ]
    if differences:
        raise DrivetrainError(
            f"the checkpoint's optimizer has other settings: {some_names(differences)}",
            remedy="use the same settings to go on with that run; or another --name for this one, and --init-from to "
            "begin with the weights of that run",
        )


def _plain(value: Any) -> Any:
    """Return a value as JSON returns it: a tuple is a list."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def parameter_names(model: nn.Module, optimizer: Optimizer, owners: Mapping[Tensor, Tensor]) -> dict[Tensor, str]:
    """Return the names of what the optimizer holds. `owners` maps each part to the model's parameter it belongs to."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    names |= {parameter: names[owner] for parameter, owner in owners.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise DrivetrainError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have",
                    remedy="make the optimizer from the parameters it is called with; for dt.drive, give the module "
                    'that has it to the run, too, by name: {"model": model, "loss": loss}',
                )
    return names


def _check_keys(shapes_here: Mapping[str, tuple[int, ...]], stored: Mapping[str, Any], remedy: str) -> None:
    missing, extra = sorted(set(shapes_here) - set(stored)), sorted(set(stored) - set(shapes_here))
    shapes = [
        f"{name} is {shapes_here[name]} here and {tuple(stored[name].shape)} there"
        for name in sorted(set(shapes_here) & set(stored))
        if shapes_here[name] != tuple(stored[name].shape)
    ]
    lines = [f"only in the model: {some_names(missing)}"] if missing else []
    lines += [f"only in the checkpoint: {some_names(extra)}"] if extra else []
    lines += [f"other shapes: {some_names(shapes)}"] if shapes else []
    if lines:
        raise DrivetrainError(
            "the checkpoint is of another model: " + "; ".join(lines),
            remedy=remedy,
        )


def some_names(names: list[str]) -> str:
    """Return the first five names and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))


# ----------------------------------------------------------------------------------------------------------------------
# Takes up a checkpoint in a fork: each weight keeps the moments that it had, whatever group of the optimizer it is in,
# and the settings are the job's own. A setting that the job has not changed is as the optimizer left it: some of them
# count or adapt in their groups.

IS_FORKED = "is_forked"  # in the meta of a checkpoint of another run
_RATES = ("lr", "initial_lr")  # the schedule sets them
_FORK_REMEDY = (
    "train the same weights of the same model; or, to begin with the weights alone, --init-from with the run that was "
    "to be forked, and no --fork"
)


@dataclass(frozen=True)
class _Retold:
    """A checkpoint with other words about its state."""

    source: TensorSource
    meta: Mapping[str, Any]

    @property
    def keys(self) -> Mapping[str, Any]:
        return self.source.keys

    def read(self, key: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        return self.source.read(key, offsets, shape)


def as_fork(source: TensorSource) -> TensorSource:
    """Return a checkpoint of the run that was forked, whose optimizer may have had other settings and groups."""
    return _Retold(source, {**source.meta, IS_FORKED: True})


def as_taken_up(source: TensorSource, names: list[list[str]], optimizer: Optimizer) -> TensorSource:
    """Return the checkpoint of a fork with this job's groups and settings, and any other checkpoint as it is.

    Args:
        source: The checkpoint.
        names: The names of the weights in each of this job's groups.
        optimizer: This job's optimizer, as it was made.
    """
    meta = source.meta
    if not meta.get(IS_FORKED):
        return source
    stored = meta["optimizer_groups"]
    made_with = meta.get("optimizer_made_with") or {"groups": stored, "attributes": {}}
    group_of = {name: number for number, group in enumerate(stored) for name in group["params"]}
    _refuse_other_weights({name for group in names for name in group}, set(group_of))
    attributes = plain_attributes(optimizer)
    kept = {
        name: value
        for name, value in meta.get("optimizer_attributes", {}).items()
        if name not in made_with["attributes"] or attributes.get(name) == made_with["attributes"][name]
    }
    is_regrouped = [group["params"] for group in stored] != names
    if is_regrouped and any(isinstance(value, Mapping) and value.get("$") == "optimizer" for value in kept.values()):
        raise DrivetrainError(
            f"{type(optimizer).__name__} wraps an optimizer whose state goes by the order of the weights, and this job "
            "has other groups of weights than the run that was forked",
            remedy="give it the same groups; Job.weight_decay (--weight-decay) makes some, so leave it as it was there",
        )
    groups = []
    for own, group in zip(names, optimizer.param_groups, strict=True):
        before = [(stored[number], made_with["groups"][number]) for number in sorted({group_of[name] for name in own})]
        groups.append({"params": own, **_settings_in_fork(group, before)})
    made_here = {"groups": [{"values": plain_settings(group)} for group in optimizer.param_groups]}
    told = {"optimizer_groups": groups, "optimizer_made_with": made_here | {"attributes": attributes}}
    return _Retold(source, {**meta, **told, "optimizer_attributes": kept})


def _refuse_other_weights(here: set[str], there: set[str]) -> None:
    lines = [
        f"only in {where}: {some_names(sorted(names))}"
        for where, names in (("this job", here - there), ("the checkpoint", there - here))
        if names
    ]
    if lines:
        raise DrivetrainError(f"the run that was forked trains other weights: {'; '.join(lines)}", remedy=_FORK_REMEDY)


def _settings_in_fork(group: Mapping[str, Any], before: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the settings of one of this job's groups, as a checkpoint has them.

    Args:
        group: The group, as the optimizer was made.
        before: The groups that its weights were in: each as it was stored, and as it had been made.
    """
    values = {name: value for name, value in group.items() if name not in ("params", ON_HOST)}
    if not before:
        return {"values": values}
    first, _ = before[0]
    unchanged = {
        name
        for name in values.keys() - set(_RATES)
        if all(
            name in stored["values"]
            and _plain(made["values"].get(name)) == _plain(values[name])
            and stored["values"][name] == first["values"][name]
            for stored, made in before
        )
    }
    exact = {name: value for name, value in first.get("exact", {}).items() if name in unchanged}
    return {"values": values | {name: first["values"][name] for name in unchanged}, "exact": exact}


# ----------------------------------------------------------------------------------------------------------------------
# Freezes weights between steps, and thaws them: what is frozen gets no gradient, and so its optimizer leaves it alone.
#
# `requires_grad` stays as it is. Gradients are computed and reduced as before, and dropped before they are clipped: so
# no strategy, compiler or bucket has to know, and ranks that freeze at the same step stay in step.


class Freezer:
    """Freezes a run's weights by their names. All ranks call it together, after the same step.

    Args:
        parts: What the strategy was given.
        owners: Where the optimizer holds this rank's parts of parameters: each part, and the parameter it is of.
    """

    def __init__(self, parts: StrategyParts, owners: Mapping[Tensor, Tensor]) -> None:
        self._parts, self._owners = parts, owners

    def freeze(self, patterns: Iterable[str]) -> None:
        """Freeze the weights whose names match one of the patterns."""
        trained = self._trained()
        frozen = self._parts.frozen.names | self._matching(patterns, trained)
        if frozen >= trained:
            raise DrivetrainError("context.freeze: nothing would be left to train", remedy="freeze fewer weights")
        set_frozen(self._parts, frozen, self._owners)

    def unfreeze(self, patterns: Iterable[str]) -> None:
        """Thaw the weights whose names match one of the patterns."""
        thawed = self._matching(patterns, self._trained())
        set_frozen(self._parts, self._parts.frozen.names - thawed, self._owners)

    def _trained(self) -> set[str]:
        """Return the names of the weights that the optimizer has."""
        names = parameter_names(self._parts.model, self._parts.optimizer, self._owners)
        return {names[tensor] for tensor in self._parts.trained}

    def _matching(self, patterns: Iterable[str], trained: set[str]) -> set[str]:
        if self._parts.frozen.refused:
            raise DrivetrainError(
                f"context.freeze: {self._parts.frozen.refused}", remedy="use --parallel-strategy ddp or fsdp"
            )
        found: set[str] = set()
        for pattern in patterns:
            matching = {name for name in trained if fnmatchcase(name, pattern)}
            if not matching:
                raise DrivetrainError(
                    f"context.freeze: no weight that the optimizer has matches {pattern!r}",
                    remedy=f"name some of {', '.join(sorted(trained)[:5])}, …; a star stands for any text",
                )
            found |= matching
        return found

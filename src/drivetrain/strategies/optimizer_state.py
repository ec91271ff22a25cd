"""What is kept beside the weights: the optimizer's state, as checkpoints store it, and averages of the weights."""

import ctypes
import enum
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.optimizers import JointOptimizer
from drivetrain.core.schedules import SWA
from drivetrain.core.state import TensorSource, local_part, put_away, read_for

# ----------------------------------------------------------------------------------------------------------------------
# Encodes an optimizer's state for checkpoints, and keeps learning rates where the optimizer reads them.
#
# Optimizers keep text, counters, tuples, lists of tensors and settings that change while they step: in the state of a
# parameter, in the state under another key, in a group, or as attributes of the object. JSON has no tuples and no
# tensors, so values are encoded: numbers, text and lists as they are, everything else as a dictionary with a tag.
#
# A captured step reads its rate from the device, since it has to change between replays. There it is a float32, for all
# types of weights. Rates on the host are rounded likewise for GPUs, so that a run is the same with and without capture.

NESTED = "optimizer_nested/"  # keys of tensors inside of other values
UNSAVED = "unsaved_attributes"  # of an optimizer: names of attributes that hold nothing worth saving
_TAG = "$"
_NOT_STATE = {  # set by torch, or when the fused form is turned on
    "_fused_guard",
    "_need_device_dtype_check_for_fused",
    "_opt_called",
    "_step_count",
    "_step_supports_amp_scaling",
    "_warned_capturable_if_run_uncaptured",
    "found_inf",
    "grad_scale",
    UNSAVED,
}
# They are made again by the code that makes the optimizer, and nothing in them changes.
_CONSTANT = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    torch.dtype,
    torch.device,
)

# Tensors that stand for others: their classes that are known, and the names of those others.
_WRAPPERS = {"torchao.optim.subclass_8bit:OptimState8bit": ("codes", "scale", "qmap")}

Put = Callable[[str, Tensor], None]
Get = Callable[[str], Tensor]


def cannot_save(what: str, value: object) -> DrivetrainError:
    return DrivetrainError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: it takes tensors, numbers, text, and "
        "lists, tuples and dictionaries of them",
        remedy="keep it as one of these, or use another optimizer; if nothing is lost with an attribute, name it in "
        f"optimizer.{UNSAVED} = (...)",
    )


class Encoder:
    """Turns values into JSON; `put` is given each tensor with the key under which it will be asked for."""

    def __init__(self, put: Put | None, names: Mapping[Tensor, str] | None = None) -> None:
        self._put, self._names = put, names or {}

    def encode(self, value: Any, what: str, key: str) -> Any:
        """Encode a value. `what` names the value in an error, `key` the tensors in it."""
        if isinstance(value, enum.Enum):
            raise cannot_save(what, value)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, what, key)
        if type(value) in (list, tuple):
            items = [self.encode(item, f"{what}[{number}]", f"{key}/{number}") for number, item in enumerate(value)]
            return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
        if isinstance(value, dict):
            pairs = [
                [self._key(name, what), self.encode(item, f"{what}[{name!r}]", f"{key}/{number}")]
                for number, (name, item) in enumerate(value.items())
            ]
            return {_TAG: "dict", "items": pairs}
        raise cannot_save(what, value)

    def _key(self, name: Any, what: str) -> Any:
        if not isinstance(name, (str, bool, int)) or isinstance(name, enum.Enum):
            raise cannot_save(f"a key of {what}", name)
        return name

    def _tensor(self, value: Tensor, what: str, key: str) -> dict[str, Any]:
        if value in self._names:
            return {_TAG: "parameter", "name": self._names[value]}
        if self._put is None:
            raise cannot_save(what, value)
        if is_wrapper(value):
            return self._wrapper(value, what, key)
        self._put(NESTED + key, value.detach())
        return {_TAG: "tensor", "key": NESTED + key, "on_host": value.device.type == "cpu"}

    def _wrapper(self, value: Any, what: str, key: str) -> dict[str, Any]:
        """Encode a tensor that stands for others by these: plain tensors, which any program can read."""
        kind = f"{type(value).__module__}:{type(value).__name__}"
        if kind not in _WRAPPERS:
            raise DrivetrainError(
                f"{what} is a {type(value).__name__}, a tensor of a kind that checkpoints do not know",
                remedy="use an optimizer with plain tensors, or torchao.optim.AdamW8bit, whose kind is known",
            )
        parts = {name: self.encode(getattr(value, name), what, f"{key}/{name}") for name in _WRAPPERS[kind]}
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TAG: "wrapper", "kind": kind, "parts": parts, "signed": bool(value.signed), "dtype": dtype}


class Decoder:
    """Decodes what `Encoder` encoded. Tensors return to where they were: host memory, or the parameters' device."""

    def __init__(self, get: Get, device: torch.device, names: Mapping[Tensor, str] | None = None) -> None:
        self._get, self._device = get, device
        self._parameters = {name: parameter for parameter, name in (names or {}).items()}

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        kind = value[_TAG]
        if kind == "float":
            return float(value["value"])
        if kind == "tuple":
            return tuple(self.decode(item) for item in value["items"])
        if kind == "dict":
            return {name: self.decode(item) for name, item in value["items"]}
        if kind == "parameter":
            return self._parameters[value["name"]]
        if kind == "wrapper":
            return self._wrapper(value)
        if kind == "tensor":
            found = self._get(value["key"])
            return found if value["on_host"] else found.to(self._device)
        raise DrivetrainError(
            f"the checkpoint holds an optimizer value of the kind {kind!r}, which this version does not know",
            remedy="use the version of drivetrain that wrote it, or a newer one",
        )

    def _wrapper(self, value: Mapping[str, Any]) -> Tensor:
        if value["kind"] not in _WRAPPERS:
            raise DrivetrainError(
                f"the checkpoint holds tensors of the kind {value['kind']!r}, which this version does not know",
                remedy="use the version of drivetrain that wrote it, or a newer one",
            )
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise DrivetrainError(
                f"the checkpoint holds an optimizer state of the dtype {value['dtype']!r}, which torch does not have",
                remedy="it is damaged, or of a newer torch: use the version that wrote it, or an older checkpoint",
            )
        parts = {name: self.decode(part) for name, part in value["parts"].items()}
        made: Tensor = _state_of_8_bits()(*(parts[name] for name in _WRAPPERS[value["kind"]]), value["signed"], dtype)
        return made


def _state_of_8_bits() -> Any:
    """Return torchao's class of such states, which is the only one that is ever made from a checkpoint."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise DrivetrainError(
            f"the checkpoint's optimizer has states of 8 bits, which cannot be loaded here: {error}",
            remedy="pip install 'drivetrain[torchao]'",
        ) from error
    return OptimState8bit


def is_wrapper(value: Any) -> bool:
    """Return whether a tensor only stands for others, as quantized states do."""
    return hasattr(value, "__tensor_flatten__") and not hasattr(value, "to_local")


def is_plain(value: Any) -> bool:
    """Return whether a value survives a round trip through JSON unchanged."""
    if type(value) is list:
        return all(map(is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def move_to_parameters(optimizer: Optimizer) -> None:
    """Move each parameter's state to its device, as torch's loading does, but keep types and text."""
    for group in optimizer.param_groups:
        steps_on_host = not (group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for field, value in state.items():
                if isinstance(value, Tensor) and not (field == "step" and steps_on_host):
                    state[field] = value.to(parameter.device)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps as attributes, by name. Torch's own optimizers keep nothing there."""
    if isinstance(optimizer, JointOptimizer):
        return {
            f"{of}.{name}": value
            for of, member in optimizer.members.items()
            for name, value in attributes_of(member).items()
        }
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}
    left_out = _attributes_of_any() | _NOT_STATE | set(getattr(optimizer, UNSAVED, ()))
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in left_out and not isinstance(value, _CONSTANT) and not _is_patched(optimizer, name)
    }


def _attributes_of_any() -> set[str]:
    return set(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))


def _is_patched(optimizer: Optimizer, name: str) -> bool:
    """Return whether it is a method that was wrapped, as torch's learning rate schedulers do with `step`."""
    return callable(getattr(type(optimizer), name, None))


def plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that can be compared between a run and its continuation."""
    return {name: _jsonable(value) for name, value in attributes_of(optimizer).items() if is_comparable(value)}


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings that can be compared."""
    return {name: _jsonable(value) for name, value in group.items() if name != "params" and is_comparable(value)}


def is_comparable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(is_comparable, value))
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _jsonable(value: Any) -> Any:
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def encode_attributes(optimizer: Optimizer, encoder: Encoder) -> dict[str, Any]:
    found = {}
    for name, value in attributes_of(optimizer).items():
        what, key = f"the optimizer's attribute {name!r}", f"attributes/{name}"
        if isinstance(value, Optimizer):
            state = _state_within(_holder(optimizer, name)[0], value, what)
            found[name] = {_TAG: "optimizer", "state": encoder.encode(state, what, key)}
        elif _has_state_dict(value):
            found[name] = {_TAG: "state_dict", "value": encoder.encode(dict(value.state_dict()), what, key)}
        else:
            found[name] = encoder.encode(value, what, key)
    return found


def _state_within(optimizer: Optimizer, wrapped: Optimizer, what: str) -> dict[str, Any]:
    """Return the state of an optimizer that another one wraps, as SAM does, by the number of its parameter.

    The two share their groups, so that one learning rate and one set of settings hold for both.
    """
    kind = type(wrapped).__name__
    if wrapped.param_groups is not optimizer.param_groups:
        raise DrivetrainError(
            f"{what} is an optimizer of its own ({kind}), whose state a checkpoint would not hold",
            remedy="share the groups, self.param_groups = wrapped.param_groups, as SAM does; or use one optimizer "
            "that does both, with all of its state in optimizer.state and param_groups",
        )
    if attributes_of(wrapped):
        raise DrivetrainError(
            f"{what} ({kind}) keeps attributes of its own, which a checkpoint would not hold",
            remedy="wrap one of torch's own optimizers",
        )
    numbers = _numbers(optimizer)
    return {str(numbers[parameter]): dict(state) for parameter, state in wrapped.state.items()}


def _numbers(optimizer: Optimizer) -> dict[Tensor, int]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: number for number, parameter in enumerate(parameters)}


def load_attributes(optimizer: Optimizer, stored: Mapping[str, Any], decoder: Decoder) -> None:
    for full_name, value in stored.items():
        holder, name = _holder(optimizer, full_name)
        fresh = getattr(holder, name, None)
        if isinstance(value, Mapping) and value[_TAG] == "optimizer" and isinstance(fresh, Optimizer):
            fresh.param_groups = holder.param_groups  # loading has made new ones
            parameters = {str(number): parameter for parameter, number in _numbers(holder).items()}
            fresh.state.clear()
            for number, state in decoder.decode(value["state"]).items():
                fresh.state[parameters[number]] = state
            continue
        if isinstance(value, Mapping) and value[_TAG] == "state_dict":
            if not _has_state_dict(fresh):
                raise DrivetrainError(
                    f"the optimizer's attribute {name!r} had a state to save, and is a {type(fresh).__name__} now",
                    remedy="use the optimizer that wrote the checkpoint, or another --name for this run",
                )
            fresh.load_state_dict(decoder.decode(value["value"]))  # type: ignore[union-attr]
            continue
        found = decoder.decode(value)
        if isinstance(fresh, dict) and type(fresh) is not dict:  # such as a defaultdict: it stays one
            fresh.clear()
            fresh.update(found)
        else:
            setattr(holder, name, found)


def _holder(optimizer: Optimizer, name: str) -> tuple[Optimizer, str]:
    """Return the optimizer that has an attribute, and what it is called there: the inverse of `attributes_of`."""
    if not isinstance(optimizer, JointOptimizer):
        return optimizer, name
    of = next(of for of in optimizer.members if name.startswith(f"{of}."))
    return optimizer.members[of], name.removeprefix(f"{of}.")


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


ON_HOST = "lr_on_host"  # of a group whose rate is on the device: its value, without a copy from the device


def rounded(rate: float) -> float:
    """Round a rate to float32."""
    return ctypes.c_float(rate).value


def are_rounded(optimizer: Optimizer) -> bool:
    """Return whether the rates of its parameters are rounded: on a GPU, unless the weights are float64."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters:  # they are somewhere else between steps, as with DeepSpeed's third stage
        return False
    return all(parameter.device.type == "cuda" and parameter.dtype is not torch.float64 for parameter in parameters)


def put_rates_on_device(optimizer: Optimizer) -> None:
    """Move the rates to the device. Called after a checkpoint was loaded, which makes numbers of them again."""
    for group in optimizer.param_groups:
        rate = rounded(float(group.get(ON_HOST, group["lr"])))
        group["lr"] = torch.tensor(rate, dtype=torch.float32, device=group["params"][0].device)
        group[ON_HOST] = rate


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of the next step. On the device the fill is enqueued after the earlier steps, without waiting."""
    if ON_HOST not in group:
        group["lr"] = rate
    elif group[ON_HOST] != rate:
        group["lr"].fill_(rate)
        group[ON_HOST] = rate


# ----------------------------------------------------------------------------------------------------------------------
# Averages of the weights, often better than the weights: they are validated and exported.
#
# `Average` is an exponential moving average (EMA), updated with each step. `RunningMean` is the plain mean of
# stochastic weight averaging (SWA), which takes the weights of some steps.

AVERAGE = "ema/"  # before the names of averaged weights in a checkpoint, of either kind


class Average:
    """An exponential moving average of the parameters that train. Buffers are not averaged.

    The decay of update n is min(decay, (1 + n) / (10 + n)): early on the weights move fast, and the first ones, which
    are random, should not be remembered for long. Of a sharded model, every rank averages its part.
    """

    every: int | Literal["epoch"] = "epoch"  # how often `after_step` has something to do

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self.num_updates = 0
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._live = [local_part(parameter) for parameter in self._trained]
        self._averaged = [part.clone() for part in self._live]
        self._model = model

    def of(self, parameter: Tensor) -> Tensor | None:
        return next((a for p, a in zip(self._trained, self._averaged, strict=True) if p is parameter), None)

    def cut(self, parameter: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
        """Take other rows of a parameter that this rank holds now: the average gets the same rows."""
        for number, trained in enumerate(self._trained):
            if trained is parameter:
                self._live[number] = local_part(parameter)
                self._averaged[number] = fill(self._averaged[number])

    @torch.no_grad()
    def update(self) -> None:
        self.num_updates += 1
        decay = min(self._decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(self._averaged, self._live, 1 - decay)

    def after_step(self, steps_done: int, *, ends_epoch: bool) -> None:
        """Take the weights of a step, where the average is one over some steps. The host does not wait."""

    def finish(self) -> None:
        """Complete the average at the end of a run, on all ranks together."""

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Take up what a checkpoint holds."""
        self.num_updates = source.meta["num_averaged"]
        for name, (average, of) in self.named().items():
            average.copy_(read_for(of, source, AVERAGE + name))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context. They are copied, so that addresses stay the same."""
        put_away(self._model)  # what was gathered of the others is not to be used any more
        with torch.no_grad():
            live = [part.clone() for part in self._live]
            torch._foreach_copy_(self._live, self._averaged)
        try:
            yield
        finally:
            put_away(self._model)  # what was gathered of the others is not to be used any more
            with torch.no_grad():
                torch._foreach_copy_(self._live, live)

    def named(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the averages and their parameters, by the model's own names; tied weights under each of theirs."""
        averages = {id(parameter): average for parameter, average in zip(self._trained, self._averaged, strict=True)}
        named = self._model.state_dict(keep_vars=True)
        return {name: (averages[id(value)], value) for name, value in named.items() if id(value) in averages}


class RunningMean(Average):
    """The mean of the weights of some steps, each with the same weight. Before the first, it is nothing at all.

    The statistics of batch-norm layers belong to the weights that computed them. Those of the mean are computed anew,
    by `compute_statistics`, when the mean is used.
    """

    def __init__(self, model: nn.Module, swa: SWA, first_step: int) -> None:
        super().__init__(model, decay=0.0)
        self.every = swa.every
        self._first_step = first_step
        self._buffers = [buffer for layer in batch_norms(model) for buffer in statistics_of(layer)]
        self._statistics = [buffer.clone() for buffer in self._buffers]
        self._is_current = not self._buffers  # the statistics are those of the mean as it is now
        self.compute_statistics: Callable[[], Sequence[Tensor]] | None = None  # of the weights that are in the model

    def update(self) -> None:
        """Do nothing: only some steps count, and `after_step` knows which."""

    @torch.no_grad()
    def after_step(self, steps_done: int, *, ends_epoch: bool) -> None:
        is_due = ends_epoch if self.every == "epoch" else steps_done % self.every == 0
        if steps_done < self._first_step or not is_due:
            return
        self.num_updates += 1
        torch._foreach_lerp_(self._averaged, self._live, 1 / self.num_updates)
        self._is_current = not self._buffers

    def finish(self) -> None:
        if self.num_updates and not self._is_current:
            with self.in_place():
                pass

    def begin_anew_after(self, steps_done: int) -> bool:
        """Drop what was averaged if a run that was made longer has not come to its first step. Return whether it did.

        Averaging does not change the training: the run is then the one that would have come of the longer job.
        """
        if steps_done < self._first_step:
            self.num_updates, self._is_current = 0, not self._buffers
        return not self.num_updates

    def load(self, source: TensorSource) -> None:
        self._is_current = not self._buffers
        self.num_updates = source.meta["num_averaged"]
        if self.num_updates and self._buffers:
            ours = {id(buffer) for buffer in self._buffers}
            named = self._model.state_dict(keep_vars=True)
            names = [name for name, value in named.items() if id(value) in ours]
            self._is_current = all(AVERAGE + name in source.keys for name in names)
        super().load(source)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        if not self.num_updates:
            yield
            return
        with super().in_place():
            live = [buffer.clone() for buffer in self._buffers]
            try:
                if not self._is_current and self.compute_statistics is not None:
                    with torch.no_grad():
                        for held, computed in zip(self._statistics, self.compute_statistics(), strict=True):
                            held.copy_(computed)
                    self._is_current = True
                if self._is_current:
                    self._put(self._statistics)
                yield
            finally:
                self._put(live)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)

    def named(self) -> dict[str, tuple[Tensor, Tensor]]:
        if not self.num_updates:
            return {}
        found = super().named()
        if self._is_current:
            held = {id(buffer): value for buffer, value in zip(self._buffers, self._statistics, strict=True)}
            named = self._model.state_dict(keep_vars=True)
            found |= {name: (held[id(value)], value) for name, value in named.items() if id(value) in held}
        return found


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the model's batch-norm layers that keep statistics."""
    found = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in found if layer.running_mean is not None and layer.running_var is not None]


def statistics_of(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the running mean and variance of a batch-norm layer."""
    mean, variance = layer.running_mean, layer.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(variance, Tensor)
    return mean, variance


def make_average(model: nn.Module, ema: float | None, swa: SWA | None, num_steps: int | None) -> Average | None:
    """Make the average that a job asks for; None if it asks for none."""
    if swa is not None:
        return RunningMean(model, swa, swa.first_step(num_steps))
    return None if ema is None else Average(model, ema)

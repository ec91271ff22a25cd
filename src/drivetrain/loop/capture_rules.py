"""The rules by which a step can be captured: for the run, for its batches, and for what a step changes in Python.

Some are known before the first step (`why_not_captured`). Batches must be alike in structure, shapes, types, and all
non-tensors (`signature`). And the device replays a captured step without Python, so a counter in the loss, a module's
attribute or a list that is appended to would silently stop. `python_state` looks at all that the model, the loss and
the optimizer can reach, as far as it is plain; two looks, before and after a step, tell what it changes. For tensors on
the run's device only the address counts: what a step writes there, a replay writes, too.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import operator
import os
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.optimizers import JointOptimizer
from drivetrain.core.plugins import strategy_facts
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.data.keyed_items import Draws, host_states
from drivetrain.data.resident import Rows

TURNS_OF_MICRO_STEPS = "a step has several turns, each of several micro-batches"
MOST_MICRO_STEPS = 16  # of a step that is captured: each is a graph of its own
_PLAIN_INPUTS = (type(None), bool, int, float, str, bytes)
MOST_ENTRIES = 100  # of a container that are looked at, from each of its ends
MOST_DEPTH = 8
MOST_FOUND = 100_000
MOST_BYTES = 2**20  # of an array that are compared; larger ones by their address
State = dict[str, Any]
_PLAIN = (type(None), bool, int, complex, str, bytes, Enum, range, torch.dtype, torch.device, torch.Size)
_OWN_TENSORS = ("_parameters", "_buffers")
# Libraries that keep nothing of a step in their own functions and classes: these, and Python's own.
_FOREIGN = ("torch", "numpy")
_STANDARD = Path(os.__file__).parent


def why_not_captured(
    world: World,
    strategy: str,
    optimizer: Optimizer,
    precision: Precision,
    *,
    num_micro_steps: int = 1,
    has_turns: bool = False,  # whether a step has several, each with a loss of its own
    activations: str = "keep",
    compile_mode: str = "",  # empty: not compiled
    asserts: bool = False,
    draws: Draws | None = None,
) -> str:
    """Return the reason in words; empty if nothing is known that prevents capture."""
    here = why_not_here(world, asserts=asserts, is_asked_for=True)
    if here:
        return here
    facts = strategy_facts(strategy)
    if not facts.captures:
        return facts.why_not_captured or f"steps of the strategy {strategy} are not captured"
    if world.size > 1 and (found := _why_not_joint(world, has_turns=has_turns)):
        return found
    if num_micro_steps > MOST_MICRO_STEPS:
        return f"a step has {num_micro_steps} micro-batches, and at most {MOST_MICRO_STEPS} are captured"
    if has_turns and num_micro_steps > 1:
        return TURNS_OF_MICRO_STEPS
    if activations != "keep":
        how = {"recompute": "saves the generators' state", "offload": "copies activations to its own memory"}
        return f"activations: {activations}, for which the host {how[activations]} in every step"
    if compile_mode in ("reduce-overhead", "max-autotune"):
        return f"compiling in mode {compile_mode} captures the model by itself"
    if draws is not None and draws.python:
        return "the model or the loss draws from Python's or numpy's generators, which a replay would not"
    return _why_not_optimizer(optimizer, world.device, precision)


def why_not_here(world: World, *, asserts: bool, is_asked_for: bool = False) -> str:
    """Return the reason that is known before there is a model. Several processes capture only if that is asked for."""
    if world.device.type != "cuda":
        return f"only CUDA devices replay a step, and this run is on {world.device.type}"
    if world.size > 1 and not is_asked_for:
        return f"{world.size} processes share a step, and a replay cannot wait for the others"
    return "device assertions look at every batch from Python" if asserts else ""


def _why_not_joint(world: World, *, has_turns: bool) -> str:
    """Return why several processes cannot capture their steps together."""
    backend = world.backend
    if backend != "nccl":
        return f"{backend} runs its collectives on the host, and a CUDA graph holds only what the device does"
    return "a step has several turns, each with a DDP of its own, which was not tried in a graph" if has_turns else ""


def _why_not_optimizer(optimizer: Optimizer, device: torch.device, precision: Precision) -> str:
    if isinstance(optimizer, JointOptimizer):
        if precision.scales_loss and len(optimizer.members) > 1:
            return "fp16: with several optimizers the host is asked whether gradients are infinite"
        return next(
            filter(None, (_why_not_optimizer(one, device, precision) for one in optimizer.members.values())), ""
        )
    kind = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"functions are hooked to the step of {kind}, and a replay would not call them"
    for group in optimizer.param_groups:
        if any(parameter.device != device for parameter in group["params"]):
            return f"parameters of {kind} are not on {device}"
        if any(parameter.dtype is torch.float64 for parameter in group["params"]):
            return "weights are float64, and a learning rate on the device is float32"
        if not group.get("fused") and "capturable" not in group:
            return f"{kind} has no fused form here, and none that reads the learning rate from the device"
        if group.get("differentiable"):
            return f"{kind} is differentiable"
    if precision.scales_loss and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"fp16: {kind} is not fused, and so asks the host whether gradients are infinite"
    return ""


def make_capturable(optimizer: Optimizer) -> None:
    """Keep the optimizer's step count on the device. Called before its first step and before a checkpoint is loaded."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True


class NotStaticError(Exception):
    """Raised for something in a batch that a captured step cannot take as a new input."""


def signature(batch: Any, tensors: list[Tensor]) -> Hashable:
    """Return a value that is equal for batches that fit one captured step. The tensors are appended in order."""
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided:
            raise NotStaticError(f"a batch holds a tensor of layout {batch.layout}")
        tensors.append(batch)
        return batch.shape, batch.dtype, batch.stride(), batch.device
    kind = type(batch)
    if kind is Rows:
        if batch.window is not None:
            return kind, id(batch.resident), id(batch.window), batch.count
        return kind, id(batch.resident), signature(batch.samples, tensors)
    if kind in _PLAIN_INPUTS:
        return kind, batch  # with its kind: 1, 1.0 and True are equal
    if isinstance(batch, (list, tuple)):
        return kind, *[signature(value, tensors) for value in batch]
    if isinstance(batch, Mapping):
        return kind, *[(key, signature(value, tensors)) for key, value in batch.items()]
    if dataclasses.is_dataclass(batch):
        return kind, *[signature(getattr(batch, field.name), tensors) for field in dataclasses.fields(batch)]
    raise NotStaticError(f"a batch holds a {kind.__name__}, which a recorded step cannot be given anew")


def with_tensors(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same structure with these tensors in place of the batch's."""
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Rows):
        return batch if batch.window is not None else Rows(batch.resident, next(tensors))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(with_tensors(value, tensors) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(with_tensors(value, tensors) for value in batch)
    if isinstance(batch, MutableMapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = with_tensors(value, tensors)
        return changed
    if isinstance(batch, Mapping):
        raise NotStaticError(f"a batch holds a {type(batch).__name__}, which cannot be given other entries")
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, with_tensors(getattr(batch, field.name), tensors))
        return changed
    return batch


def python_state(model: nn.Module, loss: Callable[..., Any], optimizer: Optimizer, device: torch.device) -> State:
    """Return the state in Python, keyed by where it is; each value compares equal as long as nothing changed."""
    look = _Look(device)
    for name, module in model.named_modules():
        look.at_module(f"model.{name}" if name else "model", module)
    look.at("loss", loss, 0)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("lr", "lr_on_host"):
                look.at(f"optimizer.param_groups[{number}][{name!r}]", value, 0)
    for number, state in enumerate(optimizer.state.values()):
        look.at(f"optimizer.state[{number}]", state, 0)
    return look.found


def generators_state(device: torch.device) -> State:
    """Return the states of the global generators that are not the device's: a replay does not draw from them."""
    states = host_states()
    if device.type != "cpu":
        states["torch's random generator of the CPU"] = torch.get_rng_state().numpy().tobytes()
    return states


def changes(before: State, after: State) -> list[str]:
    """Return where the two differ."""
    return [
        where
        for where in dict.fromkeys((*before, *after))
        if where not in before or where not in after or before[where] != after[where]
    ]


class _Look:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.found: State = {}
        self._seen: set[int] = set()

    def at_module(self, path: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for name, value in vars(module).items():
            if name == "_modules":
                self.found[f"{path}._modules"] = tuple((key, id(child)) for key, child in value.items())
            elif name in _OWN_TENSORS:
                for key, tensor in value.items():
                    self.at(f"{path}.{key}", tensor, 0)
            elif not isinstance(value, dict) or value:  # hooks, of which there are mostly none
                self.at(f"{path}.{name}", value, 0)
        self._at_class(type(module), 0)

    def at(self, path: str, value: Any, depth: int) -> None:
        found = self.found
        if isinstance(value, _PLAIN):
            found[path] = value
        elif isinstance(value, float):
            found[path] = repr(value)  # nan is not equal to itself
        elif isinstance(value, Tensor):
            found[path] = self._tensor(value)
        elif id(value) in self._seen or depth > MOST_DEPTH or len(found) > MOST_FOUND:
            found.setdefault(path, id(value))
        elif isinstance(value, nn.Module):
            self.at_module(path, value)
            for name, child in value.named_children():
                self.at(f"{path}.{name}", child, depth + 1)
        else:
            self._seen.add(id(value))
            try:
                self._inside(path, value, depth)
            except Exception:  # noqa: BLE001  (a thing that cannot be looked at tells nothing)
                found[path] = id(value)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        self.found[path] = _whole(value)
        for where, part in _parts(value):
            self.at(path + where, part, depth + 1)
        if isinstance(value, types.FunctionType):
            self._at_globals(value, depth)
        else:
            self._at_class(value if isinstance(value, type) else type(value), depth)

    def _tensor(self, value: Tensor) -> Any:
        address = value.data_ptr() if value.layout is torch.strided else 0
        elsewhere = value.device != self._device and not value.is_inference()
        return id(value), address, value._version if elsewhere else 0, value.requires_grad

    def _at_class(self, kind: type, depth: int) -> None:
        """Look at the values of a user's class, and at what its functions reach."""
        for owner in kind.__mro__:
            if id(owner) in self._seen or _is_foreign(owner.__module__):
                continue
            self._seen.add(id(owner))
            for name, value in vars(owner).items():
                inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if isinstance(inner, types.FunctionType) or not name.startswith("__"):
                    self.at(f"{owner.__qualname__}.{name}", inner, depth + 1)

    def _at_globals(self, function: types.FunctionType, depth: int) -> None:
        names = set(_names(function.__code__))
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                if not _is_foreign(value.__name__):
                    for inner in sorted(names & vars(value).keys()):
                        self.at(f"{value.__name__}.{inner}", vars(value)[inner], depth + 1)
            elif not _is_foreign(getattr(value, "__module__", None) or "") or _is_of_use(value):
                self.at(name, value, depth + 1)


@functools.cache
def _is_foreign(module: str) -> bool:
    name = module.split(".")[0]
    if name in _FOREIGN:
        return True
    if name not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)  # a user's module may have the name of one of Python's
    return file is None or _STANDARD in Path(file).parents


def _is_of_use(value: Any) -> bool:
    """Return whether a library made it for the user, like a generator or counter; not so its functions or classes."""
    return not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _whole(value: Any) -> Any:
    """Return what can be compared of an object without looking into it."""
    if isinstance(value, (list, tuple, dict, collections.deque)):
        return type(value), len(value)
    if isinstance(value, (set, frozenset)):
        return type(value), len(value), frozenset(map(repr, value)) if len(value) <= MOST_ENTRIES else None
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MOST_BYTES and not value.dtype.hasobject
        return value.shape, str(value.dtype), value.tobytes() if small else id(value)
    if isinstance(value, (np.generic, itertools.count)):
        return repr(value)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _numpy_state(value.get_state())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes() if value.device.type == "cpu" else id(value)
    if isinstance(value, types.GeneratorType):
        return value.gi_frame is None
    if isinstance(value, Iterator):
        return operator.length_hint(value, -1)
    return id(value)


def _numpy_state(state: Any) -> Any:
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each part with how it is reached."""
    if isinstance(value, (list, tuple, collections.deque)):
        ends = range(len(value)) if len(value) <= 2 * MOST_ENTRIES else (*range(MOST_ENTRIES), *range(-MOST_ENTRIES, 0))
        yield from ((f"[{number}]", value[number]) for number in ends)
    elif isinstance(value, dict):
        # As it is kept: a class of its own may make a new value whenever it is asked for one.
        for key, held in itertools.islice(dict.items(value), MOST_ENTRIES):
            yield f"[{key!r}]", held
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), (f".{value.__func__.__name__}", value.__func__))
    elif isinstance(value, types.BuiltinMethodType):
        if not isinstance(value.__self__, types.ModuleType):
            yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"'s {name}", cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from ((f"'s default {number}", found) for number, found in enumerate(value.__defaults__ or ()))
        yield from ((f"'s default {name}", found) for name, found in (value.__kwdefaults__ or {}).items())
        yield from ((f".{name}", found) for name, found in vars(value).items())
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from ((f"'s {name}", found) for name, found in value.gi_frame.f_locals.items())
    elif isinstance(value, (set, frozenset, np.ndarray, types.ModuleType, type, Optimizer)):
        return
    elif isinstance(value, Mapping) and not hasattr(value, "__dict__"):
        yield from ((f"[{key!r}]", found) for key, found in itertools.islice(value.items(), MOST_ENTRIES))
    else:
        yield from ((f".{name}", found) for name, found in getattr(value, "__dict__", {}).items())
        for owner in type(value).__mro__:
            slots = vars(owner).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)

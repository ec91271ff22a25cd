"""The state of a model: named shards that checkpoints save and load, and a watch over which parameters it has."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.core.errors import DrivetrainError


@dataclass(frozen=True)
class Shard:
    """A rank's local part of one named tensor."""

    key: str  # `model/layers.0.weight`, `optimizer/layers.0.weight/exp_avg`
    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]  # of this part within the global tensor
    is_part: bool = False  # every rank saves its own part; otherwise all have the same, and one saves it
    is_untrained: bool = False  # a parameter in no optimizer: stored once per run, for as long as it does not change

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> "Shard":
        return cls(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @classmethod
    def of(cls, key: str, tensor: Tensor, owner: Tensor) -> "Shard":
        """Return the shard of a tensor laid out like `owner`: whole, or this rank's part if `owner` is distributed."""
        if not is_distributed(owner):
            return cls.whole(key, tensor)
        return cls(key, tensor, tuple(owner.shape), offsets_of(owner), is_part=True)


def is_distributed(tensor: Any) -> bool:
    """Return whether the tensor is sharded over ranks. Works without importing DTensor, which is slow."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local_part(tensor: Any) -> Tensor:
    """Return this rank's part, which shares memory with the tensor; for a plain tensor, the tensor itself, detached."""
    part: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return part.detach()


def offsets_of(tensor: Any) -> tuple[int, ...]:
    """Return the offsets of this rank's part in the whole.

    Rows are split as by `torch.chunk`: the last ranks get fewer.
    """
    if not is_distributed(tensor):
        return (0,) * int(tensor.dim())
    mesh, placements = tensor.device_mesh, tensor.placements
    if not placements[-1].is_shard(0) or not all(each.is_replicate() for each in placements[:-1]):
        raise ValueError(f"a tensor that is distributed as {placements} cannot be saved: parts are ranges of rows")
    num_rows = tensor.shape[0]
    last = mesh.ndim - 1  # the dimension over which rows are split; over others there are copies
    first = min(num_rows, mesh.get_local_rank(last) * -(-num_rows // mesh.size(last)))
    return (first, *(0 for _ in tensor.shape[1:]))


class TensorSource(Protocol):
    """A checkpoint, as a strategy sees it."""

    @property
    def meta(self) -> Mapping[str, Any]: ...

    @property
    def keys(self) -> Mapping[str, Any]: ...

    def read(
        self, key: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> Tensor: ...


def put_value(tensor: Tensor, value: Tensor) -> None:
    """Replace a tensor's value, perhaps by another shape or device, keeping references to the tensor valid."""
    if tensor.is_meta and not value.is_meta:
        is_parameter = isinstance(tensor, nn.Parameter)
        made = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    else:
        tensor.data = value


def put_away(model: nn.Module) -> None:
    """Reshard a sharded model: its parameters become shards again, and the next forward gathers them anew.

    A forward without gradients leaves some of them unsharded. Code that changes or reads weights outside a forward
    calls this first. Other models are left untouched.
    """
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            cast(Any, module).reshard()


def read_for(owner: Any, source: TensorSource, key: str) -> Tensor:
    """Read the part of a stored tensor that belongs to `owner`: all of it, or this rank's shard."""
    if not is_distributed(owner):
        return source.read(key)
    return source.read(key, offsets_of(owner), tuple(local_part(owner).shape))


_TRAIN_IN_TWO_JOBS = (
    "train in two jobs: the second makes the model with the other parameters trained, and starts from the weights of "
    "the first with Job(init_from=...)"
)


class CountingWatch:
    """Finds numbers of a model that change with every step, and are not in its state dict.

    Such as a counter that `forward` raises, and that a loss weight depends on. A resumed run would begin it anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._numbers()
        self._changing: set[str] | None = None

    def look(self) -> list[str]:
        """Return the names of those that have changed between all looks so far."""
        now = self._numbers()
        # What the first forward sets, where there was None, has changed, too.
        changed = {name for name, value in now.items() if value != self._before.get(name)}
        self._before = now
        self._changing = changed if self._changing is None else self._changing & changed
        return sorted(self._changing)

    def _numbers(self) -> dict[str, float]:
        return {
            f"{name}.{attribute}" if name else attribute: value
            for name, module in self._model.named_modules()
            if type(module).__module__.split(".")[0] not in ("torch", "drivetrain")
            for attribute, value in vars(module).items()
            if type(value) in (int, float) and not attribute.startswith("_")
        }


class SettingsWatch:
    """Finds settings of a model's modules that code changes between steps, such as the rate of a dropout, or a switch.

    They are in no state dict: a resumed run begins with those that the model is made with. Settings are the numbers,
    switches and texts among the attributes that a module is made with; of torch's modules, a few numbers. A look takes
    some 50 ns for each.
    """

    _OF_TORCH = ("p", "dropout", "momentum", "negative_slope")
    _KINDS = (bool, int, float, str)
    _MOST = 1000

    def __init__(self, model: nn.Module) -> None:
        found = list[tuple[str, dict[str, Any], str]]()
        for prefix, module in model.named_modules():
            is_own = type(module).__module__.split(".")[0] not in ("torch", "drivetrain")
            for name, value in vars(module).items():
                is_setting = not name.startswith("_") and name != "training" if is_own else name in self._OF_TORCH
                if is_setting and type(value) in self._KINDS:
                    found.append((f"{prefix}.{name}" if prefix else name, vars(module), name))
        self._names = [full for full, _, _ in found[: self._MOST]]
        self._places = [(attributes, name) for _, attributes, name in found[: self._MOST]]
        self._before = self._after = self._values()
        self._moving = set[int]()

    def begin(self) -> None:
        """Look at the settings, before code is called that may change them."""
        self._before = self._values()
        # What forwards change is no setting: a length that was cached, which a validation of the user's changes, too.
        if self._before != self._after:
            self._moving.update(self._differences(self._after, self._before))

    def changed(self) -> list[str]:
        """Return the names of what has changed since `begin`."""
        self._after = self._values()
        if self._after == self._before:
            return []
        return [self._names[it] for it in self._differences(self._before, self._after) if it not in self._moving]

    @staticmethod
    def _differences(before: list[Any], after: list[Any]) -> list[int]:
        return [number for number, (was, now) in enumerate(zip(before, after, strict=True)) if was != now == now]

    def _values(self) -> list[Any]:
        values = [attributes.get(name) for attributes, name in self._places]
        return [value if type(value) in self._KINDS else None for value in values]


_MOST_KEPT = 1000  # entries of a dictionary or list that are looked at
_MOST_ADDED = 10**7  # numbers of a tensor: a whole data set takes seconds


GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class KeptWatch:
    """Finds what functions of the user's keep between calls, outside of the model, and change.

    Such as the moving average that a hook updates: in its attributes, its closure or a global. No checkpoint holds it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = {id(it) for it in (*model.modules(), *model.parameters(), *model.buffers())}
        self._before: dict[int, dict[str, Any]] = {}

    def look(self, function: Any) -> list[str]:
        """Return the names of what has changed since the last look at this function; none at the first look."""
        return self._changed(id(function), kept_by(function))

    def look_at(self, variables: Mapping[str, Any]) -> list[str]:
        """Return the names of variables whose value has changed since the last look at them."""
        return self._changed(0, variables.items())

    def _changed(self, key: int, kept: Iterable[tuple[str, Any]]) -> list[str]:
        now = {name: mark for name, value in kept if (mark := self._mark(value)) is not None}
        before = self._before.get(key)
        self._before[key] = now
        return [] if before is None else [name for name, mark in now.items() if before.get(name, mark) != mark]

    def _mark(self, value: Any, depth: int = 3, *, numbers: bool = True) -> Any:
        """Return what changes whenever a value does; None for what is not looked at. The host waits for tensors."""
        if isinstance(value, (int, float)):
            return value if numbers else None
        if id(value) in self._own or not depth:
            return None
        if isinstance(value, Tensor):
            return value._version, value.shape, value.detach().sum(dtype=torch.float64).item() if _can_add(value) else 0
        if isinstance(value, np.ndarray):
            can_add = value.size <= _MOST_ADDED and value.dtype.kind in "biuf"
            return value.shape, float(value.sum(dtype=np.float64)) if can_add else 0
        if isinstance(value, GENERATORS):
            return _state_of(value)
        if isinstance(value, nn.Module):
            parts: Any = value.state_dict(keep_vars=True)
        elif isinstance(value, dict):
            parts = dict(islice(value.items(), _MOST_KEPT))
        elif isinstance(value, (list, tuple, deque)):  # of anything else: a log
            is_looked_at = bool(value) and isinstance(value[0], (Tensor, nn.Module))
            parts = dict(enumerate(islice(value, _MOST_KEPT))) if is_looked_at else {}
        else:  # an object: its numbers may be those of a clock, or of a tracker
            is_object = not (callable(value) or isinstance(value, ModuleType))
            parts, numbers = getattr(value, "__dict__", {}) if is_object else {}, False
        marks = {key: self._mark(it, depth - 1, numbers=numbers) for key, it in parts.items()}
        return {key: mark for key, mark in marks.items() if mark is not None} or None


def _state_of(generator: np.random.Generator | np.random.RandomState | random.Random | torch.Generator) -> str:
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    if isinstance(generator, torch.Generator):
        return hashlib.blake2b(generator.get_state().numpy().tobytes()).hexdigest()  # its sum may stay as it is
    state = generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()
    return str(state)


def _can_add(tensor: Tensor) -> bool:
    if tensor.numel() > _MOST_ADDED:
        return False
    return tensor.layout == torch.strided and not (tensor.is_complex() or tensor.is_meta or is_distributed(tensor))


def kept_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield by name what a function, a method or a callable object can keep something in."""
    function = getattr(function, "_function", function)  # of a hook that `every` made
    if isinstance(function, partial):
        yield from function.keywords.items()
        function = function.func
    owner = getattr(function, "__self__", None if isinstance(function, FunctionType) else function)
    if owner is not None:
        yield from ((name, it) for name, it in getattr(owner, "__dict__", {}).items() if name != "every")
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if cell != CellType())
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        names = code.co_varnames[: code.co_argcount][-len(function.__defaults__ or ()) or code.co_argcount :]
        yield from zip(names, function.__defaults__ or (), strict=True)


_MOST_BESIDE = 2**24  # numbers


class BesideLoss:
    """Tensors that loss functions hold beside the model, and may change: a teacher's weights, a table of targets.

    Trials before the first step change them, too, and so do validations. They are copied to the host, the smallest
    first: not a data set that a loss refers to, nor a large reference model, which would take long.

    Args:
        losses: The loss functions.
        model: The model, whose own tensors are left out.
    """

    def __init__(self, losses: Iterable[Any], model: nn.Module) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        values = [value for loss in losses for _, value in kept_by(loss)]
        held = {id(value): value for value in values if isinstance(value, (nn.Module, Tensor)) and value is not model}
        if not held:  # as in most jobs: the model, which hooks may have changed, is not listed for each validation
            return
        parameters = list(model.parameters())
        own = {id(it) for it in (*model.modules(), *parameters, *model.buffers())}
        num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        room = min(2 * num_trained, _MOST_BESIDE)
        held = {key: value for key, value in held.items() if key not in own}
        found = [[it for it in _tensors_of(value) if id(it) not in own] for value in held.values()]
        for tensors in sorted(found, key=_num_entries):  # each as a whole, or not at all
            room -= _num_entries(tensors)
            if room >= 0:
                self._copies += [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    def put_back(self) -> bool:
        """Give those that have changed their former numbers, and return whether there were any."""
        pairs = [(tensor, copy) for tensor, copy in self._copies if tensor.shape == copy.shape]
        changed = [(tensor, copy) for tensor, copy in pairs if not torch.equal(tensor.detach().cpu(), copy)]
        for tensor, copy in changed:
            tensor.data.copy_(copy)
        self._copies.clear()
        return bool(changed)


def _tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a module, or a tensor itself, that can be copied."""
    found = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
    tensors = [it for it in found if isinstance(it, Tensor) and not is_lazy(it) and not hasattr(it, "to_local")]
    return [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]


def _num_entries(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class ParameterWatch:
    """Remembers a model's parameters when it is made; `check` raises once they have changed.

    The optimizer, gradient reduction and checkpoints were made for these. A parameter unfrozen later would not train;
    one that is frozen or replaced would be waited for by other ranks, or would differ after a resume.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Where set, a frozen parameter is reported to it, once, instead of refused: a custom loop in one process may
        # freeze some for a while.
        self.note: Callable[[str], None] | None = None
        self._known = self._now()
        self._frozen = [parameter for parameter, is_trained in self._known.values() if not is_trained]

    def check_frozen(self) -> None:
        """Check frozen parameters only, which a loop can afford in every step: free where nothing is frozen."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                self.check()

    def check(self) -> None:
        put_away(self._model)
        now = self._now()
        if now == self._known:
            return
        for name, (parameter, is_trained) in now.items():
            if name not in self._known:
                raise _changed(f"{name} was added to the model", "it is not in the optimizer and would not train")
            before, was_trained = self._known[name]
            if parameter is not before:
                raise _changed(f"{name} was replaced by another tensor", "the optimizer still trains the one before")
            if is_trained and not was_trained:
                raise DrivetrainError(
                    f"requires_grad of {name} was set after training had begun: what trains was settled before, and "
                    "left it out",
                    remedy=f'let it train from the start, and freeze it in a hook: context.freeze("{name}") in its '
                    f"method check, and context.unfreeze later; or {_TRAIN_IN_TWO_JOBS}",
                )
            if was_trained and not is_trained:
                self._frozen_now(name)
        for name in self._known:
            if name not in now:
                raise _changed(f"{name} was taken out of the model", "the optimizer and checkpoints still hold it")

    def _frozen_now(self, name: str) -> None:
        if self.note is None:
            raise DrivetrainError(
                f"requires_grad of {name} was cleared after training had begun, and a resumed run would not know, and "
                "train it",
                remedy=f'in a hook, context.freeze("{name}") and unfreeze do it for good; or {_TRAIN_IN_TWO_JOBS}',
            )
        note, self.note = self.note, lambda _: None
        note(
            f"requires_grad of {name} was cleared: a checkpoint does not hold that, and after a resume the loop has to "
            "do it again"
        )

    def _now(self) -> "dict[str, _Known]":
        return {name: _Known((p, p.requires_grad)) for name, p in self._model.named_parameters()}


class _Known(tuple[Tensor, bool]):
    """A parameter that compares by identity: tensors compare element by element."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self[0] is other[0] and self[1] == other[1]

    __hash__ = tuple.__hash__


def _changed(what: str, why: str) -> DrivetrainError:
    return DrivetrainError(f"{what} after training had begun, and {why}", remedy=_TRAIN_IN_TWO_JOBS)

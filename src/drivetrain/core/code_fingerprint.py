"""Fingerprints of functions and models: equal in every process, and different once the computation is rewritten.

A function's fingerprint covers its bytecode, its constants, its defaults, its closure, and the functions, classes and
constants of the user's modules that it uses. File names, line numbers, names of local variables, addresses and the
order of sets do not count. Code of installed packages counts by its name.
"""

import dis
import enum
import functools
import hashlib
import re
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEEPEST, _MOST_ENTRIES, _MOST_BYTES = 6, 1000, 1 << 20
_SMALL_BYTES = 1 << 12
_HAS_DOCSTRING = 0x4000000  # since Python 3.13; before that, only a function itself knows
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
# Functions that users call and that have moved since: runs of before have these names in their fingerprints.
_RECORDED_AS = {
    "drivetrain.core.metrics.log": "drivetrain.core.logged.log",
    "drivetrain.moe.mixture.auxiliary_loss": "drivetrain.moe.layer.mixture.auxiliary_loss",
    "drivetrain.moe.mixture.load_metrics": "drivetrain.moe.layer.mixture.load_metrics",
    "drivetrain.moe.mixture.mixtures_in": "drivetrain.moe.layer.mixture.mixtures_in",
}


def _installed() -> tuple[str, ...]:
    paths: list[Any] = [*site.getsitepackages(), site.getusersitepackages()]
    paths += [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = Path(__file__).parents[1]  # this one may be installed in place
    return tuple(f"{Path(path).resolve()}/" for path in [*paths, package])


_INSTALLED = _installed()


@functools.cache
def _is_own_file(name: str) -> bool:
    if name.startswith("<frozen"):
        return False
    return name.startswith("<") or not str(Path(name).resolve()).startswith(_INSTALLED)


def is_own(thing: Any) -> bool:
    """Return whether a function, class or module belongs to the user and not to an installed package."""
    if isinstance(thing, types.FunctionType):
        return _is_own_file(thing.__code__.co_filename)
    module = thing if isinstance(thing, types.ModuleType) else sys.modules.get(getattr(thing, "__module__", None) or "")
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if file is None else _is_own_file(file)


def function_fingerprint(function: Any) -> str:
    """Return the fingerprint of any callable."""
    return _digest("".join(_Walk().value(function, 0)))


def class_fingerprints(kind: type) -> dict[str, str]:
    """Return the fingerprints of the methods of a user's class, by name, including those inherited from user classes.

    `__init__` and other special methods except `__call__` are left out: their effect shows in the object.
    """
    found: dict[str, str] = {}
    for each in kind.__mro__:
        if not is_own(each):
            continue
        for name, function in vars(each).items():
            plain = getattr(function, "__func__", getattr(function, "fget", function))
            is_special = name.startswith("__") and name != "__call__"
            if isinstance(plain, types.FunctionType) and not is_special and _is_own_file(plain.__code__.co_filename):
                found.setdefault(f"{kind.__qualname__}.{name}", function_fingerprint(plain))
    return found


def module_fingerprints(model: nn.Module) -> dict[str, str]:
    """Return the fingerprint of each submodule, by name: its class, its `extra_repr` and its plain attributes."""
    return {name: _digest("".join(_module(module))) for name, module in model.named_modules()}


def _module(module: nn.Module) -> Iterator[str]:
    yield f"{type(module).__qualname__}({_ADDRESS.sub('0x', module.extra_repr())})"
    walk = _Walk()
    for name, value in sorted(vars(module).items()):
        is_plain = isinstance(value, (bool, int, float, str, tuple, types.FunctionType, types.BuiltinFunctionType))
        if is_plain and name != "training" and not name.startswith("_"):
            yield f" {name}="
            yield from walk.value(value, 1)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class _Walk:
    """Walks through values and code, visiting each function and object once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # keeps visited objects alive: an id could be reused

    def value(self, value: Any, depth: int) -> Iterator[str]:
        """Yield a description of the value that is the same in every process."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            yield f"{type(value).__name__} {value!r};"
        elif isinstance(value, enum.Enum):
            yield f"{type(value).__qualname__}.{value.name};"
        elif isinstance(value, (torch.dtype, torch.device, torch.Size, np.dtype)):
            yield f"{value};"
        elif isinstance(value, types.CodeType):
            yield from self._code(value, {}, depth)
        elif isinstance(value, types.ModuleType):
            yield f"module {value.__name__};"
        elif depth > _DEEPEST or id(value) in self._seen:
            yield f"a {type(value).__qualname__};"
        else:
            self._seen.add(id(value))
            self._alive.append(value)
            yield from self._thing(value, depth + 1)

    def _thing(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, (Tensor, np.ndarray)):
            yield _array(value)
        elif isinstance(value, (list, tuple)):
            yield f"{type(value).__name__} of {len(value)}:"
            for entry in value[:_MOST_ENTRIES]:
                yield from self.value(entry, depth)
        elif isinstance(value, (set, frozenset)):
            yield from sorted("".join(_Walk().value(entry, depth)) for entry in value)
        elif isinstance(value, Mapping):
            yield from self._mapping(value, depth)
        elif isinstance(value, nn.Module):
            yield from (f"{name} {found};" for name, found in module_fingerprints(value).items())
            yield from self._class(type(value))
        elif isinstance(value, functools.partial):
            yield "partial:"
            for part in (value.func, value.args, value.keywords):
                yield from self.value(part, depth)
        elif isinstance(value, types.MethodType):
            yield from self.value(value.__func__, depth)
            yield from self.value(value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, depth)
        elif isinstance(value, type):
            yield f"class {value.__qualname__};"
            yield from self._class(value)
        elif callable(value) and not is_own(type(value)):
            yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)};"
        else:
            yield f"a {type(value).__qualname__}:"
            yield from self._class(type(value))
            plain = {name: each for name, each in _attributes(value).items() if _is_simple(each)}
            yield from self._mapping(plain, depth)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> Iterator[str]:
        entries = list(value.items())[:_MOST_ENTRIES]
        yield from sorted("".join([*self.value(key, depth), "=", *self.value(entry, depth)]) for key, entry in entries)

    def _class(self, kind: type) -> Iterator[str]:
        if is_own(kind) and id(kind) not in self._seen:
            self._seen.add(id(kind))
            self._alive.append(kind)
            for base in kind.__mro__:
                for name, function in sorted(vars(base).items()) if is_own(base) else ():
                    plain = getattr(function, "__func__", getattr(function, "fget", function))
                    if isinstance(plain, types.FunctionType) and name != "__init__":
                        yield f"{name}:"
                        yield from self.value(plain, 1)

    def _function(self, function: types.FunctionType, depth: int) -> Iterator[str]:
        inner: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
        inner = getattr(function, "_torchdynamo_orig_callable", inner)
        if not _is_own_file(function.__code__.co_filename):
            name = f"{function.__module__}.{function.__qualname__}"
            yield f"{_RECORDED_AS.get(name, name)};"
            if inner is not None:
                yield from self.value(inner, depth)
            return
        yield from self._code(function.__code__, function.__globals__, depth, function.__doc__)
        for part in (function.__defaults__, function.__kwdefaults__):
            yield from self.value(part, depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                closed_over = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if name != "__class__":
                yield from self.value(closed_over, depth)

    def _code(
        self, code: types.CodeType, around: Mapping[str, Any], depth: int, docstring: str | None = None
    ) -> Iterator[str]:
        yield f"{code.co_code.hex()} {code.co_argcount} {code.co_kwonlyargcount} {code.co_exceptiontable.hex()};"
        yield f"{code.co_names};"
        for number, constant in enumerate(code.co_consts):
            is_docstring = bool(code.co_flags & _HAS_DOCSTRING) or constant == docstring
            if number == 0 and isinstance(constant, str) and is_docstring:
                continue
            if isinstance(constant, types.CodeType):
                yield from self._code(constant, around, depth)
            else:
                yield from _Walk().value(constant, depth)
        for name in sorted({step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}):
            if name in around:
                yield f"{name} is "
                yield from self._global(around[name], code, depth)

    def _global(self, value: Any, code: types.CodeType, depth: int) -> Iterator[str]:
        if isinstance(value, types.ModuleType):
            yield f"module {value.__name__};"
            if is_own(value):  # functions that are called by it
                for name in code.co_names:
                    if isinstance(found := getattr(value, name, None), (types.FunctionType, type)):
                        yield from self.value(found, depth)
        elif isinstance(value, (types.FunctionType, type)) or _is_simple(value):
            yield from self.value(value, depth)
        else:  # a large thing that may change while it is used: a data set, a model, a table
            yield f"a {type(value).__qualname__};"


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _MOST_ENTRIES and all(map(_is_simple, value))
    if isinstance(value, (Tensor, np.ndarray)):  # weights of classes, and the like; not data, nor what is trained
        return value.nbytes <= _SMALL_BYTES and not getattr(value, "requires_grad", False)
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype))


def _array(value: Any) -> str:
    """Describe an array by dtype and shape, plus a hash of its values if it is small and in host memory.

    Reading the values of a tensor on a device would make the host wait.
    """
    described = f"array {value.dtype} {tuple(value.shape)}"
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.nbytes > _MOST_BYTES:
            return f"{described};"
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        if value.dtype.hasobject or value.nbytes > _MOST_BYTES:
            return f"{described};"
        data = np.ascontiguousarray(value).tobytes()
    return f"{described} {hashlib.blake2b(data, digest_size=8).hexdigest()};"

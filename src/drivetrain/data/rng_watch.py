"""Finds the random generators that a dataset holds, and detects whether something drew from them."""

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Generators:
    """The generators that objects hold: in attributes, containers, closures, and in the globals their functions name.

    The search is not complete; but an augmentation with a private generator, used for a few items only, is found here
    where reading some items twice would not show it.
    """

    MOST_OBJECTS = 5000
    _KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    _METHODS = ("__getitem__", "__getitems__", "__call__", "forward")

    def __init__(self, things: list[Any]) -> None:
        self._found: list[Any] = []
        seen: set[int] = set()
        left = list(things)
        while left and len(seen) < self.MOST_OBJECTS:
            thing = left.pop()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, self._KINDS):
                self._found.append(thing)
            else:
                with suppress(Exception):  # an object that cannot be inspected counts as holding none
                    left.extend(self._inside(thing))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._found.extend(torch.cuda.default_generators)

    def states(self) -> list[Any]:
        return [_state(generator) for generator in self._found]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators on exit, whatever draws from them inside."""
        setters = [_setter(generator) for generator in self._found]
        try:
            yield
        finally:
            for put_back in setters:
                put_back()

    @classmethod
    def _inside(cls, thing: Any) -> list[Any]:
        if thing is None or isinstance(thing, (str, bytes, int, float, complex, Tensor, np.ndarray, type)):
            return []
        if isinstance(thing, dict):  # other mappings may read from a file whatever is asked for
            return list(islice(thing.values(), cls.MOST_OBJECTS))
        if isinstance(thing, (list, tuple, set, frozenset)):
            return list(islice(thing, cls.MOST_OBJECTS))
        if isinstance(thing, functools.partial):
            return [thing.func, *thing.args, *thing.keywords.values()]
        if inspect.ismethod(thing):
            return [thing.__self__, thing.__func__]
        if inspect.isfunction(thing):
            return _named_by(thing)
        if inspect.ismodule(thing) or inspect.isbuiltin(thing):
            return []
        methods = [getattr(type(thing), name, None) for name in cls._METHODS]
        slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in _slots(kind)]
        return [*getattr(thing, "__dict__", {}).values(), *slots, *filter(inspect.isfunction, methods)]


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [str(name) for name in slots]


def _named_by(function: Any) -> list[Any]:
    """Return a function's closure, and the generators and functions among the globals that it names."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    kinds = Generators._KINDS
    own = function.__module__
    return found + [
        thing for thing in named if isinstance(thing, kinds) or (inspect.isfunction(thing) and thing.__module__ == own)
    ]


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        _, keys, *rest = generator.get_state(legacy=True)
        return (np.asarray(keys).tobytes(), rest)
    if isinstance(generator, random.SystemRandom):
        return object()  # it has none, and every draw is a new one: never the same
    return generator.getstate()


def _setter(generator: Any) -> Callable[[], None]:
    """Return a function that restores a generator to its present state."""
    if isinstance(generator, random.SystemRandom):
        return lambda: None
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())

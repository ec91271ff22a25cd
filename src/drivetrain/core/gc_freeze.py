"""Keeps Python's garbage collector from pausing the training loop during a long run.

A full collection visits every object: some 300,000 with torch loaded, 100 to 170 ms in which no thread runs Python. Any
code that allocates objects can trigger it, including a background save. Objects that exist when a run has begun live
until it ends; once frozen, they are not visited again.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


class SetAside:
    """Freezes all objects from `begin` to `end`, so that collections visit only newer ones.

    Only one run holds it at a time; a second `begin` does nothing.
    """

    _held_by: "SetAside | None" = None

    def begin(self) -> None:
        """Collect once, then freeze: garbage must not be kept for the duration of the run."""
        if SetAside._held_by is None:
            SetAside._held_by = self
            gc.collect()
            gc.freeze()

    def end(self) -> None:
        if SetAside._held_by is self:
            SetAside._held_by = None
            gc.unfreeze()


_forks = [False, True]  # whether a process is being started; whether collecting was on before


@contextmanager
def forking() -> Iterator[None]:
    """Keep existing objects out of the garbage collector of a process that may be forked inside this context.

    The remains of an earlier run, such as a process group in a cycle, have threads that do not exist in the child:
    destroying them there ends in a segmentation fault. Collection is off from before the fork, because other at-fork
    handlers run in the child before the one here.
    """
    _forks[:] = True, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _forks[0] = False
        if _forks[1]:
            gc.enable()


def _in_child() -> None:
    if _forks[0]:
        gc.freeze()
        if _forks[1]:
            gc.enable()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing is forked
    os.register_at_fork(after_in_child=_in_child)

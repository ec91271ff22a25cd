"""Python's collector of garbage, and how a long run keeps it from stopping the loop.

Now and then it looks through every object that there is: some 300,000 with torch loaded, 100 to 170 ms in which no
thread runs Python. Whatever makes objects can set it off, a save beside training too. Objects that are there when a run
has begun are there until it ends; set aside, they are not looked through again.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


class SetAside:
    """From `begin` to `end` the collector looks only at what was made since. One run at a time; twice is as once."""

    _held_by: "SetAside | None" = None

    def begin(self) -> None:
        """Looks through everything once: garbage must not be kept for the time of the run."""
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
    """Around the start of a process that may be forked: what there is by now is not for its collector.

    The remains of an earlier run, such as a process group in a cycle, have threads that are not there in the child: to
    destroy them there ends in a segmentation fault. Collecting is off from before the fork, as others' handlers run in
    the child before the one here.
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

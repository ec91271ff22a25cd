"""How far a process is: a page of memory that its supervisor reads, and a watchdog where there is no supervisor.

The page is written with every step and costs less than a microsecond; nothing is sent and no disk is touched, so that
it tells where a process is even if that can do nothing any more.
"""

import faulthandler
import mmap
import os
import statistics
import struct
import threading
import time
from collections import deque
from typing import NamedTuple

from drivetrain.core.log import notice

PAGE_FD = "DRIVETRAIN_PROGRESS_FD"
PHASES = ("start", "step", "validation", "hooks", "save", "compile", "end")
LEAST_SECONDS, END_LEAST_SECONDS = 10.0, 60.0  # after which a hang is reported, and ended
FACTOR, END_FACTOR = 5.0, 20.0  # the same in steps
_FORM = struct.Struct("=qqq")


class Progress(NamedTuple):
    """Where a process is: the steps it has read back, its phase, and how often either has changed."""

    step: int = 0
    phase: str = PHASES[0]
    changes: int = 0


class ProgressPage:
    """A page of memory shared by a worker, which writes it, and its supervisor, which reads it."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> tuple["ProgressPage", int] | None:
        """Return a new page and its descriptor, for a child; None where the system has no anonymous files."""
        if not hasattr(os, "memfd_create"):
            return None
        descriptor = os.memfd_create("drivetrain-progress")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor), descriptor

    @classmethod
    def of_environment(cls) -> "ProgressPage | None":
        """Return the page that a supervisor gave this process; None without one."""
        text = os.environ.get(PAGE_FD, "")
        try:
            return cls(int(text)) if text.isdecimal() else None
        except OSError:
            return None

    def write(self, step: int, phase: int, changes: int) -> None:
        """Write how far this process is; `phase` is a number of `PHASES`."""
        _FORM.pack_into(self._map, 0, step, phase, changes)

    def read(self) -> Progress:
        step, phase, changes = _FORM.unpack_from(self._map, 0)
        return Progress(step, PHASES[phase % len(PHASES)], changes)


class StepWatchdog:
    """Reports where a process without a supervisor hangs, while it is in its steps. It ends nothing.

    The stacks are dumped by `faulthandler`'s own thread, which needs no GIL; the words before them come from a thread
    of Python, if that can run. Both begin with the second step.
    """

    EVERY_SECONDS = 1.0  # between two looks
    LEAST_SECONDS_BETWEEN = 0.02  # where something is done between steps: arming takes a tenth of a millisecond

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=64)  # seconds per step
        self._at, self._step, self._next_look = 0.0, 0, 0.0
        self._limit, self._told, self._is_paused = 0.0, False, True
        self._thread: threading.Thread | None = None
        self._armed_by = 0  # the process whose thread would dump; 0: none

    def beat(self, step: int) -> None:
        """Note that a step has ended."""
        now = time.monotonic()
        if now < self._next_look or self._is_forked:
            return
        if not self._is_paused:
            self._rates.append((now - self._at) / max(1, step - self._step))
        self._at, self._step, self._told, self._is_paused = now, step, False, False
        if self._rates:
            self._limit = max(LEAST_SECONDS, FACTOR * statistics.median(self._rates))
            faulthandler.dump_traceback_later(self._limit + self.EVERY_SECONDS, file=2)
            self._armed_by = os.getpid()
            self._next_look = now + self.EVERY_SECONDS
            self._watch()

    def pause(self) -> None:
        """Stop watching until the next step has ended: something else is done, or the run is over."""
        if self._is_paused or self._is_forked:
            return
        self._is_paused = True
        if self._limit:
            self._limit, self._next_look = 0.0, self._at + self.LEAST_SECONDS_BETWEEN
            faulthandler.cancel_dump_traceback_later()
            self._armed_by = 0

    @property
    def _is_forked(self) -> bool:
        """Whether a parent armed this, and was forked then: its thread is not here, and would be awaited for ever."""
        return self._armed_by not in (0, os.getpid())

    def _watch(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="drivetrain-watchdog", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while self._limit:
            seconds = time.monotonic() - self._at
            if seconds > self._limit > 0 and not self._told:
                self._told = True
                notice(
                    f"no step has ended for {seconds:.0f} s, after step {self._step}; one takes "
                    f"{statistics.median(self._rates):.3g} s. Where this process is follows"
                )
            time.sleep(self.EVERY_SECONDS / 2)

"""Handles Ctrl-C and termination signals: a run ends cleanly with a checkpoint, a supervisor has its workers do so.

In a run the step finishes, a checkpoint is written, and all ranks stop together. A supervisor takes the first signal as
"save and stop", a second as "at once".
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# A launcher passes a terminal's Ctrl-C on to workers that got it already. That is not a second, impatient one.
IMPATIENT_AFTER_SECONDS = 1.0

_stops: list[Callable[[], None]] = []  # of the runs of this process that go on now


def request_stop() -> bool:
    """Ask the runs of this process to end cleanly, from any thread, as Ctrl-C does.

    Return False if none is running yet.
    """
    for stop in list(_stops):
        stop()
    return bool(_stops)


@contextmanager
def stopping_cleanly(stop: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM inside this context; a later Ctrl-C ends the process at once."""
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            stop()
            say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint. Ctrl-C again: at once")
        elif number == signal.SIGINT and time.monotonic() - first[0] > IMPATIENT_AFTER_SECONDS:
            raise KeyboardInterrupt

    _stops.append(stop)
    try:
        with _handled(handle):
            yield
    finally:
        _stops.remove(stop)


@contextmanager
def written_first(say: Callable[[str], None]) -> Iterator[None]:
    """Defer the first Ctrl-C or SIGTERM inside this context to its end; a later one takes effect at once.

    Used for files that are written when a run is over: a sender of SIGTERM allows for some time.
    """
    waiting: list[tuple[int, float]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not waiting:
            waiting.append((number, time.monotonic()))
            say(f"{signal.Signals(number).name}: the run is over; its report is written first. Again: at once")
        elif time.monotonic() - waiting[0][1] > IMPATIENT_AFTER_SECONDS:
            put_back()
            signal.raise_signal(number)

    with _handled(handle) as put_back:
        yield
    if waiting:
        signal.raise_signal(waiting[0][0])


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[Callable[[], None]]:
    """Install the handlers and yield a function that restores the previous ones; it is called on exit in any case."""
    before: dict[int, Any] = {}

    def put_back() -> None:
        for handled, handler in before.items():
            signal.signal(handled, handler)

    if threading.current_thread() is threading.main_thread():  # only it may handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and the like
                before[number] = signal.signal(number, handle)
    try:
        yield put_back
    finally:
        put_back()


# SLURM, submitit and Lightning use different ones to say that time is running out.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_SAME_PRESS_SECONDS = 0.3  # a scheduler may send a signal to the group and to the leader


class StopWish:
    """Holds which signal came, and whether a second one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_once = False
        self._first_at = 0.0

    def has_come(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        return (self.signal or signal.SIGINT).name

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or signal.SIGINT)

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at = signal.Signals(number), now
        elif now - self._first_at > _SAME_PRESS_SECONDS:
            self.at_once = True


@contextmanager
def hearing() -> Iterator[StopWish]:
    wish = StopWish()
    before = {
        number: signal.signal(number, wish.hear)
        for number in _SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN  # nohup and the like
    }
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Handles Ctrl-C and the signals of schedulers in a supervisor: the first means save and stop, a second at once."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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

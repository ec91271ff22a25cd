"""Ctrl-C and SIGTERM end a run cleanly: the step is finished, a checkpoint is written, all ranks stop together."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# A launcher passes a terminal's Ctrl-C on to workers that got it already. That is not somebody losing patience.
IMPATIENT_AFTER_SECONDS = 1.0


@contextmanager
def stopping_cleanly(stop: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM calls `stop`; a later Ctrl-C ends at once, as it does elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            stop()
            say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint. Ctrl-C again: at once")
        elif number == signal.SIGINT and time.monotonic() - first[0] > IMPATIENT_AFTER_SECONDS:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and the like
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for handled, handler in before.items():
            signal.signal(handled, handler)

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
def stopping_cleanly(stop: Callable[[], None], say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Inside, the first Ctrl-C or SIGTERM calls `stop`; a later Ctrl-C ends at once, as it does elsewhere.

    Yields what is to be called when the loop is over. From then on nothing is left to stop, and what is still to be
    written, such as the report, is written first: whoever sends SIGTERM allows for some time.
    """
    is_over = False

    def end() -> None:
        nonlocal is_over
        is_over = True

    if threading.current_thread() is not threading.main_thread():
        yield end  # only the main thread may handle signals
        return
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not first:
            first.append(time.monotonic())
            if is_over:
                say(f"{name}: the loop is over; what is left is written down first. Ctrl-C again: at once")
                return
            stop()
            say(f"{name}: stopping after this step, with a checkpoint. Ctrl-C again: at once")
        elif number == signal.SIGINT and time.monotonic() - first[0] > IMPATIENT_AFTER_SECONDS:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and the like
            before[number] = signal.signal(number, handle)
    try:
        yield end
    finally:
        for handled, handler in before.items():
            signal.signal(handled, handler)

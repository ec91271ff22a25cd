"""The watchdog of a process without a supervisor, on a clock that is moved by hand."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from drivetrain.core import launchers
from drivetrain.core.launchers import StepWatchdog


class Faults:
    """Notes whether stacks would be dumped, and how often that was asked for."""

    def __init__(self) -> None:
        self.now, self.armed_for, self.num_armed = 0.0, None, 0

    def dump_traceback_later(self, seconds: float, file: int) -> None:
        self.armed_for, self.num_armed = seconds, self.num_armed + 1

    def cancel_dump_traceback_later(self) -> None:
        self.armed_for = None


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    found = Faults()
    monkeypatch.setattr(launchers, "faulthandler", found)
    monkeypatch.setattr(launchers.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(StepWatchdog, "_watch", lambda self: None)
    return found


def run(faults: Faults, num_steps: int, seconds: float, after: Callable[[StepWatchdog, int], None]) -> list[bool]:
    """Whether each step was watched while it ran."""
    watchdog, watched = StepWatchdog(), []
    for step in range(1, num_steps + 1):
        watched.append(faults.armed_for is not None)
        faults.now += seconds
        watchdog.beat(step)
        after(watchdog, step)
    watchdog.pause()
    assert faults.armed_for is None, "nothing is reported of a run that is over"
    return watched


def test_steps_are_watched_from_the_third_on(faults: Faults) -> None:
    assert run(faults, 50, 0.1, lambda watchdog, step: None) == [False, False] + 48 * [True]
    assert faults.num_armed <= 6, "once a second"


def test_a_save_after_every_fourth_step_leaves_the_others_watched(faults: Faults) -> None:
    watched = run(faults, 40, 0.05, lambda watchdog, step: watchdog.pause() if step % 4 == 0 else None)
    assert sum(watched) >= 28, "all but the first two, and those right after a save"


def test_short_steps_between_hooks_cost_little(faults: Faults) -> None:
    run(faults, 10_000, 1e-4, lambda watchdog, step: watchdog.pause() if step % 2 else None)
    assert faults.num_armed <= 1.0 / StepWatchdog.LEAST_SECONDS_BETWEEN + 1


def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """With the real `faulthandler`: in a forked process, to cancel what its parent armed would never end."""
    watchdog = StepWatchdog()
    for step in (1, 2):
        watchdog.beat(step)
    child = os.fork()
    if not child:
        watchdog.pause()
        watchdog.beat(3)
        os._exit(0)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    watchdog.pause()
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_the_limit_is_five_steps_and_at_least_ten_seconds(faults: Faults) -> None:
    limits = []
    for seconds in (0.1, 30.0):
        run(faults, 10, seconds, lambda watchdog, step: limits.append(faults.armed_for))
    assert limits[8] == 11.0
    assert limits[-1] == pytest.approx(151.0)

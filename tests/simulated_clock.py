"""A clock for tests of code that measures time: it goes on when a test says so, however busy the machine is."""

import pytest

READING_SECONDS = 1e-6  # code takes some time, so that nothing is divided by zero


class SimulatedClock:
    """Stands in for `time.perf_counter` and `time.monotonic` in this process."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        self.now += READING_SECONDS
        return self.now

    def spend(self, seconds: float) -> None:
        """Take the place of `time.sleep`, and of work."""
        self.now += seconds


@pytest.fixture
def simulated_clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    for place in ("time.perf_counter", "time.monotonic", "drivetrain.monitor.phases.perf_counter"):
        monkeypatch.setattr(place, clock.read)
    return clock

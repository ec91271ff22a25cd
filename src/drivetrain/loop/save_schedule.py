"""Decides when checkpoints are due: by what a save costs and how often runs fail, or as the user pinned it.

A save costs the time that it holds training up; a failure costs the steps since the last one. The sum is least at an
interval of sqrt(2 x cost x mean time between failures). Rank 0's clock decides. Its wish travels with the stop flags
that ranks exchange in every step, so that all ranks save at the same step, and no rank waits for another to agree.
"""

import math
import statistics
import time
from collections import deque
from typing import Literal

from drivetrain.core.value import format_duration
from drivetrain.data.division import Place

# Rank 0's wish, added to the number of ranks that want to stop. A strategy may add it up over micro-batches.
SAVE_FLAG = 2.0**-20
WRITES_APART = 10.0  # times a background write: it takes cores and the disk from training
MOST_SHARE = 0.02  # of the time may go into saves
DEFAULT_MTBF_HOURS = 4.0
# What a save is taken to cost before one was measured, and per byte of the state of rank 0.
FIRST_BLOCK_SECONDS, BLOCK_BYTES_PER_SECOND = 0.05, 4e9
FIRST_WRITE_SECONDS, WRITE_BYTES_PER_SECOND = 0.2, 5e8
NUM_MEASURED = 5  # saves whose median counts


class SaveSchedule:
    """Says after which steps to save. Made by all ranks alike; only rank 0 looks at its clock.

    Args:
        every: The pinned steps between saves, or `epoch`; None: by time.
        seconds: The pinned seconds between saves; None: by what they cost.
        mtbf_seconds: The mean time between failures.
        mtbf_is_observed: Whether that was observed in this run, and not only stated.
        is_main: Whether this is rank 0.

    Example:
        >>> schedule = SaveSchedule(mtbf_seconds=3600.0)
        >>> schedule.learn(blocked_seconds=0.5, write_seconds=2.0)
        >>> round(schedule.interval_seconds)
        60
    """

    def __init__(
        self,
        every: int | Literal["epoch"] | None = None,
        *,
        seconds: float | None = None,
        mtbf_seconds: float = 3600 * DEFAULT_MTBF_HOURS,
        mtbf_is_observed: bool = False,
        is_main: bool = True,
    ) -> None:
        self.every, self._pinned_seconds, self._is_main = (None if seconds else every), seconds, is_main
        self._mtbf_seconds, self._mtbf_is_observed = mtbf_seconds, mtbf_is_observed
        self._blocked: deque[float] = deque(maxlen=NUM_MEASURED)
        self._written: deque[float] = deque(maxlen=NUM_MEASURED)
        self._guessed = FIRST_BLOCK_SECONDS, FIRST_WRITE_SECONDS
        self._began_at, self._began_step = time.monotonic(), 0
        self._is_asked = False
        self._due_at = math.inf
        self._settle()

    @property
    def by_time(self) -> bool:
        """Whether a clock decides, and not the number of a step."""
        return self.every is None

    def is_due(self, place: Place) -> bool:
        """Return whether a save is due after a step by its number."""
        if self.every is None:
            return False
        return place.ends_epoch if self.every == "epoch" else (place.step + 1) % self.every == 0

    def request(self) -> float:
        """Return rank 0's wish to save, which is added to the stop flag of a step."""
        return SAVE_FLAG if self._is_main and self.every is None and time.monotonic() >= self._due_at else 0.0

    def hear(self, flags: float, step: int) -> bool:
        """Take the flags of all ranks that came with a step, counted from 1. Return whether a rank wants to stop."""
        if flags and SAVE_FLAG / 2 < flags % 1.0 < 0.5 and step > self._began_step + 1:
            self._is_asked = True  # flags that were sent before the last save began were meant for that one
        return flags > 0.5

    def take(self) -> bool:
        """Return whether rank 0 has asked for a save since the last call."""
        is_asked, self._is_asked = self._is_asked, False
        return is_asked

    def begun(self, step: int) -> None:
        """Note that a save of a step has begun, due or not."""
        self._began_at, self._began_step, self._is_asked = time.monotonic(), step, False
        self._settle()

    def expect(self, num_bytes: int) -> None:
        """Guess the cost of the first save from the bytes of this rank's state."""
        self._guessed = (
            FIRST_BLOCK_SECONDS + num_bytes / BLOCK_BYTES_PER_SECOND,
            FIRST_WRITE_SECONDS + num_bytes / WRITE_BYTES_PER_SECOND,
        )
        self._settle()

    def learn(self, blocked_seconds: float, write_seconds: float) -> None:
        """Take the cost of a save: how long training was held up, and how long it took until it was on the disk."""
        self._blocked.append(blocked_seconds)
        self._written.append(write_seconds)
        self._settle()

    @property
    def is_measured(self) -> bool:
        return bool(self._blocked)

    @property
    def interval_seconds(self) -> float:
        """The seconds between two saves."""
        return self._pinned_seconds or max(self._bounds().values())

    def _settle(self) -> None:
        if self.every is None:
            self._due_at = self._began_at + self.interval_seconds

    @property
    def _cost(self) -> tuple[float, float]:
        if not self._blocked:
            return self._guessed
        return statistics.median(self._blocked), statistics.median(self._written)

    def _bounds(self) -> dict[str, float]:
        blocked, written = self._cost
        return {
            "saves and failures cost least": math.sqrt(2 * blocked * self._mtbf_seconds),
            f"it is {WRITES_APART:.0f} times as long as a write takes": WRITES_APART * written,
            f"saves take {MOST_SHARE:.0%} of the time": blocked / MOST_SHARE,
        }

    def in_words(self) -> str:
        """Return how often is saved, and why."""
        if self.every is not None:
            return (
                "at the end of each epoch (pinned)" if self.every == "epoch" else f"every {self.every} steps (pinned)"
            )
        if self._pinned_seconds:
            return f"every {format_duration(self._pinned_seconds)} (pinned)"
        bounds = self._bounds()
        why = max(bounds, key=lambda name: bounds[name])
        kind = "observed" if self._mtbf_is_observed else "stated"
        blocked, written = self._cost
        return (
            f"about every {format_duration(bounds[why])}, at which {why}: one holds training up for "
            f"{format_duration(blocked)} and is written in {format_duration(written)}; mean time between failures "
            f"{format_duration(self._mtbf_seconds)} ({kind})"
        )


def observed_mtbf(stated_seconds: float, run_seconds: float, num_failures: int) -> float:
    """Return the mean time between failures, where what was stated counts as much as one failure that was seen.

    Args:
        stated_seconds: What was stated.
        run_seconds: How long the run has taken so far, over all of its starts.
        num_failures: How often it was interrupted in that time.

    Example:
        >>> observed_mtbf(14400.0, run_seconds=3600.0, num_failures=5)
        3000.0
    """
    return (stated_seconds + run_seconds) / (1 + num_failures)

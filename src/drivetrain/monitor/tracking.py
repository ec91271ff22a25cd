"""Sends a run's figures to trackers besides its own files: TensorBoard, Weights & Biases, a user's own.

A tracker is a module of `monitor/trackers`, an entry point of the group `drivetrain.trackers`, or a function given as
`package.module:function`. Each runs behind its own thread and bounded queue. One that fails, or hangs, is reported once
and dropped. Training does not stop for it and does not wait for it.
"""

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.logged import Media
from drivetrain.core.plugins import TRACKERS

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """Takes the figures of a step, by name."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self) -> None: ...


class FullTracker(Tracker, Protocol):
    """A tracker that takes everything. A tracker may leave out any of these."""

    def media(self, name: str, value: Media, step: int) -> None:
        """Take a picture, a histogram or a text."""

    def finish(self, metrics: Metrics) -> None:
        """Take the last value of each metric of a run that is finished; called before `close`."""


@dataclass(frozen=True)
class TrackerStart:
    """What the `prepare` of a tracker gets. It imports what it needs and returns a function that makes the tracker.

    Args:
        folder: the run's folder.
        run_name: the run's name.
        config: the whole configuration and the plan, as plain values.
        resumed_from: the step that the run goes on from; 0 for a new one.
        report: prints a line and keeps it in the run's events.
    """

    folder: Path
    run_name: str
    config: Mapping[str, Any]
    resumed_from: int
    report: Callable[[str], None]


class BackgroundTracker:
    """Runs a tracker in a separate thread. Its `log` costs microseconds and never raises; neither does `close`."""

    CAPACITY = 1000  # figures on their way; more are not kept
    PATIENCE_SECONDS = 15.0  # for what is still on its way at the end

    def __init__(self, name: str, make: Callable[[], Tracker], report: Callable[[str], None]) -> None:
        self.name = name
        self._make, self._report = make, report
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(self.CAPACITY)
        self._is_dropped = False
        self._num_missed = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Metrics, step: int) -> None:
        self._put("log", metrics, step)

    def log_media(self, name: str, value: Media, step: int) -> None:
        self._put("media", name, value, step)

    def finish(self, metrics: Metrics) -> None:
        self._put("finish", metrics)

    def _put(self, method: str, *given: Any) -> None:
        if self._is_dropped:
            return
        try:
            self._queue.put_nowait((method, given))
        except queue.Full:
            self._num_missed += 1

    def close(self) -> None:
        if not self._is_dropped:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=self.PATIENCE_SECONDS)
        self._thread.join(self.PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._report(f"{self.name} was still busy {self.PATIENCE_SECONDS:.0f} s after the end and was left behind")
        if self._num_missed:
            self._report(f"{self.name} was too slow: {self._num_missed} of the points are missing there")

    def _work(self) -> None:
        tracker: Tracker | None = None
        lacks_media = False
        try:
            tracker = self._make()
            while (item := self._queue.get()) is not None:
                method, given = item
                if hasattr(tracker, method):
                    getattr(tracker, method)(*given)
                elif method == "media" and not lacks_media:
                    lacks_media = True
                    self._report(f"{self.name} takes no pictures, histograms and texts; the run's folder has them")
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not reach the run
            self._drop(error)
        try:
            if tracker is not None:
                tracker.close()
        except BaseException as error:  # noqa: BLE001
            if not self._is_dropped:
                self._drop(error)

    def _drop(self, error: BaseException) -> None:
        self._is_dropped = True
        self._report(f"{self.name} is dropped, and the run goes on without it: {_cause(error)}")


def _cause(error: BaseException) -> str:
    """Return the error with its type and the line that raised it: `'loss'` alone says nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise if a tracker cannot be found, before a run begins. What a tracker itself needs is not tried."""
    for name in names:
        TRACKERS.load(name)


def start_trackers(names: tuple[str, ...], start: TrackerStart) -> list[BackgroundTracker]:
    """Start the trackers that were asked for.

    Packages are imported here and now: loader workers may be forked a moment later, and a process forked during an
    import cannot import the same module again.
    """
    started = []
    for name in names:
        try:
            make = TRACKERS.load(name)(start)
        except Exception as error:  # noqa: BLE001  (a broken third-party package; the run does not need it)
            remedy = f"pip install 'drivetrain[{name}]'" if name in ("wandb", "mlflow") else f"pip install {name}"
            known = "" if ":" in name else f" (remedy: {remedy})"
            start.report(f"{name} is dropped, and the run goes on without it: {error}{known}")
            continue
        started.append(BackgroundTracker(name, make, start.report))
    return started

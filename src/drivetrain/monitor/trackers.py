"""Sends a run's figures to trackers besides its own files: TensorBoard, Weights & Biases.

Each runs behind its own thread and bounded queue. One that fails, or hangs, is reported once and dropped. Training does
not stop for it and does not wait for it.
"""

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.errors import DrivetrainError

Metrics = Mapping[str, float]
WANDB_START_SECONDS = 30.0  # that `wandb.init` may take before it raises


class Tracker(Protocol):
    """Takes the figures of a step, by name."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self) -> None: ...


class BackgroundTracker:
    """Runs a tracker in a separate thread. Its `log` costs microseconds and never raises; neither does `close`."""

    CAPACITY = 1000  # figures on their way; more are not kept
    PATIENCE_SECONDS = 15.0  # for what is still on its way at the end

    def __init__(self, name: str, make: Callable[[], Tracker], report: Callable[[str], None]) -> None:
        self.name = name
        self._make, self._report = make, report
        self._queue: queue.Queue[tuple[Metrics, int] | None] = queue.Queue(self.CAPACITY)
        self._is_dropped = False
        self._num_missed = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Metrics, step: int) -> None:
        if self._is_dropped:
            return
        try:
            self._queue.put_nowait((metrics, step))
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
        try:
            tracker = self._make()
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
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
        cause = str(error).strip() or type(error).__name__
        self._report(f"{self.name} is dropped, and the run goes on without it: {cause}")


class TensorBoardTracker:
    """Writes an event file in the run folder.

    It writes record by record, and does not use torch's SummaryWriter: that one has its own thread, which on a full
    disk dies with a traceback on the terminal.
    """

    def __init__(self, folder: Path, resumed_from: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._write(file_version="brain.Event:2")
        if resumed_from:  # points of steps that are going to be done again are not shown
            self._write(step=resumed_from + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, metrics: Metrics, step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(value=values))

    def _write(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes a run of Weights & Biases, online where a user is logged in, else in a folder to be synced later."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def start_trackers(
    names: tuple[str, ...],
    folder: Path,
    run_name: str,
    config: Mapping[str, Any],
    resumed_from: int,
    report: Callable[[str], None],
) -> list[BackgroundTracker]:
    """Start the trackers that were asked for.

    Packages are imported here and now: loader workers may be forked a moment later, and a process forked during an
    import cannot import the same module again.
    """
    started = []
    for name in names:
        try:
            prepare = {"tensorboard": _prepare_tensorboard, "wandb": _prepare_wandb}[name]
            make = prepare(folder, run_name, config, resumed_from, report)
        except Exception as error:  # noqa: BLE001  (a broken third-party package; the run does not need it)
            remedy = "pip install 'drivetrain[wandb]'" if name == "wandb" else f"pip install {name}"
            report(f"{name} is dropped, and the run goes on without it: {error} (remedy: {remedy})")
            continue
        started.append(BackgroundTracker(name, make, report))
    return started


def _prepare_tensorboard(
    folder: Path, run_name: str, config: Mapping[str, Any], resumed_from: int, report: Callable[[str], None]
) -> Callable[[], Tracker]:
    import tensorboard.summary.writer.record_writer  # noqa: F401

    return lambda: TensorBoardTracker(folder / "tensorboard", resumed_from)


def _prepare_wandb(
    folder: Path, run_name: str, config: Mapping[str, Any], resumed_from: int, report: Callable[[str], None]
) -> Callable[[], Tracker]:
    import wandb

    def make() -> Tracker:
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _is_logged_in(wandb) else "offline")
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "drivetrain"),
            name=run_name,
            id=_wandb_id(folder),
            resume="allow" if mode == "online" else None,
            dir=str(folder),
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=WANDB_START_SECONDS),
        )
        if run is None:
            raise DrivetrainError("wandb.init gave no run")
        if mode == "offline" and "WANDB_MODE" not in os.environ:
            report(f"wandb: not logged in, so it writes to {folder / 'wandb'}; `wandb sync` uploads that")
        return WandbTracker(run)

    return make


def _is_logged_in(wandb: Any) -> bool:
    """Return whether a user is logged in, without asking: a prompt on the terminal would block the tracker for good."""
    try:
        return bool(wandb.login(prompt=False))
    except Exception:  # noqa: BLE001 - no key, no network, no server: all the same
        return False


def _wandb_id(folder: Path) -> str:
    """Return the run's id, which is the same for a run that is continued."""
    path = folder / "wandb.id"
    if not path.exists():
        path.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()

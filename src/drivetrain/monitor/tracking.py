"""Trackers: how a run's figures are sent to them without waiting, and CSV, MLflow, TensorBoard, Weights & Biases."""

import contextlib
import csv
import hashlib
import html
import json
import os
import queue
import re
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import Histogram, Image, Media, Text
from drivetrain.core.plugins import TRACKERS
from drivetrain.core.run_folder import write_atomically

# ----------------------------------------------------------------------------------------------------------------------
# Pictures, histograms and texts that hooks log: as files in the run's folder `media`, and as trackers take them.

LONGEST_NAME = 100


def keep_media(folder: Path, name: str, value: Media, step: int) -> Path:
    """Write something that was logged after `step` steps into the run's folder, and return its file."""
    folder = folder / "media"
    folder.mkdir(exist_ok=True)
    stem = f"{_file_name(name)}-{step:08d}"
    if isinstance(value, Image):
        return write_atomically(folder / f"{stem}.png", value.as_png())
    if isinstance(value, Text):
        return write_atomically(folder / f"{stem}.txt", value.text)
    counts, edges = value.counted()
    return write_atomically(folder / f"{stem}.json", json.dumps({"counts": counts, "edges": edges}) + "\n")


def _file_name(name: str) -> str:
    """Return a name as files can have it. Where much of it would be lost, a digest keeps it apart from others."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    is_lost = not name.isascii() or len(plain) > LONGEST_NAME
    return (
        f"{plain[:LONGEST_NAME]}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}" if is_lost else plain
    )


# ----------------------------------------------------------------------------------------------------------------------
# Sends a run's figures to trackers besides its own files: TensorBoard, Weights & Biases, a user's own.
#
# A tracker is `prepare_…` of a file here, an entry point of the group `drivetrain.trackers`, or a function given as
# `package.module:function`. Each runs behind its own thread and bounded queue. One that fails, or hangs, is reported
# once and dropped. Training does not stop for it and does not wait for it.

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


# ----------------------------------------------------------------------------------------------------------------------
# CSV: `metrics.csv` in the run folder, a line for each value, which any tool reads.

HEADER = ["step", "name", "value"]


def prepare_csv(start: TrackerStart) -> Callable[[], Tracker]:
    return lambda: CsvTracker(start.folder / "metrics.csv", start.resumed_from)


class CsvTracker:
    """Appends lines. A run that is continued drops those of steps that it does again."""

    def __init__(self, path: Path, resumed_from: int) -> None:
        lines = [HEADER]
        if resumed_from and path.exists():
            with path.open(newline="", encoding="utf-8") as before:
                lines += [line for line in csv.reader(before) if line[0].isdigit() and int(line[0]) <= resumed_from]
        write_atomically(path, "".join(",".join(map(_quoted, line)) + "\r\n" for line in lines))
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)

    def log(self, metrics: Metrics, step: int) -> None:
        self._writer.writerows([step, name, value] for name, value in metrics.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\r\n') else text


# ----------------------------------------------------------------------------------------------------------------------
# MLflow: a run on the server that MLFLOW_TRACKING_URI names, else in `mlruns` beside the run folders.

_MOST_AT_ONCE, _LONGEST = 100, 500  # that a server takes


def prepare_mlflow(start: TrackerStart) -> Callable[[], Tracker]:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    def make() -> Tracker:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (start.folder.absolute().parent / "mlruns").as_uri()
            start.report(f"mlflow: MLFLOW_TRACKING_URI is not set, so it writes to {address}")
        client = MlflowClient(tracking_uri=address)
        run = _run_id(client, start)
        values = [Param(_name(name), str(value)[:_LONGEST]) for name, value in _flat(start.config)]
        for first in range(0, 0 if start.resumed_from else len(values), _MOST_AT_ONCE):
            client.log_batch(run, params=values[first : first + _MOST_AT_ONCE])
        return MlflowTracker(client, run, Metric)

    return make


class MlflowTracker:
    """Writes a run of MLflow. One that is continued goes on in the same run."""

    def __init__(self, client: Any, run: str, metric: Any) -> None:
        self._client, self._run, self._metric = client, run, metric

    def log(self, metrics: Metrics, step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def media(self, name: str, value: Media, step: int) -> None:
        file = f"{_name(name).replace('/', '_')}-{step:08d}"
        if isinstance(value, Image):
            self._client.log_image(self._run, value.as_bytes().numpy(), f"media/{file}.png")
        elif isinstance(value, Text):
            self._client.log_text(self._run, value.text, f"media/{file}.txt")
        else:
            counts, edges = value.counted()
            self._client.log_dict(self._run, {"counts": counts, "edges": edges}, f"media/{file}.json")

    def finish(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._client.set_tag(self._run, f"final.{_name(name)}", f"{value:.6g}")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _run_id(client: Any, start: TrackerStart) -> str:
    """Return the id of the run, which a run that is continued has in its folder."""
    path = start.folder / "mlflow.id"
    if start.resumed_from and path.exists():
        run = path.read_text(encoding="utf-8").strip()
        client.update_run(run, status="RUNNING")
        return run
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "drivetrain")
    experiment = client.get_experiment_by_name(name)
    number = client.create_experiment(name) if experiment is None else experiment.experiment_id
    run = str(client.create_run(number, run_name=start.run_name).info.run_id)
    path.write_text(run + "\n", encoding="utf-8")
    return run


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _name(name: str) -> str:
    """Return a name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)


# ----------------------------------------------------------------------------------------------------------------------
# TensorBoard: an event file in the run folder.


def prepare_tensorboard(start: TrackerStart) -> Callable[[], Tracker]:
    import tensorboard.summary.writer.record_writer  # noqa: F401

    return lambda: TensorBoardTracker(start.folder / "tensorboard", start.resumed_from)


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

    def media(self, name: str, value: Media, step: int) -> None:
        if isinstance(value, Image):
            height, width, channels = value.as_bytes().shape
            picture = self._summary.Image(
                height=height, width=width, colorspace=channels, encoded_image_string=value.as_png()
            )
            made = self._summary.Value(tag=name, image=picture)
        elif isinstance(value, Histogram):
            made = self._summary.Value(tag=name, histo=_histogram(value))
        else:
            made = self._text(name, value.text)
        self._write(step=step, summary=self._summary(value=[made]))

    def _text(self, name: str, text: str) -> Any:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        return self._summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)

    def _write(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _histogram(value: Histogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    counts, edges = value.counted()
    found = value.values.detach().cpu().double().flatten()
    found = found[found.isfinite()]
    return HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=len(found),
        sum=float(found.sum()),
        sum_squares=float(found.square().sum()),
        bucket_limit=edges[1:],
        bucket=counts,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Weights & Biases: online where a user is logged in, else in a folder to be synced later.

START_SECONDS = 30.0  # that `wandb.init` may take before it raises


def prepare_wandb(start: TrackerStart) -> Callable[[], Tracker]:
    import wandb

    def make() -> Tracker:
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _is_logged_in(wandb) else "offline")
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "drivetrain"),
            name=start.run_name,
            id=_wandb_id(start.folder),
            resume="allow" if mode == "online" else None,
            dir=str(start.folder),
            mode=mode,
            config=dict(start.config),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=START_SECONDS),
        )
        if run is None:
            raise DrivetrainError("wandb.init gave no run")
        if mode == "offline" and "WANDB_MODE" not in os.environ:
            start.report(f"wandb: not logged in, so it writes to {start.folder / 'wandb'}; `wandb sync` uploads that")
        return WandbTracker(run)

    return make


class WandbTracker:
    """Writes a run of Weights & Biases, online where a user is logged in, else in a folder to be synced later."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def media(self, name: str, value: Media, step: int) -> None:
        import wandb

        if isinstance(value, Image):
            made: Any = wandb.Image(value.as_bytes().numpy())
        elif isinstance(value, Histogram):
            counts, edges = map(np.array, value.counted())
            made = wandb.Histogram(np_histogram=(counts, edges))
        else:
            made = wandb.Html(f"<pre>{html.escape(value.text)}</pre>")
        self._run.log({name: made}, step=step)

    def finish(self, metrics: Metrics) -> None:
        self._run.summary.update({f"final/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        self._run.finish()


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

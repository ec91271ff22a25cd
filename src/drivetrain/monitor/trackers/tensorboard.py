"""TensorBoard: an event file in the run folder."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.core.logged import Histogram, Image, Media
from drivetrain.monitor.tracking import Metrics, Tracker, TrackerStart


def prepare(start: TrackerStart) -> Callable[[], Tracker]:
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

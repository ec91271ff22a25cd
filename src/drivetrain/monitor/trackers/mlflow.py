"""MLflow: a run on the server that MLFLOW_TRACKING_URI names, else in `mlruns` beside the run folders."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drivetrain.core.logged import Image, Media, Text
from drivetrain.monitor.tracking import Metrics, Tracker, TrackerStart

_MOST_AT_ONCE, _LONGEST = 100, 500  # that a server takes


def prepare(start: TrackerStart) -> Callable[[], Tracker]:
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

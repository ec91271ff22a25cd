"""CSV: `metrics.csv` in the run folder, a line for each value, which any tool reads."""

import csv
from collections.abc import Callable
from pathlib import Path

from drivetrain.core.run_folder import write_atomically
from drivetrain.monitor.tracking import Metrics, Tracker, TrackerStart

HEADER = ["step", "name", "value"]


def prepare(start: TrackerStart) -> Callable[[], Tracker]:
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

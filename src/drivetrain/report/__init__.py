"""A run folder turned into words and pictures. Reads only the folder: it works long after the run, and anywhere."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from drivetrain.report.picture import draw
from drivetrain.report.run_data import RunData
from drivetrain.report.summary import summary

__all__ = ["RunData", "draw", "summary", "write_report"]

SUMMARY, PICTURE = "performance_summary.txt", "training_metrics.png"


def write_report(folder: Path) -> list[str]:
    """Writes `performance_summary.txt` and `training_metrics.png`. Never raises: returns what went wrong, in words."""
    makers: dict[str, Callable[[RunData], bytes]] = {SUMMARY: lambda data: summary(data).encode(), PICTURE: draw}
    problems = []
    for name, make in makers.items():
        temporary = folder / f".{name}.tmp"
        try:
            temporary.write_bytes(make(RunData.read(folder)))
            temporary.replace(folder / name)
        except Exception as error:  # noqa: BLE001 - the run is done and saved; whatever a report meets is not its end
            problems.append(f"{name} was not written: {type(error).__name__}: {error}")
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    return problems

"""Turns a run folder into text and pictures. Reads only the folder: it works long after the run, and anywhere."""

import contextlib
import errno
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from drivetrain.core.log import on_one_line
from drivetrain.core.run_folder import write_atomically
from drivetrain.report.graph_picture import draw_knowledge, draw_places
from drivetrain.report.page import page
from drivetrain.report.picture import draw, draw_activations, draw_devices, draw_lifecycle
from drivetrain.report.run_data import RunData, summary

__all__ = ["PICTURES", "RunData", "draw", "summary", "write_report"]

SUMMARY, PICTURE, PAGE = "performance_summary.txt", "training_metrics.png", "report.html"

# What there may be to see, in the order of the page. Pictures of experts are there where there are experts.
PICTURES = {
    PICTURE: "Loss, accuracy and time",
    "expert_lifecycle.png": "Experts that came and went, and what each sleep did",
    "expert_activations.png": "Who works on what",
    "knowledge_graph.png": "What the experts know, and how they are tied",
    "expert_device_distribution.png": "Where experts live",
    "expert_placement.png": "Who lives with whom",
}
_NOWHERE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # no file can be written
MOST_GRAPHS = 6  # of single epochs: the first, the last, and some between
# Drawing takes more than a second, most of it to load matplotlib: 2 % of a run of this length.
PICTURE_SECONDS = 60.0


def write_report(folder: Path, *, always_draws: bool = True) -> list[str]:
    """Write `performance_summary.txt`, the pictures and `report.html`.

    Never raises: returns what went wrong, in words.

    Args:
        folder: The run's folder.
        always_draws: Whether to draw `training_metrics.png` of a short run, too. The page has its curves in any case.
    """
    epochs = {f"knowledge_graph_epoch_{epoch}.png": partial(draw_knowledge, epoch=epoch) for epoch in _epochs(folder)}
    makers: dict[str, Callable[[RunData], bytes | None]] = {
        SUMMARY: lambda data: summary(data).encode(),
        PICTURE: draw if always_draws else _draw_if_long,
        "expert_lifecycle.png": draw_lifecycle,
        "expert_activations.png": draw_activations,
        "knowledge_graph.png": draw_knowledge,
        "expert_device_distribution.png": draw_devices,
        "expert_placement.png": draw_places,
        **epochs,
        PAGE: lambda data: page(data, summary(data), PICTURES).encode(),
    }
    problems = list[str]()
    for old in folder.glob("knowledge_graph_epoch_*.png") if epochs else ():
        if old.name not in epochs:  # of an epoch that was among the few before the run went on
            with contextlib.suppress(OSError):
                old.unlink()
    data: RunData | None = None
    for name, make in makers.items():
        try:
            if data is None:
                data = RunData.read(folder)
                problems += data.damage
            made = make(data)
            if made is not None:
                write_atomically(folder / name, made)
        except OSError as error:
            if error.errno not in _NOWHERE:
                problems.append(f"{name} was not written: {error}")
                continue
            # The others would fail in the same way.
            problems.append(
                f"the report was not written to {on_one_line(str(folder))}: {error.strerror}; remedy: make the folder "
                "writable, or copy it and give `drivetrain report` the copy"
            )
            break
        except Exception as error:  # noqa: BLE001 - the run is done and saved; whatever a report meets is not its end
            problems.append(f"{name} was not written: {type(error).__name__}: {error}")
        except KeyboardInterrupt as error:
            remedy = f"remedy: `drivetrain report {shlex.quote(str(folder))}` writes it"
            error.add_note(f"the run is saved, its report is not whole; {remedy}")
            raise
    return problems


def _draw_if_long(data: RunData) -> bytes | None:
    """Draw the picture of a run that took long, that has pictures of experts as well, or that has one from before."""
    is_long = sum(row["seconds"] for row in data.steps) >= PICTURE_SECONDS
    return draw(data) if is_long or data.told("load") or (data.folder / PICTURE).exists() else None


def _epochs(folder: Path) -> list[int]:
    """Return the epochs whose graph is drawn."""
    found = sorted(int(path.stem.removeprefix("epoch_")) for path in (folder / "knowledge").glob("epoch_*.json"))
    count = min(MOST_GRAPHS, len(found))
    return [found[round(place * (len(found) - 1) / max(count - 1, 1))] for place in range(count)]

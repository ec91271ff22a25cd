"""Defines how all pictures of a report look."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK, FAINT, GRID = "#22303c", "#8a97a3", "#e4e8ec"
TRAIN, VALID, OTHER, BARS = "#2f6db5", "#d9822b", "#3a9679", "#8fb3d9"
MANY = (
    "#2f6db5", "#d9822b", "#3a9679", "#b5485d", "#7a5fb0", "#c2a23a", "#4aa3c7", "#8c6d46", "#a35a9c", "#5f9e3f",
    "#d06f53", "#6b7f8c",
)  # fmt: skip

_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.edgecolor": GRID, "axes.labelcolor": FAINT, "text.color": INK, "axes.titlecolor": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "legend.frameon": False,
    "xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0, "xtick.minor.size": 0,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11,
}  # fmt: skip


class Canvas:
    """A figure with a heading; `png` returns it as bytes."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def head(self, title: str, subtitle: str, left: float = 0.055) -> None:
        height = self.figure.get_figheight()
        self.figure.text(left, 1 - 0.25 / height, title, fontsize=16, fontweight="bold", va="center")
        self.figure.text(left, 1 - 0.53 / height, subtitle, fontsize=10, color=FAINT, va="center")

    def png(self) -> bytes:
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png", dpi=120)
        return picture.getvalue()


@contextmanager
def canvas(width: float, height: float) -> Iterator[Canvas]:
    """Make a canvas. matplotlib's state and backend stay as they are: the caller may draw too."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        yield Canvas(figure)


def say_nothing(axis: Any) -> None:
    axis.text(0.5, 0.5, "nothing was recorded", transform=axis.transAxes, ha="center", color=FAINT)
    axis.grid(visible=False)


def end_at_all(axis: Any) -> None:
    """End an axis of shares just above 1, so that a point there is seen whole: larger shares mean nothing."""
    axis.set_ylim(top=min(axis.get_ylim()[1], 1.005))

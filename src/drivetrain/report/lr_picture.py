"""Draws a range test of the learning rate: the loss by the rate, with what was found."""

from collections.abc import Sequence

from drivetrain.report.picture import OTHER, TRAIN, VALID, canvas


def draw_range_test(
    title: str,
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    marks: Sequence[tuple[str, float | None]],
) -> bytes:
    """Return the picture as PNG. `marks` are rates to point out, with their names; None: there is no such rate."""
    with canvas(9, 5) as drawn:
        axis = drawn.figure.add_axes((0.09, 0.12, 0.87, 0.68))
        axis.plot(rates, losses, color=TRAIN, alpha=0.3, linewidth=1, label="loss")
        axis.plot(rates, smoothed, color=TRAIN, linewidth=2, label="smoothed")
        for (name, rate), color in zip(marks, (OTHER, VALID), strict=False):
            if rate is not None:
                axis.axvline(rate, color=color, linewidth=1.5, linestyle="--", label=f"{name}: {rate:.2g}")
        axis.set_xscale("log")
        lowest, first = min(smoothed), smoothed[0]
        span = max(first - lowest, abs(lowest) * 0.1) or 1.0
        axis.set_ylim(lowest - 0.2 * span, first + span)
        axis.set_xlabel("learning rate")
        axis.set_ylabel("loss")
        axis.legend(loc="upper left")
        drawn.head(title, f"{len(rates)} steps with a rising learning rate", left=0.09)
        return drawn.png()

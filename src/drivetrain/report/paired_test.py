"""Tests of paired differences that stay valid however often they are looked at, with any number of pairs.

Each pair is a bet on the sign of its difference. If a change makes no difference, the two runs of a pair could be
swapped, so each sign is a fair coin, whatever the sizes of the differences are: money that is bet on coins does not
grow, and by Ville's inequality it reaches twenty times the stake at any time with a chance of at most 1 in 20. The
money is the *e-value*. It is an average over bets of several sizes, each in units of the differences seen so far, on
either side.

The only assumption is that the pairs are independent, and that a pair was not chosen for its outcome. The confidence
sequence tests every shift of the differences in the same way; it assumes in addition that the differences are
symmetric about their center, as they are if the change shifts the metric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95  # how often all verdicts together are right
METHOD = "sign bets on paired differences (an e-process), valid at every look"
# Bets in units of the root mean square of the differences, with their weights. Large bets find a clear difference with
# the fewest pairs that two sides and 95 % allow, six; small ones find one that is far below the noise of a pair.
_BETS = np.array([0.12, 0.3, 0.7, 1.5, 4.0])
_WEIGHTS = np.array([0.12, 0.12, 0.12, 0.14, 0.5])
_GRID, _MOST_DOUBLINGS, _BISECTIONS = 801, 40, 60
_MOST_PAIRS = 100_000


@dataclass(frozen=True)
class PairedTest:
    """What the differences of pairs show.

    Args:
        num_pairs: How many pairs there are.
        mean: The mean difference.
        low: The lower end of the confidence sequence; -inf while there are too few pairs.
        high: The upper end.
        e_value: The money after betting 1; a difference is found where it reaches 1 / (1 - confidence).
        threshold: That bound.
        direction: 1 where the bets on positive differences won more, else -1.
    """

    num_pairs: int
    mean: float
    low: float
    high: float
    e_value: float
    threshold: float
    direction: int

    @property
    def is_found(self) -> bool:
        """Whether there is a difference. Where most pairs point one way and their mean the other, there is not."""
        return self.e_value >= self.threshold and self.mean * self.direction > 0

    @property
    def p_value(self) -> float:
        """A p-value that holds at every look."""
        return min(1.0, 1.0 / self.e_value)


def paired_test(differences: Sequence[float], confidence: float = CONFIDENCE) -> PairedTest:
    """Test whether paired differences are other than 0, in the order in which the pairs came in.

    Args:
        differences: One for each pair.
        confidence: How often, at least, the verdict and the interval are right at all looks together.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("differences must be finite numbers, at least one of them")
    threshold = 1.0 / (1.0 - confidence)
    low, high = _interval(values, threshold)
    above, below = (float(money[0]) for money in _money(values, np.zeros(1)))
    direction = 1 if above >= below else -1
    return PairedTest(len(values), float(values.mean()), low, high, (above + below) / 2, threshold, direction)


def evidence(differences: Sequence[float]) -> NDArray[np.float64]:
    """Return the e-value after each pair: all looks at once."""
    values = np.asarray(differences, dtype=np.float64)
    sizes = _sizes(values[None, :])[0]
    above, below = (np.log(_factors(sign * sizes)).cumsum(axis=-1) for sign in (1, -1))
    with np.errstate(over="ignore"):
        return np.asarray(0.5 * _WEIGHTS @ (np.exp(above) + np.exp(below)))


def fewest_pairs(confidence: float = CONFIDENCE) -> int:
    """Return how many pairs that all agree are needed for a verdict."""
    best = 2 / (1 + np.exp(-2 * _BETS))
    return next(number for number in range(1, 1000) if 0.5 * _WEIGHTS @ best**number >= 1.0 / (1.0 - confidence))


def pairs_needed(differences: Sequence[float], confidence: float = CONFIDENCE) -> int | None:
    """Estimate how many pairs a verdict takes if the next ones are like these; None where that cannot be told."""
    values = np.asarray(differences, dtype=np.float64)
    scale = math.sqrt(float(np.mean(values**2))) if len(values) else 0.0
    if len(values) < 3 or scale == 0:
        return None
    growth = np.log(_factors(np.abs(values.mean() / scale) + (values - values.mean()) / scale)).mean(axis=1)
    money = math.log(2 / (1 - confidence)) - np.log(_WEIGHTS)
    needed = np.divide(money, growth, out=np.full_like(money, math.inf), where=growth > 0).min()
    return max(fewest_pairs(confidence), math.ceil(needed)) if needed <= _MOST_PAIRS else None


def _factors(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each bet turns 1 into: a row for each bet. A fair coin's mean is 1."""
    return np.asarray(2 / (1 + np.exp(-2 * np.multiply.outer(_BETS, sizes))))


def _e_values(values: NDArray[np.float64], centers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the e-value against each center: large where the differences are not symmetric about it."""
    above, below = _money(values, centers)
    return (above + below) / 2


def _money(
    values: NDArray[np.float64], centers: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what betting 1 on differences above each center has come to, and on those below it."""
    sizes = _sizes(values[None, :] - centers[:, None])
    above, below = (np.log(_factors(sign * sizes)).sum(axis=-1) for sign in (1, -1))
    with np.errstate(over="ignore"):
        return _WEIGHTS @ np.exp(above), _WEIGHTS @ np.exp(below)


def _sizes(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return differences in units of those seen so far, the newest among them; a row for each center."""
    counts = np.arange(1, values.shape[1] + 1)
    scale = np.sqrt(np.cumsum(values**2, axis=1) / counts)  # of the sizes alone, which tell nothing of the signs
    return np.asarray(np.divide(values, scale, out=np.zeros_like(values), where=scale > 0))


def _interval(values: NDArray[np.float64], threshold: float) -> tuple[float, float]:
    """Return the lowest and highest center that is not ruled out."""
    if 0.5 * _WEIGHTS @ (2 / (1 + np.exp(-2 * _BETS))) ** len(values) < threshold:
        return -math.inf, math.inf  # not even a center far from all of them is
    center, width = float(np.median(values)), float(np.ptp(values))
    if width == 0:
        return center, center
    for _ in range(_MOST_DOUBLINGS):
        ends = np.array([center - width, center + width])
        if (_e_values(values, ends) >= threshold).all():
            break
        width *= 2
    else:
        return -math.inf, math.inf
    grid = np.unique(np.concatenate([np.linspace(ends[0], ends[1], _GRID), values, [center]]))
    kept = np.flatnonzero(_e_values(values, grid) < threshold)
    if not len(kept):  # no center fits: they are not symmetric about any
        return float(values.min()), float(values.max())
    return (
        _edge(values, threshold, grid[kept[0]], grid[kept[0] - 1]),
        _edge(values, threshold, grid[kept[-1]], grid[kept[-1] + 1]),
    )


def _edge(values: NDArray[np.float64], threshold: float, inside: float, outside: float) -> float:
    """Return the place between two centers where they begin to be ruled out."""
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        if _e_values(values, np.array([middle]))[0] < threshold:
            inside = middle
        else:
            outside = middle
    return float(outside)

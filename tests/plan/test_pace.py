"""How fast a machine that is not here may train."""

import pytest
import torch
from torch import nn

from drivetrain.core.precision import Precision
from drivetrain.plan.pace import LEAST_OF_PEAK, MOST_OF_PEAK, SLOWEST_LINK, sample_seconds
from drivetrain.plan.simulate import simulate


def test_flops_are_counted_on_shapes_alone() -> None:
    """Of two linear layers: forward, gradient of the weights, and that of the inputs except the first layer's."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    found = simulate(model, lambda model, batch: model(batch).sum(), torch.zeros(5, 8), Precision("fp32", "cpu"))
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert found.flops == 2 * first + 3 * second


def test_the_range() -> None:
    found = sample_seconds(1e12, 1e14, 4, 100, 10**9, recomputes=False)
    assert found is not None
    best, worst = found
    assert best == pytest.approx(1e12 / 4e14 / MOST_OF_PEAK)
    exchange = 2 * 1e9 * 3 / 4 / SLOWEST_LINK / 100  # a ring all-reduce, per sample
    assert worst == pytest.approx(1e12 / 4e14 / LEAST_OF_PEAK + exchange)
    again = sample_seconds(1e12, 1e14, 4, 100, 10**9, recomputes=True)
    assert again is not None
    assert again[0] == pytest.approx(best * 4 / 3)


@pytest.mark.parametrize(("flops", "peak"), [(0.0, 1e14), (1e12, 0.0), (1e3, 1e14)])
def test_where_flops_say_nothing(flops: float, peak: float) -> None:
    assert sample_seconds(flops, peak, 1, 8, 0, recomputes=False) is None

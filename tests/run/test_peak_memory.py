"""The meters of peak memory, against tensors of known size."""

import sys

import pytest
import torch

from drivetrain.run.peak_memory import NoPeakMeter, ResidentPeakMeter, peak_meter

MB = 10**6


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is Linux's")
def test_resident_memory_is_seen_and_forgotten() -> None:
    meter = peak_meter(torch.device("cpu"))
    assert isinstance(meter, ResidentPeakMeter)
    assert meter.is_coarse
    held = torch.ones(25 * MB)
    meter.reset()
    big = torch.ones(50 * MB)
    del big
    small = torch.ones(10 * MB)
    assert meter.peak_bytes() == pytest.approx(200 * MB, abs=20 * MB), "the most at once, above what was held before"
    meter.reset()
    assert meter.peak_bytes() < 20 * MB
    del held, small


def test_where_nobody_counts() -> None:
    meter = NoPeakMeter()
    meter.reset()
    assert meter.peak_bytes() == 0

"""The benchmark of comparisons, in short: real runs of a few seeds, and its statistics on made-up losses."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.sweep_honesty import figures, losses

from drivetrain.report.paired_test import evidence


def test_pairs_of_real_runs_are_alike_and_a_null_change_is_no_win(tmp_path: Path) -> None:
    found = losses(range(5), ["base", "null", "gain"], tmp_path)
    base, null, gain = (np.array(found[arm]) for arm in ("base", "null", "gain"))
    assert (base != null).all(), "the null change does change something"
    assert (base - null).std() < base.std() / 2, "less than another seed does"
    assert (base - gain).std() < base.std() / 5
    assert gain.mean() < base.mean()
    assert evidence(null - base).max() < 20


def test_the_statistics_of_the_benchmark() -> None:
    rng = np.random.default_rng(0)
    base = 1 + 0.05 * rng.normal(size=240)
    noise = [0.01 * rng.normal(size=240) for _ in range(3)]
    arms = {
        "base": base,
        "null": base + noise[0],
        "gain": base - 0.005 + noise[1] / 10,
        "gain and null": base - 0.005 + noise[2],
    }
    told = figures({name: list(values) for name, values in arms.items()})
    assert told["false wins of 200, other draws of dropout"][0] <= 18
    assert told["false wins of 200, other seeds"][0] <= 18
    assert told["gain: change of the loss (%)"][0] == pytest.approx(-0.5, abs=0.05)
    for arm in ("gain", "gain and null"):
        paired = told[f"{arm}: runs to find it, paired and looked at after each"][0]
        assert paired < told[f"{arm}: runs to find it, unpaired and planned"][0] / 3

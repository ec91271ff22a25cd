"""The benchmark of the loop's overhead runs, so that a renamed part of the runtime cannot break it unnoticed."""

import pytest

from benchmarks import overhead


def test_every_loop_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    monkeypatch.setattr(overhead, "STEPS", 60)
    monkeypatch.setattr(overhead, "CAPTURED_STEPS", 60)
    samples = overhead.measure()
    times = {name: values for name, values in samples.items() if "overhead" not in name}
    assert len(times) == 6
    assert all(len(values) == 1 and values[0] > 0 for values in times.values())

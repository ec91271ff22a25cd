"""Processes in real time are stopped by Linux for 50 ms of each second in which they did not rest."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import drivetrain as dt
from benchmarks import forecast


@pytest.mark.parametrize("may_be_in_real_time", [True, False])
def test_each_measurement_begins_after_a_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, may_be_in_real_time: bool
) -> None:
    done: list[str] = []

    def in_real_time(*_: Any) -> None:
        done.append("real time")
        if not may_be_in_real_time:
            raise PermissionError

    def measured(*_: Any, **__: Any) -> SimpleNamespace:
        done.append("measured")
        return SimpleNamespace(step_seconds=0.01)

    monkeypatch.setattr(os, "sched_setscheduler", in_real_time)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append(f"rest of {seconds} s"))
    monkeypatch.setattr(dt, "benchmark_performance", measured)
    forecast.rank_main(0, 1, tmp_path, 0)
    assert done == ["real time", *["rest of 1.0 s", "measured"] * 6]
    assert (tmp_path / "found-1-0.json").exists()

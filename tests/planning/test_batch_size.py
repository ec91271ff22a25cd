"""`--auto-batch-size`: what is measured decides, and what is learned stays."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job, configure, export, train
from drivetrain.core.errors import DrivetrainError
from drivetrain.plan.tune import Measurement
from drivetrain.planning import trials
from drivetrain.planning.trials import search_batch_size
from drivetrain.run import Session
from drivetrain.run.model_factory import build_model

INPUTS = torch.randn(96, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, torch.arange(96) % 3)


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {"epochs": 2, "data": DATA} | changes
    return Job(
        name="mine",
        model=lambda: torch.nn.Linear(4, 3).double(),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **given,
    )


def config(folder: Path, **changes: Any) -> Any:
    given = {"output_dir": folder, "gpu_mode": "cpu", "report": False, "loss_weighting": "samples"}
    return configure(**given | changes)


def found_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: dict[int, float], **search: Any) -> Any:
    """The search over made-up measurements: seconds per sample by size; no entry is out of memory."""
    asked: list[int] = []

    def measured(run: Session, model: Any, size: int, *, keeps_step: bool) -> Measurement:
        asked.append(size)
        if size not in seconds:
            return Measurement(problem="out of memory", out_of_memory=True)
        return Measurement(sample_seconds=seconds[size])

    monkeypatch.setattr(trials, "_measured", measured)
    setup = Session.join(job(global_batch=64), config(tmp_path), quiet=True)
    try:
        return search_batch_size(setup, build_model(setup), 0.8, **search), asked
    finally:
        setup.close_loaders()
        setup.close()


def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, asked = found_with(monkeypatch, tmp_path, {1: 8, 2: 4, 4: 2, 8: 1, 16: 0.99, 32: 1.2})
    assert asked == [1, 2, 4, 8, 16, 32]  # two in a row gained nothing: 64 is not tried
    assert found.fastest == 8  # 16 is not faster by 3 %
    assert "gain nothing" in found.ended


def test_dividing_a_step_the_largest_of_equals_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = {1: 8, 2: 4, 4: 2, 8: 1, 16: 0.99, 32: 1.2}
    assert found_with(monkeypatch, tmp_path, seconds, at_most=32, keeps_step=True)[0].fastest == 16


def test_memory_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, asked = found_with(monkeypatch, tmp_path, {1: 4, 2: 2, 4: 1})
    assert (found.fastest, found.ended, asked[-1]) == (4, "out of memory", 8)
    with pytest.raises(DrivetrainError, match="not even one sample fits"):
        found_with(monkeypatch, tmp_path, {})


def test_the_data_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {size: 1 / size for size in (1, 2, 4, 8, 16, 32, 64, 96)}
    found, _ = found_with(monkeypatch, tmp_path, sizes)
    assert (found.fastest, found.largest, found.ended) == (96, 96, "that is all of the data")


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_step_stays_what_it_is(tmp_path: Path) -> None:
    """The same weights as without it, to rounding, whatever was measured."""
    plain = train(job(global_batch=12), config(tmp_path / "a"), quiet=True)
    found = train(job(global_batch=12), config(tmp_path / "b", auto_batch_size=True), quiet=True)
    assert plain.steps == found.steps == 16
    files = [torch.load(export(run, run.folder / "weights.pt")) for run in (plain, found)]
    for name, value in files[0].items():
        torch.testing.assert_close(files[1][name], value, rtol=0, atol=1e-12)
    told = [row["words"] for row in events(found.folder) if row["event"] == "auto batch size"]
    assert len(told) == 1
    assert "is fastest" in told[0]
    assert "a step stays at 12 samples" in told[0]


def test_flags_say_how_many_samples_a_step_has(tmp_path: Path) -> None:
    result = train(job(), config(tmp_path, auto_batch_size=True, batch_size=8, accumulation_steps=2), quiet=True)
    assert result.steps == 2 * 6  # 96 samples, 16 at a time


def test_where_nobody_says_it_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trials, "_measured", lambda *_, **__: Measurement(sample_seconds=1.0)
    )  # all alike: the smallest
    given = {"auto_batch_size": True, "max_steps": 3}
    first = train(job(), config(tmp_path, **given), quiet=True)
    assert first.steps == 3
    assert "global_batch: 1\n" in (first.folder / "job.yaml").read_text()
    told = [row["words"] for row in events(first.folder) if row["event"] == "auto batch size"]
    assert "the number of samples in a step was not given: 1" in told[0]


def test_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    class Numbers:
        def __iter__(self) -> Any:
            return iter([(INPUTS[index], torch.tensor(index % 3)) for index in range(12)])

    result = train(job(data=Numbers(), global_batch=4, epochs=1), config(tmp_path, auto_batch_size=True), quiet=True)
    assert result.last is not None
    assert math.isfinite(result.last.loss)
    told = [row["words"] for row in events(result.folder) if row["event"] == "auto batch size"]
    assert told == ["not measured: data that can only be iterated is not read for measuring"]

"""A disk that is really full: a small file system in memory. Training goes on, and no line is torn."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import JsonLines
from tests.api.jobs import Variant, make_job, run, vector_loss

SMALL = Variant(dtype=torch.float32, steps=40, num_samples=64, global_batch=8, save_every=1000)


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    return ballast


def test_lines_are_whole_or_not_there(small_disk: Path) -> None:
    log = JsonLines(small_disk / "log.jsonl")
    log.append({"step": 1})
    log.flush()
    ballast = fill(small_disk)
    row = {"step": 2, "text": "y" * 100_000}
    log.hold(row)
    with pytest.raises(OSError, match="No space"):
        log.flush()
    assert (small_disk / "log.jsonl").read_text() == '{"step": 1}\n'
    ballast.unlink()
    log.close()
    assert [json.loads(line) for line in (small_disk / "log.jsonl").read_text().splitlines()] == [{"step": 1}, row]


def test_training_goes_on_and_writes_when_there_is_room_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(JsonLines, "FLUSH_SECONDS", 0.0)  # every row is tried at once
    calls = [0]

    def filling(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 10:
            fill(small_disk)
        if calls[0] == 30:
            (small_disk / "ballast").unlink()
        return vector_loss(model, batch)

    settings = {"log_every": 1, "gpu_log_interval": 1, "trackers": ["tensorboard"]}
    trained = run(str(small_disk), SMALL, settings=settings, loss=filling)
    assert trained is not None
    assert len(trained.losses) == SMALL.steps
    assert [row["step"] for row in trained.rows] == list(range(1, SMALL.steps + 1))  # those of the full disk too
    speed = [json.loads(line) for line in (small_disk / "suite" / "speed.jsonl").read_text().splitlines()]
    assert sum(row["steps"] for row in speed) == SMALL.steps


def test_it_is_said_once(small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from drivetrain.api.training import train
    from drivetrain.config import configure

    monkeypatch.setattr(JsonLines, "FLUSH_SECONDS", 0.0)
    calls = [0]

    def filling(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 5:
            fill(small_disk)
        if calls[0] == 38:
            (small_disk / "ballast").unlink()
        return vector_loss(model, batch)

    given = {"monitor_gpu": False, "report": False, "loss_weighting": "samples"}  # calls are counted
    train(make_job(SMALL, loss=filling), configure(output_dir=small_disk, gpu_mode="cpu", **given))
    assert capsys.readouterr().out.count("steps.jsonl cannot be written") == 1


@pytest.mark.parametrize("num_free", [4096, 5 * 4096])
def test_a_start_on_a_full_disk_names_the_folder_and_the_next_one_is_whole(small_disk: Path, num_free: int) -> None:
    ballast = fill(small_disk)
    os.truncate(ballast, ballast.stat().st_size - num_free)
    with pytest.raises(DrivetrainError, match="suite cannot be written to: No space left on device") as caught:
        run(str(small_disk), SMALL)
    assert "free space there" in caught.value.remedy
    ballast.unlink()
    trained = run(str(small_disk), SMALL)
    assert trained is not None
    assert [row["step"] for row in trained.rows] == list(range(1, SMALL.steps + 1))


def test_an_interrupted_run_waits_for_room(small_disk: Path) -> None:
    ended = threading.Event()

    def interrupted(model: Any, batch: Any) -> Tensor:
        if (small_disk / "suite" / "checkpoints" / "step-00000020").exists() and not ended.is_set():
            ended.set()
            raise RuntimeError("here")
        return vector_loss(model, batch)

    saving = replace(SMALL, save_every=20)
    with pytest.raises(RuntimeError, match="here"):
        run(str(small_disk), saving, settings={"async_save": False}, loss=interrupted)
    ballast = fill(small_disk)
    with pytest.raises(DrivetrainError, match="suite cannot be written to: No space left on device"):
        run(str(small_disk), saving, loss=interrupted)
    ballast.unlink()
    trained = run(str(small_disk), saving, loss=interrupted)
    assert trained is not None
    assert trained.resumed_from == 20
    assert [row["step"] for row in trained.rows] == list(range(1, SMALL.steps + 1))


def test_a_report_that_cannot_be_written_is_said(small_disk: Path) -> None:
    from drivetrain.report import write_report

    run(str(small_disk), SMALL)
    fill(small_disk)
    (problem,) = write_report(small_disk / "suite")  # once, not for the words, the picture and the page each
    assert "No space left" in problem
    assert "remedy: " in problem
    assert not list((small_disk / "suite").glob(".*.tmp"))

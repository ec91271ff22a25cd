"""Validation in a loop of one's own: the same as in `train`, through interruptions, on several ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drivetrain as dt
from drivetrain.api.driving import Drive
from drivetrain.checkpoint import Checkpoint
from tests.api.jobs import Variant, Vectors, make_job, vector_loss
from tests.api.test_drive import start
from tests.gloo_pool import GlooPool

JOB = Variant(steps=8, num_samples=40, global_batch=16, dropout=0.3, save_every=4)


def correct(output: Tensor, batch: Any) -> Tensor:
    return output.argmax(1) == batch[1]


def validated(**changes: Any) -> dict[str, Any]:
    sets = {"own": Vectors(JOB), "few": Vectors(Variant(num_samples=7))}
    values = {"valid": sets, "valid_every": 2, "metrics": {"accuracy": correct}, "keep_last": 1}
    return {**values, "best": dt.Aim("valid_own_loss", "max"), **changes}


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]


def drive_on(going: Drive, leave_after: int | None = None) -> Drive:
    for batch in going:
        going.backward(vector_loss(going.model, batch))
        going.step()
        if going.steps == leave_after:
            break
    return going


def looped(folder: Path | str, leave_after: int | None = None, micro_batch: int = 8, **changes: Any) -> Drive:
    return drive_on(start(str(folder), JOB, micro_batch, loss=vector_loss, **validated(**changes)), leave_after)


def trained(folder: Path, **changes: Any) -> dt.Result:
    config = dt.configure(
        output_dir=folder, gpu_mode="cpu", batch_size=8, num_workers=0, report=False, loss_weighting="samples"
    )
    return dt.train(make_job(JOB, **validated(**changes)), config, quiet=True)


def test_validation_is_that_of_train_also_after_an_interruption(tmp_path: Path) -> None:
    result = trained(tmp_path / "train")
    expected = rows(result.folder)
    assert [row["step"] for row in expected] == [2, 4, 6, 8]
    whole = looped(tmp_path / "whole")
    assert whole.finished
    assert rows(whole.folder) == expected
    assert whole.metrics == result.metrics
    assert whole.best == result.best
    assert result.best is not None
    assert result.best.step < 5  # before the interruption
    left = looped(tmp_path / "left", leave_after=5)
    assert not left.finished
    again = looped(tmp_path / "left")
    assert again.resumed_from == 5
    assert (rows(again.folder), again.best) == (expected, result.best)
    checkpoints = {path.name for path in (again.folder / "checkpoints").iterdir() if path.name.startswith("step-")}
    assert checkpoints == {f"step-{result.best.step:08d}", "step-00000008"}


def test_early_stopping_ends_the_loop(tmp_path: Path) -> None:
    stopping = dt.EarlyStopping(patience=2, metric="valid_loss", mode="max")
    result = trained(tmp_path / "train", early_stopping=stopping)
    going = looped(tmp_path / "drive", early_stopping=stopping)
    assert going.finished
    assert going.steps == result.steps < 8


def test_a_loop_that_was_stopped_early_does_no_further_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = dt.EarlyStopping(patience=2, metric="valid_loss", mode="max")
    with monkeypatch.context() as patch:
        patch.setattr("drivetrain.monitor.recorder.RunRecorder.finish", killed)
        with pytest.raises(RuntimeError, match="killed"):
            looped(tmp_path, early_stopping=stopping)
    going = looped(tmp_path, early_stopping=stopping)
    assert going.finished
    assert going.steps == going.resumed_from < 8


def killed(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("killed")


def run_on_rank(folder: str) -> tuple[dict[str, float], Any]:
    going = looped(folder, micro_batch=3)
    return dict(going.metrics), going.best


def test_ranks_validate_together(tmp_path: Path, gloo_pool: GlooPool) -> None:
    one, other = gloo_pool.run(run_on_rank, str(tmp_path), world=2)
    assert one == other
    model = make_job(JOB).model()
    checkpoint = Checkpoint.open(tmp_path / "suite" / "checkpoints" / "step-00000008")
    keys = [key for key in checkpoint.keys if key.startswith("model/")]
    model.load_state_dict({key.removeprefix("model/"): checkpoint.read(key) for key in keys})
    data = Vectors(JOB)
    with torch.no_grad():
        loss = vector_loss(model.eval(), (data.inputs, data.labels))
    assert one[0]["valid_loss"] == pytest.approx(float(loss), rel=1e-9)


def test_validation_on_demand(tmp_path: Path) -> None:
    going = start(str(tmp_path), JOB, 16, loss=vector_loss, **validated())
    found = []
    for batch in going:
        if going.steps == 3:
            with pytest.raises(dt.DrivetrainError, match=r"between a batch and its run\.step"):
                going.validate()
        going.backward(vector_loss(going.model, batch))
        going.step()
        found.append(going.validate())
        assert going.model.training
    assert found[1::2] == [
        {name: value for name, value in row.items() if name.startswith("valid_")} for row in rows(going.folder)
    ]
    assert looped(tmp_path / "undisturbed", micro_batch=16).metrics == going.metrics
    with pytest.raises(dt.DrivetrainError, match="after the loop"):
        going.validate()


def test_what_validation_needs(tmp_path: Path) -> None:
    with pytest.raises(dt.ConfigError, match="validation needs a loss function"):
        start(str(tmp_path), JOB, valid=Vectors(JOB))
    going = start(str(tmp_path), JOB)
    with pytest.raises(dt.DrivetrainError, match="no validation set"):
        going.validate()
    going.close()

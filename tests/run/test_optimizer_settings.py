"""The flags --lr, --weight-decay, --clip-norm and --warmup-steps: what the steps of a run compute with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim import lr_scheduler as torchs

import drivetrain as dt
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.run.job_settings import with_optimizer_settings
from tests.api.test_schedules import job_of, loss_of, model_of, rows, two_groups


def train(folder: Path, job: dt.Job, **settings: Any) -> dt.Result:
    config = dt.configure(
        output_dir=str(folder), gpu_mode="cpu", num_workers=0, loss_weighting="samples", report=False, **settings
    )
    return dt.train(job, config, quiet=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)


def test_the_rate_of_all_groups(tmp_path: Path) -> None:
    train(tmp_path, job_of(dt.Constant(), optimizer=adam, weight_decay=0.1), lr=0.002)
    assert {row["lr"] for row in rows(tmp_path)} == {0.002}
    assert "lr_1" not in rows(tmp_path)[0]


def test_groups_keep_their_ratio_and_it_is_told(tmp_path: Path) -> None:
    train(tmp_path, job_of(dt.StepDecay(4, 0.5), optimizer=two_groups), lr=0.1)
    assert [(row["lr"], row["lr_bias"]) for row in rows(tmp_path)][3:5] == [(0.1, 0.02), (0.05, 0.01)]
    events = [json.loads(line) for line in (tmp_path / "rates" / "events.jsonl").read_text().splitlines()]
    (told,) = [event["words"] for event in events if event["event"] == "learning rate"]
    assert told.endswith(": 0.1, 0.02")


def test_the_settings_are_those_of_a_job_that_says_them_itself(tmp_path: Path) -> None:
    """Weight decay, clipping and warm-up: the same steps to the bit, the same record of the job."""
    edited = job_of(dt.WarmupLinear(3), optimizer=adam, weight_decay=0.2, clip_norm=0.5)
    train(tmp_path / "edited", edited)
    flags = {"weight_decay": 0.2, "clip_norm": 0.5, "warmup_steps": 3}
    train(tmp_path / "flags", job_of(dt.WarmupLinear(), optimizer=adam), **flags)
    assert rows(tmp_path / "flags") == rows(tmp_path / "edited")
    records = [yaml.safe_load((tmp_path / name / "rates" / "job.yaml").read_text()) for name in ("flags", "edited")]
    assert records[0] == records[1]


@pytest.mark.parametrize("settings", [{"lr": 0.5}, {"clip_norm": 2.0}, {"weight_decay": 0.0}, {"warmup_steps": 2}])
def test_another_value_is_another_job(tmp_path: Path, settings: dict[str, Any]) -> None:
    def stop(context: dt.StepContext) -> dt.Verdict:
        if context.step == 3:
            raise KeyError
        return dt.Verdict()

    job = job_of(dt.WarmupLinear(), optimizer=adam, hooks=[dt.every(1, stop)])
    with pytest.raises(KeyError):
        train(tmp_path, job)
    with pytest.raises(DrivetrainError, match=r"another|other settings|groups"):
        train(tmp_path, job, **settings)


def test_a_loop_of_ones_own_obeys_the_rate(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    config = dt.configure(output_dir=str(tmp_path), gpu_mode="cpu", num_workers=0, report=False, lr=0.02, clip_norm=1.0)
    data = [(torch.ones(3).double(), torch.ones(1).double())] * 4
    run = dt.drive(model, optimizer, data, name="rates", global_batch=4, max_steps=2, config=config, quiet=True)
    for batch in run:
        run.backward(loss_of(run.model, batch))
        run.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02]


@pytest.mark.parametrize(
    ("schedule", "settings", "words"),
    [
        (lambda step: 1.0, {"warmup_steps": 3}, "no warm-up to set"),
        (dt.OneCycle(), {"warmup_steps": 3}, "OneCycle, which has no warm-up"),
        (lambda it: torchs.OneCycleLR(it, 0.1, total_steps=12), {"lr": 0.1}, "OneCycleLR, which sets rates of its own"),
        (dt.Constant(), {"weight_decay": 0.5}, "--weight-decay 0.5 has no effect"),
    ],
)
def test_a_flag_without_effect_is_refused(tmp_path: Path, schedule: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DrivetrainError), match=words):
        train(tmp_path, job_of(schedule), **settings)  # its optimizer makes groups of its own


def test_nothing_given_changes_nothing() -> None:
    job = job_of(dt.Constant())
    assert with_optimizer_settings(job, dt.configure()) == job

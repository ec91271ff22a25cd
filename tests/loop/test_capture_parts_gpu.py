"""On a GPU: a loss of named parts, captured and compiled, against a plain loop in float64 on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain import Job, LossSum
from drivetrain.api.training import Result, train
from drivetrain.config import configure
from drivetrain.strategies.loss_parts import LossParts
from tests.api.test_loss_parts import GLOBAL_BATCH, WEIGHTS, Heads, count, make_data, plain_loop, rows_of
from tests.waits import IN_A_STEP, refuse_waits

pytestmark = pytest.mark.gpu

NUM_STEPS = 60


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Heads().double().float()  # the weights that the plain loop has, rounded


def loss(model: Any, batch: Any) -> dict[str, Tensor | LossSum]:
    answer, findings, size = model(batch["inputs"])
    known = (batch["findings"] >= 0).float()
    each = functional.binary_cross_entropy_with_logits(
        findings, batch["findings"].clamp(min=0).float(), reduction="none"
    )
    return {
        "answer": functional.cross_entropy(answer, batch["answers"]),
        "findings": LossSum((each * known).sum(), known.sum()),
        "size": functional.mse_loss(size, batch["sizes"]),
    }


def ramp(step: int) -> float:
    return step / NUM_STEPS


def make_job(**changes: Any) -> Job:
    data = {name: column.float() if column.is_floating_point() else column for name, column in make_data().items()}
    values: dict[str, Any] = {
        "name": "parts",
        "model": make_model,
        "data": data,
        "loss": loss,
        "loss_weights": WEIGHTS | {"size": ramp},
        "count": count,
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.9),
        "global_batch": GLOBAL_BATCH,
        "max_steps": NUM_STEPS,
        "seed": 3,
    }
    return Job(**{**values, **changes})


def trained(folder: Path, job: Job, **values: Any) -> Result:
    given = {"precision": "fp32", "auto_optimize": False, "monitor_gpu": False, "loss_weighting": "samples", **values}
    return train(job, configure(output_dir=folder, gpu_mode="single_gpu", **given), quiet=True)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, float]]:
    job = make_job(data=make_data())
    rows, _ = plain_loop(job, WEIGHTS | {"size": ramp}, lr=0.125)
    return rows


@pytest.mark.parametrize(
    "values",
    [
        {"capture": "on", "resident": "on", "batch_size": GLOBAL_BATCH},
        {"capture": "on", "resident": "off", "batch_size": GLOBAL_BATCH},
        {"capture": "on", "compile": True, "batch_size": GLOBAL_BATCH},
        {"capture": "off", "compile": True, "batch_size": 4},
        {"capture": "off", "resident": "on", "batch_size": 4},
        {"capture": "off", "resident": "off", "batch_size": 4},
    ],
    ids=["captured resident", "captured copied", "captured compiled", "compiled", "counted resident", "counted copied"],
)
def test_parts_are_those_of_the_plain_loop(
    tmp_path: Path, expected: list[dict[str, float]], values: dict[str, Any]
) -> None:
    result = trained(tmp_path, make_job(), **values)
    rows = rows_of(result.folder)
    for row, wanted in zip(rows, expected, strict=True):
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value, rel=2e-3, abs=1e-4), (row["step"], name)
    if values["capture"] == "on":
        told = [row for row in rows_of(result.folder, "events") if row["event"] == "step captured"]
        assert told, "the step was captured"


def test_captured_and_plain_steps_are_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", make_job(), capture="off", batch_size=GLOBAL_BATCH)
    captured = trained(tmp_path / "captured", make_job(), capture="on", batch_size=GLOBAL_BATCH)
    names = ["loss", "loss_answer", "loss_findings", "loss_size"]
    for one, other in zip(rows_of(plain.folder), rows_of(captured.folder), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]


def test_the_host_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting beforehand, with several micro-batches per step, from host memory."""
    calls = refuse_waits(monkeypatch, *IN_A_STEP, (LossParts, "begin"), num_spared=9)
    trained(tmp_path, make_job(), capture="off", resident="off", batch_size=4)
    assert len(calls) > 2 * NUM_STEPS

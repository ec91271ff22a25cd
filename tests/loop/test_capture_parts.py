"""Captured steps of a loss with named parts, against a plain loop. A recorder for a CPU stands in for CUDA's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.test_loss_parts import (
    GLOBAL_BATCH,
    WEIGHTS,
    assert_same,
    count,
    loss_of_means,
    loss_of_sums,
    make_job,
    plain_loop,
    trained,
)
from tests.loop.test_capture import Captures

NUM_STEPS = 20


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def ramp(step: int) -> float:
    return step / 8


def job_of(loss: Any, **changes: Any) -> Any:
    # A rate that float32 holds exactly: on the device it is one.
    optimizer = lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.9)  # noqa: E731
    weights = WEIGHTS | {"findings": ramp}
    return make_job(loss=loss, loss_weights=weights, max_steps=NUM_STEPS, optimizer=optimizer, **changes)


@pytest.mark.parametrize("resident", ["on", "off"])
@pytest.mark.parametrize(("loss", "counts"), [(loss_of_means, True), (loss_of_sums, False)])
def test_replayed_steps_have_their_parts(
    captures: Captures, tmp_path: Path, loss: Any, counts: bool, resident: str
) -> None:
    job = job_of(loss, count=count if counts else None)
    values = {"capture": "on", "auto_optimize": False, "monitor_gpu": False, "loss_weighting": "samples"}
    result = trained(tmp_path, job, GLOBAL_BATCH, resident=resident, **values)
    assert captures.recorders[0].num_replayed > NUM_STEPS // 2
    assert_same(result.folder, plain_loop(job, job.loss_weights, lr=0.125))

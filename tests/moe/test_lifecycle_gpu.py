"""Experts that come and go on a GPU: as on a CPU, and the same bits after a stop."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.moe import Knowledge, Lifecycle, MixtureOfExperts
from drivetrain.moe.mixture import outputs_of
from tests.api.jobs import Trained, Variant
from tests.api.test_resume import assert_identical
from tests.moe.jobs import Mixture, run_mixture
from tests.moe.test_knowledge import first_of
from tests.moe.test_lifecycle import RULES
from tests.strategies.test_expert_parallel import sgd

pytestmark = pytest.mark.gpu


def train(
    folder: Path, gpu_mode: str, dtype: torch.dtype, crash_at_call: int = 0, **changes: Any
) -> tuple[Trained | None, list[tuple[Any, ...]]]:
    """What came of it, and what happened to whom."""
    variant = Variant(dtype=dtype, steps=24, global_batch=30, num_samples=90, save_every=4)
    knowledge = Knowledge(labels=first_of)
    given = {"hooks": [Lifecycle(3, RULES, knowledge=knowledge)], "ema": 0.9, **changes}
    settings = {"gpu_mode": gpu_mode, "precision": "fp32", "auto_optimize": False}
    wanted = Mixture(num_experts=3, num_slots=6, dtype=dtype)
    found = run_mixture(str(folder), variant, wanted, 10, settings, crash_at_call, given)
    rows = [json.loads(line) for line in (folder / "suite" / "events.jsonl").read_text().splitlines()]
    told = [(row["step"], row["what"], row["expert"], row.get("parent")) for row in rows if row["event"] == "expert"]
    return found, told


def test_the_same_experts_come_and_go_as_on_a_cpu(tmp_path: Path) -> None:
    """`fp32` computes in float64, as the model has it: the precision casts nothing."""
    (here, told_here), (there, told_there) = (
        train(tmp_path / mode, mode, torch.float64, optimizer=sgd) for mode in ("cpu", "single_gpu")
    )
    assert here is not None
    assert there is not None
    assert "grown" in {what for _, what, *_ in told_here}
    assert told_there == told_here
    assert there.losses == pytest.approx(here.losses, rel=1e-9)
    for key, value in here.weights.items():
        assert np.allclose(there.weights[key], value, rtol=0, atol=1e-8), key  # -inf equals -inf


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", "single_gpu", torch.float32)
    crashed, _ = train(tmp_path / "parts", "single_gpu", torch.float32, crash_at_call=40)
    assert crashed is None
    resumed, _ = train(tmp_path / "parts", "single_gpu", torch.float32)
    assert whole is not None
    assert resumed is not None
    assert 0 < resumed.resumed_from < 24
    assert int(whole.weights["model/mixture.next_id"]) > 3, "something grew"
    assert_identical(resumed, whole)


def test_every_expert_on_every_token() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 5, [8, 12, 8, 12, 8], k=2, num_slots=7).double()
    tokens, slots = torch.randn(64, 16, dtype=torch.float64), [4, 0, 3]
    expected = outputs_of(layer, tokens, slots)
    layer, tokens = layer.cuda(), tokens.cuda()
    with torch.no_grad():
        found = outputs_of(layer, tokens, slots)
    assert torch.allclose(found.cpu(), expected, rtol=0, atol=1e-12)

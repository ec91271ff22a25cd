"""Two gloo ranks on one GPU, half of the experts each: as one process on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.api.jobs import Trained, Variant
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, run_mixture
from tests.strategies.test_expert_parallel import EXPERT_PARALLEL, sgd

pytestmark = pytest.mark.gpu


def train(folder: str, mode: str, precision: str) -> Trained | None:
    dtype = torch.float64 if precision == "fp32" else torch.float32
    settings = {"gpu_mode": mode, "precision": precision if mode != "cpu" else "fp32"}
    settings |= EXPERT_PARALLEL if mode != "cpu" else {}
    variant = Variant(dtype=dtype, steps=10, global_batch=30, num_samples=100)
    wanted = Mixture(num_experts=5, num_slots=7, dtype=dtype)
    return run_mixture(folder, variant, wanted, 8, settings, changes={"optimizer": sgd})


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-9), ("bf16", 0.05), ("fp16", 0.05)])
def test_two_ranks_on_the_gpu_learn_what_one_process_learns(
    gloo_pool: GlooPool, tmp_path: Path, precision: str, limit: float
) -> None:
    """`fp32` computes in float64, as the model has it: the precision casts nothing."""
    alone = train(str(tmp_path / "alone"), "cpu", precision)
    args = (str(tmp_path / "shared"), "single_gpu", precision)
    shared = gloo_pool.run(train, *args, world=2)[0]
    assert alone is not None
    assert shared.losses == pytest.approx(alone.losses, rel=limit)
    if precision == "fp32":
        for key, value in alone.weights.items():
            assert np.allclose(shared.weights[key], value, rtol=0, atol=1e-8), key  # -inf equals -inf

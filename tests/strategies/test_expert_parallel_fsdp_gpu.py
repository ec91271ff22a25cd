"""Two gloo ranks on one GPU, half of the experts and half of all else each: as one process on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.moe import MixtureOfExperts
from drivetrain.strategies import ShardOptions, SharedExperts
from drivetrain.strategies.sharding import build, shard
from tests.api.jobs import Trained, Variant, run
from tests.gloo_pool import GlooPool
from tests.strategies.test_expert_parallel import sgd
from tests.strategies.test_expert_parallel_fsdp import SHARDED, All, Deep

pytestmark = pytest.mark.gpu

LIMIT = {"time_limit_seconds": 180}


def train(folder: str, mode: str, precision: str, given: dict[str, Any], dtype: torch.dtype) -> Trained | None:
    settings = {**SHARDED, **given, "precision": precision} if mode != "cpu" else {"precision": "fp32"}
    variant = Variant(dtype=dtype, steps=10, global_batch=30, num_samples=100)
    changes = {"model": lambda: Deep().to(dtype), "optimizer": sgd, "ema": 0.9}
    return run(folder, variant, 8, gpu_mode=mode, settings=settings, **changes)


@pytest.mark.parametrize("given", [{}, {"fsdp_accumulate": "shards"}, {"fsdp_offload": True}], ids=str)
def test_float64_equals_one_process(gloo_pool: GlooPool, tmp_path: Path, given: dict[str, Any]) -> None:
    alone = train(str(tmp_path / "alone"), "cpu", "fp32", {}, torch.float64)
    args = (str(tmp_path / "shared"), "single_gpu", "fp32", given, torch.float64)
    shared = gloo_pool.run(train, *args, world=2, **LIMIT)[0]
    assert alone is not None
    assert shared.losses == pytest.approx(alone.losses, rel=1e-9)
    for key, value in (alone.weights | alone.state).items():
        assert np.allclose((shared.weights | shared.state)[key], value, rtol=0, atol=1e-8), key


@pytest.mark.parametrize(
    ("precision", "given"),
    [("bf16", {}), ("bf16", {"fsdp_cast": "blocks"}), ("bf16", {"fsdp_offload": True}), ("fp16", {})],
    ids=str,
)
def test_low_precision_is_near(gloo_pool: GlooPool, tmp_path: Path, precision: str, given: dict[str, Any]) -> None:
    alone = train(str(tmp_path / "alone"), "cpu", "fp32", {}, torch.float32)
    args = (str(tmp_path / "shared"), "single_gpu", precision, given, torch.float32)
    shared = gloo_pool.run(train, *args, world=2, **LIMIT)[0]
    assert alone is not None
    assert shared.losses == pytest.approx(alone.losses, rel=0.05)
    assert shared.losses != pytest.approx(alone.losses, rel=1e-7), "it computes in the low precision"


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.mixture = MixtureOfExperts(16, 3, 16, k=2, num_slots=5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        result: torch.Tensor = self.last(hidden + self.mixture(hidden))
        return result


def grow(folder: str, mode: str) -> Trained | None:
    variant = Variant(dtype=torch.float64, steps=16, global_batch=30, num_samples=90)
    changes = {"model": lambda: Growing().double(), "optimizer": sgd, "ema": 0.9, "hooks": [All()]}
    settings = {**(SHARDED if mode != "cpu" else {}), "precision": "fp32"}
    return run(folder, variant, 8, gpu_mode=mode, settings=settings, **changes)


def test_experts_come_and_go(gloo_pool: GlooPool, tmp_path: Path) -> None:
    alone = grow(str(tmp_path / "alone"), "cpu")
    shared = gloo_pool.run(grow, str(tmp_path / "shared"), "single_gpu", world=2, **LIMIT)[0]
    assert alone is not None
    assert shared.losses == pytest.approx(alone.losses, rel=1e-9)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 512), MixtureOfExperts(512, 8, 512), nn.Linear(512, 512)) for _ in range(4)
        )


def peak_of_cutting() -> tuple[int, int, int]:
    """The most that the device held while a model was cut, what it holds then, and what the model takes."""
    world = World.join([torch.device("cuda:0")])
    model = build(Large, world)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    experts = SharedExperts(model, world)
    sharded = shard(model, world, ShardOptions(), Precision("fp32", "cuda"), experts)
    found = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before, whole
    assert sharded.parameters
    experts.close()
    return found


def test_no_device_ever_holds_the_whole_model(gloo_pool: GlooPool) -> None:
    for peak, held, whole in gloo_pool.run(peak_of_cutting, world=2, **LIMIT):
        assert held < 0.55 * whole
        assert peak < 0.6 * whole, "a half, and one expert or one block more"

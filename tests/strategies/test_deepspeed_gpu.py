"""DeepSpeed on a GPU: one rank over NCCL, and two gloo ranks that share the GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.recipes.gpt import SmallGpt, Windows, next_token_loss
from drivetrain.strategies import DeepSpeedStrategy, StrategyParts, Trial
from tests.api.jobs import Trained, Variant, make_job, plain_loop, run
from tests.api.test_resume import BASE, MICRO_BATCH, CrashingLoss, PlantedError, assert_identical, call_in
from tests.gloo_pool import GlooPool
from tests.strategies.deepspeed_runs import TINY_PIECES, made_strategy, zero

pytest.importorskip("deepspeed", reason="the package deepspeed is not here")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LIMIT = {"time_limit_seconds": 240}
SHORT = Variant("transformer", torch.float32, 12, num_samples=60, steps=8)


def on_gpu(folder: str, variant: Variant, micro_batch: int, settings: dict[str, Any]) -> Trained | None:
    return run(folder, variant, micro_batch, 0, "single_gpu", {"precision": "fp32", **settings})


def crash_on_gpu(folder: str, at_call: int, settings: dict[str, Any]) -> bool:
    loss = CrashingLoss(make_job(BASE).loss, at_call)
    try:
        run(folder, BASE, MICRO_BATCH, 0, "single_gpu", {"precision": "fp32", **settings}, loss=loss)
    except PlantedError:
        return True
    return False


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_equals_the_plain_loop(gloo_pool: GlooPool, tmp_path: Path, world: int, stage: int, offload: bool) -> None:
    path = tmp_path / "pieces.json"
    path.write_text(json.dumps(TINY_PIECES))
    settings = {**zero(stage, offload), "deepspeed_config": str(path)}
    trained = gloo_pool.run(on_gpu, str(tmp_path), SHORT, 2, settings, world=world, **LIMIT)[0]
    assert trained.losses == pytest.approx(plain_loop(SHORT)[0], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_bit_identical_after_a_stop(gloo_pool: GlooPool, tmp_path: Path, stage: int) -> None:
    settings = zero(stage, offload=True)
    whole = gloo_pool.run(on_gpu, str(tmp_path / "whole"), BASE, MICRO_BATCH, settings, world=2, **LIMIT)[0]
    assert all(gloo_pool.run(crash_on_gpu, str(tmp_path / "broken"), call_in(5, 1, 2), settings, world=2, **LIMIT))
    mended = gloo_pool.run(on_gpu, str(tmp_path / "broken"), BASE, MICRO_BATCH, settings, world=2, **LIMIT)[0]
    assert mended.resumed_from == 3
    assert_identical(mended, whole)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_equals_fp32_to_its_rounding(gloo_pool: GlooPool, tmp_path: Path, stage: int) -> None:
    """With a file as DeepSpeed's users have it: the loss is scaled from 2 ** 16 on, and weights stay float32."""
    path = tmp_path / "fp16.json"
    path.write_text(json.dumps({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}))
    settings = {**zero(stage), "deepspeed_config": str(path), "precision": "auto"}
    trained = gloo_pool.run(on_gpu, str(tmp_path), SHORT, 2, settings, world=2, **LIMIT)[0]
    kept = [row["loss"] for row in trained.rows if not row.get("skipped")]
    assert len(kept) > len(trained.rows) // 2
    assert trained.losses[0] == pytest.approx(plain_loop(SHORT)[0][0], rel=5e-3)
    assert {value.dtype.name for value in trained.weights.values()} == {"float32"}


def auto_with_little_memory(folder: str, free_bytes: int) -> Trained | None:
    real = torch.cuda.mem_get_info
    torch.cuda.mem_get_info = lambda device=None: (free_bytes, real(device)[1])
    try:
        return on_gpu(folder, SHORT, 2, {"auto_optimize": False})
    finally:
        torch.cuda.mem_get_info = real


@pytest.mark.parametrize("world", [1, 2])
def test_auto_takes_it_where_nothing_else_fits(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    """Weights w with Adam take 4 w, or 4 w ÷ ranks each under fsdp; offloaded, 2 w ÷ ranks."""
    weights = 4 * sum(value.numel() for value in make_job(SHORT).model().parameters())
    free = int(3 * weights / world / 0.8)
    trained = gloo_pool.run(auto_with_little_memory, str(tmp_path), free, world=world, **LIMIT)[0]
    assert trained.losses == pytest.approx(plain_loop(SHORT)[0], rel=1e-5)
    events = [json.loads(line) for line in (tmp_path / "suite" / "events.jsonl").read_text().splitlines()]
    told = next(event for event in events if event["event"] == "deepspeed")["config"]
    assert told["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def gpt_small() -> Job:
    """The body of GPT-2 small: 12 layers of width 768, 85 million weights."""
    text = b"".join(str(number * number).encode() + b" " for number in range(20_000))
    return Job(
        name="gpt-small",
        model=lambda: SmallGpt(768, 12, 12),
        data=Windows(text),
        loss=next_token_loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4),
        global_batch=32,
        max_steps=30,
        clip_norm=1.0,
        weight_decay=0.1,
    )


def test_gpt_small_with_the_optimizer_in_host_memory(tmp_path: Path) -> None:
    losses = {}
    for name, settings in (("single", {"parallel_strategy": "single"}), ("zero", zero(2, offload=True))):
        given = {"precision": "bf16", "report": False, "auto_optimize": False, "batch_size": 16, **settings}
        config = configure(output_dir=tmp_path / name, gpu_mode="single_gpu", **given)
        result = train(gpt_small(), config, quiet=True)
        rows = [json.loads(line) for line in (result.folder / "steps.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows]
    assert losses["zero"] == pytest.approx(losses["single"], rel=3e-2)
    assert losses["zero"][-1] < 0.7 * losses["zero"][0]


def test_where_things_are() -> None:
    """Offloaded: weights and gradients on the GPU, the optimizer's state and what it steps in host memory."""
    world = World.join([torch.device("cuda:0")])
    try:
        model = SmallGpt()
        model.to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        strategy = made_strategy("zero-2-offload", world)
        assert isinstance(strategy, DeepSpeedStrategy)
        tokens = torch.randint(0, 255, (4, 32), device=world.device)
        parts = StrategyParts(model, next_token_loss, optimizer, 1.0)
        objective = strategy.prepare(parts, Trial([tokens, tokens], 4))
        strategy.backward(objective([tokens, tokens], 4, 4, 1))
        strategy.step(False)
        assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
        held = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert {value.device.type for value in held} == {"cpu"}
        strategy.close()
    finally:
        world.close()

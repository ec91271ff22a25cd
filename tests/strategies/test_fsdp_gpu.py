"""Fully sharded training on a GPU: one rank over NCCL, and two gloo ranks that share the GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.recipes.gpt import CONTEXT, VOCABULARY, SmallGpt
from drivetrain.strategies import ShardOptions
from drivetrain.strategies.sharding import shard
from tests.api.jobs import Trained, Variant, make_job, plain_loop, run
from tests.api.test_equivalence import difference
from tests.api.test_resume import BASE, MICRO_BATCH, CrashingLoss, PlantedError, assert_identical, call_in
from tests.gloo_pool import GlooPool
from tests.strategies.fsdp_runs import everything_is_tried
from tests.waits import refuse_waits

pytestmark = pytest.mark.gpu

FP32 = {"precision": "fp32"}
LIMIT = {"time_limit_seconds": 180}
GATHERED = {"fsdp_reshard": "off", "fsdp_unit_blocks": 2, "fsdp_gather_ahead": 1}
SHORT = Variant("transformer", torch.float64, 12, num_samples=60, steps=8)


def on_gpu(
    folder: str, strategy: str, variant: Variant, micro_batch: int | None, settings: dict[str, Any] | None = None
) -> Trained | None:
    given = {**FP32, "parallel_strategy": strategy, **(settings or {})}
    return run(folder, variant, micro_batch, 0, "single_gpu", given)


def crash_on_gpu(folder: str, variant: Variant, at_call: int) -> bool:
    loss = CrashingLoss(make_job(variant).loss, at_call)
    try:
        run(folder, variant, MICRO_BATCH, 0, "single_gpu", {**FP32, "parallel_strategy": "fsdp"}, loss=loss)
    except PlantedError:
        return True
    return False


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"fsdp_accumulate": "shards"}, {"fsdp_offload": True}, GATHERED])
def test_float64_equals_the_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    trained = gloo_pool.run(on_gpu, str(tmp_path), "fsdp", SHORT, 2, settings, world=world, **LIMIT)[0]
    of_losses, of_weights = difference(trained, *plain_loop(SHORT))
    assert max(of_losses, of_weights) < 1e-9


@pytest.mark.parametrize(("cast", "tolerance"), [("operations", 3e-3), ("blocks", 5e-2)])
def test_two_ranks_in_bf16_equal_ddp(gloo_pool: GlooPool, tmp_path: Path, cast: str, tolerance: float) -> None:
    variant = Variant("transformer", torch.float32, 12, num_samples=60, steps=6)
    bf16 = {"precision": "bf16"}
    ddp = gloo_pool.run(on_gpu, str(tmp_path / "ddp"), "ddp", variant, 3, bf16, world=2, **LIMIT)[0]
    settings = {**bf16, "fsdp_cast": cast}
    fsdp = gloo_pool.run(on_gpu, str(tmp_path / "fsdp"), "fsdp", variant, 3, settings, world=2, **LIMIT)[0]
    assert fsdp.losses == pytest.approx(ddp.losses, rel=tolerance)
    assert fsdp.losses != pytest.approx(plain_loop(variant)[0], rel=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_bit_identical_after_a_stop(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    limit = {"world": world, **LIMIT}
    whole = gloo_pool.run(on_gpu, str(tmp_path / "whole"), "fsdp", BASE, MICRO_BATCH, **limit)[0]
    assert all(gloo_pool.run(crash_on_gpu, str(tmp_path / "broken"), BASE, call_in(5, 1, world), **limit))
    mended = gloo_pool.run(on_gpu, str(tmp_path / "broken"), "fsdp", BASE, MICRO_BATCH, **limit)[0]
    assert mended.resumed_from == 3
    assert_identical(mended, whole)


def peak_of_sharding() -> tuple[int, int]:
    """The most that the device held while a model was cut, and what the model takes."""
    world = World.join([torch.device("cuda:0")])
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(8)))
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    shard(model, world, ShardOptions(), Precision("fp32", "cuda"))
    return torch.cuda.max_memory_allocated() - before, whole


def test_no_device_ever_holds_the_whole_model(gloo_pool: GlooPool) -> None:
    for peak, whole in gloo_pool.run(peak_of_sharding, world=2, **LIMIT):
        assert 0.5 * whole <= peak < 0.8 * whole  # a half, and one block


def forecast_and_peak(folder: str) -> dict[str, Any]:
    """A GPT whose plan was measured: the bytes that were forecast for the run, and that it then took, on rank 0."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (512, CONTEXT + 1), generator=generator)
    job = Job(
        name="peak",
        model=lambda: SmallGpt(width=512, num_layers=8, num_heads=8),
        data=TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten()),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
        global_batch=256,  # the constant 64 MiB that matrix products work in are small beside it
        max_steps=60,
        checkpoint_every=1000,
    )
    settings = {"plan_cache": False, "compile": False, "async_save": False, "report": False, "precision": "bf16"}
    with everything_is_tried():
        config = configure(output_dir=folder, gpu_mode="single_gpu", parallel_strategy="fsdp", **settings)
        result = train(job, config, quiet=True)
    plan = yaml.safe_load((result.folder / "plan.yaml").read_text())
    rows = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    peak = max(row["peak_allocated_bytes"] for row in rows if row["event"] == "memory")
    problems = [row["problem"] for row in plan["tried"] if row.get("problem")]
    return {"plan": plan["planned"], "forecast": plan["forecast"], "peak": peak, "problems": problems}


@pytest.mark.parametrize("world", [1, 2])
def test_memory_is_as_forecast(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    """The plan is measured with all ranks together, and its forecast of the run's peak is within 5 % of it."""
    found = gloo_pool.run(forecast_and_peak, str(tmp_path), world=world, **LIMIT)[0]
    assert found["plan"] == "measured on this machine", found
    assert not found["problems"], found
    assert found["forecast"]["run_peak_bytes"] == pytest.approx(found["peak"], rel=0.05), found
    assert found["forecast"]["peak_bytes"] == pytest.approx(found["forecast"]["measured_peak_bytes"], rel=0.05), found


# In this process: a world of one makes an NCCL group for itself


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_over_nccl_equals_single(tmp_path: Path, precision: str) -> None:
    variant = Variant("transformer", torch.float32, 12, num_samples=60, steps=8)
    given = {"precision": precision}
    single = on_gpu(str(tmp_path / "single"), "single", variant, 6, given)
    fsdp = on_gpu(str(tmp_path / "fsdp"), "fsdp", variant, 6, given)
    assert single is not None
    assert fsdp is not None
    assert fsdp.losses == pytest.approx(single.losses, rel=1e-5 if precision == "fp32" else 5e-3)
    assert fsdp.weights.keys() == single.weights.keys()
    assert not torch.distributed.is_initialized()


def test_the_host_never_waits_inside_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_waits(monkeypatch)
    trained = on_gpu(str(tmp_path), "fsdp", Variant("transformer", torch.float32, steps=10), 8)
    assert trained is not None
    assert len(trained.losses) == 10


def test_offloaded_shards_leave_the_device(tmp_path: Path) -> None:
    """Between steps nothing of weights, gradients and optimizer is on the device."""
    found: dict[str, Any] = {}

    class Look:
        every = 2

        def __call__(self, context: Any) -> None:
            found["devices"] = {str(parameter.to_local().device) for parameter in context.model.parameters()}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    config = configure(
        output_dir=tmp_path,
        gpu_mode="single_gpu",
        precision="bf16",
        num_workers=0,
        report=False,
        parallel_strategy="fsdp",
        fsdp_offload=True,
    )
    variant = Variant("transformer", torch.float32, 12, num_samples=24, steps=2)
    assert train(make_job(variant, hooks=[Look()]), config, quiet=True).finished
    assert found["devices"] == {"cpu"}

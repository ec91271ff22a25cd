"""The suites on a GPU: one process, and two gloo ranks that share it (NCCL refuses that, gloo does not)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.loop import Stepper
from tests.api.jobs import Trained, Variant, make_job, plain_loop, read, run, vector_loss
from tests.api.test_resume import BASE, MICRO_BATCH, CrashingLoss, PlantedError, assert_identical, call_in
from tests.gloo_pool import GlooPool
from tests.waits import refuse_waits

pytestmark = pytest.mark.gpu

FP32 = {"precision": "fp32"}


def run_on_gpu(folder: str, variant: Variant, micro_batch: int | None, num_workers: int = 0) -> Trained | None:
    return run(folder, variant, micro_batch, num_workers, "single_gpu", FP32)


def run_on_gpu_until_crash(folder: str, variant: Variant, num_workers: int, at_call: int) -> bool:
    loss = CrashingLoss(make_job(variant).loss, at_call)
    try:
        run(folder, variant, MICRO_BATCH, num_workers, "single_gpu", FP32, loss=loss)
    except PlantedError:
        return True
    return False


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize(("world", "global_batch", "micro_batch"), [(1, 32, 32), (1, 32, 8), (2, 32, 8), (2, 37, 4)])
def test_float64_equals_the_plain_loop_on_the_cpu(
    gloo_pool: GlooPool, tmp_path: Path, kind: str, world: int, global_batch: int, micro_batch: int
) -> None:
    variant = Variant(kind, torch.float64, global_batch)
    trained = gloo_pool.run(run_on_gpu, str(tmp_path), variant, micro_batch, world=world)[0]
    losses, weights = plain_loop(variant)
    assert trained.losses == pytest.approx(losses, abs=1e-10)
    for key, value in weights.items():
        assert np.allclose(trained.weights[key], value, rtol=0, atol=1e-10), key


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_bit_identical_after_a_stop(gloo_pool: GlooPool, tmp_path: Path, world: int, num_workers: int) -> None:
    limit = {"world": world, "time_limit_seconds": 180}
    whole = gloo_pool.run(run_on_gpu, str(tmp_path / "whole"), BASE, MICRO_BATCH, 0, **limit)[0]
    folder = str(tmp_path / "broken")
    assert all(gloo_pool.run(run_on_gpu_until_crash, folder, BASE, num_workers, call_in(5, 1, world), **limit))
    mended = gloo_pool.run(run_on_gpu, folder, BASE, MICRO_BATCH, num_workers, **limit)[0]
    assert mended.resumed_from == 3
    assert_identical(mended, whole)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.norm(self.first(inputs))))
        return result


def run_normed(folder: str, synchronised: bool) -> Trained | None:
    config = configure(output_dir=folder, gpu_mode="single_gpu", precision="fp32", sync_batchnorm=synchronised)
    variant = Variant(global_batch=32, steps=8, num_samples=128)
    result = train(make_job(variant, model=lambda: Normed().double()), config, quiet=True)
    return read(result.folder) if result.is_main else None


def test_synchronised_batch_norm_equals_one_process(gloo_pool: GlooPool, tmp_path: Path) -> None:
    alone = gloo_pool.run(run_normed, str(tmp_path / "1"), False, world=1)[0]
    apart = gloo_pool.run(run_normed, str(tmp_path / "2"), False, world=2)[0]
    together = gloo_pool.run(run_normed, str(tmp_path / "3"), True, world=2)[0]
    assert together.losses == pytest.approx(alone.losses, abs=1e-9)
    assert apart.losses != pytest.approx(alone.losses, abs=1e-6)  # each rank's own statistics


def test_the_host_never_waits_inside_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes the host wait for the device raises inside a step, and where its outcome is put on its way.

    The first step, which sets things up, aside.
    """
    refuse_waits(monkeypatch)
    for variant in (Variant(dtype=torch.float32), Variant("transformer", torch.float32)):
        trained = run(str(tmp_path / variant.kind), variant, 8, 0, "single_gpu", FP32)
        assert trained is not None
        assert len(trained.losses) == Variant.steps


def test_a_planted_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting_loss(model: Any, batch: Any) -> Tensor:
        loss = vector_loss(model, batch)
        loss.item()
        return loss

    original = Stepper.run

    def watched(self: Stepper, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Stepper, "run", watched)
    with pytest.raises(RuntimeError, match="synchroniz"):
        run(str(tmp_path), Variant(dtype=torch.float32, steps=3), 8, 0, "single_gpu", FP32, loss=waiting_loss)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_precisions_stay_close_to_fp32(tmp_path: Path, precision: str) -> None:
    variant = replace(Variant(dtype=torch.float32), steps=20)
    reference, _ = plain_loop(variant)
    trained = run(str(tmp_path), variant, 16, 0, "single_gpu", {"precision": precision})
    assert trained is not None
    assert trained.losses == pytest.approx(reference, rel=0.03)
    assert trained.losses[0] != reference[0]

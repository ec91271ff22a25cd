"""A loop of one's own on a GPU: model and optimizer made on the host, the same bits as `train`, no waiting."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.jobs import Trained, Variant, make_job, plain_loop, read, run
from tests.api.test_drive import Stop, at_last_micro, looped, start
from tests.api.test_resume import BASE, MICRO_BATCH, assert_identical
from tests.gloo_pool import GlooPool

pytestmark = pytest.mark.gpu

ON_GPU = {"gpu_mode": "single_gpu", "precision": "fp32"}


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bit_identical_to_train(tmp_path: Path, kind: str, precision: str) -> None:
    """The optimizer was made before the model was on the GPU: parameters stay the same objects."""
    variant = Variant(kind, torch.float32, steps=14, dropout=0.3, save_every=5)
    settings = {"precision": precision, "deterministic": True}
    trained = run(str(tmp_path / "train"), variant, 7, 0, "single_gpu", settings)
    driven = looped(str(tmp_path / "drive"), variant, 7, {**ON_GPU, **settings})
    assert trained is not None
    assert driven is not None
    assert_identical(driven, trained)


def looped_on_gpu(folder: str, variant: Variant, micro_batch: int) -> Trained | None:
    return looped(folder, variant, micro_batch, ON_GPU)


def left_on_gpu(folder: str, variant: Variant, stop: Stop) -> None:
    loss = make_job(variant).loss
    going = start(folder, variant, MICRO_BATCH, ON_GPU)
    for batch in going:
        going.backward(loss(going.model, batch))
        going.step()
        if going.steps > stop.step and not going.accumulating:
            break


@pytest.mark.parametrize("world", [1, 2])
def test_bit_identical_after_a_break(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    limit: dict[str, Any] = {"world": world, "time_limit_seconds": 180}
    whole = gloo_pool.run(looped_on_gpu, str(tmp_path / "whole"), BASE, MICRO_BATCH, **limit)[0]
    gloo_pool.run(left_on_gpu, str(tmp_path / "broken"), BASE, at_last_micro(Stop(4), world), **limit)
    mended = gloo_pool.run(looped_on_gpu, str(tmp_path / "broken"), BASE, MICRO_BATCH, **limit)[0]
    assert mended.resumed_from == 5
    assert_identical(mended, whole)


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_float64_equals_the_plain_loop_on_two_processes(gloo_pool: GlooPool, tmp_path: Path, kind: str) -> None:
    variant = Variant(kind, torch.float64, 37)
    driven = gloo_pool.run(looped_on_gpu, str(tmp_path), variant, 4, world=2)[0]
    assert driven.losses == pytest.approx(plain_loop(variant)[0], abs=1e-10)


def test_the_host_never_waits_inside_the_loop(tmp_path: Path) -> None:
    """The first steps, which set things up, and the end, which saves, aside."""
    variant = replace(Variant(dtype=torch.float32), steps=30)
    loss = make_job(variant).loss
    going = start(str(tmp_path), variant, 8, ON_GPU)
    try:
        for batch in going:
            torch.cuda.set_sync_debug_mode("error" if 2 < going.steps < 28 else "default")
            going.backward(loss(going.model, batch))
            going.step()
            torch.cuda.set_sync_debug_mode("default")  # fetching a batch may wait for a copy of the one before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(read(going.folder).losses) == 30

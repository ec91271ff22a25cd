"""DataParallel on GPUs: two if there are, else the first one twice, where torch copies instead of using NCCL."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import replicate

from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.run import Session
from drivetrain.strategies import DataParallelStrategy, StrategyParts, Trial
from tests.api.jobs import Variant, make_job, plain_loop, run
from tests.api.test_resume import BASE, MICRO_BATCH, CrashingLoss, PlantedError, assert_identical

pytestmark = pytest.mark.gpu

FP32 = {"precision": "fp32"}


def two_devices() -> list[torch.device]:
    if torch.cuda.device_count() > 1:
        return [torch.device("cuda", 0), torch.device("cuda", 1)]
    devices = [torch.device("cuda", 0)] * 2
    try:
        replicate(nn.Linear(2, 2).to(devices[0]), devices)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"one GPU, and torch does not copy a model to it twice: {error}")
    return devices


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Every run uses the strategy on them."""
    found = two_devices()

    def made(self: Session, **changes: Any) -> DataParallelStrategy:
        self.strategy = DataParallelStrategy.name
        return DataParallelStrategy(self.world, found)

    monkeypatch.setattr(Session, "make_strategy", made)
    return found


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize(("global_batch", "micro_batch"), [(32, 32), (32, 7), (31, 1)])
def test_float64_equals_the_plain_loop_on_the_cpu(
    tmp_path: Path, kind: str, global_batch: int, micro_batch: int
) -> None:
    variant = Variant(kind, torch.float64, global_batch)
    trained = run(str(tmp_path), variant, micro_batch, 0, "single_gpu", FP32)
    losses, weights = plain_loop(variant)
    assert trained is not None
    assert trained.losses == pytest.approx(losses, abs=1e-10)
    for key, value in weights.items():
        assert np.allclose(trained.weights[key], value, rtol=0, atol=1e-10), key


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bit_identical_after_a_stop(tmp_path: Path, kind: str, precision: str) -> None:
    """With dropout on both devices. Which kernels are not deterministic by themselves is `--deterministic`'s affair."""
    settings = {"precision": precision, "deterministic": True}
    variant = replace(BASE, kind=kind, noisy_items=kind == "mlp")
    whole = run(str(tmp_path / "whole"), variant, MICRO_BATCH, 0, "single_gpu", settings)
    loss = CrashingLoss(make_job(variant).loss, 100)
    with pytest.raises(PlantedError):
        run(str(tmp_path / "broken"), variant, MICRO_BATCH, 0, "single_gpu", settings, loss=loss)
    mended = run(str(tmp_path / "broken"), variant, MICRO_BATCH, 0, "single_gpu", settings)
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from > 0
    assert_identical(mended, whole)


def test_a_checkpoint_of_it_loads_under_single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, variant = two_devices(), replace(BASE, dtype=torch.float64, dropout=0.0)
    whole = run(str(tmp_path / "whole"), variant, MICRO_BATCH, 0, "single_gpu", FP32)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "strategy", "data_parallel", raising=False)
        patch.setattr(Session, "make_strategy", lambda self, **_: DataParallelStrategy(self.world, found))
        loss = CrashingLoss(make_job(variant).loss, 100)
        with pytest.raises(PlantedError):
            run(str(tmp_path / "moved"), variant, MICRO_BATCH, 0, "single_gpu", FP32, loss=loss)
    moved = run(str(tmp_path / "moved"), variant, MICRO_BATCH, 0, "single_gpu", FP32)
    assert whole is not None
    assert moved is not None
    assert moved.resumed_from > 0
    assert moved.losses == pytest.approx(whole.losses, abs=1e-10)
    assert not any("module." in key for key in (*moved.weights, *moved.state))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.norm(self.first(inputs))))
        return result


def test_buffers_and_penalties() -> None:
    """Copies see their weights as parameters; the first one's buffers are the model's own."""
    found = two_devices()
    torch.manual_seed(0)
    model = Normed().double().to(found[0])
    inputs = torch.randn(8, 6, dtype=torch.float64, device=found[0])
    labels = torch.arange(8, device=found[0]) % 4

    def loss(model: nn.Module, batch: Any) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return functional.cross_entropy(model(batch[0]), batch[1]) + 0.01 * penalty

    strategy = DataParallelStrategy(World(device=found[0]), found)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = strategy.prepare(StrategyParts(model, loss, optimizer), Trial([inputs, labels], 8))
    assert model.norm.num_batches_tracked.item() == 0  # the trial left nothing behind
    value = objective([inputs, labels], 8, 8, 1)
    # Two copies on one device both use the model's own buffers; on two devices only the first does.
    assert model.norm.num_batches_tracked.item() == (1 if found[0] != found[1] else 2)
    halves = [
        functional.cross_entropy(_apart(model, inputs[part]), labels[part]) for part in (slice(0, 4), slice(4, 8))
    ]
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    assert value.item() == pytest.approx((sum(halves) / 2 + 0.01 * penalty).item(), abs=1e-12)
    torch.autograd.backward(value)
    expected = torch.autograd.grad(sum(halves) / 2 + 0.01 * penalty, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def _apart(model: Normed, inputs: Tensor) -> Tensor:
    """With the statistics of these samples, and without changing the running ones."""
    hidden = functional.batch_norm(
        model.first(inputs), None, None, model.norm.weight, model.norm.bias, training=True, eps=model.norm.eps
    )
    result: Tensor = model.out(torch.tanh(hidden))
    return result


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_asked_for_by_name(tmp_path: Path) -> None:
    config = configure(output_dir=tmp_path, parallel_strategy="data_parallel")
    assert config.distributed.strategy == "data_parallel"
    trained = run(str(tmp_path), Variant(steps=5), 8, 0, "multi_gpu", {"parallel_strategy": "data_parallel"})
    assert trained is not None
    assert "strategy: data_parallel" in (tmp_path / "suite" / "plan.yaml").read_text()

"""On a GPU: skipped steps of fp16, deterministic kernels, the average, validation, memory."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job, WarmupCosine
from drivetrain.api.training import Result, train
from drivetrain.checkpoint import Checkpoint
from drivetrain.config import configure
from tests.api.jobs import Mlp, Variant, make_job, run
from tests.gloo_pool import GlooPool
from tests.loop.test_validation import METRICS, valid_set
from tests.waits import refuse_waits

pytestmark = pytest.mark.gpu

FP32 = Variant(dtype=torch.float32, steps=12, num_samples=48, global_batch=16)


def weights_at(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder / "checkpoints" / f"step-{step:08d}")
    return {key: checkpoint.read(key) for key in checkpoint.keys if key.startswith("model/")}


def exploding_loss(model: nn.Module, batch: Any) -> Tensor:
    """Finite, but one batch's gradients overflow once they are scaled up."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    model.calls += 1  # type: ignore[operator,assignment]
    return loss * torch.where(model.calls == 6, 1e36, 1.0)  # type: ignore[arg-type]


def counting_model() -> nn.Module:
    model = Mlp(0.0)
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    return model


def run_exploding(folder: str) -> list[dict[str, Any]] | None:
    config = configure(output_dir=folder, gpu_mode="single_gpu", precision="fp16")
    job = make_job(FP32, model=counting_model, loss=exploding_loss, checkpoint_every=1, keep_last=100, max_steps=10)
    result = train(job, config, quiet=True)
    if not result.is_main:
        return None
    return [json.loads(line) for line in (result.folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_with_infinite_gradients_is_skipped_by_all_and_counted(
    tmp_path: Path, gloo_pool: GlooPool, world: int
) -> None:
    rows = gloo_pool.run(run_exploding, str(tmp_path), world=world)[0]
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert len(skipped) >= 1
    for step in skipped:
        before, after = (weights_at(tmp_path / "suite", number) for number in (step - 1, step))
        assert all(torch.equal(before[key], after[key]) for key in before if not key.endswith("calls"))
    learned = next(step for step in range(2, 11) if step not in skipped)
    before, after = (weights_at(tmp_path / "suite", number) for number in (learned - 1, learned))
    assert not all(torch.equal(before[key], after[key]) for key in before)
    schedule = WarmupCosine(warmup_steps=5, floor=0.1)
    expected = [1e-2 * schedule.factor(step, 10) for step in range(10)]
    assert [row["lr"] for row in rows] == pytest.approx(expected), "a skipped step takes its place in the schedule"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_host_never_waits_inside_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    refuse_waits(monkeypatch)
    trained = run(str(tmp_path), FP32, 8, 0, "single_gpu", {"precision": precision, "ema": 0.9})
    assert trained is not None
    assert len(trained.losses) == 12


def validated(folder: Path, mode: str) -> Result:
    config = configure(output_dir=folder / mode, gpu_mode=mode, precision="fp32")
    variant = Variant(steps=10, num_samples=40, global_batch=16)
    return train(make_job(variant, valid=valid_set(), metrics=METRICS, ema=0.8), config, quiet=True)


def test_validation_and_average_are_those_of_the_cpu(tmp_path: Path) -> None:
    on_cpu, on_gpu = validated(tmp_path, "cpu"), validated(tmp_path, "single_gpu")
    assert on_gpu.metrics == pytest.approx(dict(on_cpu.metrics), rel=1e-9)
    assert on_gpu.metrics["valid_accuracy"] == on_cpu.metrics["valid_accuracy"]


def convolution_weights(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(64, 3, 16, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    )
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(64, 4)
    )
    job = Job(
        name="convolutions",
        model=model,
        data=data,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        global_batch=16,
        max_steps=20,
    )
    config = configure(output_dir=folder, gpu_mode="single_gpu", precision="bf16", deterministic=True)
    return weights_at(train(job, config, quiet=True).folder, 20)


def test_deterministic_kernels_give_the_same_bits(tmp_path: Path) -> None:
    first, second = (convolution_weights(tmp_path / name) for name in ("a", "b"))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("how", ["recompute", "offload"])
def test_less_memory_for_activations(tmp_path: Path, how: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = inputs + self.inner(inputs)
            return result

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(12)))
            self.out = nn.Linear(256, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.out(self.blocks(inputs))
            return result

    data = TensorDataset(torch.randn(32768, 256), torch.randint(0, 4, (32768,)))
    job = Job(
        name="stack",
        model=Stack,
        data=data,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2),
        global_batch=4096,
        epochs=2,
    )
    peaks, losses = [], []
    gc.collect()
    before = torch.cuda.memory_allocated()  # of tests before this one, whatever it is
    for name in ("keep", how):
        settings = {"gpu_mode": "single_gpu", "precision": "fp32", "resident": "off"}
        config = configure(output_dir=tmp_path / name, activations=name, **settings)
        result = train(job, config, quiet=True)
        events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
        memory = [event for event in events if event["event"] == "memory"]
        assert [event["epoch"] for event in memory] == [0, 1]
        peaks.append(memory[-1]["peak_allocated_bytes"])
        losses.append(result.last.loss if result.last else None)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert peaks[1] - before < 0.6 * (peaks[0] - before), before

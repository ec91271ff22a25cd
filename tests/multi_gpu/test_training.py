"""`await train()`: the same weights as a plain loop, a live event loop, early stops, cancelling, and every key."""

import asyncio
import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.multi_gpu import (
    MultiGPUConfig,
    OptimizedTrainingOptimizer,
    create_multi_gpu_trainer,
    create_optimized_training_optimizer,
)
from tests.multi_gpu.parts import SequenceModel, Sequences

FAST = {"quiet": True, "report": False, "auto_optimize": False, "loss_weighting": "samples"}


def make(folder: Path, **changes: Any) -> OptimizedTrainingOptimizer:
    given: dict[str, Any] = {
        "model": SequenceModel(),
        "train_loader": DataLoader(Sequences(64), batch_size=16, shuffle=True),
        "val_loader": DataLoader(Sequences(32, seed=1), batch_size=16),
        "multi_gpu_config": MultiGPUConfig(training_mode="auto"),
        "max_epochs": 2,
        "output_dir": folder,
        **FAST,
    }
    return create_optimized_training_optimizer(**given | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[OptimizedTrainingOptimizer, dict[str, Any], list[float]]:
    """One training beside a task that notes when it ran."""
    folder = tmp_path_factory.mktemp("runs")
    optimizer = make(folder, experiment_name="mine", max_epochs=3, learning_rate=0.01, report=True)

    async def main() -> tuple[dict[str, Any], list[float]]:
        times: list[float] = []

        async def tick() -> None:
            while True:
                times.append(time.monotonic())
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        results = await optimizer.train()
        ticking.cancel()
        return results, times

    return optimizer, *asyncio.run(main())


def test_the_keys_of_the_results(trained: Any) -> None:
    _, results, _ = trained
    assert set(results) == {
        *("total_epochs", "best_epoch", "best_metric", "final_training_loss", "final_validation_loss"),
        *("early_stopping_triggered", "finished", "resumed_from", "history", "folder", "performance_summary"),
        "multi_gpu_summary",
    }
    assert (results["total_epochs"], results["finished"], results["early_stopping_triggered"]) == (3, True, False)
    history = results["history"]
    assert set(history[0]) == {
        *("epoch", "loss", "learning_rate", "epoch_duration", "validation_loss", "validation_accuracy")
    }
    assert history[-1]["loss"] < history[0]["loss"]
    assert results["best_metric"] == min(row["validation_loss"] for row in history)
    assert history[results["best_epoch"] - 1]["validation_loss"] == results["best_metric"]
    assert results["final_training_loss"] == history[-1]["loss"]
    assert results["final_validation_loss"] == history[-1]["validation_loss"]
    assert 0 <= history[-1]["validation_accuracy"] <= 1


def test_the_event_loop_goes_on(trained: Any) -> None:
    _, results, times = trained
    assert len(times) > 10
    # Blocked, it would tick once before and once after.
    assert times[-1] - times[0] > results["performance_summary"]["training_time"]


def test_summaries(trained: Any) -> None:
    optimizer, results, _ = trained
    found = optimizer.multi_gpu_trainer.get_performance_summary()
    assert found["throughput"] > 0
    assert found["memory_efficiency"] is None or found["memory_efficiency"] <= 1
    assert found["num_steps"] == 12
    assert found["gpu_summary"]["total_recordings"] >= 1  # the run recorded by itself
    assert set(found) >= {"gpu_summary", "training_info", "throughput", "memory_efficiency", "phases"}
    assert optimizer.get_performance_summary().keys() == results["multi_gpu_summary"].keys()
    assert optimizer.get_training_summary()["results"] is results
    info = found["training_info"]
    assert info["is_initialized"]
    assert info["gpu_info"]["device_count"] == torch.cuda.device_count()


def test_pictures(trained: Any) -> None:
    optimizer, results, _ = trained
    picture = Path(results["folder"]) / "training_metrics.png"
    picture.unlink()
    files = optimizer.create_training_visualizations()
    assert picture in files
    assert all(path.stat().st_size > 100 for path in files)


def test_benchmark_and_batch_size(trained: Any) -> None:
    optimizer, _, _ = trained
    before = copy.deepcopy(optimizer.model.state_dict())
    found = optimizer.benchmark_performance(num_iterations=3)
    parts = ("forward", "backward", "optimizer")
    assert all(found[f"average_{name}_time"] > 0 for name in parts)
    assert sum(found[f"average_{name}_time"] for name in parts) <= found["average_step_time"] * 1.05
    assert found["num_iterations"] == 3
    assert 1 <= optimizer.get_optimal_batch_size(target_memory_usage=0.8) <= 64
    for name, value in optimizer.model.state_dict().items():
        assert torch.equal(value, before[name])  # measuring trains nothing


@pytest.mark.parametrize("share", [0, 1.5, -1])
def test_no_part_of_the_memory(share: float, trained: Any) -> None:
    with pytest.raises(DrivetrainError, match="target_memory_usage"):
        trained[0].get_optimal_batch_size(share)


def plain_loop(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, epochs: int, batch: int) -> nn.Module:
    """What the optimizer promises, by hand: AdamW without decay on biases, clipping at 1, warm-up and cosine."""
    weights = [value for value in model.parameters() if value.dim() >= 2]
    biases = [value for value in model.parameters() if value.dim() < 2]
    groups = [{"params": weights, "weight_decay": 1e-5}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    steps = epochs * (len(inputs) // batch)
    warmup = int(0.1 * steps)
    for step in range(steps):
        way = (step - warmup) / (steps - warmup)
        factor = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * way))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor
        begin = step * batch % len(inputs)
        loss = nn.functional.cross_entropy(model(inputs[begin : begin + batch]), targets[begin : begin + batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_weights_as_a_plain_loop(tmp_path: Path, accumulation: int) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(80, 4, dtype=torch.float64), torch.arange(80) % 3
    model = nn.Linear(4, 3).double()
    expected = plain_loop(copy.deepcopy(model), inputs, targets, epochs=3, batch=8)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8 // accumulation, shuffle=False)
    asyncio.run(
        make(
            tmp_path,
            model=model,
            train_loader=loader,
            val_loader=None,
            max_epochs=3,
            learning_rate=0.01,
            gradient_accumulation_steps=accumulation,
            enable_mixed_precision=False,
        ).train()
    )
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=0, atol=1e-12)


def test_it_stops_early(tmp_path: Path) -> None:
    # Nothing is better by 10, so the first validation stays the best one.
    results = asyncio.run(
        make(tmp_path, max_epochs=50, early_stopping_patience=2, early_stopping_min_delta=10.0).train()
    )
    assert results["early_stopping_triggered"]
    assert results["total_epochs"] == 3


def test_cancelled_it_can_go_on(tmp_path: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(make(tmp_path, max_epochs=3000, val_loader=None).train())
        steps = tmp_path / "multi_gpu" / "steps.jsonl"
        while not steps.exists() or not steps.stat().st_size:
            await asyncio.sleep(0.01)
            assert not task.done(), task.result()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    again = make(tmp_path, max_epochs=3000, val_loader=None)
    events = tmp_path / "multi_gpu" / "events.jsonl"

    async def resumed() -> None:
        task = asyncio.create_task(again.train())
        while '"event": "resume"' not in events.read_text():
            await asyncio.sleep(0.01)
            assert not task.done(), task.result()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(resumed())


def test_without_data_or_model() -> None:
    trainer = create_multi_gpu_trainer()
    with pytest.raises(DrivetrainError, match="there is no model to train") as caught:
        asyncio.run(trainer.train())
    assert "initialize_training" in caught.value.remedy
    trainer.initialize_training(SequenceModel())
    with pytest.raises(DrivetrainError, match="there is no data to train on") as caught:
        asyncio.run(trainer.train())
    assert "setup_dataloader" in caught.value.remedy
    with pytest.raises(DrivetrainError, match="there was no training yet"):
        create_optimized_training_optimizer(SequenceModel(), Sequences(4)).create_training_visualizations()


def test_what_cannot_be_done_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = make(
        tmp_path,
        val_loader=None,
        max_epochs=1,
        early_stopping_patience=3,
        enable_gradient_checkpointing=True,
        enable_mixed_precision=True,
        batch_size=8,
        multi_gpu_config=MultiGPUConfig(training_mode="data_parallel", device_ids=None),
        quiet=False,
    )
    results = asyncio.run(optimizer.train())
    said = capsys.readouterr().err
    assert "early_stopping_patience needs val_loader" in said
    assert "no repeated blocks" in said
    if torch.cuda.device_count() < 2:
        assert "data_parallel shares batches between GPUs" in said
    assert results["performance_summary"]["num_steps"] == 8  # batches of 8, not of the loader's 16


def test_unknown_settings_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        asyncio.run(make(tmp_path, num_worker=2).train())


def test_batches_that_need_a_loss(tmp_path: Path) -> None:
    data = [{"x": torch.zeros(2)} for _ in range(8)]
    with pytest.raises(DrivetrainError, match="has to be \\(inputs, targets\\)"):
        asyncio.run(make(tmp_path, model=nn.Linear(2, 1), train_loader=DataLoader(data, 4), val_loader=None).train())

"""`benchmark_performance`: the time is where it was planted, the phases add up, and nothing is touched."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import drivetrain as dt
from drivetrain import DrivetrainError, Job, LossSum
from drivetrain.api.measuring import Performance
from drivetrain.cli import main
from drivetrain.config import configure
from tests.gloo_pool import GlooPool
from tests.simulated_clock import SimulatedClock

SECONDS = 0.02
PHASES = ("forward", "backward", "optimizer")
spend: Callable[[float], None] = [].append  # of the simulated clock, where there is one


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        spend(SECONDS)
        return gradient


class Planted(nn.Module):
    """Drops out, counts its calls in a buffer, and sleeps where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.layer, self.dropout = nn.Linear(6, 4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "forward":
            spend(SECONDS)
        result: Tensor = self.dropout(self.layer(inputs))
        return _SlowBackward.apply(result) if self.where == "backward" else result


class SlowSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        spend(SECONDS)
        return super().step(closure)


def job(where: str = "", **changes: Any) -> Job:
    generator = torch.Generator().manual_seed(0)  # the same samples on every rank, whatever it did before
    values: dict[str, Any] = {
        "name": "planted",
        "model": lambda: Planted(where),
        "data": TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator)),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda groups: (SlowSgd if where == "optimizer" else torch.optim.SGD)(groups, lr=0.1),
        "global_batch": 16,
        "epochs": 1,
    }
    return Job(**{**values, **changes})


def measured(folder: Path, wanted: Job, num_iterations: int = 8, **settings: Any) -> Performance:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, **settings)
    return dt.benchmark_performance(wanted, config, num_iterations=num_iterations)


@pytest.mark.parametrize("where", PHASES)
@pytest.mark.parametrize("micro_batch", [16, 6])
def test_the_time_is_where_it_was_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated_clock: SimulatedClock, where: str, micro_batch: int
) -> None:
    monkeypatch.setattr("tests.commands.test_benchmark.spend", simulated_clock.spend)
    found = measured(tmp_path, job(where), batch_size=micro_batch)
    times = 1 if where == "optimizer" else -(-16 // micro_batch)
    assert found.accumulation == -(-16 // micro_batch)
    assert getattr(found, f"{where}_seconds") == pytest.approx(times * SECONDS, rel=0.01)
    assert all(getattr(found, f"{other}_seconds") < 1e-3 for other in PHASES if other != where)
    phases = sum(getattr(found, f"{name}_seconds") for name in PHASES)
    assert phases == pytest.approx(found.step_seconds, rel=0.01)
    assert phases <= found.step_seconds
    assert found.samples_per_second == pytest.approx(16 / found.step_seconds)


def test_nothing_is_touched(tmp_path: Path) -> None:
    model = Planted("").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = job(model=model)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    measured(tmp_path, wanted, num_iterations=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_items_and_flops(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> LossSum:
        return LossSum(model(batch[0]).square().sum(), batch[0].numel())

    found = measured(tmp_path, job(loss=loss, items="tokens"))
    assert found.items == "tokens"
    assert found.items_per_second == pytest.approx(6 * found.samples_per_second)
    assert found.flops_per_sample == 2 * 2 * 6 * 4  # forward, and the gradient of the weight
    assert found.mfu is None  # nobody knows this machine's peak


def benchmark_on_rank(folder: str) -> Performance:
    return measured(Path(folder), job(), num_iterations=3)


def test_processes_take_part_together(gloo_pool: GlooPool, tmp_path: Path) -> None:
    first, second = gloo_pool.run(benchmark_on_rank, str(tmp_path), world=2)
    assert first == second
    assert first.num_devices == 2
    assert first.micro_batch == 8
    assert first.communication_seconds > 0


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(6), torch.tensor(0)


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="used up"):
        measured(tmp_path, job(data=Endless(), epochs=None, max_steps=3))
    with pytest.raises(DrivetrainError, match="num_iterations is 0"):
        measured(tmp_path, job(), num_iterations=0)


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    flags = ["benchmark", "digits", "--output-dir", str(tmp_path), "--gpu-mode", "cpu", "--iterations", "2"]
    assert main(flags) == 0
    text = capsys.readouterr().out
    for word in ("forward", "backward", "optimizer", "whole step", "samples per second", "MFU"):
        assert word in text
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forward_seconds"] > 0
    assert found["num_steps"] == 2
    assert not list(tmp_path.iterdir())

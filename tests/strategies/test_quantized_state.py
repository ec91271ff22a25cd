"""Optimizer states of 8 bits, of torchao: exact after a stop, and plain tensors in a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.checkpoint import Checkpointer
from drivetrain.core.world import World
from drivetrain.strategies.optimizer_state import Decoder, Encoder

STEPS = 9


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 64, generator=drawn), torch.randint(0, 4, (32,), generator=drawn))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))  # 8,192 weights: from 4,096 on in 8 bits


class StopError(Exception):
    """Ends a run in the middle."""


def train(folder: Path, optimizer: Any, stop_at: int = 0, **settings: Any) -> dt.Result:
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == stop_at:
            raise StopError
        return functional.cross_entropy(model(batch[0]), batch[1])

    job = dt.Job(
        name="small",
        model=make_model,
        data=data(),
        loss=loss,
        optimizer=lambda groups: optimizer(groups, lr=1e-2),
        schedule=dt.WarmupLinear(),
        global_batch=32,
        max_steps=STEPS,
        checkpoint_every=2,
        seed=0,
    )
    fixed = {"gpu_mode": "cpu", "num_workers": 0, "report": False, "loss_weighting": "samples"}
    config = dt.configure(output_dir=str(folder), auto_optimize=False, **fixed, **settings)
    with torch.compiler.set_stance("force_eager"):  # the optimizer compiles its step, for half a minute
        return dt.train(job, config, quiet=True)


def losses_of(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "small" / "steps.jsonl").read_text().splitlines()]


def test_in_8_bits_it_is_a_plain_loop_and_resumes_to_the_bit(tmp_path: Path) -> None:
    adamw = pytest.importorskip("torchao.optim").AdamW8bit
    train(tmp_path / "whole", adamw)
    torch.manual_seed(0)
    model, losses, (inputs, labels) = make_model(), list[float](), data().tensors
    optimizer = adamw(model.parameters(), lr=1e-2)
    with torch.compiler.set_stance("force_eager"):
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"].fill_(1e-2 * (1 - step / STEPS))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses_of(tmp_path / "whole") == pytest.approx(losses, rel=1e-5)
    with pytest.raises(StopError):
        train(tmp_path / "broken", adamw, stop_at=7)
    assert train(tmp_path / "broken", adamw).resumed_from == 4
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "whole")
    whole, broken = (
        Checkpointer(tmp_path / name / "small" / "checkpoints", World()).latest() for name in ("whole", "broken")
    )
    assert whole is not None
    assert broken is not None
    stored = {key: whole.read(key) for key in whole.keys}
    assert all(torch.equal(value, broken.read(key)) for key, value in stored.items())
    codes = [value for key, value in stored.items() if key.endswith("/codes")]
    assert [(value.dtype, tuple(value.shape)) for value in codes] == [(torch.uint8, (128, 64))] * 2


def test_shards_in_8_bits_are_refused(tmp_path: Path) -> None:
    adamw = pytest.importorskip("torchao.optim").AdamW8bit
    with pytest.raises(dt.DrivetrainError, match="AdamW8bit is not known to treat every element of a weight alike"):
        train(tmp_path, adamw, parallel_strategy="fsdp")


def test_tensors_of_a_kind_that_is_not_known_are_refused() -> None:
    with pytest.raises(dt.DrivetrainError, match="a TwoTensor, a tensor of a kind that checkpoints do not know"):
        Encoder(lambda key, value: None).encode(TwoTensor(torch.ones(2), torch.ones(2)), "the state", "key")


@pytest.mark.parametrize("dtype", ["float33", "nn", "bfloat16.x", ""])
def test_a_damaged_dtype_is_reported(dtype: str) -> None:
    """The names of torch that are no dtypes, too."""
    kind = "torchao.optim.subclass_8bit:OptimState8bit"
    damaged = {"$": "wrapper", "kind": kind, "parts": {}, "signed": True, "dtype": dtype}
    with pytest.raises(dt.DrivetrainError, match=f"of the dtype {dtype!r}, which torch does not have"):
        Decoder(lambda key: torch.ones(2), torch.device("cpu")).decode(damaged)

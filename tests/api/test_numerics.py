"""Precision, kernels and memory: what is switched, what it may change, and that everything is put back."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain import ConfigError, DrivetrainError
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.precision import FP32_ON_CPU, Precision, numerics
from drivetrain.hardware import Hardware
from drivetrain.hardware.facts import Rate
from drivetrain.plan import Pins, choose_settings
from drivetrain.strategies.layers import recompute, repeated_blocks
from tests.api.jobs import Transformer, Variant, make_job, read
from tests.hardware_fixtures import load

SMALL = Variant(kind="transformer", steps=6, num_samples=40, global_batch=16, dropout=0.2)


def weights(folder: Path, variant: Variant = SMALL, **settings: Any) -> dict[str, Any]:
    config = configure(output_dir=folder, gpu_mode="cpu", batch_size=6, report=False, **settings)
    result = train(make_job(variant), config, quiet=True)
    return read(result.folder).weights


@pytest.mark.parametrize("how", ["recompute", "offload"])
def test_activations_that_are_not_kept_change_nothing(tmp_path: Path, how: str) -> None:
    kept = weights(tmp_path / "kept", activations="keep")
    others = weights(tmp_path / how, activations=how)
    for name, value in kept.items():
        assert (others[name] == value).all(), name


def test_recomputing_really_does(tmp_path: Path) -> None:
    model = Transformer(0.0)
    assert list(repeated_blocks(model)) == ["encoder.layers.0", "encoder.layers.1"]
    calls = [0]
    model.encoder.layers[0].linear1.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    model(tokens).sum().backward()
    assert calls == [1]
    assert recompute(model) == ["encoder.layers.0", "encoder.layers.1"]
    model(tokens).sum().backward()
    assert calls == [3], "once forward, once again in backward"
    assert "encoder.layers.0.linear1.weight" in model.state_dict()


def test_blocks_are_found_where_models_repeat_themselves() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())

    stages = nn.ModuleDict(
        {"a": nn.Sequential(Block(), Block()), "head": nn.Linear(2, 2), "b": nn.ModuleList([Block()])}
    )
    assert list(repeated_blocks(stages)) == ["a.0", "a.1"]
    assert not repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_a_model_without_blocks_says_so(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="no repeated blocks"):
        weights(tmp_path, Variant(steps=2), activations="recompute")


def test_switches_are_put_back(tmp_path: Path) -> None:
    def switches() -> list[Any]:
        return [
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            torch.backends.cudnn.allow_tf32,
        ]

    before = switches()
    with numerics(Precision("tf32", "cuda"), deterministic=True, cudnn_benchmark=True):
        assert switches() == ["high", True, False, True, ":4096:8", True]
    assert switches() == before
    with numerics(FP32_ON_CPU, deterministic=False, cudnn_benchmark=True):
        assert switches()[:4] == ["highest", False, True, False]
        assert torch.backends.cudnn.allow_tf32 is False, "fp32 is fp32, in convolutions too"
    weights(tmp_path, deterministic=True)
    assert switches() == before


def test_an_operation_without_a_deterministic_kernel_is_an_error(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which of the two stays is open
        return functional.cross_entropy(model(batch[0]), batch[1])

    def trained(**values: Any) -> None:
        job = make_job(Variant(steps=2), loss=loss, name=f"irregular-{len(values)}")
        train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False, **values), quiet=True)

    trained()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        trained(deterministic=True)


def with_measured_cpu(bf16: float, fp32: float) -> Hardware:
    hardware = load("cpu-2core")
    rates = {
        name: Rate(value=value, unit="TFLOP/s", origin="measured", source="drivetrain verify")
        for name, value in (("bf16", bf16), ("fp32", fp32))
    }
    return hardware.model_copy(update={"cpu": hardware.cpu.model_copy(update={"peaks": rates})})


def test_a_cpu_takes_bf16_only_where_it_was_measured_to_be_faster() -> None:
    plain = load("cpu-2core")
    assert choose_settings(plain).precision.value == "fp32"
    assert "verify --save" in choose_settings(plain).precision.reason
    fast = choose_settings(with_measured_cpu(3.0, 1.0)).precision
    assert (fast.value, "bf16 3" in fast.reason) == ("bf16", True)
    assert choose_settings(with_measured_cpu(0.1, 1.0)).precision.value == "fp32"
    assert choose_settings(with_measured_cpu(1.1, 1.0)).precision.value == "fp32"
    assert choose_settings(with_measured_cpu(0.1, 1.0), Pins(mixed=True)).precision.value == "bf16"


def test_bf16_on_a_cpu_trains(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        seen.append(output.dtype)
        return functional.cross_entropy(output, batch[1])

    variant = Variant(dtype=torch.float32, steps=3)
    job = make_job(variant, loss=loss)
    given = {"precision": "bf16", "loss_weighting": "samples"}  # the probe of the loss runs in fp32
    result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False, **given), quiet=True)
    assert set(seen) == {torch.bfloat16}
    assert result.last is not None
    assert not result.last.skipped


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mixed_precision": False, "precision": "bf16"}, "bf16 is mixed precision"),
        ({"mixed_precision": True, "precision": "fp32"}, "fp32 is not mixed precision"),
        ({"deterministic": True, "cudnn_benchmark": True}, "not the same every time"),
        ({"gpu_mode": "cpu", "precision": "fp16"}, "fp16 needs a GPU"),
        ({"activations": "forget"}, "got 'forget'"),
        ({"ema": 1.5}, "got 1.5"),
        ({"patience": 0}, "got 0"),
    ],
)
def test_wrong_settings(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(**values)


def test_mixed_precision_off_is_fp32() -> None:
    config = configure(mixed_precision=False)
    assert choose_settings(load("4x-l4"), Pins(**config.pins())).precision.value == "fp32"

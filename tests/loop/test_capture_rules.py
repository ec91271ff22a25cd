"""Each reason for which a step cannot be captured, told before the first of them."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from drivetrain.api.driving import drive
from drivetrain.config import configure
from drivetrain.core.errors import ConfigError
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.data.keyed_items import Draws
from drivetrain.loop import make_capturable, why_not_captured

# A device that need not be there: nothing is put on it.
META = torch.device("meta")
GPU = torch.device("cuda", 0)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, dtype=dtype, device=META))]


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters(), lr=1e-3, **options)


class Handmade(torch.optim.Optimizer):
    def __init__(self) -> None:
        super().__init__(parameters(), {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        pass


def reason(optimizer: torch.optim.Optimizer | None = None, precision: str = "bf16", **changes: Any) -> str:
    values: dict[str, Any] = {"world": World(device=GPU), "strategy": "single"} | changes
    found = optimizer or adam()
    for group in found.param_groups:
        for parameter in group["params"]:
            parameter.__class__ = _OnGpu
    return why_not_captured(values.pop("world"), values.pop("strategy"), found, Precision(precision, "cuda"), **values)


class _OnGpu(nn.Parameter):
    """A parameter that says it is on the GPU, for a machine that has none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


def hooked() -> torch.optim.Optimizer:
    optimizer = adam()
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world": World(device=torch.device("cpu"))}, "this run is on cpu"),
        ({"world": World(size=2, device=GPU, group=cast(Any, object()))}, "2 processes share a step"),
        ({"strategy": "data_parallel"}, "data_parallel"),
        ({"num_micro_steps": 4}, "4 micro-batches"),
        ({"activations": "offload"}, "activations: offload"),
        ({"activations": "recompute"}, "activations: recompute"),
        ({"compile_mode": "reduce-overhead"}, "reduce-overhead captures the model by itself"),
        ({"compile_mode": "max-autotune"}, "max-autotune captures the model by itself"),
        ({"asserts": True}, "device assertions"),
        ({"draws": Draws(python=True, torch=False)}, "draws from Python's or numpy's generators"),
        ({"optimizer": Handmade()}, "Handmade has no fused form here"),
        ({"optimizer": torch.optim.SGD(parameters(), lr=0.1, foreach=True)}, "SGD has no fused form here"),
        ({"optimizer": torch.optim.AdamW(parameters(torch.float64), lr=0.1)}, "weights are float64"),
        ({"optimizer": hooked()}, "hooked to the step of AdamW"),
        ({"precision": "fp16"}, "fp16: AdamW is not fused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in reason(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compile_mode": "default"},
        {"draws": Draws(python=False, torch=True)},
        {"optimizer": torch.optim.NAdam(parameters(), lr=0.1)},
        {"optimizer": torch.optim.RMSprop(parameters(), lr=0.1)},
    ],
)
def test_otherwise_nothing_stands_in_the_way(changes: dict[str, Any]) -> None:
    assert reason(**changes) == ""


def test_a_parameter_elsewhere() -> None:
    world = World(device=GPU)
    assert "not on cuda:0" in why_not_captured(world, "single", adam(), Precision("bf16", "cuda"))


def test_a_loop_of_ones_own_is_not_captured(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", capture="on")
    with pytest.raises(ConfigError, match="in your own loop Python runs it"):
        drive(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2)] * 4, max_steps=1, config=config)


def test_every_group_is_made_capturable() -> None:
    optimizer = torch.optim.AdamW([{"params": parameters()}, {"params": parameters()}], lr=0.1)
    make_capturable(optimizer)
    assert all(group["capturable"] for group in optimizer.param_groups)
    make_capturable(torch.optim.SGD(parameters(), lr=0.1))

"""Learning rates on the device: the same steps as with numbers, and nobody asks the device for them."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from drivetrain.strategies import StrategyParts
from drivetrain.strategies.lr_on_device import ON_HOST, are_rounded, put_rates_on_device, rounded, set_rate
from drivetrain.strategies.replicated import whole_state


@given(some.floats(0, 100, allow_nan=False))
def test_rounding_is_that_of_float32(rate: float) -> None:
    assert rounded(rate) == float(np.float32(rate))


def learnt(on_device: bool, make: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = make(model.parameters())
    if on_device:
        put_rates_on_device(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for step in range(20):
        set_rate(optimizer.param_groups[0], rounded(0.1 / (step // 3 + 1)))
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
    if on_device:
        assert optimizer.param_groups[0]["lr"] is rates[0], "a replay reads it where it was"
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    ],
)
def test_the_same_steps_as_with_numbers(make: Any) -> None:
    assert all(map(torch.equal, learnt(True, make), learnt(False, make)))


def test_a_save_takes_the_value_that_the_host_knows() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    put_rates_on_device(optimizer)
    set_rate(optimizer.param_groups[0], 0.25)
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    with mock.patch.object(Tensor, "item", side_effect=AssertionError("the device was asked")):
        _, meta = whole_state(StrategyParts(model, lambda *_: torch.zeros(()), optimizer))
    values = meta["optimizer_groups"][0]["values"]
    assert values["lr"] == 0.25
    assert ON_HOST not in values


def test_on_a_cpu_nothing_is_rounded() -> None:
    assert not are_rounded(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))

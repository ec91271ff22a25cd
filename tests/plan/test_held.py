"""What weights, gradients and optimizers hold: counted before anything ran, against what is there after a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.plan.held import Held, count_held, forecast_held, without_memory

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
}


class Tied(nn.Module):
    """With an embedding that is also the last layer, a frozen layer, half-precision weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.out.weight = self.words.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.half = nn.Linear(16, 16).to(torch.bfloat16)
        self.register_buffer("mask", torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_forecast_is_what_is_held_after_a_step(name: str) -> None:
    def make(model: nn.Module) -> Optimizer:
        return OPTIMIZERS[name]([parameter for parameter in model.parameters() if parameter.requires_grad])

    model = Tied()
    forecast = forecast_held(model, make)
    optimizer = make(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert forecast == count_held(model, optimizer)


def test_by_hand() -> None:
    model = Tied()
    held = forecast_held(model, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1))
    trained, halves = 50 * 16 * 4, (16 * 16 + 16) * 2
    num_trained = 3  # each has a step count of 4 bytes
    assert held == Held(
        parameters=trained + halves + (16 * 16 + 16) * 4,
        buffers=7,
        gradients=trained + halves,
        optimizer=2 * (trained + halves) + num_trained * 4,
    )
    assert held.total == held.parameters + held.buffers + held.gradients + held.optimizer


def test_an_optimizer_that_looks_at_values() -> None:
    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["params"][0].grad.sum().item() > 0:
                return super().step(closure)
            return None

    assert forecast_held(nn.Linear(2, 2), lambda model: Looks(model.parameters(), lr=0.1)) is None


def test_the_copy_takes_no_memory_and_leaves_the_model_alone() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ghost = without_memory(model)
    assert {value.device.type for value in ghost.state_dict().values()} == {"meta"}
    assert ghost.out.weight is ghost.words.weight
    assert [p.requires_grad for p in ghost.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

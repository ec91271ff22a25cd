"""Each way in which a step can keep something in Python is found; what a replay does as well is not."""

import itertools
import random
import types
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.loop.python_state import changes, generators_state, python_state

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CALLS = 0
HISTORY: list[float] = []
SETTINGS = types.SimpleNamespace(calls=0)
COUNTER = itertools.count()
DRAWS = np.random.default_rng(0)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.layer(inputs))


class Counting(Plain):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs)


class CountingInClass(Plain):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(inputs)


class Averaging(Plain):
    """Binds a new tensor in every step: a replay would read the old one's place and write another."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        result = super().forward(inputs)
        self.mean = 0.9 * self.mean + 0.1 * result.detach().mean(0)
        return result


class Rebinding(Averaging):
    """The same with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(3))


class Remembering(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"losses": deque()}

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen["losses"].append(len(inputs))
        return super().forward(inputs)


class UsingGlobals(Plain):
    def forward(self, inputs: Tensor) -> Tensor:
        HISTORY.append(1.0)
        return super().forward(inputs)


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.mse_loss(model(batch), torch.zeros(len(batch), 3))


def global_counter(model: nn.Module, batch: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return mean_of(model, batch)


def through_another(model: nn.Module, batch: Tensor) -> Tensor:
    return global_counter(model, batch)


def settings(model: nn.Module, batch: Tensor) -> Tensor:
    SETTINGS.calls += 1
    return mean_of(model, batch)


def counts_on(model: nn.Module, batch: Tensor) -> Tensor:
    next(COUNTER)
    return mean_of(model, batch)


def draws(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_of(model, batch) * DRAWS.random()


def in_default(model: nn.Module, batch: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return mean_of(model, batch)


def in_attribute(model: nn.Module, batch: Tensor) -> Tensor:
    in_attribute.calls += 1  # type: ignore[attr-defined]
    return mean_of(model, batch)


in_attribute.calls = 0  # type: ignore[attr-defined]


class LossWithState:
    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.kinds["all"] += 1
        return mean_of(model, batch)

    def method(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self(model, batch)


class WithSlots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        return mean_of(model, batch)


def closure() -> Callable[..., Tensor]:
    calls = 0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return mean_of(model, batch)

    return loss


def appending() -> Callable[..., Tensor]:
    note = [].append

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        result = mean_of(model, batch)
        note(result.detach())
        return result

    return loss


def generator() -> Callable[..., Tensor]:
    weights = (1 / number for number in itertools.count(1))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_of(model, batch) * next(weights)

    return loss


def looked_at(model: nn.Module, loss: Callable[..., Any], device: torch.device = CPU) -> list[str]:
    """What changed in a step that is not the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, torch.randn(5, 4)).backward()
        optimizer.step()

    step()
    before = python_state(model, loss, optimizer, device)
    step()
    return changes(before, python_state(model, loss, optimizer, device))


@pytest.mark.parametrize("loss", [mean_of, partial(mean_of), lambda model, batch: mean_of(model, batch)])
def test_an_ordinary_step_changes_nothing(loss: Callable[..., Any]) -> None:
    assert looked_at(Plain(), loss) == []


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (Counting, "model.calls"),
        (CountingInClass, "CountingInClass.calls"),
        (Averaging, "model.mean"),
        (Rebinding, "model.mean"),
        (Remembering, "model.seen['losses']"),
        (UsingGlobals, "HISTORY"),
    ],
)
def test_what_a_model_keeps(make: Callable[[], nn.Module], where: str) -> None:
    assert looked_at(make(), mean_of)[0].startswith(where)
    inner = nn.Sequential(nn.Identity(), make())
    assert looked_at(inner, mean_of)[0].startswith(where.replace("model", "model.1"))


@pytest.mark.parametrize(
    ("loss", "where"),
    [
        (global_counter, "CALLS"),
        (through_another, "CALLS"),
        (settings, "SETTINGS.calls"),
        (counts_on, "COUNTER"),
        (draws, "DRAWS"),
        (in_default, "loss's default 0"),
        (in_attribute, "loss.calls"),
        (LossWithState(), "loss.kinds['all']"),
        (LossWithState().method, "loss.kinds['all']"),
        (partial(LossWithState()), "loss.func.kinds['all']"),
        (WithSlots(), "loss.calls"),
        (closure(), "loss's calls"),
        (appending(), "loss's note"),
        (generator(), "loss's weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_loss_keeps(loss: Callable[..., Any], where: str) -> None:
    assert any(found.startswith(where) for found in looked_at(Plain(), loss)), looked_at(Plain(), loss)


def test_a_hook_of_a_module() -> None:
    seen: list[int] = []
    model = Plain()
    model.layer.register_forward_hook(lambda module, arguments, output: seen.append(1))
    assert "seen" in looked_at(model, mean_of)[0]


def test_a_tensor_that_is_not_on_the_device() -> None:
    """In place on the host: a replay would not do it. On the run's own device it would."""
    kept = torch.zeros(1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        kept.add_(1)
        return mean_of(model, batch)

    assert not any("kept" in where for where in looked_at(Plain(), loss, CPU))
    assert any("kept" in where for where in looked_at(Plain(), loss, GPU))


@pytest.mark.parametrize(
    ("draw", "who"),
    [(random.random, "Python's"), (np.random.random, "numpy's"), (lambda: torch.rand(()), "torch's")],
)
def test_draws_from_the_hosts_generators(draw: Callable[[], Any], who: str) -> None:
    before = generators_state(GPU)
    assert changes(before, generators_state(GPU)) == []
    draw()
    assert changes(before, generators_state(GPU))[0].startswith(who)


def test_changes_between_steps() -> None:
    """What a hook may do: anything but writing values in place asks for a new recording."""
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        return python_state(model, mean_of, optimizer, CPU)

    before = state()
    with torch.no_grad():
        model.layer.weight.mul_(0.5)
    assert changes(before, state()) == []
    for change, where in (
        (lambda: setattr(model.norm, "momentum", 0.5), "model.norm.momentum"),
        (lambda: model.norm.eval(), "model.norm.training"),
        (lambda: model.layer.bias.requires_grad_(False), "model.layer.bias"),
        (lambda: setattr(model, "layer", nn.Linear(4, 3)), "model._modules"),
        (lambda: optimizer.param_groups[0].update(weight_decay=0.5), "optimizer.param_groups[0]['weight_decay']"),
    ):
        before = state()
        change()
        assert where in changes(before, state())

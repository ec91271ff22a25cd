"""Schedules against torch's own, over all steps."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

import drivetrain as dt
from drivetrain.core.errors import ConfigError
from drivetrain.core.schedules import FactorSchedule, is_factor

RATE, STEPS = 0.3, 97


def optimizer_of(rate: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)


def rates_of(make: Callable[[torch.optim.Optimizer], torchs.LRScheduler], num_steps: int = STEPS) -> list[float]:
    """Return the rate of each step in a plain loop."""
    optimizer = optimizer_of()
    scheduler, found = make(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR steps with a number
        for step in range(num_steps):
            if step:
                optimizer.step()
                scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def linear(optimizer: torch.optim.Optimizer, warmup: int, floor: float) -> torchs.LRScheduler:
    parts = [
        torchs.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1),
        torchs.LinearLR(optimizer, 1.0, floor, total_iters=STEPS - warmup),
    ]
    return torchs.SequentialLR(optimizer, parts, [warmup])


def stable(optimizer: torch.optim.Optimizer, warmup: int, decay: int, floor: float) -> torchs.LRScheduler:
    parts = [
        torchs.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1),
        torchs.ConstantLR(optimizer, 1.0),
        torchs.LinearLR(optimizer, 1.0, floor, total_iters=decay),
    ]
    return torchs.SequentialLR(optimizer, parts, [warmup, STEPS - decay])


def cycle(**settings: Any) -> Callable[[torch.optim.Optimizer], torchs.LRScheduler]:
    return lambda optimizer: torchs.OneCycleLR(optimizer, RATE, total_steps=STEPS, **settings)


CASES: dict[str, tuple[FactorSchedule, Callable[[torch.optim.Optimizer], torchs.LRScheduler]]] = {
    "linear": (dt.WarmupLinear(10, floor=0.1), lambda it: linear(it, 10, 0.1)),
    "linear without warm-up": (
        dt.WarmupLinear(floor=0.25),
        lambda it: torchs.LinearLR(it, 1.0, 0.25, total_iters=STEPS),
    ),
    "step": (dt.StepDecay(13, gamma=0.5), lambda it: torchs.StepLR(it, 13, 0.5)),
    "milestones": (dt.MultiStep([20, 20, 61], gamma=0.3), lambda it: torchs.MultiStepLR(it, [20, 20, 61], 0.3)),
    "one cycle": (dt.OneCycle(), cycle()),
    "one cycle, linear": (
        dt.OneCycle(0.2, 10, 100, "linear"),
        cycle(pct_start=0.2, div_factor=10, final_div_factor=100, anneal_strategy="linear"),
    ),
    "one cycle, three phases": (dt.OneCycle(three_phase=True), cycle(three_phase=True)),
    "one cycle, all rise": (dt.OneCycle(pct_start=1.0), cycle(pct_start=1.0)),
    "one cycle, all fall": (dt.OneCycle(pct_start=0.0), cycle(pct_start=0.0)),
    "stable": (dt.WarmupStableDecay(10, 0.3, floor=0.05), lambda it: stable(it, 10, round(0.3 * STEPS), 0.05)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_is_torchs(case: str) -> None:
    schedule, make = CASES[case]
    ours = [RATE * schedule.factor(step, STEPS) for step in range(STEPS)]
    assert ours == pytest.approx(rates_of(make), rel=0, abs=1e-12)


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_shapes_of_the_decay(shape: Any, half: float) -> None:
    schedule = dt.WarmupStableDecay(decay=0.5, shape=shape)
    assert [schedule.factor(step, 80) for step in (0, 39, 40)] == [1.0, 1.0, 1.0]
    assert schedule.factor(60, 80) == pytest.approx(half, abs=1e-12)
    assert schedule.factor(80, 80) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("schedule", [dt.StepDecay(10, warmup_steps=4), dt.MultiStep([10], warmup_steps=4)])
def test_steps_after_a_warm_up(schedule: FactorSchedule) -> None:
    found = [schedule.factor(step, 20) for step in range(20)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, *[1.0] * 6, *[0.1] * 10], abs=1e-12)


@pytest.mark.parametrize("schedule", [it for it, _ in CASES.values()], ids=list(CASES))
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_jobs_have_finite_factors(schedule: FactorSchedule, num_steps: int) -> None:
    assert all(0 <= schedule.factor(step, num_steps) <= 1 for step in range(num_steps))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: dt.StepDecay(0), "StepDecay.every"),
        (lambda: dt.StepDecay(3, gamma=0), "StepDecay.gamma"),
        (lambda: dt.MultiStep([3, 2]), "MultiStep.milestones"),
        (lambda: dt.OneCycle(pct_start=2), "OneCycle.pct_start"),
        (lambda: dt.OneCycle(anneal_strategy="cubic"), "OneCycle.anneal_strategy"),  # type: ignore[arg-type]
        (lambda: dt.WarmupStableDecay(decay=30), "WarmupStableDecay.decay"),
        (lambda: dt.WarmupStableDecay(shape="cubic"), "WarmupStableDecay.shape"),  # type: ignore[arg-type]
        (lambda: dt.OnPlateau(factor=1.0), "OnPlateau.factor"),
        (lambda: dt.OnPlateau(patience=-1), "OnPlateau.patience"),
    ],
)
def test_a_wrong_value_is_named(make: Callable[[], Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make()


def test_which_functions_are_factors() -> None:
    """A function of the step is never taken for one that makes a scheduler, and the other way round."""
    of_steps: list[Any] = [
        lambda step: 0.9**step,
        lambda step: 1,
        lambda optimizer: torch.tensor(0.5),
        lambda optimizer, gamma=0.5: gamma**optimizer,
        dt.WarmupCosine(),
    ]
    others: list[Any] = [
        lambda step: torchs.StepLR(step, 30),
        lambda it: torchs.LambdaLR(it, lambda step: 1.0),
        lambda it: torchs.SequentialLR(it, [torchs.LinearLR(it), torchs.ConstantLR(it)], [3]),
        lambda it: torchs.ReduceLROnPlateau(it),
        lambda it: torchs.CyclicLR(it, 0.1, 0.2),
        dt.OnPlateau(),
    ]
    assert all(is_factor(schedule) for schedule in of_steps)
    assert not any(is_factor(schedule) for schedule in others)

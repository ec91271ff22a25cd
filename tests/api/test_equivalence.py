"""What a job means does not depend on devices, micro-batch or accumulation: against a plain loop, in float64."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain.core.metrics import LossSum
from drivetrain.data.division import SampleStream
from drivetrain.job import Job
from drivetrain.strategies.base import Objective
from drivetrain.strategies.ddp import _CarryingObjective
from tests.api.jobs import Trained, Variant, plain_loop, run
from tests.gloo_pool import GlooPool

# (world, global batch, micro-batch, samples): what each divides is ragged in its own way.
CASES = {
    "1 process 32×1": (1, 32, 32, 150),
    "1 process 8×4": (1, 32, 8, 150),
    "2 processes 8×2": (2, 32, 8, 150),
    "4 processes, 30 per step": (4, 30, 8, 150),
    "3 processes": (3, 32, 5, 150),
    "a last batch that leaves ranks empty": (4, 37, 4, 150),  # 150 = 4 × 37 + 2
}


def but_soak(cases: Iterable[str], *kept: str) -> list[Any]:
    """The cases as parameters: those that are not kept are part of the long runs only."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.soak) for case in cases]


def difference(trained: Trained, losses: list[float], weights: dict[str, Any]) -> tuple[float, float]:
    assert trained.weights.keys() == weights.keys()
    return (
        float(np.max(np.abs(np.array(trained.losses) - np.array(losses)))),
        max(float(np.max(np.abs(trained.weights[key] - weights[key]))) for key in weights),
    )


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("case", CASES)
def test_float64_equals_the_plain_loop(gloo_pool: GlooPool, tmp_path: Path, kind: str, case: str) -> None:
    world, global_batch, micro_batch, num_samples = CASES[case]
    variant = Variant(kind, torch.float64, global_batch, num_samples=num_samples)
    measured = {"loss_weighting": "auto"}
    trained = gloo_pool.run(run, str(tmp_path), variant, micro_batch, 0, "cpu", measured, world=world)[0]
    of_losses, of_weights = difference(trained, *plain_loop(variant))
    assert of_losses < 1e-10, of_losses
    assert of_weights < 1e-10, of_weights


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("case", but_soak(CASES, "1 process 8×4", "a last batch that leaves ranks empty"))
def test_float32_losses_agree(gloo_pool: GlooPool, tmp_path: Path, kind: str, case: str) -> None:
    world, global_batch, micro_batch, num_samples = CASES[case]
    variant = Variant(kind, torch.float32, global_batch, num_samples=num_samples)
    trained = gloo_pool.run(run, str(tmp_path), variant, micro_batch, world=world)[0]
    losses, _ = plain_loop(variant)
    assert trained.losses == pytest.approx(losses, rel=1e-6, abs=1e-6)


def _tally(objective: Objective, value: Tensor, num_samples: int, weight: int) -> None:
    if weight:
        objective.losses.append((value.detach(), num_samples))
        objective.counts.append(num_samples)


def mean_of_means(self: Objective, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
    """Each micro-batch's own mean, averaged: what dividing by the number of micro-steps comes to."""
    result = self._loss(self.model, batch)
    mean = result.total / result.count if isinstance(result, LossSum) else result
    _tally(self, mean, num_samples, weight)
    return mean * (num_samples / step_samples * weight * self.scale)


def unweighted_ranks(self: Objective, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
    """Every rank's mean counts alike, however many samples it had: what plain DDP does."""
    result = self._loss(self.model, batch)
    assert isinstance(result, Tensor)
    _tally(self, result, num_samples, weight)
    return result * weight


def schedule_by_world(self: Job, step: int, num_steps: int) -> float:
    return self.schedule.factor(step * torch.distributed.get_world_size(), num_steps)  # type: ignore[union-attr]


def epoch_forgotten(self: SampleStream, epoch: int, start: int, stop: int) -> Any:
    return self._permuted(0, start, stop)


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], Variant, int]] = {
    "mean of means": (Objective, "forward", mean_of_means, Variant("transformer"), 8),
    "unweighted ragged ranks": (Objective, "forward", unweighted_ranks, Variant("mlp", global_batch=31), 32),
    "schedule × world": (Job, "lr_factor", schedule_by_world, Variant("mlp"), 32),
    "set_epoch forgotten": (SampleStream, "samples", epoch_forgotten, Variant("mlp"), 32),
}


def run_with_planted_bug(name: str, folder: str) -> Trained | None:
    target, attribute, bug, variant, micro_batch = PLANTED[name]
    with mock.patch.object(target, attribute, bug):
        return run(folder, variant, micro_batch)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(gloo_pool: GlooPool, tmp_path: Path, name: str) -> None:
    variant = PLANTED[name][3]
    trained = gloo_pool.run(run_with_planted_bug, name, str(tmp_path), world=2)[0]
    of_losses, _ = difference(trained, *plain_loop(variant))
    assert of_losses > 1e-6


def test_the_carrier_is_no_part_of_the_model(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """The parameter that carries loss and count is neither trained nor saved."""
    trained = gloo_pool.run(run, str(tmp_path), Variant(steps=3), 8, world=2)[0]
    alone = run(str(tmp_path / "alone"), Variant(steps=3))
    assert alone is not None
    assert trained.weights.keys() == alone.weights.keys()
    assert trained.state.keys() == alone.state.keys()
    assert issubclass(_CarryingObjective, Objective)

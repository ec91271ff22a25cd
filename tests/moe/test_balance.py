"""Loads are counted once each over all ranks, biases follow them, and a step means the same however it is divided."""

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.core.isolation import uncounted
from drivetrain.moe import Balance, MixtureOfExperts, Settlement, auxiliary_loss, load_metrics
from drivetrain.moe.mixture import figures_of
from tests.api.jobs import Trained, Variant
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, run_mixture

CPU = torch.device("cpu")


def layer_of(balance: Balance, **changes: int) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(8, 4, 8, k=2, balance=balance, **changes)


def test_the_auxiliary_loss_is_that_of_the_formula() -> None:
    layer = layer_of(Balance(0.0, 0.5, 0.25), num_slots=6).double()
    layer.load.copy_(torch.tensor([6, 1, 2, 1, 0, 0]))
    inputs = torch.randn(7, 8, dtype=torch.float64)
    layer(inputs)
    weight = layer.router.weight.detach()[:4].numpy()
    logits = inputs.numpy() @ weight.T
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    switch = 4 * (np.array([0.6, 0.1, 0.2, 0.1]) * scores.mean(0)).sum()
    z = (np.log(np.exp(logits).sum(1)) ** 2).mean()
    found = auxiliary_loss(layer)
    assert found is not None
    assert found.item() == pytest.approx(0.5 * switch + 0.25 * z, rel=1e-12)
    found.backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad[:4].abs().min() > 0
    assert not layer.router.weight.grad[4:].any()
    assert auxiliary_loss(layer) is None, "it was handed over"


def test_before_the_first_step_the_load_counts_as_even() -> None:
    layer = layer_of(Balance(0.0, 1.0))
    layer(torch.randn(7, 8))
    found = auxiliary_loss(layer)
    assert found is not None
    assert found.item() == pytest.approx(1.0)


def test_several_calls_of_one_layer_are_one_mean() -> None:
    layer = layer_of(Balance(0.0, 0.0, 1.0))
    inputs = torch.randn(9, 8)
    layer(inputs[:2])
    layer(inputs[2:])
    parts = auxiliary_loss(layer)
    layer(inputs)
    whole = auxiliary_loss(layer)
    assert parts is not None
    assert whole is not None
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)


def test_what_does_not_train_is_not_counted() -> None:
    layer = layer_of(Balance(1e-3, 1e-2))
    inputs = torch.randn(5, 8)
    layer.eval()
    layer(inputs)
    assert auxiliary_loss(layer) is None
    layer.train()
    with uncounted(layer):
        layer(inputs)
    assert not layer.tally.on(CPU).any()
    layer(inputs)
    assert layer.tally.on(CPU).sum() == 10


def test_biases_move_towards_the_mean_and_only_those_of_active_experts() -> None:
    layers = nn.ModuleList([layer_of(Balance(0.5), num_slots=5), layer_of(Balance(0.0), num_slots=5)])
    for layer in layers:
        layer.tally.on(CPU).copy_(torch.tensor([9, 5, 4, 2, 0]))
    Settlement(layers).settle()
    assert layers[0].router.bias.tolist() == [-0.5, 0.0, 0.5, 0.5, 0.0]
    assert not layers[1].router.bias.any()
    for layer in layers:
        assert layer.load.tolist() == [9, 5, 4, 2, 0]
        assert not layer.tally.on(CPU).any()


def test_the_bias_balances_a_skewed_router() -> None:
    layer = layer_of(Balance(3e-3))
    with torch.no_grad():
        layer.router.weight[0] += 0.3
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1)) + 1
    settlement, violations = Settlement(layer), []
    for _ in range(250):
        layer(inputs)
        settlement.settle()
        violations.append(load_metrics(layer)["max_violation"])
    assert violations[0] > 0.8
    assert violations[-1] < 0.2


def test_figures() -> None:
    figures = figures_of([6, 2, 0, 0, 9], [True, True, True, True, False], [0, 0, 1, 1, 1], 2)
    assert figures.max_violation == 2.0
    assert figures.dead_experts == 2
    assert figures.entropy == pytest.approx((0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4))
    assert figures_of([3, 3], [True, True], [0, 1], 2).as_dict() == {
        "max_violation": 0.0,
        "dead_experts": 0,
        "entropy": pytest.approx(1.0),
        "straggler": 1.0,
    }
    assert figures_of([4, 0, 0, 0], [True] * 4, [0, 0, 1, 1], 2).straggler == 2.0


VARIANT = Variant(steps=20, global_batch=30, num_samples=100)  # the last step of an epoch leaves ranks without samples


def finite(values: np.ndarray) -> np.ndarray:
    """Masks hold -inf, of which differences are nan."""
    return np.nan_to_num(values.astype(np.float64), nan=1e9, neginf=-1e6)


def alike(one: Trained, other: Trained, limit: float) -> None:
    assert one.losses == pytest.approx(other.losses, rel=limit, abs=limit)
    assert one.weights.keys() == other.weights.keys()
    for name, value in other.weights.items():
        assert np.abs(finite(one.weights[name]) - finite(value)).max() < limit, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained = run_mixture(str(tmp_path_factory.mktemp("alone")), VARIANT, Mixture(num_slots=7), 30)
    assert trained is not None
    return trained


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 7), (2, 4), (4, 3)])
def test_a_step_means_the_same_however_it_is_divided(
    gloo_pool: GlooPool, tmp_path: Path, alone: Trained, world: int, micro_batch: int
) -> None:
    """Balance and all: in the last step of an epoch some ranks have no sample left, and run one at weight 0."""
    trained = gloo_pool.run(run_mixture, str(tmp_path), VARIANT, Mixture(num_slots=7), micro_batch, world=world)[0]
    alike(trained, alone, 1e-10)
    assert np.abs(alone.weights["model/mixture.router.bias"]).max() > 0.01
    assert trained.weights["model/mixture.load"].sum() == 20  # the last step has 10 samples, each k times


def test_fsdp_shares_loads_too(gloo_pool: GlooPool, tmp_path: Path, alone: Trained) -> None:
    args = (str(tmp_path), VARIANT, Mixture(num_slots=7), 5, {"parallel_strategy": "fsdp"})
    trained = gloo_pool.run(run_mixture, *args, world=2)[0]
    alike(trained, alone, 1e-10)


def run_without_sharing_loads(folder: str) -> Trained | None:
    with mock.patch("drivetrain.moe.mixture._over_all_ranks", lambda counts, group: counts):
        return run_mixture(folder, VARIANT, Mixture(num_slots=7), 8)


def test_loads_that_are_not_shared_are_caught(gloo_pool: GlooPool, tmp_path: Path, alone: Trained) -> None:
    trained = gloo_pool.run(run_without_sharing_loads, str(tmp_path), world=2)[0]
    with pytest.raises(AssertionError):
        alike(trained, alone, 1e-10)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    variant = Variant(dtype=torch.float32, steps=12, global_batch=30, num_samples=100, save_every=4)
    wanted = Mixture(num_slots=7, dtype=torch.float32)
    whole = run_mixture(str(tmp_path / "whole"), variant, wanted, 10)
    folder = str(tmp_path / "parts")
    assert run_mixture(folder, variant, wanted, 10, crash_at_call=20) is None
    resumed = run_mixture(folder, variant, wanted, 10)
    assert whole is not None
    assert resumed is not None
    assert resumed.resumed_from == 4
    for name, value in (whole.weights | whole.state).items():
        assert np.array_equal(value, (resumed.weights | resumed.state)[name]), name

"""Experts shared out over ranks learn what one process learns: gradients, norm, losses; in any number of ranks."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from drivetrain.checkpoint import CheckpointError
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.world import World
from drivetrain.moe import Balance, MixtureOfExperts
from drivetrain.moe.experts import costs_of, free_slot, place
from drivetrain.strategies import ExpertParallelStrategy, StrategyParts, Trial
from drivetrain.strategies.shared_experts import SharedExperts, _Exchange
from tests.api.jobs import Trained, Variant, Vectors, run
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, MixtureModel, mixture_loss, run_mixture

# Replicas are compared, too: the experts of a rank have none, and all else is the same to the bit.
EXPERT_PARALLEL = {"parallel_strategy": "expert_parallel", "compare_replicas": 3}
# 100 = 3 × 30 + 10: the last step of an epoch leaves ranks without samples.
STEPS = Variant(steps=6, global_batch=30, num_samples=100)  # an epoch of 4 with a short last one, and half of another


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Whose steps are as long as its gradients: Adam would hide a wrong scale."""
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9)


def train(folder: str, wanted: Mixture, micro_batch: int, shares: bool, clip: float | None) -> Trained | None:
    changes = {"optimizer": sgd, "clip_norm": clip, "weight_decay": 0.01}
    settings = EXPERT_PARALLEL if shares else {}
    return run_mixture(folder, STEPS, wanted, micro_batch, settings, changes=changes)


def distances(one: Trained, other: Trained) -> dict[str, float]:
    """Of losses, of the norms that clip, and of every tensor that was saved; relative to the largest in each."""
    assert one.weights.keys() == other.weights.keys()
    assert one.state.keys() == other.state.keys()
    pairs: dict[str, tuple[Any, Any]] = {"losses": (one.losses, other.losses)}
    if one.rows[0].get("grad_norm") is not None:
        pairs["norms"] = tuple([row["grad_norm"] for row in trained.rows] for trained in (one, other))  # type: ignore[assignment]
    ours, theirs = one.weights | one.state, other.weights | other.state
    pairs |= {key: (ours[key], theirs[key]) for key in theirs}
    return {key: _distance(*pair) for key, pair in pairs.items()}


def _distance(one: Any, other: Any) -> float:
    one, other = (np.nan_to_num(np.asarray(value, np.float64), nan=1e9, neginf=-1e6) for value in (one, other))  # masks
    assert one.shape == other.shape
    return float(np.abs(one - other).max(initial=0) / max(1e-3, np.abs(other).max(initial=0)))


CASES = {
    "2 ranks, k 2": (2, Mixture(num_experts=4), 5, 0.5),
    "3 ranks, 5 experts, accumulation": (3, Mixture(num_experts=5, num_slots=7), 4, 0.5),
    "3 ranks, 7 experts, k 3, accumulation": (3, Mixture(num_experts=7, k=3), 4, 0.5),
    "4 ranks, k 1, no clipping": (4, Mixture(num_experts=5, k=1, kind="mlp"), 8, None),
    "4 ranks, 3 experts: a rank has none": (4, Mixture(num_experts=3), 3, 0.5),
    "3 ranks, skew that leaves ranks empty": (3, Mixture(num_experts=6, skewed=True, k=1), 10, 0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_it_learns_what_one_process_learns(gloo_pool: GlooPool, tmp_path: Path, case: str) -> None:
    world, wanted, micro_batch, clip = CASES[case]
    alone = train(str(tmp_path / "alone"), wanted, 30, False, clip)
    assert alone is not None
    if wanted.skewed:
        assert np.count_nonzero(alone.weights["model/mixture.load"]) == 1, "all tokens go to one expert"
    args = (str(tmp_path / "shared"), wanted, micro_batch, True, clip)
    shared = gloo_pool.run(train, *args, world=world)[0]
    found = distances(shared, alone)
    assert max(found.values()) < 1e-9, found


def train_wrongly(folder: str, wanted: Mixture) -> Trained | None:
    with mock.patch.object(ExpertParallelStrategy, "gradient_factor", 1.0):
        return train(folder, wanted, 8, True, None)


def train_without_backward(folder: str, wanted: Mixture) -> Trained | None:
    """Gradients stay on the rank where they arose: what a plain all-to-all does."""

    def forgetful(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].new_zeros(sum(ctx.sent), gradients[0].shape[1]), None, None, None

    with mock.patch.object(_Exchange, "backward", staticmethod(forgetful)):
        return train(folder, wanted, 8, True, None)


@pytest.mark.parametrize("bug", [train_wrongly, train_without_backward])
def test_a_planted_bug_is_caught(gloo_pool: GlooPool, tmp_path: Path, bug: Any) -> None:
    wanted = Mixture(num_experts=4)
    alone = train(str(tmp_path / "alone"), wanted, 30, False, None)
    assert alone is not None
    shared = gloo_pool.run(bug, str(tmp_path / "shared"), wanted, world=2)[0]
    found = distances(shared, alone)
    assert found["losses"] > 1e-4
    assert found["model/mixture.experts.w_in"] > 1e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mixture = MixtureOfExperts(6, 3, 8, k=2, balance=Balance(1e-2, 1e-2))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.mixture(self.norm(inputs))
        return result


def blocks() -> nn.Module:
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(6, 4)).double()


def train_blocks(folder: str, micro_batch: int, settings: dict[str, Any]) -> Trained | None:
    return run(folder, STEPS, micro_batch, settings=settings, model=blocks, optimizer=sgd)


def test_recomputed_blocks_exchange_their_tokens_again(gloo_pool: GlooPool, tmp_path: Path) -> None:
    alone = train_blocks(str(tmp_path / "alone"), 30, {})
    args = (str(tmp_path / "shared"), 8, {**EXPERT_PARALLEL, "activations": "recompute"})
    shared = gloo_pool.run(train_blocks, *args, world=2)[0]
    assert alone is not None
    found = distances(shared, alone)
    assert max(found.values()) < 1e-9, found


def go_on(
    folder: str, micro_batch: int, shares: bool, crash_at_call: int, dtype: torch.dtype, steps: int = 13
) -> Trained | None:
    wanted = Mixture(num_experts=5, num_slots=7, dtype=dtype)
    settings = EXPERT_PARALLEL if shares else {}
    variant = Variant(dtype=dtype, steps=steps, global_batch=30, num_samples=100, save_every=4)
    # Averaged and validated, too: ranks with fewer samples left take part in every exchange.
    changes = {"ema": 0.9, "valid": Vectors(Variant(dtype=dtype, num_samples=23)), "valid_every": 5}
    return run_mixture(folder, variant, wanted, micro_batch, settings, crash_at_call, changes)


def test_a_run_goes_on_in_other_numbers_of_ranks(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """4 → 2 → 1 → 4 ranks, cut short in each, with optimizer and average; against one that was never stopped."""
    whole = go_on(str(tmp_path / "whole"), 30, False, 0, torch.float64)
    folder = str(tmp_path / "parts")
    for world, micro_batch, crash_at_call in ((4, 8, 8), (2, 15, 7), (1, 30, 7)):
        args = (folder, micro_batch, world > 1, crash_at_call, torch.float64)
        assert gloo_pool.run(go_on, *args, world=world)[0] is None
    args = (folder, 8, True, 0, torch.float64)
    parts = gloo_pool.run(go_on, *args, world=4)[0]
    assert parts.resumed_from == 12
    assert whole is not None
    assert any(key.startswith("ema/mixture.experts") for key in parts.state)
    found = distances(parts, whole)
    assert max(found.values()) < 1e-9, found


def test_in_the_same_world_a_resumed_run_has_the_same_bits(gloo_pool: GlooPool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    whole = gloo_pool.run(go_on, folders[0], 5, True, 0, torch.float32, 7, world=3)[0]
    assert gloo_pool.run(go_on, folders[1], 5, True, 10, torch.float32, 7, world=3)[0] is None
    resumed = gloo_pool.run(go_on, folders[1], 5, True, 0, torch.float32, 7, world=3)[0]
    assert resumed.resumed_from == 4
    assert resumed.rows == whole.rows
    ours, theirs = resumed.weights | resumed.state, whole.weights | whole.state
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


def run_without_experts(folder: str) -> str:
    try:
        run(folder, Variant(steps=2), 8, settings=EXPERT_PARALLEL)
    except DrivetrainError as error:
        return str(error)
    return ""


def test_a_model_without_experts_is_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for words in gloo_pool.run(run_without_experts, str(tmp_path), world=2):
        assert "no mixture of experts" in words
        assert "--parallel-strategy ddp" in words


def frozen() -> MixtureModel:
    model = MixtureModel(Mixture(num_experts=4))
    model.double().mixture.experts.requires_grad_(False)
    return model


def train_frozen_then_again(folder: str) -> tuple[list[float], str]:
    """Losses with experts that do not learn; and what a second run says to a model that the first has cut."""
    variant = Variant(steps=2, global_batch=30, num_samples=100)
    model = frozen()
    kept = [parameter.detach().clone() for parameter in model.mixture.experts.parameters()]
    changes = {"model": model, "loss": mixture_loss, "optimizer": sgd}
    run(folder, variant, 8, settings=EXPERT_PARALLEL, **changes)
    moved = [
        float((now - before[: len(now)]).abs().max()) if len(now) else 0.0
        for now, before in zip(model.mixture.experts.parameters(), kept, strict=True)
    ]
    try:
        run(f"{folder}-again", variant, 8, settings=EXPERT_PARALLEL, **changes)
    except DrivetrainError as error:
        return moved, str(error)
    return moved, ""


def test_frozen_experts_stay_and_a_model_that_was_cut_is_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    found = gloo_pool.run(train_frozen_then_again, str(tmp_path / "frozen"), world=2)
    assert found[0][0] == [0.0] * 4, "rank 0 has the first experts, as they were"
    for _, words in found:
        assert "holds only some of its experts" in words


class Damaged:
    """A checkpoint of another world whose files cannot be read."""

    meta: dict[str, Any] = {}  # noqa: RUF012
    keys: dict[str, Any] = {}  # noqa: RUF012

    def read(self, key: str, *rest: Any) -> Any:
        raise CheckpointError(f"{key} is damaged", remedy="use another")


def placed_by_damaged() -> str:
    world = World.join([torch.device("cpu")])
    experts = SharedExperts(MixtureModel(Mixture()), world)
    try:
        experts.room_for(Damaged())  # type: ignore[arg-type]
    except DrivetrainError as error:
        return str(error)
    finally:
        experts.close()
    return ""


def test_what_rank_0_cannot_read_is_an_error_on_all(gloo_pool: GlooPool) -> None:
    for words in gloo_pool.run(placed_by_damaged, world=2, time_limit_seconds=60):
        assert "mixture.load is damaged" in words
        assert "use another" in words


def test_a_single_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expert_parallel needs several processes"):
        run_mixture(str(tmp_path), STEPS, Mixture(), 30, EXPERT_PARALLEL)
    model = nn.Sequential(MixtureOfExperts(4, 2, 4))
    parts = StrategyParts(model, mixture_loss, sgd(model.parameters()))
    strategy = ExpertParallelStrategy(World())
    with pytest.raises(DrivetrainError, match="several processes"):
        strategy.prepare(parts, Trial(None, 1))


costs = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=12)


@given(costs, st.lists(st.floats(0.5, 4), min_size=1, max_size=4))
def test_placement_is_near_the_best(found_costs: list[float], capabilities: list[float]) -> None:
    """The dearest first, to whoever is done soonest: no rank is left waiting by more than one expert."""
    placement = place(found_costs, capabilities)
    assert len(placement) == len(found_costs)
    assert set(placement) <= set(range(len(capabilities)))
    if len(set(found_costs)) <= 1:
        return
    loads = [0.0] * len(capabilities)
    for cost, rank in zip(found_costs, placement, strict=True):
        loads[rank] += cost
    even = sum(found_costs) / sum(capabilities)
    slowest = max(load / capability for load, capability in zip(loads, capabilities, strict=True))
    assert slowest <= even + max(found_costs) / min(capabilities) + 1e-9


def test_equal_experts_on_equal_ranks_are_neighbours() -> None:
    assert place([1.0] * 5, [1.0] * 2) == (0, 0, 1, 1, 1)
    assert place([1.0] * 2, [1.0] * 3) == (1, 2)
    assert place([1.0] * 6, [2.0, 1.0]).count(0) == 4, "by what a device can do"
    assert place([9.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0]) == (0, 1, 1, 1, 0, 0), "free slots where the fewest are"


def test_a_new_expert_goes_to_the_rank_with_the_least_to_do() -> None:
    placement = (0, 0, 1, 1)
    load, active = [9, 0, 2, 0], [True, False, True, False]
    assert free_slot(load, active, active, placement, [1.0, 1.0]) == 3
    assert free_slot(load, active, active, placement, [9.0, 1.0]) == 1
    assert free_slot(load, [True] * 4, [True] * 4, placement, [1.0, 1.0]) is None
    assert costs_of([0, 0], [True, False]) == [1.0, 0.0]

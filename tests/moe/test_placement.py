"""Experts that work together share a rank, as far as none gets too much; slots that change places change nothing."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.core.hook import StepContext
from drivetrain.moe import Balance, Knowledge, Lifecycle, MixtureOfExperts, Slots
from drivetrain.moe.experts import SLACK, exchanges, place, share_together
from tests.api.jobs import Variant
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, run_mixture, the_mixture
from tests.moe.test_lifecycle import RULES
from tests.strategies.test_expert_parallel import EXPERT_PARALLEL


def symmetric(values: list[float], size: int) -> Tensor:
    """From the upper half, row by row."""
    result = torch.zeros(size, size)
    result[tuple(torch.triu_indices(size, size, 1))] = torch.tensor(values[: size * (size - 1) // 2])
    return result + result.T


def slowest(costs: list[float], ranks: Any, capabilities: list[float]) -> float:
    work = [
        sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == each) for each in range(len(capabilities))
    ]
    return max(each / power for each, power in zip(work, capabilities, strict=True))


@given(
    st.integers(2, 7).flatmap(
        lambda size: st.tuples(
            st.lists(st.floats(0, 10), min_size=size, max_size=size),
            st.lists(st.floats(0, 1), min_size=21, max_size=21),
        )
    ),
    st.lists(st.floats(0.5, 4), min_size=1, max_size=3),
)
def test_more_is_together_and_nobody_gets_too_much(
    given: tuple[list[float], list[float]], capabilities: list[float]
) -> None:
    costs, values = given
    together = symmetric(values, len(costs))
    plain = place(costs, capabilities)
    found = place(costs, capabilities, together)
    assert sorted(found) == sorted(plain), "every rank keeps as many slots"
    assert share_together(found, together) >= share_together(plain, together) - 1e-12
    assert slowest(costs, found, capabilities) <= slowest(costs, plain, capabilities) * (1 + SLACK) + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_it_is_as_good_as_trying_all_where_it_can_be_tried(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    together = symmetric(torch.rand(15, generator=generator).tolist(), 6)
    costs = [1.0] * 6
    best = max(share_together(ranks, together) for ranks in set(permutations((0, 0, 0, 1, 1, 1))))
    assert share_together(place(costs, [1.0, 1.0], together), together) >= 0.97 * best


def test_planted_teams_are_found() -> None:
    teams = [0, 1, 2, 3] * 4  # spread over all blocks
    together = torch.tensor([[0.1 if one == other else 0.001 for one in teams] for other in teams]).fill_diagonal_(0.0)
    found = place([1.0] * 16, [1.0] * 4, together)
    assert all(len({found[slot] for slot in range(16) if teams[slot] == team}) == 1 for team in range(4))
    assert exchanges([1.0] * 16, found, [1.0] * 4, together) == [], "nothing is left to gain"
    costs = [15.0] + [1.0] * 15
    heavy = place(costs, [1.0, 1.0], together)
    assert slowest(costs, heavy, [1.0, 1.0]) <= 15.0 * (1 + SLACK), "the dear one's rank gets at most one more"


def test_an_exchange_changes_no_output_and_is_its_own_inverse() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(4, 3, [8, 6, 8], k=2, num_slots=5, balance=Balance(0.1))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    tokens = torch.randn(50, 4)
    layer(tokens).square().sum().backward()
    optimizer.step()
    layer.together[0, 1] = layer.together[1, 0] = 0.3
    layer.router.bias[0] = 0.2
    slots = Slots(layer, lambda parameter: {k: v for k, v in optimizer.state[parameter].items() if v.dim()})
    everything = {**layer.state_dict(), **{f"{i}": s["exp_avg_sq"] for i, s in enumerate(optimizer.state.values())}}
    before, output = {name: value.clone() for name, value in everything.items()}, layer(tokens).detach()
    slots.exchange(0, 4)
    assert layer.expert_ids.tolist() == [-1, 1, 2, -1, 0]
    assert layer.together[4, 1] == layer.together[1, 4] == pytest.approx(0.3)
    assert torch.equal(everything["0"][4], before["0"][0])
    torch.testing.assert_close(layer(tokens).detach(), output)
    slots.exchange(0, 4)
    assert all(torch.equal(everything[name], before[name]) for name in before)


# In training


class Teams:
    """Says, once, that experts 0 and 1 work together."""

    every = 1

    def __call__(self, context: StepContext) -> None:
        if context.step == 5:
            layer = the_mixture(context.model)
            slots = {number: slot for slot, number in Slots(layer).ids.items()}
            layer.together.zero_()
            layer.together[slots[0], slots[1]] = layer.together[slots[1], slots[0]] = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Watcher(Teams):
    """Where experts are in the end."""

    every = 12

    def __call__(self, context: StepContext) -> None:
        layer = the_mixture(context.model)
        ranks, _ = layer.dispatcher.placement(layer.num_slots)
        self.found = {number: ranks[slot] for slot, number in Slots(layer).ids.items()}


def train(folder: str, shares: bool, moves: bool, micro_batch: int) -> Any:
    rules = type(RULES)(far=1e9, agreement=2.0, idle_looks=10**9, move_looks=2 if moves else 10**9)
    watcher = Watcher()
    hooks = [Teams(), Lifecycle(3, rules, knowledge=Knowledge()), watcher]
    variant = Variant(steps=12, global_batch=30, num_samples=90)
    wanted = Mixture(num_experts=4, num_slots=6)
    found = run_mixture(
        folder, variant, wanted, micro_batch, EXPERT_PARALLEL if shares else {}, changes={"hooks": hooks}
    )
    return watcher.found, found and found.losses, found and found.weights["model/mixture.expert_ids"]


def test_experts_move_to_their_team_and_nothing_is_learnt_otherwise(gloo_pool: GlooPool, tmp_path: Path) -> None:
    alone = train(str(tmp_path / "alone"), False, False, 30)
    moved = gloo_pool.run(train, str(tmp_path / "moved"), True, True, 5, world=2)[0]
    stayed = gloo_pool.run(train, str(tmp_path / "stayed"), True, False, 5, world=2)[0]
    assert stayed[0][0] != stayed[0][1], "apart at first"
    assert moved[0][0] == moved[0][1], "then together"
    assert moved[2].tolist() != stayed[2].tolist()
    np.testing.assert_allclose(moved[1], alone[1], rtol=1e-9)
    np.testing.assert_allclose(moved[1], stayed[1], rtol=1e-9)

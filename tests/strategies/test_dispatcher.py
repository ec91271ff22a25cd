"""A token's row goes once to each rank that has experts of it, and one comes back: the same as a loop over tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from drivetrain.core.world import World
from drivetrain.moe.dispatch import LocalDispatcher, Spread, copied, summed
from drivetrain.moe.experts import Experts, Routing, slots_of
from drivetrain.strategies import shared_experts
from drivetrain.strategies.shared_experts import (
    ExchangeDispatcher,
    arriving_rows,
    homes_of,
    leaving_rows,
    parcels_of,
    traffic_of,
)
from tests.gloo_pool import GlooPool

WIDTH, HIDDEN, OUTPUTS = 5, 6, 7


@dataclass(frozen=True)
class Case:
    placement: tuple[int, ...]  # the rank of each expert
    chosen: tuple[tuple[tuple[int, ...], ...], ...]  # by rank, by token: its experts
    dtype: torch.dtype = torch.float64
    recomputes: bool = False
    learns: bool = True  # routing weights and tokens have gradients
    seed: int = field(default=0, compare=False)

    @property
    def world(self) -> int:
        return len(self.chosen)

    @property
    def k(self) -> int:
        return len(next(token for tokens in self.chosen for token in tokens))

    def choices(self, rank: int) -> Tensor:
        return torch.tensor(self.chosen[rank], dtype=torch.int64).view(-1, self.k)


def inputs_of(case: Case) -> tuple[Experts, list[dict[str, Tensor]]]:
    """All experts; for each rank its tokens, routing weights, and the gradient of its outputs. The same everywhere."""
    torch.manual_seed(case.seed)
    experts = Experts(WIDTH, [HIDDEN] * len(case.placement), OUTPUTS, kind="gated", activation="silu").to(case.dtype)
    exact = torch.promote_types(case.dtype, torch.float32)
    parts = [
        {
            "tokens": torch.randn(len(tokens), WIDTH, dtype=case.dtype),
            "weights": torch.rand(len(tokens), case.k, dtype=exact),
            "upstream": torch.randn(len(tokens), OUTPUTS, dtype=case.dtype),
        }
        for tokens in case.chosen
    ]
    return experts, parts


def ran(
    dispatcher: Any, experts: Experts, part: dict[str, Tensor], chosen: Tensor, case: Case
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients: of what a rank has for itself, and of its experts."""
    tokens, weights = (part[name].clone().requires_grad_(case.learns) for name in ("tokens", "weights"))
    logits = tokens.new_zeros(len(tokens), len(case.placement))

    def call(tokens: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = dispatcher(experts, tokens, Routing(chosen, weights, logits))
        return result

    output = checkpoint(call, tokens, weights, use_reentrant=False) if case.recomputes else call(tokens, weights)
    assert output.dtype == tokens.dtype
    output.backward(part["upstream"])
    own = {"output": output.detach()}
    if case.learns:
        assert tokens.grad is not None
        assert weights.grad is not None
        own |= {"tokens": tokens.grad, "weights": weights.grad}
    of_experts = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in experts.named_parameters()}
    return own, of_experts


@contextmanager
def watched() -> Iterator[list[tuple[int, int]]]:
    """(width, number) of the rows of every exchange that a rank sends, to itself too."""
    seen: list[tuple[int, int]] = []
    real = shared_experts._exchanged

    def seeing(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        seen.append((rows.shape[1], sum(sent)))
        return real(rows, sent, received, group)

    with mock.patch.object(shared_experts, "_exchanged", seeing):
        yield seen


def dispatch(case: Case, device: str = "cpu") -> dict[str, Any]:
    """On a rank."""
    world = World.join([torch.device(device)])
    experts, parts = inputs_of(case)
    for parameter in experts.parameters():
        parameter.data = parameter.data[slots_of(case.placement, world.rank)].to(device)
    part = {name: value.to(device) for name, value in parts[world.rank].items()}
    assert world.group is not None
    dispatcher = ExchangeDispatcher(world, world.group, case.placement, [1.0] * world.size)
    with watched() as seen:
        found = ran(dispatcher, experts, part, case.choices(world.rank).to(device), case)
    own, of_experts = ({name: value.cpu() for name, value in values.items()} for values in found)
    return {"own": own, "experts": of_experts, "seen": seen}


def by_hand(case: Case) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Token by token and choice by choice, in one process."""
    experts, parts = inputs_of(case)
    result = []
    for part, chosen in zip(parts, case.chosen, strict=True):
        tokens, weights = (part[name].clone().requires_grad_() for name in ("tokens", "weights"))
        rows = []
        for token, shares, slots in zip(tokens, weights, chosen, strict=True):
            row = torch.zeros(OUTPUTS, dtype=case.dtype)
            for share, slot in zip(shares, slots, strict=True):
                gate, up = (experts.w_in[slot] @ token + experts.b_in[slot]).chunk(2)  # type: ignore[index]
                hidden = torch.nn.functional.silu(gate) * up
                row = row + share * (experts.w_out[slot] @ hidden + experts.b_out[slot])  # type: ignore[index]
            rows.append(row)
        output = torch.stack(rows) if rows else part["upstream"].new_zeros(0, OUTPUTS)
        if rows:
            output.backward(part["upstream"])
        found = {"output": output.detach()}
        for name, value in (("tokens", tokens), ("weights", weights)):
            found[name] = torch.zeros_like(value) if value.grad is None else value.grad
        result.append(found)
    of_experts = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in experts.named_parameters()}
    return result, of_experts


def check(case: Case, answers: list[dict[str, Any]]) -> None:
    own, of_experts = by_hand(case)
    limit = 1e-12 if case.dtype == torch.float64 else 1e-5
    for rank, answer in enumerate(answers):
        for name, value in answer["own"].items():
            assert torch.allclose(value, own[rank][name], rtol=limit, atol=limit), (rank, name)
        for name, value in answer["experts"].items():
            expected = of_experts[name][slots_of(case.placement, rank)]
            assert torch.allclose(value, expected, rtol=limit, atol=limit), (rank, name)


def rows_wanted(case: Case) -> list[int]:
    """Distinct (token, rank) pairs, by the rank that sends."""
    return [sum(len({case.placement[slot] for slot in token}) for token in tokens) for tokens in case.chosen]


TOGETHER = (((0, 1), (1, 0)), ((2, 3), (0, 1), (3, 2)))
SPREAD = (((0, 2), (3, 1)), ((2, 1), (0, 3), (3, 0)))
CASES = {
    "2 ranks, k 1": Case((0, 0, 1, 1), (((0,), (3,), (2,)), ((1,), (1,)))),
    "2 ranks, all of a token on one": Case((0, 0, 1, 1), TOGETHER),
    "2 ranks, each token on both": Case((0, 0, 1, 1), SPREAD),
    "2 ranks, none of a rank's own": Case((1, 1, 0, 0), (((0, 1), (1, 0)), ((2, 3), (3, 2)))),
    "3 ranks, k 3, 1 to 3 experts on a rank": Case(
        (0, 0, 0, 1, 1, 2), (((0, 1, 2), (0, 3, 5), (3, 0, 4)), ((5, 4, 3), (2, 0, 1)), ((1, 5, 0),))
    ),
    "3 ranks, skew that leaves ranks empty": Case((0, 1, 1, 2), (((1, 2), (2, 1)), ((1, 2),), ((2, 1), (1, 2)))),
    "4 ranks, one without tokens, one without experts": Case(
        (0, 2, 2, 3, 3), (((1, 2), (3, 0)), (), ((4, 3), (2, 0), (1, 4)), ((0, 1),))
    ),
    "4 ranks, one expert each": Case((3, 2, 1, 0), (((0, 1), (2, 3)), ((1, 3),), ((2, 0),), ((3, 2), (1, 0)))),
    "4 ranks, all experts on the last": Case((3, 3, 3), (((0, 1, 2),), ((2, 1, 0),), ((1, 0, 2),), ((0, 2, 1),))),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_a_loop_over_tokens(gloo_pool: GlooPool, name: str) -> None:
    case = CASES[name]
    answers = gloo_pool.run(dispatch, case, world=case.world)
    check(case, answers)


def test_recomputed_and_without_gradients_of_what_comes_in(gloo_pool: GlooPool) -> None:
    once = CASES["3 ranks, k 3, 1 to 3 experts on a rank"]
    for changes in ({"recomputes": True}, {"learns": False}):
        case = Case(once.placement, once.chosen, **changes)  # type: ignore[arg-type]
        check(case, gloo_pool.run(dispatch, case, world=case.world))


@pytest.mark.parametrize("name", CASES)
def test_a_row_goes_once_to_each_rank(gloo_pool: GlooPool, name: str) -> None:
    """And one comes back; so do their gradients. What else travels is a few numbers for each choice."""
    case = CASES[name]
    wanted, choices = rows_wanted(case), [len(tokens) * case.k for tokens in case.chosen]
    seen = [answer["seen"] for answer in gloo_pool.run(dispatch, case, world=case.world)]
    forward = [dict(reversed(found))[WIDTH] for found in seen]
    assert forward == wanted
    backward = [[number for width, number in found if width == OUTPUTS][1] for found in seen]
    assert backward == wanted, "the gradients of the results go where the rows went"
    assert all(sum(width in (WIDTH, OUTPUTS) for width, _ in found) == 4 for found in seen)
    small = [[(width, number) for width, number in found if width not in (WIDTH, OUTPUTS)] for found in seen]
    if case.k == 1 or max(map(case.placement.count, case.placement)) == 1:
        assert not any(small), "where no row has two experts, nothing has to be said of it"
    else:
        assert [found[0] for found in small] == [(4, number) for number in choices], "weight and code, 8 bytes each"
        assert [width for found in small for width, _ in found[1:]] == [1] * case.world, "gradients of the weights"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(2, 4))
    num_experts = draw(st.integers(1, 7))
    placement = tuple(draw(st.integers(0, world - 1)) for _ in range(num_experts))
    k = draw(st.integers(1, min(3, num_experts)))
    tokens = st.lists(st.permutations(range(num_experts)).map(lambda order: tuple(order[:k])), max_size=6).map(tuple)
    chosen = tuple(draw(tokens) for _ in range(world))
    if not any(chosen):
        chosen = ((tuple(range(k)),), *chosen[1:])
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    return Case(placement, chosen, dtype, recomputes=draw(st.booleans()), seed=draw(st.integers(0, 99)))


@settings(max_examples=40)
@given(case=cases())
def test_any_placement_and_any_choice(gloo_pool: GlooPool, case: Case) -> None:
    answers = gloo_pool.run(dispatch, case, world=case.world)
    check(case, answers)
    assert [dict(reversed(answer["seen"]))[WIDTH] for answer in answers] == rows_wanted(case)


def many(world: int, placement: tuple[int, ...], dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(1)
    chosen = tuple(
        tuple(tuple(torch.randperm(len(placement), generator=generator)[:3].tolist()) for _ in range(50))
        for _ in range(world)
    )
    return Case(placement, chosen, dtype)


def test_the_same_bits_each_time(gloo_pool: GlooPool) -> None:
    case = many(3, (0, 0, 0, 1, 1, 2, 2), torch.float32)
    one, other = (gloo_pool.run(dispatch, case, world=3) for _ in range(2))
    for ours, theirs in zip(one, other, strict=True):
        for kind in ("own", "experts"):
            assert all(torch.equal(ours[kind][name], theirs[kind][name]) for name in theirs[kind])


def test_what_bf16_rounds_more_than_one_process(gloo_pool: GlooPool) -> None:
    """Where one rank has all experts of a token, nothing. Otherwise a sum of each rank, once, when it is sent back."""
    together = many(2, (1,) * 6, torch.bfloat16)
    spread = many(2, (0, 0, 0, 1, 1, 1), torch.bfloat16)
    experts, parts = inputs_of(together)
    local = LocalDispatcher("loop")
    weighed = [ran(local, experts, part, together.choices(rank), together)[0] for rank, part in enumerate(parts)]
    for rank, answer in enumerate(gloo_pool.run(dispatch, together, world=2)):
        assert torch.equal(answer["own"]["output"], weighed[rank]["output"])
        assert torch.equal(answer["own"]["weights"], weighed[rank]["weights"])
    for rank, answer in enumerate(gloo_pool.run(dispatch, spread, world=2)):
        # A gradient of a weight is a product of what both have: it is not rounded differently.
        assert torch.equal(answer["own"]["weights"], weighed[rank]["weights"])
        for name in ("output", "tokens"):
            ours, theirs = (found[name].float() for found in (answer["own"], weighed[rank]))
            assert not torch.equal(ours, theirs), "a rounding in between is seen, or nothing was rounded in between"
            assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()


# The parts


class NoWaits(TorchDispatchMode):
    """Refuses whatever a device would have to tell the host before it can go on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        by_numbers = func is torch.ops.aten.index.Tensor and all(index.dtype != torch.bool for index in args[1])
        assert not depends or by_numbers or kwargs.get("output_size") is not None, f"the host waits for {func}"
        return func(*args, **kwargs)


def test_the_host_waits_for_nothing_but_the_counts() -> None:
    placement = (0, 0, 1, 1, 1)
    homes = homes_of(placement, [2, 3])
    choices = [torch.rand(9, 5).topk(3).indices for _ in range(2)]
    with NoWaits():
        parcels = [parcels_of(chosen, homes, 2) for chosen in choices]
    table = torch.stack([each.counts for each in parcels])  # what ranks gather
    traffic = traffic_of(table.tolist(), 0, 3)
    parts = [each.codes.split(traffic_of(table.tolist(), rank, 3).choices_sent)[0] for rank, each in enumerate(parcels)]
    rows = torch.randn(9, 4, requires_grad=True)
    with NoWaits():
        leaving = leaving_rows(parcels[0], table[0], traffic)
        order, arriving = arriving_rows(torch.cat(parts), table[:, traffic.here], traffic, 2)
        summed(copied(rows, leaving), leaving, torch.float32).sum().backward()
        copies = copied(torch.randn(sum(traffic.rows_received), 4, requires_grad=True), arriving)
        summed(copies, arriving, torch.float32, torch.rand(len(order.pairs), requires_grad=True)).sum().backward()
    with pytest.raises(AssertionError, match="the host waits"), NoWaits():
        torch.ones(3).nonzero()


def ragged() -> Spread:
    """Four items with 2, 1, 3, 1 copies, which stand in any order."""
    holders = torch.tensor([0, 1, 2, 3, 0, 2, 2])  # first copies, second ones, third ones
    places = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    items = torch.empty_like(holders)
    items[places] = holders
    return Spread(items, places, (4, 2, 1))


def test_copies_and_their_sums() -> None:
    spread = ragged()
    torch.manual_seed(0)
    items = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    copies = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(copied(items, spread), items[spread.items])
    plain = torch.zeros(4, 3, dtype=torch.float64).index_add(0, spread.items, copies)
    assert torch.allclose(summed(copies, spread, torch.float64), plain, rtol=1e-15)
    weighed = torch.zeros(4, 3, dtype=torch.float64).index_add(0, spread.items, copies * weights[:, None])
    assert torch.allclose(summed(copies, spread, torch.float64, weights), weighed, rtol=1e-15)
    assert torch.autograd.gradcheck(lambda rows: copied(rows, spread), [items])
    assert torch.autograd.gradcheck(lambda rows: summed(rows, spread, torch.float64), [copies])
    assert torch.autograd.gradcheck(lambda *given: summed(given[0], spread, torch.float64, given[1]), [copies, weights])


def test_a_sum_takes_nothing_from_other_items() -> None:
    """Not even times 0: what is not finite stays where it is."""
    spread = ragged()
    copies = torch.ones(7, 2, dtype=torch.float64)
    copies[spread.items == 2] = torch.inf
    found = summed(copies, spread, torch.float64, torch.ones(7, dtype=torch.float64))
    assert found[:, 0].tolist() == [2.0, 1.0, torch.inf, 1.0]


def test_sums_are_rounded_once() -> None:
    """1 + 2⁻⁸ + 2⁻⁸: in bf16 each step on its own would be lost."""
    spread = Spread(torch.zeros(3, dtype=torch.int64), torch.arange(3), (1, 1, 1))
    copies = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    assert summed(copies, spread, torch.float32).item() == 1 + 2**-7
    items = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    copied(items, spread).backward(copies)
    assert items.grad is not None
    assert items.grad.item() == 1 + 2**-7

"""The exchange on a GPU: two ranks on one with gloo; one with NCCL, which takes no tensors of the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from drivetrain.core.world import World
from drivetrain.moe.dispatch import LocalDispatcher
from drivetrain.moe.experts import Experts, Routing
from drivetrain.strategies.shared_experts import ExchangeDispatcher
from tests.gloo_pool import GlooPool
from tests.strategies.test_dispatcher import CASES, check, dispatch, many

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("2 ranks")])
def test_two_ranks_on_one_gpu_equal_a_loop_over_tokens(gloo_pool: GlooPool, name: str) -> None:
    check(CASES[name], gloo_pool.run(dispatch, CASES[name], GPU, world=2))


def test_the_same_bits_each_time_on_a_gpu(gloo_pool: GlooPool) -> None:
    case = many(2, (0, 0, 0, 1, 1, 1, 1), torch.float32)
    one, other = (gloo_pool.run(dispatch, case, GPU, world=2) for _ in range(2))
    for ours, theirs in zip(one, other, strict=True):
        for kind in ("own", "experts"):
            assert all(torch.equal(ours[kind][name], theirs[kind][name]) for name in theirs[kind])


@contextmanager
def one_wait() -> Iterator[list[str]]:
    """The host waits where it asks for the counts; anywhere else, it is an error."""
    asked: list[str] = []
    real = ExchangeDispatcher._counts_of_all

    def asking(self: ExchangeDispatcher, counts: torch.Tensor) -> tuple[torch.Tensor, list[list[int]]]:
        asked.append("counts")
        torch.cuda.set_sync_debug_mode("default")
        try:
            return real(self, counts)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    with mock.patch.object(ExchangeDispatcher, "_counts_of_all", asking):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield asked
        finally:
            torch.cuda.set_sync_debug_mode("default")


def over_nccl() -> tuple[list[str], dict[str, float], dict[str, bool]]:
    """Of a rank that sends all to itself: how often the host waited; how far it is from no exchange; what is there."""
    group = dist.new_group(backend="nccl")
    device = torch.device(GPU)
    dispatcher = ExchangeDispatcher(World(device=device, group=group), group, (0,) * 6, [1.0])
    torch.manual_seed(0)
    experts = Experts(32, [64] * 6, 32, kind="gated", activation="silu", bias=False).to(device)
    tokens = torch.randn(200, 32, device=device, dtype=torch.bfloat16)
    chosen = torch.rand(200, 6, device=device).topk(3).indices
    given = torch.rand(200, 3, device=device)

    def run(dispatch: ExchangeDispatcher | LocalDispatcher) -> dict[str, torch.Tensor]:
        experts.zero_grad()
        rows, weights = tokens.clone().requires_grad_(), given.clone().requires_grad_()
        output = dispatch(experts, rows, Routing(chosen, weights, torch.zeros(200, 6, device=device)))
        output.backward(torch.ones_like(output))
        assert rows.grad is not None
        assert weights.grad is not None
        of_experts = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
        return {"output": output.detach(), "tokens": rows.grad, "weights": weights.grad, **of_experts}

    run(dispatcher)  # sets things up
    with one_wait() as asked:
        found = run(dispatcher)
    expected = run(LocalDispatcher("grouped"))
    dist.destroy_process_group(group)
    far = {name: ((found[name] - value).abs().max() / value.abs().max()).item() for name, value in expected.items()}
    return asked, far, {name: bool(value.any()) for name, value in found.items()}


def test_over_nccl_the_host_waits_once_and_all_is_as_without_an_exchange(gloo_pool: GlooPool) -> None:
    ((asked, far, present),) = gloo_pool.run(over_nccl, world=1)
    assert asked == ["counts"]
    assert far.keys() >= {"output", "tokens", "weights", "w_in", "w_out"}
    assert max(far.values()) <= 0.02, far
    assert all(present.values())

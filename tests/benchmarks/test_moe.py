"""What the mixture is measured against computes the same as it."""

import pytest
import torch
from benchmarks.contest import Circumstances
from benchmarks.moe import LoopOverExperts, LoopOverModules, Routed
from benchmarks.moe_twin import TINY, TOP, Sizes, Twin, contest, utilization
from torch import nn

from drivetrain.moe import MixtureOfExperts


@pytest.mark.parametrize("rival", [LoopOverModules, LoopOverExperts])
def test_rivals_compute_the_same(rival: type[Routed]) -> None:
    torch.manual_seed(0)
    ours = MixtureOfExperts(8, 4, 16, k=2, kind="gated")
    layers = [ours, rival(ours)]
    upstream = torch.randn(50, 8)
    tokens = [torch.arange(400.0).view(50, 8).sin().requires_grad_() for _ in layers]
    outputs = [layer(inputs) for layer, inputs in zip(layers, tokens, strict=True)]
    for output in outputs:
        output.backward(upstream)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(inputs.grad for inputs in tokens))
    norms = [torch.stack([p.grad.norm() for p in layer.parameters()]).norm() for layer in layers]
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("sizes", [TINY, Sizes()])
def test_twins_compute_as_much_for_a_token_as_is_counted(sizes: Sizes) -> None:
    with torch.device("meta"):
        dense, mixture = (Twin(sizes, is_mixture=is_mixture) for is_mixture in (False, True))
    attention = 6.0 * sizes.layers * sizes.width * sizes.length
    for model in (dense, mixture):
        linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
        routers = [part.router.weight for part in model.modules() if isinstance(part, MixtureOfExperts)]
        linear -= sum(weight.numel() for weight in routers if any(weight is one.weight for one in _linears(model)))
        experts = [part.experts for part in model.modules() if isinstance(part, MixtureOfExperts)]
        active = sum(TOP * (each.w_in[0].numel() + each.w_out[0].numel()) for each in experts)
        assert 6.0 * (linear + active) + attention == sizes.flop_per_token()


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [part for part in model.modules() if isinstance(part, nn.Linear)]


def test_a_mixture_loses_points_against_its_twin() -> None:
    half = 0.5e12 / TINY.flop_per_token()  # tokens per second that are half of one TFLOP/s
    assert utilization(TINY, half, None, 1.0) == {"mfu_percent": 50.0}
    assert utilization(TINY, half, 1.1 * half, 1.0) == {"mfu_percent": 50.0, "mfu_points_lost": 5.0}


def test_the_mixture_trains() -> None:
    found = contest(smoke=True).competitor("ours").measure(Circumstances(True, False, {"dense": 1000.0}))
    assert len(found.seconds) == 2

"""What the mixture is measured against computes the same as it."""

import pytest
import torch
from benchmarks.moe import LoopOverExperts, LoopOverModules, Routed

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

"""Fused optimizers on a GPU, against torch's plain form there."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain.core.optimizers import use_fused
from tests.core.test_optimizers import OPTIMIZERS, a_channels_last_model_goes_on_exactly, gradients_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("pattern", ["all", "late", "sparse"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_equals_plain(name: str, pattern: str) -> None:
    if pattern == "sparse" and name not in ("momentum", "dampening", "adagrad"):
        pytest.skip("plain torch takes no sparse gradient there")
    found = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(7)
        shapes = [(4, 3), (3,), (2,)]
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        parameters = [nn.Parameter(value.cuda()) for value in made]
        optimizer = OPTIMIZERS[name](parameters)
        if fused:
            use_fused(optimizer, nn.Module())
        for step in range(5):
            given = gradients_of(pattern, step, [parameter.shape for parameter in parameters])
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter)
            optimizer.step()
        found.append([parameter.detach().cpu() for parameter in parameters])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_a_skipped_first_step_leaves_no_momentum() -> None:
    """fp16 mostly begins with one: the scale is too high at first."""
    weight = nn.Parameter(torch.ones(1 << 16, device="cuda"))
    optimizer = SGD([weight], lr=1.0, momentum=0.5)
    use_fused(optimizer, nn.Module())
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    for value, expected in ((float("inf"), 1.0), (1.0, 0.0), (1.0, -1.5)):
        scaler.scale(torch.zeros(1, device="cuda"))  # it makes its scale on the device when it is first asked
        weight.grad = torch.full_like(weight, value) * scaler.get_scale()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight.detach().cpu(), torch.full((1 << 16,), expected))


def test_a_channels_last_model_goes_on_exactly(tmp_path: Path) -> None:
    a_channels_last_model_goes_on_exactly(tmp_path)

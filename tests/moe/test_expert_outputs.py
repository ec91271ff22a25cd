"""What experts say to given tokens: each on all of them, in one go, equals each by itself."""

import pytest
import torch
from torch.nn import functional

from drivetrain.core.world import World
from drivetrain.moe import MixtureOfExperts
from drivetrain.moe.mixture import agreements, outputs_of
from tests.gloo_pool import GlooPool


def made() -> tuple[MixtureOfExperts, torch.Tensor]:
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 5, [8, 12, 8, 12, 8], k=2, num_slots=7).double()
    return layer, torch.randn(6, 8, dtype=torch.float64)


def test_experts_by_themselves() -> None:
    layer, tokens = made()
    counted = layer.tally.on(torch.device("cpu")).clone()
    found = outputs_of(layer, tokens, [0, 3, 4])
    experts = layer.experts
    assert experts.b_in is not None
    assert experts.b_out is not None
    for place, slot in enumerate([0, 3, 4]):
        hidden = functional.gelu(tokens @ experts.w_in[slot].T + experts.b_in[slot])
        expected = hidden @ experts.w_out[slot].T + experts.b_out[slot]
        assert torch.allclose(found[place], expected, rtol=0, atol=1e-14)
    assert torch.equal(layer.tally.on(torch.device("cpu")), counted), "nothing is counted"


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_every_slot_at_once_is_as_one_by_one(kind: str) -> None:
    """As on a GPU, where all experts are there."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 5, [8, 12, 8, 12, 8], 6, k=2, num_slots=7, kind=kind).double()  # type: ignore[arg-type]
    tokens = torch.randn(6, 8, dtype=torch.float64)
    slots = [4, 0, 3, 6]
    assert torch.allclose(layer.experts.each(tokens)[slots], outputs_of(layer, tokens, slots), rtol=0, atol=1e-14)


def test_how_far_two_agree() -> None:
    layer, tokens = made()
    with torch.no_grad():
        for kept in layer.experts.parameters():
            kept[3] = kept[1]
        assert layer.experts.b_out is not None
        layer.experts.w_out[4], layer.experts.b_out[4] = -layer.experts.w_out[0], -layer.experts.b_out[0]
        layer.experts.w_in[4] = layer.experts.w_in[0]
        assert layer.experts.b_in is not None
        layer.experts.b_in[4] = layer.experts.b_in[0]
    table = agreements(layer, tokens, [0, 1, 3, 4], World())
    assert table[1][2] == pytest.approx(1.0)
    assert table[0][3] == pytest.approx(0.0, abs=1e-7)
    assert 0.0 < table[0][1] < 1.0


def agreed() -> list[list[float]]:
    layer, tokens = made()
    world = World.join([torch.device("cpu")])
    return agreements(layer, tokens[world.rank :: world.size], [0, 1, 2], world)


def test_over_all_ranks(gloo_pool: GlooPool) -> None:
    layer, tokens = made()
    alone = agreements(layer, tokens, [0, 1, 2], World())
    for found in gloo_pool.run(agreed, world=2):
        assert [value for row in found for value in row] == pytest.approx([value for row in alone for value in row])

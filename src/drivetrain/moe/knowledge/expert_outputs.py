"""Computes experts' outputs for given tokens, outside of steps: nothing is counted, and no noise is drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.core.isolation import evaluating
from drivetrain.core.world import World
from drivetrain.moe.layer.mixture import MixtureOfExperts
from drivetrain.moe.layer.router import Routing


def route(layer: MixtureOfExperts, tokens: Tensor) -> Routing:
    with evaluating(layer.router):
        routing: Routing = layer.router(tokens)
    return routing


def outputs(layer: MixtureOfExperts, tokens: Tensor) -> Tensor:
    """Return the outputs of the layer."""
    tokens = tokens.to(layer.experts.w_in.dtype)
    return layer.dispatcher(layer.experts, tokens, route(layer, tokens))


def outputs_of(layer: MixtureOfExperts, tokens: Tensor, slots: Sequence[int]) -> Tensor:
    """Run some experts on all the tokens, at once, whichever rank they are on: (experts, tokens, outputs)."""
    tokens = tokens.to(layer.experts.w_in.dtype)
    _, capabilities = layer.dispatcher.placement(layer.num_slots)
    if tokens.is_cuda and len(capabilities) == 1:
        return layer.experts.each(tokens)[list(slots)]
    chosen = torch.tensor(list(slots), device=tokens.device).repeat_interleave(len(tokens)).unsqueeze(1)
    weights = torch.ones(chosen.shape, dtype=torch.promote_types(tokens.dtype, torch.float32), device=tokens.device)
    rows = tokens.repeat(len(slots), 1)
    found = layer.dispatcher(layer.experts, rows, Routing(chosen, weights, rows.new_zeros(len(rows), layer.num_slots)))
    return found.view(len(slots), len(tokens), -1)


@torch.no_grad()
def agreements(layer: MixtureOfExperts, tokens: Tensor, slots: list[int], world: World) -> list[list[float]]:
    """Return 1 − |a − b| ÷ (|a| + |b|) of each pair's outputs, over all ranks' tokens: 1 if equal, 0 if opposite."""
    found = outputs_of(layer, tokens, slots).double().flatten(1)
    products = world.all_reduce(found @ found.T)
    norms = products.diagonal().clamp_min(0).sqrt()
    distances = (products.diagonal()[:, None] + products.diagonal()[None] - 2 * products).clamp_min(0).sqrt()
    table: list[list[float]] = (1 - distances / (norms[:, None] + norms[None]).clamp_min(1e-30)).tolist()
    return table

"""What experts say to given tokens, outside of steps: nothing is counted, and no noise is drawn."""

import torch
from torch import Tensor

from drivetrain.core.modes import evaluating
from drivetrain.core.world import World
from drivetrain.moe.layer import MixtureOfExperts
from drivetrain.moe.router import Routing


def route(layer: MixtureOfExperts, tokens: Tensor) -> Routing:
    with evaluating(layer.router):
        routing: Routing = layer.router(tokens)
    return routing


def outputs(layer: MixtureOfExperts, tokens: Tensor, slot: int | None = None) -> Tensor:
    """Of the layer, or of one of its experts."""
    tokens = tokens.to(layer.experts.w_in.dtype)
    routing = route(layer, tokens)
    if slot is not None:
        chosen = torch.full((len(tokens), 1), slot, device=tokens.device)
        routing = Routing(chosen, torch.ones_like(routing.weights[:, :1]), routing.logits)
    return layer.dispatcher(layer.experts, tokens, routing)


@torch.no_grad()
def agreements(layer: MixtureOfExperts, tokens: Tensor, slots: list[int], world: World) -> list[list[float]]:
    """1 − |a − b| ÷ (|a| + |b|) of the outputs of each pair, over all ranks' tokens: the same is 1, opposites are 0."""
    found = torch.stack([outputs(layer, tokens, slot) for slot in slots]).double().flatten(1)
    products = world.all_reduce(found @ found.T)
    norms = products.diagonal().clamp_min(0).sqrt()
    distances = (products.diagonal()[:, None] + products.diagonal()[None] - 2 * products).clamp_min(0).sqrt()
    table: list[list[float]] = (1 - distances / (norms[:, None] + norms[None]).clamp_min(1e-30)).tolist()
    return table

"""The layer as one would write it on a blackboard: token by token, choice by choice, in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.moe import MixtureOfExperts

ACTIVATIONS = {"gelu": functional.gelu, "relu": functional.relu, "silu": functional.silu, "tanh": torch.tanh}


def plain_expert(layer: MixtureOfExperts, weights: dict[str, Tensor], slot: int, width: int, token: Tensor) -> Tensor:
    """Only the units that an expert really has: what fills it up to the widest is not computed with."""
    experts, wide = layer.experts, layer.experts.num_hidden
    act = ACTIVATIONS[experts.activation]
    w_in, w_out = weights["experts.w_in"][slot], weights["experts.w_out"][slot][:, :width]
    b_in, b_out = weights.get("experts.b_in"), weights.get("experts.b_out")

    def into(first: int) -> Tensor:
        result = w_in[first : first + width] @ token
        return result if b_in is None else result + b_in[slot][first : first + width]

    hidden = act(into(0)) if experts.kind == "mlp" else act(into(0)) * into(wide)
    result = w_out @ hidden
    return result if b_out is None else result + b_out[slot]


def plain_forward(
    layer: MixtureOfExperts, weights: dict[str, Tensor], widths: Sequence[int], tokens: Tensor
) -> tuple[Tensor, list[list[int]]]:
    """Outputs, and whom each token chose. `weights` are float64, by the layer's own names."""
    router = layer.router
    live = [slot for slot, active in enumerate(router.active.tolist()) if active]
    outputs, choices = [], []
    for token in tokens:
        logits = torch.stack([weights["router.weight"][slot] @ token for slot in live])
        scores = logits.softmax(0) if router.scores == "softmax" else logits.sigmoid()
        bias = router.bias.double()[live] if router.uses_bias else torch.zeros(len(live))
        order = sorted(range(len(live)), key=lambda place: -(scores[place] + bias[place]).item())[: layer.k]
        shares = [scores[place] for place in order]
        if router.normalize:
            shares = [share / sum(shares) for share in shares]
        parts = [
            share * plain_expert(layer, weights, live[place], widths[live[place]], token)
            for share, place in zip(shares, order, strict=True)
        ]
        outputs.append(torch.stack(parts).sum(0))
        choices.append([live[place] for place in order])
    empty = tokens.new_zeros(0, layer.experts.num_outputs) + tokens.sum()
    return torch.stack(outputs) if outputs else empty, choices


def plain_gradients(
    layer: MixtureOfExperts, widths: Sequence[int], tokens: Tensor, upstream: Tensor
) -> dict[str, Tensor]:
    """Of Σ output × upstream, with respect to every weight and the tokens; and the output itself."""
    weights = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    inputs = tokens.detach().double().requires_grad_()
    output, _ = plain_forward(layer, weights, widths, inputs)
    values = [*weights.values(), inputs]
    found = torch.autograd.grad((output * upstream.double()).sum(), values, allow_unused=True)
    named = zip([*weights, "tokens"], values, found, strict=True)
    result = {name: torch.zeros_like(value) if grad is None else grad for name, value, grad in named}
    return {**result, "output": output.detach()}


def gradients(layer: nn.Module, tokens: Tensor, upstream: Tensor, called: Any = None) -> dict[str, Tensor]:
    """The same of the layer itself."""
    layer.zero_grad()
    inputs = tokens.detach().clone().requires_grad_()
    output = (layer if called is None else called)(inputs)
    torch.autograd.backward(output, upstream.to(output.dtype))
    result = {name: value.grad for name, value in layer.named_parameters()}
    return {
        **{name: value for name, value in result.items() if value is not None},
        "tokens": inputs.grad,
        "output": output.detach(),
    }  # type: ignore[dict-item]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, each by the largest value of what it is a part of."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, value in other.items():
        if value.numel():
            difference = (one[name].double().cpu() - value.double().cpu()).abs().max().item()
            worst = max(worst, difference / max(value.abs().max().item(), 1e-6))
    return worst

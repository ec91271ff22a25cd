"""Chooses the experts of a token, and their weights: token-choice top-k, in fp32 or better."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.core.errors import DrivetrainError

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    chosen: Tensor  # (tokens, k): slots of experts, best first
    weights: Tensor  # (tokens, k), fp32 or better
    logits: Tensor  # (tokens, slots): -inf where there is no expert


class Router(nn.Module):
    """A linear map from a token to a score for each slot.

    Slots without an active expert are never chosen: their scores are 0, and no gradient reaches their rows. `bias`
    moves the choice and not the weights; balancing sets it. Noise, in training, is drawn from torch's generators, which
    a run keys by step, rank and micro-step.
    """

    mask: Tensor  # 0 for an active expert, -inf for any other slot
    bias: Tensor

    def __init__(
        self,
        num_inputs: int,
        num_slots: int,
        k: int,
        *,
        scores: Scores = "softmax",
        normalize: bool | None = None,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        if scores not in ("softmax", "sigmoid"):
            raise DrivetrainError(f"scores is {scores!r}", remedy="'softmax' or 'sigmoid'")
        self.k, self.scores, self.noise = k, scores, noise
        # The normalized weight of a single expert is always 1: the router would never learn.
        self.normalize = k > 1 if normalize is None else normalize
        self.weight = nn.Parameter(torch.empty(num_slots, num_inputs))
        bound = num_inputs**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        self.register_buffer("mask", torch.zeros(num_slots))
        self.register_buffer("bias", torch.zeros(num_slots))
        self.uses_bias = False

    def forward(self, tokens: Tensor) -> Routing:
        dtype = torch.promote_types(torch.promote_types(tokens.dtype, self.weight.dtype), torch.float32)
        logits = functional.linear(tokens.to(dtype), self.weight.to(dtype))
        if self.noise and self.training:
            logits = logits + self.noise * torch.randn_like(logits)
        logits = logits + self.mask
        ranked = logits
        if self.uses_bias:
            ranked = self.score(logits.detach()) + self.bias + self.mask
        chosen = ranked.topk(self.k, -1).indices
        return Routing(chosen, self._weights(logits, chosen), logits)

    def score(self, logits: Tensor) -> Tensor:
        """Return the scores, (tokens, slots): 0 where there is no expert."""
        return logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()

    @property
    def active(self) -> Tensor:
        return self.mask == 0

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.scores == "softmax" and self.normalize:
            return logits.gather(1, chosen).softmax(-1)  # the same as scores over their sum, in half the kernels
        weights = self.score(logits).gather(1, chosen)
        if self.normalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)  # all of them may underflow
        return weights

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bias = self.bias.float()  # steps of a thousandth vanish in bf16
        return self

"""The networks that are compared: a dense one, and mixtures of networks of its kind; pixels in, class logits out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.core.hook import StepContext
from drivetrain.moe import Balance, MixtureOfExperts, mixtures_in

SMALL = 256  # pixels; up to here all experts at once are quicker than one by one, on a CPU too


class Dense(nn.Module):
    """A network of one hidden layer: an expert's form, wider."""

    def __init__(self, num_pixels: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(num_pixels, hidden), nn.Linear(hidden, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.out(functional.gelu(self.into(pixels)))
        return logits


class Mixture(nn.Module):
    """A mixture with whole networks as experts, so that a later task could spoil only the routing for all of them.

    `by_nearness`: a sample goes to the experts whose centroids are nearest, and no gradient moves that choice.
    """

    def __init__(
        self,
        num_pixels: int,
        hidden: int,
        num_classes: int,
        num_experts: int,
        num_slots: int,
        *,
        k: int,
        by_nearness: bool,
    ) -> None:
        super().__init__()
        self.by_nearness = by_nearness
        self.mixture = MixtureOfExperts(
            num_pixels + by_nearness,  # an input that is always 1 lets a linear router rank by distance
            num_experts,
            hidden,
            num_classes,
            k=k,
            num_slots=num_slots,
            normalize=True if by_nearness else None,
            balance=Balance(bias_rate=0.0 if by_nearness else 1e-3),
            way="dense" if num_pixels <= SMALL else "auto",
        )
        self.mixture.router.weight.requires_grad_(not by_nearness)

    def forward(self, pixels: Tensor) -> Tensor:
        if self.by_nearness:
            pixels = functional.pad(pixels, (0, 1), value=1.0)
        logits: Tensor = self.mixture(pixels)
        return logits


class RankByNearness:
    """A hook that makes routers rank experts by the distance of their centroids, after hooks that move centroids.

    |x|² − |x − c|² = 2 c·x − |c|² is linear in x: it is the router's row of the expert whose centroid is c.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    @torch.no_grad()
    def __call__(self, context: StepContext) -> None:
        for layer in mixtures_in(context.model).values():
            centroids = layer.centroids[:, :-1]
            layer.router.weight[:, :-1] = 2 * centroids
            layer.router.weight[:, -1] = -centroids.square().sum(1)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def num_experts_in(model: nn.Module) -> int:
    return sum(int(layer.router.active.sum()) for layer in mixtures_in(model).values())

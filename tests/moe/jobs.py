"""A small job whose model has a mixture of experts in the middle, for one process or many."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.moe import Balance, MixtureOfExperts, mixtures_in
from tests.api.jobs import Trained, Variant, run
from tests.api.test_resume import CrashingLoss, PlantedError


@dataclass(frozen=True)
class Mixture:
    """What a test varies of the model."""

    num_experts: int = 5
    k: int = 2
    num_slots: int | None = None
    balance: Balance = field(default_factory=lambda: Balance(1e-2, 1e-2, 1e-3))
    skewed: bool = False  # all tokens prefer the first experts
    kind: str = "gated"
    dtype: torch.dtype = torch.float64


class MixtureModel(nn.Module):
    def __init__(self, wanted: Mixture) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.mixture = MixtureOfExperts(
            8,
            wanted.num_experts,
            [8 + 4 * (number % 2) for number in range(wanted.num_experts)],
            k=wanted.k,
            kind=wanted.kind,  # type: ignore[arg-type]
            balance=wanted.balance,
            num_slots=wanted.num_slots,
            bias=True,
        )
        self.last = nn.Linear(8, 4)
        if wanted.skewed:
            with torch.no_grad():
                self.first.bias += 3
                self.mixture.router.weight[: wanted.k] += 3

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        result: Tensor = self.last(torch.tanh(hidden + self.mixture(hidden)))
        return result


def mixture_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def run_mixture(
    folder: str,
    variant: Variant,
    wanted: Mixture,
    micro_batch: int | None,
    settings: dict[str, Any] | None = None,
    crash_at_call: int = 0,
    changes: dict[str, Any] | None = None,
) -> Trained | None:
    """The main rank returns what came of it; None if it crashed at that call of the loss."""
    # What counts its calls cannot be captured: only where something is to crash.
    loss = CrashingLoss(mixture_loss, crash_at_call) if crash_at_call else mixture_loss
    given = dict(settings or {})
    gpu_mode = given.pop("gpu_mode", "cpu")
    try:
        return run(
            folder,
            variant,
            micro_batch,
            gpu_mode=gpu_mode,
            settings=given,
            model=lambda: MixtureModel(wanted).to(wanted.dtype),
            loss=loss,
            **(changes or {}),
        )
    except PlantedError:
        return None


def the_mixture(model: nn.Module) -> MixtureOfExperts:
    (layer,) = mixtures_in(model).values()
    return layer

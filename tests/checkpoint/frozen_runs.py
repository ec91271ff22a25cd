"""Runs of a model with a frozen backbone, a low-rank adapter and, if wanted, a teacher that follows the adapter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from drivetrain import StepContext
from tests.api.jobs import Trained, Variant, run, vector_loss
from tests.api.test_resume import CrashingLoss, PlantedError

WIDTH, RANK = 256, 32
VARIANT = Variant("mlp", torch.float32, global_batch=16, steps=9, num_samples=60, save_every=3)


class Adapted(nn.Module):
    """`backbone` is frozen, and one of its tensors has two names. `adapter` and `head` are trained. A buffer counts."""

    def __init__(self, with_teacher: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.backbone[2].weight  # type: ignore[assignment]
        self.backbone.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))
        self.num_forwards: Tensor
        self.teacher = nn.Linear(WIDTH, 4).requires_grad_(False) if with_teacher else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.num_forwards += 1
        hidden = self.backbone(inputs)
        hidden = torch.tanh(hidden + self.adapter(hidden) + self.tied(hidden))
        result: Tensor = self.head(hidden)
        return result if self.teacher is None else result + 0.1 * self.teacher(hidden)


class Hook:
    every = 1

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class FollowHead(Hook):
    """A momentum teacher, moved where torch does not see it."""

    def __call__(self, context: StepContext) -> None:
        model: Any = context.model
        model.teacher.weight.data.lerp_(model.head.weight.data, 0.1)


class ChangeAt(Hook):
    """Changes a frozen weight after one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, context: StepContext) -> None:
        if context.step == self.step:
            model: Any = context.model
            model.backbone[0].bias.data.add_(1)


def run_adapted(
    folder: str, strategy: str = "single", at_call: int = 0, hooks: str = "", **settings: Any
) -> Trained | None:
    """Trains in this world, until the loss is called for that time. Returns what came of it; None if it was stopped."""
    variant, loss = VARIANT, CrashingLoss(vector_loss, at_call)
    made = {"teacher": [FollowHead()], "change": [ChangeAt(4)]}.get(hooks, [])
    try:
        return run(
            folder,
            variant,
            4,
            settings={"parallel_strategy": strategy, **settings},
            model=lambda: Adapted(with_teacher=hooks == "teacher"),
            loss=loss,
            hooks=made,
            ema=0.9,
        )
    except PlantedError:
        return None


# What the checkpoints of format 1 in tests/fixtures were written with


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 6)
        self.backbone.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(torch.tanh(self.backbone(inputs)))).squeeze(1)
        return result


class OldData(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(4.0) * (index % 5) - index / 7, torch.tensor(float(index % 3))


def old_loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()

"""Jobs whose steps leave weights unused, for the ranks of a pool; and the same as a plain loop."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.moe import MixtureOfExperts
from tests.api.jobs import Trained, read
from tests.strategies.fsdp_runs import Block

STEPS, BATCH = 6, 8


class Rare(nn.Module):
    """A branch that only some samples take, a number that fsdp leaves whole on every rank among its weights; and a
    block, gathered by all ranks together, that only some steps use."""

    def __init__(self, mixture: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.mixture = MixtureOfExperts(6, 4, 8, k=1, kind="mlp", num_outputs=6) if mixture else None
        self.branch = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.out = nn.Linear(6, 1)
        self.double()

    def forward(self, inputs: Tensor, rare: Tensor) -> Tensor:
        hidden = self.blocks[0](self.first(inputs))
        if (rare == 1).any():
            hidden = torch.where(rare[:, None] == 1, self.branch(hidden) * self.scale, hidden)
        if (rare == 2).all():
            hidden = self.blocks[1](hidden)
        result: Tensor = self.out(hidden)
        return result


class RareMixture(Rare):
    """The mixture runs in some steps only, then on all ranks."""

    def __init__(self) -> None:
        super().__init__(mixture=True)

    def forward(self, inputs: Tensor, rare: Tensor) -> Tensor:
        hidden = self.branch(self.blocks[1](self.blocks[0](self.first(inputs)))) * self.scale
        if (rare == 2).all():
            assert self.mixture is not None
            hidden = hidden + self.mixture(hidden)
        result: Tensor = self.out(hidden)
        return result


def samples(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(STEPS * BATCH, 6, generator=generator, dtype=torch.float64)
    rare = torch.zeros(STEPS, BATCH, dtype=torch.long)
    if kind == "branch":
        rare[1, 6] = rare[3, 1] = 1  # one rank uses the branch; in the other steps none does
    rare[2] = rare[4] = 2
    return TensorDataset(inputs, rare.flatten(), inputs.sum(1, keepdim=True))


def made(kind: str) -> nn.Module:
    torch.manual_seed(2)
    return Rare() if kind == "branch" else RareMixture()


def optimizer(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.2)


def loss(model: Any, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0], batch[1]), batch[2])


def plain_weights(kind: str) -> dict[str, Any]:
    model, data = made(kind), samples(kind)
    stepped = optimizer(model.parameters())
    for step in range(STEPS):
        stepped.zero_grad()
        loss(model, data[step * BATCH : (step + 1) * BATCH]).backward()
        stepped.step()
    return {f"model/{name}": value.detach().numpy() for name, value in model.named_parameters()}


def run_rare(folder: str, kind: str, settings: dict[str, Any]) -> Trained | None:
    given = {"find_unused_parameters": True, "batch_size": 2, **settings}
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, **given)
    job = dt.Job(
        name="rare",
        model=lambda: made(kind),
        data=samples(kind),
        loss=loss,
        optimizer=optimizer,
        global_batch=BATCH,
        epochs=1,
        shuffle=False,
    )
    result = dt.train(job, config, quiet=True)
    return read(result.folder) if result.is_main else None


def run_at_the_end(folder: str) -> None:
    """Train two steps with a branch that the last one leaves out."""
    inputs, _, targets = samples("branch")[: 2 * BATCH]
    rare = (torch.arange(2 * BATCH) < BATCH).long()
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False)
    job = dt.Job(
        name="end",
        model=WithoutBlock,
        data=TensorDataset(inputs, rare, targets),
        loss=loss,
        optimizer=optimizer,
        global_batch=BATCH,
        epochs=1,
        shuffle=False,
        checkpoint_every=1,
    )
    dt.train(job, config, quiet=True)


class WithoutBlock(Rare):
    """The branch is all that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[1]


class Alternating(nn.Module):
    """Both branches have the same shape; which one a rank takes depends on its rank from the second call on."""

    def __init__(self, from_call: int) -> None:
        super().__init__()
        self.rank, self.calls, self.from_call = World.join([torch.device("cpu")]).rank, 0, from_call
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 1)
        self.double()

    def forward(self, inputs: Tensor, _: Tensor) -> Tensor:
        self.calls += 1
        chosen = self.rank % 2 if self.calls >= self.from_call else 0
        result: Tensor = self.out(self.branches[chosen](inputs))
        return result


def run_alternating(folder: str, from_call: int) -> None:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, parallel_strategy="fsdp")
    job = dt.Job(
        name="other",
        model=lambda: Alternating(from_call),
        data=samples("branch"),
        loss=loss,
        optimizer=optimizer,
        global_batch=BATCH,
        epochs=1,
        shuffle=False,
    )
    dt.train(job, config, quiet=True)

"""Batch normalisation on ranks and in micro-batches, where a step does not divide: against plain torch in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.config import configure
from tests.api.jobs import Trained, read
from tests.gloo_pool import GlooPool

X = torch.randn(23, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(23) % 3
GLOBAL_BATCH = 10


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def run_job(folder: str, num_samples: int, micro_batch: int) -> Trained | None:
    job = dt.Job(
        name="bn",
        model=make_model,
        data=TensorDataset(X[:num_samples], Y[:num_samples]),
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        global_batch=GLOBAL_BATCH,
        epochs=2,
        shuffle=False,
    )
    config = configure(output_dir=folder, gpu_mode="cpu", batch_size=micro_batch, report=False)
    result = dt.train(job, config, quiet=True)
    return read(result.folder) if result.is_main else None


def plain_loop(steps: list[list[list[int]]]) -> tuple[list[float], dict[str, Any]]:
    """Steps as lists, per rank, of the sizes of forwards. Running statistics are those of the first rank."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        start = 0
        for ranks in steps:
            total = sum(map(sum, ranks))
            optimizer.zero_grad()
            loss_of_step = 0.0
            kept: list[Tensor] = []
            for number, sizes in enumerate(ranks):
                for size in sizes:
                    rows = slice(start, start + size)
                    part = loss(model, (X[rows], Y[rows])) * (size / total)
                    part.backward()
                    loss_of_step += part.item()
                    start += size
                if number == 0:
                    kept = [buffer.clone() for buffer in model.buffers()]
                for buffer, value in zip(model.buffers(), kept, strict=True):
                    buffer.copy_(value)
            optimizer.step()
            losses.append(loss_of_step)
    return losses, {f"model/{name}": value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("world", "num_samples", "micro_batch", "steps"),
    [
        (2, 22, 5, [[[5], [5]], [[5], [5]], [[2], []]]),  # one sample for each of two ranks
        (2, 23, 5, [[[5], [5]], [[5], [5]], [[3], []]]),
        (2, 14, 4, [[[4, 4], [2]], [[4], []]]),
        (2, 14, 3, [[[3, 3], [2, 2]], [[2], [2]]]),  # not three threes and one
        (3, 15, 2, [[[2, 2], [2, 2], [2]], [[2], [3], []]]),  # nothing to spare: one micro-batch is larger
        (1, 20, 3, [[[3, 3, 2, 2]], [[3, 3, 2, 2]]]),
    ],
)
def test_no_forward_sees_one_sample(
    gloo_pool: GlooPool,
    tmp_path: Path,
    world: int,
    num_samples: int,
    micro_batch: int,
    steps: list[list[list[int]]],
) -> None:
    losses, weights = plain_loop(steps)
    trained = gloo_pool.run(run_job, str(tmp_path), num_samples, micro_batch, world=world)[0]
    assert trained.losses == pytest.approx(losses, abs=1e-12)
    for name, value in weights.items():
        assert trained.weights[name] == pytest.approx(value, abs=1e-12), name

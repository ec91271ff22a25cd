"""The loss over a large vocabulary in chunks, as torch has it: in a job it is the plain loss, and memory says when."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.run.memory import needs_of
from tests.gloo_pool import GlooPool

KINDS, WIDTH, LENGTH, SAMPLES = 53, 8, 6, 12
needs_torch = pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="this torch has none")


class Model(nn.Module):
    """Returns the sum of the losses of its tokens: with shards, weights are whole only inside of forward."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        self.chunk = chunk
        self.tokens, self.head = nn.Embedding(KINDS, WIDTH), nn.Linear(WIDTH, KINDS, bias=False)
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, wanted = self.tokens(tokens).tanh().flatten(0, 1), targets.flatten()
        if self.chunk is None:
            return functional.cross_entropy(self.head(hidden), wanted, ignore_index=-1, reduction="sum")
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk, allow_retain_graph=True)
        found: Tensor = functional.linear_cross_entropy(
            hidden, self.head.weight, wanted, ignore_index=-1, reduction="sum", options=options
        )
        return found


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, KINDS, (SAMPLES, LENGTH + 1), generator=drawn)
    targets = tokens[:, 1:].clone()
    targets[::3, 2:] = -1
    return tokens[:, :-1].contiguous(), targets


def loss_of(model: nn.Module, batch: Any) -> dt.LossSum:
    return dt.LossSum(model(*batch), (batch[1] >= 0).sum())


def plain_loop(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses, (tokens, targets) = Model(None), list[float](), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(tokens, targets) / (targets >= 0).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train(folder: str, strategy: str) -> list[float]:
    job = dt.Job(
        name="chunked",
        model=lambda: Model(5),
        data=TensorDataset(*data()),
        loss=loss_of,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.1),
        global_batch=SAMPLES,
        max_steps=6,
    )
    config = dt.configure(
        output_dir=folder, gpu_mode="cpu", batch_size=4, num_workers=0, report=False, parallel_strategy=strategy
    )
    losses: list[float] = []
    dt.train(job, config, quiet=True)
    for line in (Path(folder) / "chunked" / "steps.jsonl").read_text().splitlines():
        losses.append(float(json.loads(line)["loss"]))
    return losses


@needs_torch
@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_in_a_job_it_is_the_plain_loss(gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int) -> None:
    found = gloo_pool.run(train, str(tmp_path), strategy, world=world)[0]
    assert found == pytest.approx(plain_loop(6), abs=1e-10)


@needs_torch
@pytest.mark.parametrize("compiles", [False, True])
def test_gradients_are_those_of_the_plain_loss(compiles: bool) -> None:
    torch.manual_seed(1)
    chunked, plain, batch = Model(5), Model(None), data()
    plain.load_state_dict(chunked.state_dict())
    call: Any = torch.compile(chunked, backend="aot_eager") if compiles else chunked
    found, expected = call(*batch), plain(*batch)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    for one, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kinds", "is_told"), [(8192, True), (64, False)])
def test_where_logits_take_most_of_the_memory_that_is_told(kinds: int, is_told: bool) -> None:
    tokens = torch.zeros(8, 16, dtype=torch.long)
    job = dt.Job(
        name="logits",
        model=lambda: nn.Sequential(nn.Embedding(kinds, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, kinds)),
        data=TensorDataset(tokens, tokens),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        optimizer=lambda groups: torch.optim.AdamW(groups),
        global_batch=4,
        max_steps=2,
    )
    notes = needs_of(job, job.model(), "fp32", 4, 1e12).notes  # type: ignore[operator]
    assert any("linear_cross_entropy" in note for note in notes) == is_told, notes

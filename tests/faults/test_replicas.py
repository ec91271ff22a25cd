"""Ranks that must have the same weights and moments are compared, and the odd one is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain as dt
from drivetrain import DrivetrainError
from drivetrain.core.metrics import StepRecord
from drivetrain.core.world import World
from drivetrain.run.periodic import ReplicaCheck, bit_sums
from tests.api.jobs import Variant, run
from tests.faults.events import events
from tests.gloo_pool import GlooPool
from tests.strategies.fsdp_runs import world_here

VARIANT = Variant(steps=12, save_every=12)


def trained(folder: str, inject: str, every: int) -> str:
    try:
        run(folder, VARIANT, settings={"inject": inject, "compare_replicas": every})
    except DrivetrainError as error:
        return f"{error.message} | {error.remedy}"
    return ""


@pytest.mark.parametrize(("world", "rank"), [(3, 0), (3, 2), (4, 1)])
def test_a_flipped_bit_is_found_and_its_rank_named(gloo_pool: GlooPool, tmp_path: Path, world: int, rank: int) -> None:
    answers = gloo_pool.run(trained, str(tmp_path), f"flip@6:rank{rank}", 4, world=world)
    for answer in answers:
        assert f"replicas are not equal after step 8: rank {rank} differs from the other ranks in layers.0" in answer
        assert "they were equal after step 4" in answer
    assert [row["ranks"] for row in events(tmp_path / "suite", "replicas differ")] == [[rank]]


def test_of_two_neither_is_blamed(gloo_pool: GlooPool, tmp_path: Path) -> None:
    answers = gloo_pool.run(trained, str(tmp_path), "flip@6:rank1", 4, world=2)
    assert all("after step 8: the ranks differ in layers.0" in answer for answer in answers)


def test_equal_replicas_are_equal(gloo_pool: GlooPool, tmp_path: Path) -> None:
    assert gloo_pool.run(trained, str(tmp_path), "", 2, world=3) == [""] * 3


class Centered(nn.Module):
    """Takes its shift from its first batch, as the layers of normalizing flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(3, 3), nn.Parameter(torch.zeros(3))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, batch: Tensor) -> Tensor:
        if not self.is_set:
            self.shift.data.copy_(-batch.mean(0))
            self.is_set.fill_(True)
        return self.layer(batch + self.shift)


def centered(folder: str, way: str) -> str:
    torch.manual_seed(0)
    data, model = torch.randn(16, 3), Centered()
    given = {"name": "centered", "data": data, "global_batch": 8, "max_steps": 3}
    config = dt.configure(output_dir=folder, device="cpu", auto_optimize=False)
    try:
        if way == "train":
            job = dt.Job(
                model=Centered,
                loss=lambda model, batch: model(batch).square().mean(),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                **given,
            )
            dt.train(job, config)
        else:
            teacher = nn.Linear(3, 3).requires_grad_(False)
            models = {"model": model, "teacher": teacher}
            run = dt.drive(models, torch.optim.SGD(model.parameters(), lr=0.1), config=config, **given)
            for batch in run:
                if way == "drive":
                    run.backward(model(batch).square().mean())
                else:  # a teacher that only the main process moves, which saves it
                    run.backward(model.layer(batch).square().mean() + 0 * model.shift.sum())
                    teacher.weight.data.add_(run.world.is_main)
                run.step()
    except DrivetrainError as error:
        return f"{error.message} | {error.remedy}"
    return ""


@pytest.mark.parametrize("way", ["train", "drive", "teacher"])
def test_weights_that_each_process_sets_from_its_own_samples_are_refused(
    gloo_pool: GlooPool, tmp_path: Path, way: str
) -> None:
    """Nothing compared the processes before step 100, and those of a loop never: each trained a model of its own."""
    for answer in gloo_pool.run(centered, str(tmp_path), way, world=2):
        assert ("hold different weights after step 1" in answer) == (way != "teacher")
        assert "shift" in answer or way == "teacher"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    values = torch.randn(7, 5, dtype=torch.float64).to(dtype)
    before = bit_sums({"a": values})
    as_bytes = values.view(-1).view(torch.uint8)
    for place in range(0, len(as_bytes), 3):
        for bit in range(8):
            as_bytes[place] ^= 1 << bit
            assert bit_sums({"a": values}) != before
            as_bytes[place] ^= 1 << bit
    assert bit_sums({"a": values}) == before
    assert bit_sums({"a": values.t().contiguous().t()}) == before


def settled(seconds: float) -> list[Any]:
    """How often it is compared where steps are this long."""
    told: list[Any] = []
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    check = ReplicaCheck(model, optimizer, world_here(), lambda kind, **facts: told.append(facts))
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    for step in range(1, 401):
        check.observe(StepRecord(step, 0, 1, 1.0, 1.0, 0.1, None, seconds))
    return [check.every, told]


def test_it_costs_at_most_half_a_percent(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(settled, 10.0, world=2) == [[100, []]] * 2
    (every, told), (other, _) = gloo_pool.run(settled, 1e-6, world=2)
    assert every == other > 100
    assert told[-1]["share"] <= 0.005


def test_one_process_has_no_replica() -> None:
    model = nn.Linear(2, 2)
    check = ReplicaCheck(model, torch.optim.SGD(model.parameters(), lr=0.1), World(), lambda *_, **__: None, every=1)
    check.observe(StepRecord(1, 0, 1, 1.0, 1.0, 0.1, None, 1.0))

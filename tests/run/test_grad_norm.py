"""The gradient norm in the records of a run that clips nothing, against gradients by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core.world import World
from drivetrain.data.division import SampleStream
from drivetrain.run import periodic
from drivetrain.run.periodic import FIRST, LAST, MOST_OF_NORMS, NormCadence, round_up
from drivetrain.strategies import StrategyParts
from tests.api.jobs import Variant, Vectors, make_model, run, vector_loss
from tests.gloo_pool import GlooPool

SHORT = Variant(steps=4, num_samples=40, global_batch=16)


def norms_of(folder: Path) -> dict[int, float | None]:
    rows = [json.loads(line) for line in (folder / "suite" / "steps.jsonl").read_text().splitlines()]
    return {row["step"]: row["grad_norm"] for row in rows}


def first_norm_by_hand(variant: Variant) -> float:
    """Of the first step of a plain loop, whose weights nothing has moved."""
    torch.manual_seed(variant.seed)
    model, data = make_model(variant), Vectors(variant)
    first = torch.from_numpy(SampleStream(variant.num_samples, variant.seed).samples(0, 0, variant.global_batch))
    vector_loss(model, (data.inputs[first], data.labels[first])).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_first_steps_have_their_norm(tmp_path: Path, micro_batch: int | None) -> None:
    run(str(tmp_path / "plain"), SHORT, micro_batch, clip_norm=None)
    found = norms_of(tmp_path / "plain")
    assert found[1] == pytest.approx(first_norm_by_hand(SHORT), rel=1e-9)
    run(str(tmp_path / "clipped"), SHORT, micro_batch, clip_norm=1e9)
    assert found == norms_of(tmp_path / "clipped")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_record_the_norm_of_the_whole_gradient(gloo_pool: GlooPool, tmp_path: Path, strategy: str) -> None:
    gloo_pool.run(run_on_ranks, str(tmp_path), strategy, world=2)
    assert norms_of(tmp_path)[1] == pytest.approx(first_norm_by_hand(SHORT), rel=1e-9)


def run_on_ranks(folder: str, strategy: str) -> None:
    run(folder, SHORT, 4, settings={"parallel_strategy": strategy}, clip_norm=None)


def test_the_norm_of_sparse_gradients() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    parts = StrategyParts(table, vector_loss, torch.optim.SGD(table.parameters(), lr=0.0))
    parts.norms.is_due = True
    assert parts.move(None)[0] == 0.0, "without gradients"
    table(torch.tensor([1, 1, 4])).square().sum().backward()
    dense = torch.nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
    dense(torch.tensor([1, 1, 4])).square().sum().backward()
    assert dense.weight.grad is not None
    torch.testing.assert_close(parts.move(None)[0], dense.weight.grad.norm())


def cadence(monkeypatch: pytest.MonkeyPatch, norm: float, told: list[Any]) -> tuple[NormCadence, StrategyParts]:
    monkeypatch.setattr(periodic, "norm_seconds", lambda *_, **__: norm)
    model = torch.nn.Linear(2, 2)
    parts = StrategyParts(model, vector_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    return NormCadence(parts, World(), 5, lambda words, facts: told.append((words, facts)), shares=False), parts


@pytest.mark.parametrize(("norm", "every"), [(0.5e-4, 1), (4.5e-4, 5), (4e-3, 50)])
def test_it_costs_at_most_a_hundredth(monkeypatch: pytest.MonkeyPatch, norm: float, every: int) -> None:
    told: list[Any] = []
    found, parts = cadence(monkeypatch, norm, told)
    now = 0.0
    monkeypatch.setattr(periodic.time, "perf_counter", lambda: now)
    for step in range(5, 5 + LAST + 1):
        is_over = found.begin(step)
        assert parts.norms.is_due or step == 5 + LAST, "until it is decided, each step has its norm"
        now += 0.01 + norm
    assert found.every == every
    assert norm / every <= MOST_OF_NORMS * 0.0101
    assert is_over == (every == 1)
    ((words, facts),) = told
    assert facts["every"] == every
    assert (f"every {every} steps" in words) == (every > 1)
    if every > 1:
        due = []
        for step in range(100, 100 + 2 * every):
            found.begin(step)
            due += [step + 1] if parts.norms.is_due else []
        assert len(due) == 2
        assert all(number % every == 0 for number in due)


def test_a_busy_machine_does_not_make_it_look_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take the core from most steps, and hardly ever from a norm, which is so much shorter."""
    found, _ = cadence(monkeypatch, 4.5e-4, [])
    now = 0.0
    monkeypatch.setattr(periodic.time, "perf_counter", lambda: now)
    for step in range(5, 5 + LAST + 1):
        found.begin(step)
        now += (0.01 if step % 4 == 0 else 0.1) + 4.5e-4
    assert found.every == 5


def test_a_captured_step_is_decided_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    for step_seconds, every in ((None, periodic.EVERY_CAPTURED), (1.0, 1), (1e-3, periodic.EVERY_CAPTURED)):
        found, parts = cadence(monkeypatch, 1e-4, told)
        found.settle_captured(step_seconds)
        assert found.every == every
        assert found.begin(5) == (every == 1)
        assert parts.norms.is_due == (every == 1)
        found.begin(periodic.EVERY_CAPTURED - 1)
        assert parts.norms.is_due
        assert parts.norms.is_apart == (every > 1)


def test_rounding() -> None:
    assert [round_up(number) for number in (0.2, 1.0, 1.1, 4, 6, 99, 101)] == [1, 1, 2, 5, 10, 100, 200]
    assert FIRST < LAST


def test_a_long_run_says_how_often(tmp_path: Path) -> None:
    run(str(tmp_path), Variant(steps=LAST + 12, num_samples=40, global_batch=16), clip_norm=None)
    events = [json.loads(line) for line in (tmp_path / "suite" / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "gradient norm"]
    for step, norm in norms_of(tmp_path).items():
        assert (norm is not None) == (step <= LAST or step % told["every"] == 0), step

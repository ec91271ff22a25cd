"""`dt.log` against a plain loop in float64: a step's value is that of its whole global batch, however it is divided."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from drivetrain import DrivetrainError, Job, LossSum
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.metrics import LoggedTotals, StepRecord
from drivetrain.data.division import SampleStream
from drivetrain.strategies.loss_parts import StepLog
from tests.gloo_pool import GlooPool

NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS = 45, 16, 6


def make_data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "inputs": torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 3, (NUM_SAMPLES,), generator=generator),
        "lengths": torch.randint(0, 9, (NUM_SAMPLES,), generator=generator),
    }


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    outputs = model(batch["inputs"])
    dt.log("accuracy", (outputs.argmax(1) == batch["labels"]).double().mean())
    long = batch["lengths"] > 4  # some micro-batches have none
    dt.log("margin of long", LossSum((outputs.amax(1) * long).sum(), long.sum()))
    dt.log("constant", 0.25)
    return functional.cross_entropy(outputs, batch["labels"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def make_job(**changes: Any) -> Job:
    given = {
        "name": "logs",
        "model": make_model,
        "data": make_data(),
        "loss": loss,
        "optimizer": sgd,
        "global_batch": GLOBAL_BATCH,
        "max_steps": NUM_STEPS,
        "epochs": 9,
        "seed": 4,
    }
    return Job(**{**given, **changes})


def run(folder: Path | str, job: Job | None = None, **settings: Any) -> list[dict[str, Any]]:
    given = {"device": "cpu", "precision": "fp32", "num_workers": 0, "auto_optimize": False} | settings
    result = train(job or make_job(), config=configure(output_dir=Path(folder), **given), quiet=True)
    return rows_of(result.folder)


def rows_of(folder: Path, name: str = "steps") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def plain_values() -> list[dict[str, float]]:
    """The values of each step by a plain loop over undivided global batches."""
    model, data, found = make_model(), make_data(), []
    optimizer = sgd(model.parameters())
    stream, step = SampleStream(NUM_SAMPLES, 4, shuffle=True), 0
    while step < NUM_STEPS:
        order = stream.samples(step // -(-NUM_SAMPLES // GLOBAL_BATCH), 0, NUM_SAMPLES)
        for start in range(0, NUM_SAMPLES, GLOBAL_BATCH):
            if step == NUM_STEPS:
                break
            numbers = torch.as_tensor(order[start : start + GLOBAL_BATCH])
            inputs, labels, lengths = (data[name][numbers] for name in ("inputs", "labels", "lengths"))
            outputs = model(inputs)
            long = lengths > 4
            value = functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            margin = outputs.detach().amax(1)[long].mean().item() if long.any() else math.nan
            accuracy = (outputs.argmax(1) == labels).double().mean().item()
            found.append({"loss": value.item(), "accuracy": accuracy, "margin of long": margin, "constant": 0.25})
            step += 1
    return found


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, float]]) -> None:
    assert len(rows) == len(expected)
    for row, values in zip(rows, expected, strict=True):
        for name, value in values.items():
            assert row[name] == pytest.approx(value, abs=1e-9), (row["step"], name)


@pytest.mark.parametrize("micro_batch", [16, 3])
def test_equals_the_plain_loop_in_micro_batches(tmp_path: Path, micro_batch: int) -> None:
    assert_same(run(tmp_path, batch_size=micro_batch), plain_values())


def rows_on_ranks(folder: str, strategy: str, micro_batch: int) -> list[dict[str, Any]]:
    return run(folder, parallel_strategy=strategy, batch_size=micro_batch)


@pytest.mark.parametrize(("strategy", "world", "micro_batch"), [("ddp", 2, 3), ("fsdp", 3, 2)])
def test_equals_the_plain_loop_on_several_ranks(
    tmp_path: Path, gloo_pool: GlooPool, strategy: str, world: int, micro_batch: int
) -> None:
    rows, *_ = gloo_pool.run(rows_on_ranks, str(tmp_path), strategy, micro_batch, world=world)
    assert_same(rows, plain_values())


@pytest.mark.usefixtures("no_kernels")
def test_compiled_in_one_graph_without_recompiling(tmp_path: Path) -> None:
    """The values are outputs of the compiled function: no graph break, and nothing recompiles step by step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    data = {name: value[:32] for name, value in make_data().items()}
    rows = run(tmp_path, make_job(data=data), compile=True, compile_mode="default", batch_size=16)
    assert [row["constant"] for row in rows] == [0.25] * NUM_STEPS
    assert rows[0]["accuracy"] == pytest.approx(plain_accuracy(data))
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the trial's and the run's


def plain_accuracy(data: Mapping[str, Tensor]) -> float:
    order = torch.as_tensor(SampleStream(32, 4, shuffle=True).samples(0, 0, 16))
    outputs = make_model()(data["inputs"][order])
    return (outputs.argmax(1) == data["labels"][order]).double().mean().item()


def test_validation_has_them_as_metrics(tmp_path: Path) -> None:
    data = make_data()
    valid = {name: value[:20] for name, value in data.items()}
    job = make_job(valid=valid, max_steps=3, best=dt.Aim("valid_accuracy"))
    run(tmp_path, job, batch_size=3)
    (row,) = rows_of(tmp_path / "logs", "metrics")
    assert row["valid_constant"] == 0.25
    trained = make_model()
    weights = dt.export(tmp_path / "logs", tmp_path / "weights.pt")
    trained.load_state_dict(torch.load(weights))
    outputs, long = trained(data["inputs"][:20]), data["lengths"][:20] > 4
    assert row["valid_accuracy"] == pytest.approx((outputs.argmax(1) == data["labels"][:20]).double().mean().item())
    assert row["valid_margin of long"] == pytest.approx(outputs.amax(1)[long].mean().item())


def test_hooks_log_into_the_metrics(tmp_path: Path) -> None:
    hook = dt.every(2, lambda context: dt.log("twice", 2 * context.step))
    rows = run(tmp_path, make_job(hooks=[hook]))
    assert all("twice" not in row for row in rows)
    assert [(row["step"], row["twice"]) for row in rows_of(tmp_path / "logs", "metrics")] == [(2, 4), (4, 8), (6, 12)]


def late(model: Any, batch: Any) -> Tensor:
    value = loss(model, batch)
    if (calls := getattr(model, "calls", 0)) > 3:
        dt.log("late", 1.0)
    model.calls = calls + 1
    return value


def shaped(model: Any, batch: Any) -> Tensor:
    dt.log("outputs", model(batch["inputs"]))
    return loss(model, batch)


def reserved(model: Any, batch: Any) -> Tensor:
    dt.log("lr", 1.0)
    return loss(model, batch)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (late, "the name 'late', and the first batch logged accuracy, margin of long, constant"),
        (shaped, r"dt.log\('outputs', …\) got a tensor of shape \(\d+, 3\), expected a scalar"),
        (reserved, "the name 'lr'"),
    ],
)
def test_what_cannot_be_logged_is_named(tmp_path: Path, wrong: Any, words: str) -> None:
    with pytest.raises(DrivetrainError, match=words):
        run(tmp_path, make_job(loss=wrong), batch_size=16, loss_weighting="samples")


def test_outside_a_run_nothing_happens() -> None:
    batch = {name: value[:4] for name, value in make_data().items()}
    assert loss(make_model(), batch).dim() == 0


class PlantedError(Exception):
    pass


def fail(context: dt.StepContext) -> None:
    if context.step == 4:
        raise PlantedError


def test_a_resumed_run_shows_the_same_values(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(PlantedError):
        run(tmp_path / "parts", make_job(hooks=[dt.every(1, fail)], checkpoint_every=3))
    again = run(tmp_path / "parts", make_job(hooks=[dt.every(1, lambda context: None)], checkpoint_every=3))
    for one, other in zip(whole, again, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("micro_batch", [16, 3])
def test_in_a_loop_of_ones_own(tmp_path: Path, micro_batch: int) -> None:
    model = make_model()
    given = {"device": "cpu", "precision": "fp32", "num_workers": 0, "batch_size": micro_batch}
    loop = dt.drive(
        model,
        sgd(model.parameters()),
        make_data(),
        name="logs",
        global_batch=GLOBAL_BATCH,
        max_steps=NUM_STEPS,
        seed=4,
        config=configure(output_dir=tmp_path, **given),
        quiet=True,
    )
    for batch in loop:
        outputs = loop.model(batch["inputs"])
        loop.log("accuracy", (outputs.argmax(1) == batch["labels"]).double().mean())
        long = batch["lengths"] > 4
        loop.log("margin of long", LossSum((outputs.amax(1) * long).sum(), long.sum()))
        dt.log("constant", 0.25)
        loop.backward(functional.cross_entropy(outputs, batch["labels"]))
        loop.step()
        if loop.ends_epoch:
            loop.log("score", loop.steps / 2)
    assert_same(rows_of(loop.folder), plain_values())
    assert [(row["step"], row["score"]) for row in rows_of(loop.folder, "metrics")] == [(3, 1.5), (6, 3.0)]


def test_a_value_of_one_micro_batch_is_what_was_logged() -> None:
    log = StepLog()
    for _ in range(2):
        log.add({"value": [torch.tensor(0.1, dtype=torch.float64, requires_grad=True)]}, 3)  # 0.1 * 3 / 3 is not 0.1
        assert read(log) == {"value": 0.1}
    log.add({"value": [torch.tensor(1.0)]}, 1)
    log.add({"value": [torch.tensor(4.0)]}, 2)
    assert read(log) == {"value": 3.0}
    log.add({"value": [torch.tensor(1.0)]}, 1)
    log.add({"value": [dt.LossSum(torch.tensor(12.0), 2)]}, 1)  # a mean and a sum, in two micro-batches
    assert read(log) == {"value": 13 / 3}


def test_a_truth_value_is_logged_as_a_number() -> None:
    log = StepLog()
    for _ in range(2):
        log.add({"value": [torch.tensor(True)]}, 4)
        logged = read(log)
        record = json.loads(StepRecord(1, 0, 4, 1.0, 4, 0.1, None, 0.01, logged=logged).as_json())
        assert record["value"] == 1.0


def read(log: StepLog) -> dict[str, float] | None:
    logged = log.take()
    return logged.read(logged.values.tolist()) if isinstance(logged, LoggedTotals) else logged

"""A loss of named parts against a plain loop in float64 over the undivided global batch, however steps are divided."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from drivetrain import ConfigError, DrivetrainError, Job, LossSum
from drivetrain.api.training import Result, train
from drivetrain.checkpoint import Checkpoint
from drivetrain.config import configure
from drivetrain.data.division import SampleStream
from tests.gloo_pool import GlooPool

NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS, NUM_FINDINGS = 40, 16, 6, 5
WEIGHTS = {"answer": 1.0, "findings": 0.5, "size": 2.0}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.answer, self.findings, self.size = nn.Linear(12, 4), nn.Linear(12, NUM_FINDINGS), nn.Linear(12, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(inputs)
        return self.answer(hidden), self.findings(hidden), self.size(hidden)[:, 0]


def make_data(num_samples: int = NUM_SAMPLES, seed: int = 1) -> dict[str, Tensor]:
    """Answers for some samples only, findings with missing labels, a size for every sample."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(0, 4, (num_samples,), generator=generator)
    answers[torch.rand(num_samples, generator=generator) < 0.6] = -100
    findings = torch.randint(0, 2, (num_samples, NUM_FINDINGS), generator=generator)
    findings[torch.rand(num_samples, NUM_FINDINGS, generator=generator) < 0.5] = -1
    findings[::3] = -1
    return {
        "inputs": torch.randn(num_samples, 6, generator=generator, dtype=torch.float64),
        "answers": answers,
        "findings": findings,
        "sizes": torch.randn(num_samples, generator=generator, dtype=torch.float64),
    }


def sums(model: Any, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum and count of each part, from the definitions."""
    answer, findings, size = model(batch["inputs"])
    has_answer, has_label = batch["answers"] >= 0, batch["findings"] >= 0
    logits = answer.log_softmax(1)
    chosen = logits.gather(1, batch["answers"].clamp(min=0)[:, None])[:, 0]
    each = functional.binary_cross_entropy_with_logits(
        findings, batch["findings"].clamp(min=0).double(), reduction="none"
    )
    error = (size - batch["sizes"]).square()
    return {
        "answer": (-(chosen * has_answer).sum(), has_answer.sum()),
        "findings": ((each * has_label).sum(), has_label.sum()),
        "size": (error.sum(), torch.tensor(len(error))),
    }


def count(batch: Any) -> dict[str, Any]:
    return {"answer": (batch["answers"] >= 0).sum(), "findings": (batch["findings"] >= 0).sum()}


def count_in_numbers(batch: Any) -> dict[str, Any]:
    return {name: int(value) for name, value in count(batch).items()}


def loss_of_means(model: Any, batch: Any) -> dict[str, Tensor]:
    """Means with torch's own functions: that of a batch without an answer is 0/0."""
    answer, findings, size = model(batch["inputs"])
    weight = (batch["findings"] >= 0).double()
    of_findings = functional.binary_cross_entropy_with_logits(
        findings, batch["findings"].clamp(min=0).double(), weight, reduction="sum"
    )
    return {
        "answer": functional.cross_entropy(answer, batch["answers"]),
        "findings": of_findings / weight.sum().clamp(min=1),
        "size": functional.mse_loss(size, batch["sizes"]),
    }


def loss_of_sums(model: Any, batch: Any) -> dict[str, Tensor | LossSum]:
    found = sums(model, batch)
    return {
        "answer": LossSum(*found["answer"]),
        "findings": LossSum(*found["findings"]),
        "size": found["size"][0] / found["size"][1],
    }


def loss_of_routed(model: Any, batch: Any) -> dict[str, Tensor | LossSum]:
    """A batch leaves out the parts that it has nothing of, as a model with routed heads does."""
    found = loss_of_sums(model, batch)
    there = {name for name, number in count_in_numbers(batch).items() if number}
    return {name: part for name, part in found.items() if name in there or name == "size"}


LOSSES = {"means": loss_of_means, "sums": loss_of_sums, "routed": loss_of_routed}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Heads().double()


def make_job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": "parts",
        "model": make_model,
        "data": make_data(),
        "loss": loss_of_means,
        "loss_weights": WEIGHTS,
        "count": count,
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "global_batch": GLOBAL_BATCH,
        "max_steps": NUM_STEPS,
        "seed": 3,
    }
    return Job(**{**values, **changes})


def trained(folder: Path | str, job: Job, micro_batch: int | None = None, **values: Any) -> Result:
    config = configure(output_dir=folder, gpu_mode="cpu", batch_size=micro_batch, report=False, **values)
    return train(job, config, quiet=True)


def plain_loop(
    job: Job, weights: dict[str, Any] = WEIGHTS, *, lr: float = 0.1
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Rows and weights of a loop that computes each step's loss over all its samples at once."""
    data, model = job.data, make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    stream = SampleStream(len(data["inputs"]), job.seed)
    per_epoch, rows = -(-len(data["inputs"]) // GLOBAL_BATCH), []
    for step in range(job.max_steps or 0):
        start = step % per_epoch * GLOBAL_BATCH
        stop = min(start + GLOBAL_BATCH, len(data["inputs"]))
        samples = torch.from_numpy(stream.samples(step // per_epoch, start, stop))
        found = sums(model, {name: column[samples] for name, column in data.items()})
        total, row = torch.zeros((), dtype=torch.float64), {}
        for name, (value, number) in found.items():
            if number > 0:
                weight = weights[name]
                total = total + (weight(step) if callable(weight) else weight) * value / number
                row[f"loss_{name}"] = (value / number).item()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        rows.append({"loss": total.item(), **row})
    return rows, {name: value.detach() for name, value in model.state_dict().items()}


def rows_of(folder: Path, name: str = "steps") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def weights_of(folder: Path, step: int = NUM_STEPS) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder / "checkpoints" / f"step-{step:08d}")
    return {key.removeprefix("model/"): checkpoint.read(key) for key in checkpoint.keys if key.startswith("model/")}


def assert_same(folder: Path, expected: tuple[list[dict[str, float]], dict[str, Tensor]]) -> None:
    rows, weights = expected
    found = rows_of(folder)
    assert len(found) == len(rows)
    for row, wanted in zip(found, rows, strict=True):
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value, rel=1e-9), (row["step"], name)
    for name, value in weights_of(folder, len(rows)).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("loss", "micro_batch"),
    [("means", 1), ("means", 8), ("sums", 2), ("sums", None), ("routed", 1), ("routed", 8)],
)
def test_parts_are_those_of_the_undivided_batch(tmp_path: Path, loss: str, micro_batch: int | None) -> None:
    job = make_job(loss=LOSSES[loss], count=count if loss == "sums" else count_in_numbers)
    result = trained(tmp_path, job, micro_batch)
    assert_same(result.folder, plain_loop(job))
    last = result.last
    assert last is not None
    assert last.parts is not None
    assert list(last.parts) == ["answer", "findings", "size"]
    assert last.parts["size"].num_items == last.samples
    assert 0 < last.parts["answer"].num_items < last.samples


def run_in_world(folder: str, loss: str, micro_batch: int | None, strategy: str, counts: bool) -> None:
    values = {"find_unused_parameters": True} if loss == "routed" else {}
    changes = {} if counts else {"count": None}
    trained(folder, make_job(loss=LOSSES[loss], **changes), micro_batch, parallel_strategy=strategy, **values)


@pytest.mark.parametrize(
    ("strategy", "loss", "micro_batch", "counts"),
    [
        ("ddp", "means", 1, True),
        ("ddp", "sums", 8, False),
        ("ddp", "routed", 2, True),
        ("fsdp", "means", 2, True),
        ("fsdp", "sums", 8, False),
    ],
)
def test_ranks_share_the_counts(
    tmp_path: Path, gloo_pool: GlooPool, strategy: str, loss: str, micro_batch: int, counts: bool
) -> None:
    gloo_pool.run(run_in_world, str(tmp_path), loss, micro_batch, strategy, counts, world=2)
    assert_same(tmp_path / "parts", plain_loop(make_job()))


def per_sample(model: Any, batch: Any) -> dict[str, Tensor]:
    """Parts that are means over samples, and need no count."""
    answer, _, size = model(batch["inputs"])
    return {"size": functional.mse_loss(size, batch["sizes"]), "flat": answer.square().sum(1).mean()}


def test_a_plain_dictionary_is_divided_by_samples(tmp_path: Path) -> None:
    job = make_job(loss=per_sample, loss_weights=None, count=None)
    divided, whole = trained(tmp_path / "divided", job, 3), trained(tmp_path / "whole", job, GLOBAL_BATCH)
    reference = make_model()
    first = SampleStream(NUM_SAMPLES, job.seed).samples(0, 0, GLOBAL_BATCH)
    expected = per_sample(reference, {name: column[torch.from_numpy(first)] for name, column in job.data.items()})
    row = rows_of(divided.folder)[0]
    assert row["loss_flat"] == pytest.approx(expected["flat"].item(), rel=1e-9)
    assert row["loss"] == pytest.approx(sum(part.item() for part in expected.values()), rel=1e-9)
    for name, value in weights_of(divided.folder).items():
        torch.testing.assert_close(value, weights_of(whole.folder)[name], rtol=1e-9, atol=1e-12)
    assert not [row for row in rows_of(divided.folder, "events") if row["event"] == "loss weighting"]


def test_means_that_nobody_counts_hold_the_division(tmp_path: Path) -> None:
    result = trained(tmp_path, make_job(count=None, max_steps=1, loss=loss_of_means), 8)
    (told,) = [row for row in rows_of(result.folder, "events") if row["event"] == "loss weighting"]
    assert "named parts without a count are divided by samples, and their sum is not" in told["holds_division"]


def ramp(step: int) -> float:
    return step / NUM_STEPS


@pytest.mark.parametrize("micro_batch", [4])
def test_a_weight_may_follow_the_steps(tmp_path: Path, micro_batch: int) -> None:
    weights = WEIGHTS | {"findings": ramp}
    job = make_job(loss_weights=weights)
    assert_same(trained(tmp_path, job, micro_batch).folder, plain_loop(job, weights))


def test_parts_are_curves_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    valid = make_data(23, seed=5)
    job = make_job(valid=valid, valid_batch=4, best=dt.Aim("valid_loss_answer", "min"), loss=loss_of_routed)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=4, trackers=["tensorboard"], log_every=1)
    result = train(job, config)
    model = make_model()
    model.load_state_dict(weights_of(result.folder))
    expected = {name: (total / number).item() for name, (total, number) in sums(model, valid).items()}
    for name, value in expected.items():
        assert result.metrics[f"valid_loss_{name}"] == pytest.approx(value, rel=1e-9)
    total = sum(WEIGHTS[name] * value for name, value in expected.items())
    assert result.metrics["valid_loss"] == pytest.approx(total, rel=1e-9)
    assert rows_of(result.folder, "metrics")[-1]["valid_loss_findings"] == pytest.approx(expected["findings"])
    assert result.best_step is not None
    assert dt.evaluate(job, result, config) == pytest.approx(dict(result.metrics), rel=1e-9)

    row = rows_of(result.folder)[-1]
    events = EventAccumulator(str(result.folder / "tensorboard")).Reload()
    assert events.Scalars("train/loss_answer")[-1].value == pytest.approx(row["loss_answer"], rel=1e-6)
    assert {"train/loss", "train/loss_findings", "train/loss_size", "valid/loss_size"} <= set(events.Tags()["scalars"])
    shown = capsys.readouterr().out
    assert "(answer " in shown.replace("\n", " ")
    assert "valid loss findings" in shown
    summary = (result.folder / "performance_summary.txt").read_text()
    assert "  findings " in summary


def loss_with(**others: Any) -> Any:
    return lambda model, batch: {**per_sample(model, batch), **others}


def test_a_part_that_is_not_learned_from_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(loss=loss_with(accuracy=torch.tensor(0.5)), loss_weights=None, count=None)
    trained(tmp_path, job, GLOBAL_BATCH)
    told = [line for line in capsys.readouterr().err.splitlines() if "nothing is learned from it" in line]
    assert len(told) == 1
    assert "the part 'accuracy' of the loss depends on no weight" in told[0]
    assert 'dt.log("accuracy", value)' in told[0]


def total_of(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a trainer that takes `loss` out of a dictionary is given."""
    return {"loss": sum(parts.values(), torch.zeros(())), **parts}


class Growing:
    """A loss that has another part from its second batch on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, batch: Any) -> dict[str, Tensor]:
        self.calls += 1
        found = per_sample(model, batch)
        return found | {"late": found["size"] * 2} if self.calls > 1 else found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": Growing(), "loss_weights": None, "count": None}, "the part 'late', which it had not in the trial"),
        ({"loss": per_sample, "count": None}, "has the part 'flat', and Job.loss_weights names answer, findings"),
        ({"loss": per_sample, "loss_weights": None}, "Job.count counts 'answer', and the loss has the parts size"),
        ({"loss": loss_of_sums, "count": None}, "'answer' of the loss is a LossSum, and a step has 4 micro-batches"),
        ({"loss": loss_with(odd=0.0), "loss_weights": None, "count": None}, "'odd' of the loss is float, not a scalar"),
        ({"loss": loss_with(odd=torch.ones(2)), "loss_weights": None, "count": None}, "shape (2,), not a scalar"),
        ({"count": lambda batch: 3}, "Job.count returned int"),
        (
            {"loss": lambda model, batch: total_of(per_sample(model, batch)), "loss_weights": None, "count": None},
            "returned 'loss' beside size, flat: the values of a dictionary are parts that are added up",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    job = make_job(**changes)
    with pytest.raises(DrivetrainError, match=words.replace("(", r"\(").replace(")", r"\)")) as raised:
        trained(tmp_path, job, 4, loss_weighting="samples")
    assert "shape (2,)" not in words or "output.loss" in raised.value.remedy


@pytest.mark.parametrize("weights", [{}, {"a": "much"}, {"a": math.nan}, {"a": True}, [("a", 1)]])
def test_weights_are_checked_with_the_job(weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"Job\.loss_weights"):
        make_job(loss_weights=weights)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=4, accumulation_steps=2, report=False)
    run = dt.drive(model, optimizer, data, name="own", max_steps=2, config=config, quiet=True)
    for batch in run:
        run.backward(per_sample(run.model, batch))
        run.step()
    run.close()
    row = rows_of(tmp_path / "own")[-1]
    assert row["loss"] == pytest.approx(row["loss_size"] + row["loss_flat"], rel=1e-9)

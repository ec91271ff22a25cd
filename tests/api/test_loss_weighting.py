"""Scalar losses of every kind train the same however a step is divided: against a plain loop over whole batches."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import drivetrain as dt
from drivetrain import Job
from drivetrain.api.measuring import evaluate
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpointer
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.world import World
from drivetrain.data.division import SampleStream
from drivetrain.plan.loss_weighting import Finding
from drivetrain.run import Session, loss_weighting
from drivetrain.run.loss_probe import Parts, ReplayedDraws, leaves_labels_out, part_bounds, probe_loss
from tests.gloo_pool import GlooPool

VOCABULARY, LENGTH, SAMPLES, BATCH, STEPS, SEED = 13, 9, 60, 16, 6, 5


class Sentences(Dataset[dict[str, Tensor]]):
    """Token sequences of unequal length. Samples in `empty` have no label at all."""

    def __init__(self, empty: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=generator)
        self.empty = empty

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 0 if index in self.empty else int(self.lengths[index])
        labels = self.tokens[index].clone()
        labels[length:] = -100
        return {
            "tokens": self.tokens[index],
            "labels": labels,
            "mask": labels.ne(-100),
            "weight": (self.tokens[index, 0].double() + 1) / VOCABULARY,
        }


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(tokens)))
        result: Tensor = self.out(hidden + hidden.cumsum(1) / LENGTH)
        return result


class Normalised(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.norm(self.mix(self.embedding(tokens))).sum(2, keepdim=True)


def cross_entropy(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), **options)


def next_token(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["tokens"])[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten(), reduction="none")
    return (losses * batch["mask"].flatten()).sum() / batch["mask"].sum()


def sample_weights(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten(), reduction="none")
    by_sample = losses.view(batch["tokens"].shape).mean(1)
    return (by_sample * batch["weight"]).sum() / batch["weight"].sum()


def per_sample(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    kept = batch["mask"]
    return ((losses.view(kept.shape) * kept).sum(1) / kept.sum(1)).mean()


def total(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch, reduction="sum") / 100


def class_weights(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch, weight=torch.linspace(0.3, 2.0, VOCABULARY).to(model.out.weight.dtype))


LOSSES: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "mean over tokens": (cross_entropy, "tokens", "labels != -100"),
    "next token": (next_token, "tokens", "labels[:, 1:] != -100"),
    "masked mean": (masked_mean, "tokens", "labels != -100"),
    "sample weights": (sample_weights, "tokens", "the sum of weight"),
    "class weights": (class_weights, "tokens", "the class weights of labels"),
    "mean over samples": (per_sample, "samples", ""),
    "sum": (total, "sum", ""),
}


def weights_of_its_own(model: nn.Module, batch: Any) -> Tensor:
    losses, weights = cross_entropy(model, batch, reduction="none"), torch.linspace(0.3, 2.0, VOCABULARY)
    kept = batch["labels"].flatten() != -100
    weights = weights[batch["labels"].flatten().clamp(min=0)].to(losses) * kept
    return (losses * weights).sum() / weights.sum()


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    states = functional.normalize(model(batch["tokens"]).mean(1), dim=1)
    others = functional.normalize(model(batch["tokens"].flip(1)).mean(1), dim=1)
    return functional.cross_entropy(states @ others.T * 4, torch.arange(len(states)))


def with_auxiliary(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["tokens"])
    load = logits.softmax(-1).mean((0, 1))
    return cross_entropy(model, batch) + 0.1 * VOCABULARY * (load**2).sum()


def shuffled(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["tokens"])
    return cross_entropy(model, batch) + (logits * logits[torch.randperm(len(logits))]).mean()


HELD = {
    "weights of its own": (Tagger, weights_of_its_own, "weighted mean"),
    "contrastive": (Tagger, contrastive, "couples"),
    "auxiliary loss": (Tagger, with_auxiliary, "couples"),
    "mixes samples at random": (Tagger, shuffled, "could not be found out"),
    "batch normalization": (Normalised, cross_entropy, "batch normalization"),
}


def job_of(loss: Callable[..., Tensor], data: Any = None, model: Callable[[], nn.Module] = Tagger, **more: Any) -> Job:
    return Job(
        name="weighted",
        model=lambda: model().double(),
        data=Sentences() if data is None else data,
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.5),
        **{"global_batch": BATCH, "max_steps": STEPS, "seed": SEED, "clip_norm": 0.5} | more,
    )


def trained(folder: str, job: Job, micro_batch: int | None, **settings: Any) -> dict[str, Any]:
    """Train on this rank; all that the test compares, from rank 0."""
    config = configure(output_dir=Path(folder), batch_size=micro_batch, quiet=True, report=False, **settings)
    result = train(job, config)
    checkpoint = Checkpointer(result.folder / "checkpoints", World(), 1).latest()
    assert checkpoint is not None
    return {
        "loss": None if result.last is None else result.last.loss,
        "weights": {key: checkpoint.read(key).double() for key in checkpoint.keys if key.startswith("model/")},
        "rule": checkpoint.meta["loss"],
        "plan": (result.folder / "plan.yaml").read_text(),
        "events": (result.folder / "events.jsonl").read_text(),
    }


def trained_by_name(folder: str, name: str, micro_batch: int, **settings: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    return trained(folder, job_of(LOSSES[name][0]), micro_batch, **settings)


def sharded_by_name(folder: str, name: str, micro_batch: int) -> dict[str, Any]:
    return trained_by_name(folder, name, micro_batch, parallel_strategy="fsdp")


def plain_loop(job: Job) -> tuple[float, dict[str, Tensor]]:
    """Whole batches, one after the other: what the loss means."""
    torch.manual_seed(SEED)
    model = job.model()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    stream = SampleStream(SAMPLES, SEED)
    value = torch.zeros(())
    for step in range(STEPS):
        epoch, number = divmod(step, -(-SAMPLES // BATCH))
        samples = stream.samples(epoch, number * BATCH, min((number + 1) * BATCH, SAMPLES))
        value = job.loss(model, (job.collate or default_collate)([job.data[int(sample)] for sample in samples]))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return float(value.detach()), {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


def difference(found: dict[str, Any], job: Job) -> float:
    loss, weights = plain_loop(job)
    assert found["weights"].keys() == weights.keys()
    return max(
        abs(found["loss"] - loss),
        *(float((found["weights"][key] - weights[key]).detach().abs().max()) for key in weights),
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro_batch", [16, 4, 1])
def test_micro_batches_equal_whole_batches(tmp_path: Path, name: str, micro_batch: int) -> None:
    found = trained_by_name(str(tmp_path), name, micro_batch)
    assert found["rule"]["by"] == LOSSES[name][1]
    assert LOSSES[name][2] in found["plan"]
    assert difference(found, job_of(LOSSES[name][0])) < 1e-10


@pytest.mark.parametrize("name", ["mean over tokens", "sum", "sample weights"])
@pytest.mark.parametrize("world", [2, 3])
def test_processes_equal_whole_batches(gloo_pool: GlooPool, tmp_path: Path, name: str, world: int) -> None:
    found = gloo_pool.run(trained_by_name, str(tmp_path), name, 3, world=world)[0]
    assert difference(found, job_of(LOSSES[name][0])) < 1e-10


@pytest.mark.parametrize("name", ["mean over tokens", "sum"])
def test_sharded_models_equal_whole_batches(gloo_pool: GlooPool, tmp_path: Path, name: str) -> None:
    found = gloo_pool.run(sharded_by_name, str(tmp_path), name, 3, world=2)[0]
    assert difference(found, job_of(LOSSES[name][0])) < 1e-10


@pytest.mark.parametrize("name", HELD)
def test_the_division_is_kept_where_it_is_part_of_what_is_learnt(tmp_path: Path, name: str) -> None:
    model, loss, why = HELD[name]
    found = trained(str(tmp_path), job_of(loss, model=model), BATCH)
    assert why in found["rule"]["holds_division"]
    assert why in found["events"]
    if name != "mixes samples at random":
        assert difference(found, job_of(loss, model=model)) < 1e-10
    assert found["rule"]["by"] == ("tokens" if name == "batch normalization" else "samples")


def masking(items: list[Any]) -> Any:
    """Choose the tokens to predict at random, for each batch anew, as a collator for masked language models does."""
    batch = default_collate(items)
    chosen = torch.rand(batch["labels"].shape) < 0.4
    return {**batch, "labels": torch.where(chosen, batch["labels"], -100)}


def mixing(items: list[Any]) -> Any:
    batch = default_collate(items)
    return {**batch, "weight": batch["weight"] * random.random(), "tokens": batch["tokens"].roll(1, 0)}


@pytest.mark.parametrize(
    ("collate", "loss", "by"), [(masking, cross_entropy, "tokens"), (mixing, per_sample, "samples")]
)
def test_a_loss_is_known_whatever_its_collate_function_draws(
    tmp_path: Path, collate: Callable[..., Any], loss: Callable[..., Tensor], by: str
) -> None:
    """The parts of a batch had draws of their own, so it looked like one that compares samples."""
    found = trained(str(tmp_path), job_of(loss, collate=collate), 4)
    assert found["rule"]["by"] == by
    assert found["rule"]["holds_division"] == "the collate function draws random numbers for each batch that it makes"
    assert "the collate function draws" in found["events"]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_iterable", [True, False])
def test_what_is_drawn_for_batches_of_data_without_numbers_is_told(
    tmp_path: Path, is_iterable: bool, num_workers: int
) -> None:
    order = SampleStream(SAMPLES, SEED).samples(0, 0, 3 * BATCH).tolist()

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (Sentences()[number] for number in order)

    data = Stream() if is_iterable else DataLoader(Sentences(), sampler=order)
    for collate, held in ((masking, "the collate function draws random numbers"), (default_collate, "")):
        job = job_of(cross_entropy, data, max_steps=3, epochs=1, collate=collate)
        found = trained(str(tmp_path / collate.__name__), job, 4, num_workers=num_workers)
        assert found["rule"]["holds_division"].startswith(held)
        assert bool(found["rule"]["holds_division"]) == bool(held)


def test_a_count_with_the_same_mean_in_each_part_is_told_apart() -> None:
    # Samples of topic 0, or without a label from the second token on, come last: 3 and 1 labels, as many as 2 and 2.
    labeled = [(0, 3), (1, 1)] + [(1, 2), (0, 3)] * 9
    items = [
        {"labels": torch.tensor([5] * number + [-100] * (LENGTH - number)), "topic": topic} for topic, number in labeled
    ]
    chosen = loss_weighting._chosen(items, [default_collate([item]) for item in items], 10)
    parts = [chosen[first:last] for first, last in pairwise(part_bounds(10))]
    means = {sum(int(item["labels"].ne(-100).sum()) for item in part) / len(part) for part in parts}
    assert len(means) > 1


def test_padding_that_comes_late_is_looked_at_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = SampleStream(SAMPLES, SEED).samples(0, 0, SAMPLES).tolist()

    class Late(Sentences):
        """Without padding up to the third step."""

        def __init__(self) -> None:
            super().__init__()
            self.lengths[order[: 2 * BATCH]] = LENGTH

    job = job_of(cross_entropy, Late(), max_steps=STEPS)
    monkeypatch.setattr(loss_weighting, "MOST_LOOKED_AT", 2 * BATCH)
    found = trained(str(tmp_path), job, 4)
    (event,) = [line for line in found["events"].splitlines() if "loss weighting" in line]
    assert '"by": "tokens"' in event
    assert "weighting: by samples" in found["plan"]  # as it looked before the first step
    assert difference(found, job) < 1e-10


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """What the first samples, more than are looked at before the first step, do not have in their labels."""

    def __init__(self, late: int, labels_type: torch.dtype = torch.long) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(160, 4, dtype=torch.float64, generator=generator)
        labels = torch.randint(0, 2, (160, 3), generator=generator)
        rare = torch.rand(160, 3, generator=generator) < 0.4
        rare[:96] = False
        self.labels = torch.where(rare, late, labels).to(labels_type)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def of_rows(ignored: int, weight: Tensor | None = None) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0]).unflatten(1, (3, 3))
        weights = None if weight is None else weight.to(logits)
        return functional.cross_entropy(logits, batch[1].long(), ignore_index=ignored, weight=weights)

    return loss


@pytest.mark.parametrize(("labels_type", "ignored"), [(torch.long, 255), (torch.uint8, 255), (torch.long, -1)], ids=str)
@pytest.mark.parametrize("is_in_memory", [True, False])
def test_labels_are_left_out_by_the_value_that_the_loss_names(
    tmp_path: Path, is_in_memory: bool, labels_type: torch.dtype, ignored: int
) -> None:
    """It was known by the labels only, and by those of the first samples; without its sign."""
    rows = Rows(ignored, labels_type)
    data = TensorDataset(rows.inputs, rows.labels) if is_in_memory else rows
    job = job_of(of_rows(ignored), data, lambda: nn.Linear(4, 9), shuffle=False, global_batch=16, max_steps=10)
    whole, divided = trained(str(tmp_path / "whole"), job, 16), trained(str(tmp_path / "divided"), job, 5)
    for key, value in whole["weights"].items():
        torch.testing.assert_close(divided["weights"][key], value, rtol=0, atol=1e-12)
    assert f"batch[1] != {ignored}," in divided["events"]


def in_order(job: Job, columns: TensorDataset) -> dict[str, Tensor]:
    """Train by a plain loop over whole batches, in the order of the data."""
    torch.manual_seed(SEED)
    model = job.model()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for batch in zip(*(column.split(16) for column in columns.tensors), strict=True):
        optimizer.zero_grad()
        job.loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


def not_known_left_out(model: nn.Module, batch: Any) -> Tensor:
    found, targets = model(batch[0]), batch[1]
    is_known = ~targets.isnan()
    return (found[is_known] - targets[is_known]).square().mean()


@pytest.mark.parametrize("all_known", [0, 96], ids=["early", "late"])
@pytest.mark.parametrize("is_in_memory", [True, False])
def test_targets_that_are_nan_are_not_counted(tmp_path: Path, is_in_memory: bool, all_known: int) -> None:
    """A mean over the targets that are known, as for properties of molecules: most have some of them only."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = (torch.randn(160, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    is_known = torch.rand(targets.shape, generator=generator) < 0.6
    is_known[:all_known] = True  # more samples than are looked at before the first step
    targets[~is_known] = float("nan")
    columns = TensorDataset(inputs, targets)
    data = columns if is_in_memory else [columns[number] for number in range(160)]
    more = {"shuffle": False, "global_batch": 16, "max_steps": 10}
    job = job_of(not_known_left_out, data, lambda: nn.Linear(4, 4), **more)
    found = trained(str(tmp_path), job, 5)
    assert "batch[1] that is not NaN" in found["events"]
    for key, value in in_order(job, columns).items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-12)


def each_property_by_its_own(model: nn.Module, batch: Any) -> Any:
    found, targets = model(batch[0]), batch[1]
    total: Any = 0.0
    for column in range(targets.shape[1]):
        is_known = ~targets[:, column].isnan()
        if is_known.any():
            total = total + functional.mse_loss(found[is_known, column], targets[is_known, column])
    return total / targets.shape[1]


def test_heads_that_each_leave_nan_out_keep_the_division(tmp_path: Path) -> None:
    """Samples without any label were tried alone: their loss is a plain number, which was taken for a LossSum."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(96, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    targets[torch.rand(targets.shape, generator=generator) < 0.7] = float("nan")
    data = TensorDataset(inputs, targets)
    job = job_of(each_property_by_its_own, data, lambda: nn.Linear(4, 4), shuffle=False, max_steps=2)
    assert "adds means over different items" in trained(str(tmp_path), job, 8)["rule"]["holds_division"]


def test_a_loss_that_is_a_number_where_nothing_counts_is_measured(tmp_path: Path) -> None:
    """Three of four samples have no label, and the loss of such a batch is a plain 0.0 or a tensor without gradient."""
    inputs, targets = torch.randn(2, 96, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets[torch.arange(96) % 4 > 0] = float("nan")

    for nothing in (0.0, torch.tensor(0.0)):

        def loss(model: nn.Module, batch: Any, nothing: Any = nothing) -> Any:
            return nothing if batch[1].isnan().all() else not_known_left_out(model, batch)

        job = job_of(loss, TensorDataset(inputs, targets), lambda: nn.Linear(4, 4), shuffle=False, max_steps=2)
        assert "that is not NaN" in str(trained(str(tmp_path / str(nothing)), job, 4)["rule"]["reason"])


def by_positives(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="sum")
    return losses / batch[1].sum().clamp(min=1)


def of_positives(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")
    penalty = sum((it.square().sum() for it in model.parameters()), torch.zeros(()))
    return (losses * batch[1]).sum() / batch[1].sum().clamp(min=1) + 0.01 * penalty


@pytest.mark.parametrize("loss", [by_positives, of_positives])
def test_a_sum_over_all_that_is_divided_by_some_is_no_mean_over_these(tmp_path: Path, loss: Any) -> None:
    """A micro-batch without any positive sample was left out, with all of its negative ones."""
    inputs = torch.randn(96, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = (inputs[:, :1] > 0.8).double()
    more = {"shuffle": False, "global_batch": 16, "max_steps": 6}
    job = job_of(loss, columns := TensorDataset(inputs, labels), lambda: nn.Linear(4, 1), **more)
    found = trained(str(tmp_path), job, 4)
    if loss is by_positives:
        assert "divides a sum over all samples by a count of some" in found["rule"]["holds_division"]
        return
    assert found["rule"]["by"] == "tokens"
    for key, value in in_order(job, columns).items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_class_weights_are_seen_where_the_first_labels_have_the_same(tmp_path: Path, is_in_memory: bool) -> None:
    """The first samples lack the rare class: with their labels alone the loss is a mean over samples."""
    loss = of_rows(-100, torch.tensor([1.0, 1.0, 20.0]))
    rows = Rows(2)
    data = TensorDataset(rows.inputs, rows.labels) if is_in_memory else rows
    job = job_of(loss, data, lambda: nn.Linear(4, 9), shuffle=False, global_batch=16, max_steps=10)
    found = trained(str(tmp_path / "divided"), job, 5)
    assert found["rule"]["count"]["weights"] == [1.0, 1.0, 20.0]
    assert found["rule"]["holds_division"] == ""
    for key, value in in_order(job, TensorDataset(rows.inputs, rows.labels)).items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-12)
    model = nn.Linear(4, 9).double()
    assert leaves_labels_out(loss(model, rows[:8]))
    assert not leaves_labels_out(of_rows(-100, torch.ones(3))(model, rows[:8]))


@pytest.mark.parametrize("first", [1.0, 3.0])
def test_class_weights_that_change_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], first: float) -> None:
    """Re-weighting that begins late is common for data with rare classes."""
    weight = torch.tensor([1.0, 1.0, first])
    job = job_of(of_rows(-100, weight), Rows(2), lambda: nn.Linear(4, 9), global_batch=80, max_steps=6)

    def told(**more: Any) -> list[str]:
        config = configure(output_dir=tmp_path, batch_size=10, report=False)
        train(replace(job, **more), config)
        return [line for line in capsys.readouterr().out.splitlines() if "other weights than at first" in line]

    assert told(name="steady") == []
    (line,) = told(name="changed", hooks=(dt.every(4, lambda context: weight[2:].fill_(9)),))
    assert "since epoch 3 its classes have other weights" in line


def test_a_micro_batch_that_counts_nothing_contributes_nothing(tmp_path: Path) -> None:
    empty = tuple(SampleStream(SAMPLES, SEED).samples(0, 4, 8).tolist())
    for loss in (cross_entropy, masked_mean):
        job = job_of(loss, Sentences(empty=empty))
        assert difference(trained(str(tmp_path / loss.__name__), job, 1), job) < 1e-10


def test_data_without_numbers_is_told_by_its_first_batch(tmp_path: Path) -> None:
    order = SampleStream(SAMPLES, SEED).samples(0, 0, 3 * BATCH).tolist()
    data = Sentences()

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (data[number] for number in order)

    job = job_of(cross_entropy, Stream(), max_steps=3, epochs=1)
    found = trained(str(tmp_path), job, 4)
    assert found["rule"]["by"] == "tokens"
    whole = trained(str(tmp_path / "whole"), job, BATCH)
    for key, value in whole["weights"].items():
        assert torch.allclose(found["weights"][key], value, atol=1e-12)


def test_a_sampler_whose_first_batch_tells_nothing(tmp_path: Path) -> None:
    """Data in memory is looked at whole, by its numbers: the order is the sampler's, and the numbers are the data's."""
    order, tokens = SampleStream(SAMPLES, SEED).samples(0, 0, SAMPLES).tolist(), Sentences().tokens
    labels = tokens.clone()
    labels[order[2 * BATCH :], 2:] = -100

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    loader = DataLoader(TensorDataset(tokens, labels), batch_size=BATCH, sampler=order)
    job = job_of(loss, loader, global_batch=None, max_steps=None, epochs=1)
    found = trained(str(tmp_path), job, 4)
    assert found["rule"]["by"] == "tokens"
    torch.manual_seed(SEED)
    model = Tagger().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for batch in loader:
        optimizer.zero_grad()
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for key, value in model.state_dict().items():
        assert torch.allclose(found["weights"][f"model/{key}"], value, atol=1e-12)


class StopAt:
    """Breaks a run off after a step."""

    every = 1

    def __init__(self, step: int | None) -> None:
        self.step = step

    def __call__(self, context: Any) -> None:
        if context.step == self.step:
            raise KeyboardInterrupt

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def time_first(items: list[Any]) -> tuple[Tensor, Tensor]:
    padded = nn.utils.rnn.pad_sequence([item["tokens"][item["mask"]] for item in items], padding_value=1)
    return padded[:-1], padded


def translated(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs.T).transpose(0, 1).flatten(0, 1), labels[1:].flatten(), ignore_index=1)


def test_time_may_come_first(tmp_path: Path) -> None:
    """As in torch's example of translation: padded by `pad_sequence`, the first token of each sentence left out."""
    job = job_of(translated, collate=time_first)
    found = trained(str(tmp_path), job, 5)
    assert found["rule"]["by"] == "tokens"
    assert "[1:] != 1" in found["rule"]["reason"]
    assert not found["rule"]["holds_division"]
    assert difference(found, job) < 1e-12


def test_a_resumed_run_keeps_its_rule(tmp_path: Path) -> None:
    job = job_of(cross_entropy, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        trained(str(tmp_path), replace(job, hooks=(StopAt(3),)), 4)
    job = replace(job, hooks=(StopAt(None),))
    with pytest.raises(DrivetrainError, match="would change what the run learns"):
        trained(str(tmp_path), job, 4, loss_weighting="sum")
    assert difference(trained(str(tmp_path), job, 4), job) < 1e-10


def test_a_run_that_was_begun_before_goes_on_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(cross_entropy, checkpoint_every=1)
    meta = Session.meta
    monkeypatch.setattr(Session, "meta", lambda self, division: {**meta(self, division), "loss": None})
    with pytest.raises(KeyboardInterrupt):
        trained(str(tmp_path), replace(job, hooks=(StopAt(3),)), 4, loss_weighting="samples")
    monkeypatch.undo()
    found = trained(str(tmp_path), replace(job, hooks=(StopAt(None),)), 4)
    assert found["rule"]["by"] == "samples"
    assert "begun by a version" in found["events"]


def contrastive_run(folder: str, stop_at: int | None, micro_batch: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    job = job_of(contrastive, checkpoint_every=1, hooks=(StopAt(stop_at),))
    try:
        return trained(folder, job, micro_batch)
    except KeyboardInterrupt:
        return {}


def test_another_world_keeps_the_division_of_a_coupled_loss(gloo_pool: GlooPool, tmp_path: Path) -> None:
    whole = contrastive_run(str(tmp_path / "whole"), None, 4)
    gloo_pool.run(contrastive_run, str(tmp_path / "moved"), 3, 4, world=1)
    moved = gloo_pool.run(contrastive_run, str(tmp_path / "moved"), None, None, world=2)[0]
    for key, value in whole["weights"].items():
        assert torch.allclose(moved["weights"][key], value, atol=1e-10), key


def test_validation_weights_alike(tmp_path: Path) -> None:
    job = job_of(cross_entropy, valid=Sentences(), max_steps=2)
    result = train(job, configure(output_dir=tmp_path, batch_size=3, report=False, quiet=True))
    torch.manual_seed(SEED)
    model = job.model()  # type: ignore[operator]
    checkpoint = Checkpointer(result.folder / "checkpoints", World(), 1).latest()
    assert checkpoint is not None
    model.load_state_dict({name: checkpoint.read(f"model/{name}") for name in model.state_dict()})
    whole = cross_entropy(model, torch.utils.data.default_collate([job.data[number] for number in range(SAMPLES)]))
    assert result.metrics["valid_loss"] == pytest.approx(float(whole.detach()), abs=1e-12)
    again = evaluate(job, result, configure(output_dir=tmp_path, batch_size=7, quiet=True))
    assert again["valid_loss"] == pytest.approx(float(whole.detach()), abs=1e-12)


def test_the_flag_pins_it(tmp_path: Path) -> None:
    found = trained(str(tmp_path), job_of(cross_entropy), 4, loss_weighting="samples")
    assert found["rule"]["by"] == "samples"
    assert difference(found, job_of(cross_entropy)) > 1e-3  # a mean of means: what was asked for
    with pytest.raises(DrivetrainError, match="not a mean over a count"):
        trained(str(tmp_path / "sum"), job_of(total), 4, loss_weighting="tokens")


def noisy(generator: torch.Generator | None) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["tokens"])
        noise = torch.randn(logits.shape, generator=generator)
        return functional.cross_entropy((logits + noise).flatten(0, 1), batch["labels"].flatten())

    return loss


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "one of the user's own"])
def test_draws_are_replayed_wherever_they_come_from(own: bool) -> None:
    finding, _ = probed(noisy(torch.Generator().manual_seed(3) if own else None))
    assert finding.kind == "count"


def test_operations_are_not_watched_where_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(self: Any, *call: Any) -> Any:
        raise AssertionError("an operation was watched")

    monkeypatch.setattr(ReplayedDraws, "__torch_dispatch__", watch)
    assert probed(cross_entropy)[0].kind == "count"
    with pytest.raises(AssertionError, match="was watched"):
        probed(noisy(None))


def probed(loss: Callable[[nn.Module, Any], Tensor]) -> tuple[Finding, str]:
    """What is found out about a loss on ten sentences, cut into three parts."""
    data, bounds = Sentences(), part_bounds(10)
    whole, *parts = (
        default_collate([data[number] for number in range(first, last)]) for first, last in ((0, 10), *pairwise(bounds))
    )
    sizes = tuple(last - first for first, last in pairwise(bounds))
    torch.manual_seed(0)
    found = probe_loss(loss, Tagger(), Parts(whole, tuple(parts), sizes), torch.device("cpu"))
    return found.finding, found.why_unknown

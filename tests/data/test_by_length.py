"""`dt.by_length`: an order that groups samples of similar length, as a formula of seed, epoch and lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import drivetrain as dt
from drivetrain.data.division import LengthGroupedStream, SampleStream
from drivetrain.data.source import Source
from tests.api.jobs import Trained, read
from tests.gloo_pool import GlooPool

NUM_SAMPLES, BATCH = 150, 16


def random_lengths(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 1000, size)


@given(st.integers(1, 3000), st.integers(1, 70), st.integers(0, 2**63), st.integers(0, 3), st.data())
def test_each_sample_exactly_once_and_any_slice_equals_the_whole(
    size: int, batch: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    stream = LengthGroupedStream(random_lengths(size), seed, batch)
    whole = stream.samples(epoch, 0, size).tolist()
    assert sorted(whole) == list(range(size))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert (
        LengthGroupedStream(random_lengths(size), seed, batch).samples(epoch, start, stop).tolist()
        == (whole[start:stop])
    )
    assert stream.copy().samples(epoch, start, stop).tolist() == whole[start:stop]


def padded_share(order: Any, lengths: Any, batch: int) -> float:
    """The share of padding, where each batch is padded to its longest sample: counted by hand."""
    padded = sum(max(lengths[i] for i in order[at : at + batch]) * len(order[at : at + batch])
                 for at in range(0, len(order), batch))  # fmt: skip
    return 1 - sum(lengths) / padded


@pytest.mark.parametrize("size", [400, 20000])
def test_batches_are_of_similar_length(size: int) -> None:
    lengths = random_lengths(size)
    grouped = LengthGroupedStream(lengths, 3, BATCH).samples(0, 0, size).tolist()
    plain = SampleStream(size, 3).samples(0, 0, size).tolist()
    most = 0.2 if size < 1000 else 0.02
    assert padded_share(grouped, lengths.tolist(), BATCH) < most < padded_share(plain, lengths.tolist(), BATCH)


def test_the_first_batch_is_the_one_with_the_longest_sample_of_its_pool() -> None:
    """The plan is made on the first batch: a later one should not need much more memory."""
    lengths = random_lengths(5000)
    order = LengthGroupedStream(lengths, 3, BATCH).samples(0, 0, BATCH)
    assert lengths[order].max() > 980


def test_epochs_and_seeds_differ_and_batches_are_made_anew() -> None:
    lengths = random_lengths(1000)
    stream = LengthGroupedStream(lengths, 7, BATCH)
    first, second = ({tuple(sorted(stream.samples(epoch, at, at + BATCH).tolist())) for at in range(0, 992, BATCH)}
                     for epoch in (0, 1))  # fmt: skip
    assert len(first & second) < 5
    other = LengthGroupedStream(lengths, 8, BATCH).samples(0, 0, 1000).tolist()
    assert other != stream.samples(0, 0, 1000).tolist()


def test_the_order_is_frozen() -> None:
    """A change here would change the order of every such job: resumed runs would repeat and miss samples."""
    stream = LengthGroupedStream(np.arange(19) * 7 % 19, 0, 2)
    assert stream.samples(0, 0, 19).tolist() == FROZEN


FROZEN = [8, 18, 6, 0, 14, 3, 10, 4, 9, 11, 16, 2, 5, 13, 7, 17, 15, 12, 1]


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 9, (NUM_SAMPLES,), generator=generator).tolist()
    return [{"values": torch.randn(length, 3, generator=generator, dtype=torch.float64)} for length in lengths]


def collate(items: list[Any]) -> Any:
    longest = max(len(item["values"]) for item in items)
    return torch.stack([functional.pad(item["values"], (0, 0, 0, longest - len(item["values"]))) for item in items])


def loss(model: Any, batch: Any) -> dt.LossSum:
    counted = batch.abs().sum(-1) > 0
    return dt.LossSum((model(batch).squeeze(-1).square() * counted).sum(), counted.sum())


def make_job(**changes: Any) -> dt.Job:
    values: dict[str, Any] = {
        "name": "suite",
        "model": lambda: torch.nn.Linear(3, 1).double(),
        "data": dt.by_length(texts(), lambda item: len(item["values"])),
        "loss": loss,
        "optimizer": lambda groups: torch.optim.Adam(groups, lr=0.01),
        "global_batch": BATCH,
        "max_steps": 12,
        "seed": 3,
        "collate": collate,
        "clip_norm": 0.5,
    }
    return dt.Job(**{**values, **changes})


def run(folder: str, micro_batch: int, num_workers: int = 0, **changes: Any) -> Trained | None:
    config = dt.configure(output_dir=folder, gpu_mode="cpu", num_workers=num_workers, batch_size=micro_batch,
                          report=False)  # fmt: skip
    result = dt.train(make_job(**changes), config, quiet=True)
    return read(result.folder, result.resumed_from) if result.is_main else None


def plain_loop() -> tuple[list[float], dict[str, Any]]:
    """Whole batches of the same order, in a loop that has nothing of the trainer."""
    data = texts()
    stream = LengthGroupedStream(np.array([len(each["values"]) for each in data]), 3, BATCH)
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[float] = []
    for epoch in range(2):
        order = stream.samples(epoch, 0, NUM_SAMPLES).tolist()
        for at in range(0, NUM_SAMPLES, BATCH):
            if len(losses) == 12:
                break
            rows = torch.cat([data[index]["values"] for index in order[at : at + BATCH]])
            optimizer.zero_grad()
            mean = model(rows).square().mean()
            mean.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(mean.item())
    return losses, {f"model/{name}": value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("world", "micro_batch", "workers"), [(1, 16, 0), (1, 5, 2), (2, 3, 0), (3, 4, 0)])
def test_any_world_trains_like_a_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, world: int, micro_batch: int, workers: int
) -> None:
    trained = gloo_pool.run(run, str(tmp_path), micro_batch, workers, world=world)[0]
    losses, weights = plain_loop()
    assert trained.losses == pytest.approx(losses, abs=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(trained.weights[name], value, rtol=0, atol=1e-12)


class StoppedError(Exception):
    pass


def stop(context: dt.StepContext) -> None:
    if context.step == 7:
        raise StoppedError


def run_in_part(folder: Path) -> None:
    with pytest.raises(StoppedError):
        run(str(folder), 5, checkpoint_every=2, hooks=[dt.every(1, stop)])


def test_a_stopped_run_goes_on_exactly(tmp_path: Path) -> None:
    whole = run(str(tmp_path / "whole"), 5)
    run_in_part(tmp_path / "part")
    again = run(str(tmp_path / "part"), 5, checkpoint_every=2, hooks=[dt.every(1, lambda context: None)])
    assert whole is not None
    assert again is not None
    assert again.resumed_from > 0
    assert again.losses == whole.losses
    assert all(np.array_equal(again.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.parametrize("data", [lambda: dt.by_length(texts(), list(range(NUM_SAMPLES))), texts])
def test_another_grouping_is_another_job(tmp_path: Path, data: Any) -> None:
    run_in_part(tmp_path)
    with pytest.raises(dt.DrivetrainError, match="grouped by length"):
        run(str(tmp_path), 5, checkpoint_every=2, data=data())


def test_samples_in_memory_are_grouped_too(tmp_path: Path) -> None:
    """Tensors take the resident path, which computes the order in a thread of its own."""
    lengths = random_lengths(64)
    values = {"value": torch.arange(64.0).unsqueeze(1)}
    seen: list[list[int]] = []

    def watching(model: Any, batch: Any) -> torch.Tensor:
        if model.training:
            seen.append(batch["value"].flatten().long().tolist())
        mean: torch.Tensor = model(batch["value"]).mean()
        return mean

    job = make_job(data=dt.by_length(values, lengths), model=lambda: torch.nn.Linear(1, 1), loss=watching, max_steps=3,
                   collate=torch.utils.data.default_collate)  # fmt: skip
    dt.train(job, dt.configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=16, compile="off", quiet=True,
                               report=False, loss_weighting="samples"))  # fmt: skip
    order = LengthGroupedStream(lengths, 3, BATCH).samples(0, 0, 48).tolist()
    assert seen[-3:] == [order[0:16], order[16:32], order[32:48]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dt.by_length([1, 2, 3], [1, 2]), "2 lengths for 3 samples"),
        (lambda: dt.by_length([1, 2], [1, -2]), "a length is a number from 0"),
        (lambda: dt.by_length([1, 2], ["a", "b"]), "a length is a number from 0"),
        (lambda: dt.by_length(iter([1, 2]), [1, 2]), "can only be iterated"),
        (lambda: dt.by_length([1, 2], lambda item: len(item)), "length of sample 0"),
        (lambda: make_job(shuffle=False), "shuffle=False"),
    ],
)
def test_what_cannot_be_grouped(make: Any, words: str) -> None:
    with pytest.raises(dt.DrivetrainError, match=words):
        make()


def test_lengths_of_items_by_default() -> None:
    source = dt.by_length(["a", "bbb", "cc"])
    assert isinstance(source, Source)
    assert source.lengths is not None
    assert source.lengths.tolist() == [1, 3, 2]

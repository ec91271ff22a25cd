"""A global batch that grows over a run: against a plain loop that changes its batch size by hand, in float64."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import drivetrain as dt
from drivetrain.api.measuring import plan
from drivetrain.commands.monitor import state_of
from drivetrain.config import configure
from drivetrain.core.aims import in_words, samples_between
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.run_folder import read_job
from drivetrain.data.division import SampleStream
from tests.api.jobs import Trained, Variant, Vectors, make_job, make_model, read, run
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.gloo_pool import GlooPool

# 60 samples: the batch grows in the middle of the first epoch, at 8 of them, and shrinks in the third.
SIZES = {0: 8, 3: 16, 9: 5}
VARIANT = Variant("mlp", torch.float64, steps=14, num_samples=60, save_every=4)
EMA = 0.9


def plain_loop(drop_last: bool = False) -> tuple[list[float], list[int], dict[str, Any]]:
    """The same job by hand: returns losses, the samples of each step, and the weights with their moving average."""
    data = Vectors(VARIANT)
    torch.manual_seed(VARIANT.seed)
    model = make_model(VARIANT)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, counts, epoch, left = [], [], -1, list[int]()
    size = 0
    for step in range(VARIANT.steps):
        size = SIZES.get(step, size)
        if len(left) < (size if drop_last else 1):
            epoch += 1
            left = SampleStream(60, VARIANT.seed).samples(epoch, 0, 60).tolist()
        batch, left = left[:size], left[size:]
        inputs, labels = (torch.stack(column) for column in zip(*(data[index] for index in batch), strict=True))
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.3 * 0.9**step
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1 - min(EMA, (2 + step) / (11 + step)))
        losses.append(loss.item())
        counts.append(len(batch))
    weights = {f"model/{name}": value.numpy() for name, value in model.state_dict().items()}
    return losses, counts, weights | {f"ema/{name}": value.numpy() for name, value in average.items()}


def changes(**more: Any) -> dict[str, Any]:
    return {
        "global_batch": SIZES,
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.9),
        "schedule": lambda step: 0.9**step,
        "clip_norm": None,
        "weight_decay": None,
        "ema": EMA,
        **more,
    }


def trained(folder: str, micro_batch: int, num_workers: int = 0) -> Trained | None:
    return run(folder, VARIANT, micro_batch, num_workers, **changes())


def assert_as_by_hand(found: Trained, by_hand: tuple[list[float], list[int], dict[str, Any]]) -> None:
    losses, counts, weights = by_hand
    assert [row["samples"] for row in found.rows] == counts
    assert np.abs(np.array(found.losses) - np.array(losses)).max() < 1e-9
    tensors = found.weights | found.state
    for name, value in weights.items():
        assert np.abs(tensors[name] - value).max() < 1e-9, name


@pytest.mark.parametrize(("world", "micro_batch", "workers"), [(1, 16, 0), (1, 6, 1), (2, 4, 0), (3, 16, 0)])
def test_equals_a_loop_that_changes_its_batch_by_hand(
    gloo_pool: GlooPool, tmp_path: Path, world: int, micro_batch: int, workers: int
) -> None:
    found = gloo_pool.run(trained, str(tmp_path), micro_batch, workers, world=world)[0]
    assert_as_by_hand(found, plain_loop())


def test_a_loader_that_drops_the_last_batch_drops_what_is_less_than_the_step_needs(tmp_path: Path) -> None:
    loader = DataLoader(Vectors(VARIANT), batch_size=8, shuffle=True, drop_last=True)
    found = run(str(tmp_path), VARIANT, 16, **changes(data=loader))
    assert found is not None
    assert_as_by_hand(found, plain_loop(drop_last=True))


@pytest.mark.parametrize("crash_in_step", [3, 4, 11])
def test_goes_on_bit_identically_across_a_change(tmp_path: Path, crash_in_step: int) -> None:
    noisy = Variant("mlp", torch.float32, steps=14, dropout=0.3, noisy_items=True, num_samples=60, save_every=2)
    whole = run(str(tmp_path / "whole"), noisy, 16, **changes())
    loss = CrashingLoss(make_job(noisy).loss, 1 + crash_in_step)  # one call is the trial's, then one of each step
    with pytest.raises(PlantedError):
        run(str(tmp_path / "two"), noisy, 16, **changes(loss=loss))
    with pytest.raises(DrivetrainError, match="global_batch is"):  # another job, which changes nothing of this one
        run(str(tmp_path / "two"), noisy, 16, **changes(global_batch={0: 8, 4: 16}))
    second = run(str(tmp_path / "two"), noisy, 16, **changes())
    assert whole is not None
    assert second is not None
    assert second.resumed_from > 0
    assert_identical(second, whole)


def test_an_extended_run_is_the_one_begun_longer(tmp_path: Path) -> None:
    config = {"gpu_mode": "cpu", "report": False, "batch_size": 16}
    jobs = [make_job(VARIANT, **changes(max_steps=None, epochs=epochs)) for epochs in (1, 3)]
    whole = dt.train(jobs[1], configure(output_dir=tmp_path / "whole", **config), quiet=True)
    dt.train(jobs[0], configure(output_dir=tmp_path / "two", **config), quiet=True)
    second = dt.train(jobs[1], configure(output_dir=tmp_path / "two", **config), quiet=True, extend=True)
    assert_identical(read(second.folder), read(whole.folder))
    # 60 is 3 × 8 + 2 × 16 + 4, then 3 × 16 + 2 × 5 + 2, then 12 × 5
    assert [job.num_steps for job in jobs] == [6, 6 + 6 + 12]
    assert read_job(second.folder)["global_batch"] == {"0": 8, "3": 16, "9": 5}


def test_the_run_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(VARIANT, **changes())
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, batch_size=4)
    found = plan(job, config)
    words = "8 samples, 16 after 3 steps, 5 after 9 steps"
    assert found.choices["batch.accumulation"].value == 4
    assert found.choices["batch.accumulation"].reason == f"follows: steps of {words} on 1 device(s)"
    result = dt.train(job, config)
    shown = capsys.readouterr().out
    assert f"training 14 steps of {words}" in shown
    assert "4 × 4 accumulated × 1 device = 16, the largest" in shown
    assert f"batch_over_steps: {words}" in (result.folder / "plan.yaml").read_text()
    assert state_of(result.folder).num_steps == 14


def test_the_samples_of_steps_are_counted_by_their_sizes() -> None:
    sizes = ((0, 8), (3, 16), (9, 5))
    of_each = [8] * 3 + [16] * 6 + [5] * 11
    for first in range(20):
        for last in range(first, 20):
            assert samples_between(sizes, first, last) == sum(of_each[first:last])
    assert in_words(()) == ""


def test_a_schedule_that_changes_nothing_is_a_number() -> None:
    job = make_job(VARIANT, global_batch={0: 8, 5: 8})
    assert (job.batch_sizes, job.num_samples, job.steps_per_epoch) == ((), 60, 8)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from Vectors(VARIANT)


TENSORS = TensorDataset(torch.zeros(60, 6), torch.zeros(60, dtype=torch.int64))


@pytest.mark.parametrize(
    ("asked", "data", "said"),
    [
        ({3: 8}, TENSORS, "how many samples the first steps have"),
        ({}, TENSORS, "how many samples the first steps have"),
        ({0: 8, "3": 16}, TENSORS, "'3' is not a number of steps"),
        ({0: 8, 3: 0}, TENSORS, "0 is not a number of samples"),
        ({0: 8, 3: 61}, TENSORS, "61 samples are asked for per step, and the data set has 60"),
        (SIZES, Endless(), "data that can only be iterated"),
        (SIZES, dt.by_length(TENSORS, [1] * 60), "dt.by_length groups samples for batches of one size"),
        (SIZES, DataLoader(TENSORS, 8, sampler=RandomSampler(TENSORS, replacement=True)), "the DataLoader's sampler"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(asked: Any, data: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_job(VARIANT, global_batch=asked, data=data)


def test_an_own_loop_has_the_same_batches(tmp_path: Path) -> None:
    torch.manual_seed(VARIANT.seed)
    model = make_model(VARIANT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, counts, _ = plain_loop()
    driven = dt.drive(
        model,
        optimizer,
        Vectors(VARIANT),
        global_batch=SIZES,
        max_steps=VARIANT.steps,
        seed=VARIANT.seed,
        schedule=lambda step: 0.9**step,
        config=configure(output_dir=tmp_path, gpu_mode="cpu", report=False, batch_size=16),
        quiet=True,
    )
    found = []
    for inputs, labels in driven:
        loss = functional.cross_entropy(driven.model(inputs), labels)
        driven.backward(loss)
        driven.step()
        found.append((loss.item(), len(labels)))
    assert [count for _, count in found] == counts
    assert np.abs(np.array([loss for loss, _ in found]) - np.array(losses)).max() < 1e-9

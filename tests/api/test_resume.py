"""Stop anywhere, go on: bit-identical to never stopping in the same world; to rounding in another."""

import functools
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from drivetrain.checkpoint import CheckpointError, Files
from drivetrain.core.errors import DrivetrainError
from tests.api.jobs import Trained, Variant, make_job, run
from tests.gloo_pool import GlooPool

# 4 steps per epoch, the last of them ragged (12 samples); saved every 3 steps; dropout, noise in every item.
BASE = Variant(
    "mlp", torch.float32, global_batch=16, steps=10, dropout=0.3, noisy_items=True, num_samples=60, save_every=3
)
MICRO_BATCH = 2  # several micro-steps per step in every world


class PlantedError(Exception):
    """Planted."""


class CrashingLoss:
    """The job's loss, which fails at its n-th call: on all ranks alike, since all run equally many micro-steps."""

    def __init__(self, loss: Callable[..., Any], at_call: int) -> None:
        self.loss, self.at_call, self.calls = loss, at_call, 0

    def __call__(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        if self.calls == self.at_call:
            raise PlantedError
        return self.loss(model, batch)


def run_until_crash(folder: str, variant: Variant, num_workers: int, at_call: int) -> bool:
    loss = CrashingLoss(make_job(variant).loss, at_call)
    try:
        run(folder, variant, MICRO_BATCH, num_workers, loss=loss)
    except PlantedError:
        return True
    return False


def run_until_failing_save(folder: str, variant: Variant, num_workers: int) -> bool:
    """The next save fails at its last moment, after everything was written: what was trained for it is lost."""

    def rename(self: Files, *paths: Any, **options: Any) -> Any:
        raise OSError(5, "planted")

    try:
        with mock.patch.object(Files, "rename", rename):
            run(folder, variant, MICRO_BATCH, num_workers)
    except CheckpointError:
        return True
    return False


def assert_identical(one: Trained, other: Trained) -> None:
    assert one.rows == other.rows
    for ours, theirs in ((one.weights, other.weights), (one.state, other.state)):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].dtype == theirs[key].dtype
            assert np.array_equal(ours[key], theirs[key]), key


def micro_steps(world: int) -> int:
    """Of a whole step."""
    return ceil(ceil(16 / world) / MICRO_BATCH)


# Calls of the loss: one for the trial at the start, then each micro-step.
def call_in(step: int, micro: int, world: int) -> int:
    """The number of the loss call at a step (from 0) and micro-step, all steps before it whole."""
    ragged = step // 4 * (micro_steps(world) - ceil(ceil(12 / world) / MICRO_BATCH))
    return 1 + step * micro_steps(world) - ragged + micro + 1


@pytest.fixture(scope="module")
def whole(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Trained]:
    """What a run that is never stopped comes to, in a world of a size."""

    @functools.cache
    def run_in(world: int) -> Trained:
        folder = str(tmp_path_factory.mktemp("whole"))
        trained: Trained = gloo_pool.run(run, folder, BASE, MICRO_BATCH, 0, world=world)[0]
        return trained

    return run_in


@pytest.mark.parametrize(
    ("world", "num_workers"),
    [
        (1, 0),
        (1, 2),
        (2, 2),
        *(pytest.param(*both, marks=pytest.mark.soak) for both in ((2, 0), (3, 0), (3, 2), (4, 0), (4, 2))),
    ],
)
def test_bit_identical_after_every_kind_of_stop(
    gloo_pool: GlooPool, whole: Callable[[int], Trained], tmp_path: Path, world: int, num_workers: int
) -> None:
    folder = str(tmp_path / "broken")
    stops = [
        call_in(5, 0, world),  # in the middle of an epoch, a step after a checkpoint was due at 3
        call_in(8, 0, world) - call_in(3, 0, world) + 2,  # at an epoch's end, counted from the checkpoint at 3
        call_in(7, micro_steps(world) - 1, world) - call_in(6, 0, world) + 2,  # inside an accumulation window
    ]
    for at_call in stops:
        assert all(gloo_pool.run(run_until_crash, folder, BASE, num_workers, at_call, world=world))
    assert all(gloo_pool.run(run_until_failing_save, folder, BASE, num_workers, world=world))
    mended = gloo_pool.run(run, folder, BASE, MICRO_BATCH, num_workers, world=world)[0]
    assert mended.resumed_from > 0
    assert_identical(mended, whole(world))


@pytest.mark.parametrize("step", range(0, 10, 3))
def test_a_stop_in_any_step(whole: Callable[[int], Trained], tmp_path: Path, step: int) -> None:
    assert run_until_crash(str(tmp_path / "broken"), BASE, 0, call_in(step, 1, 1))
    mended = run(str(tmp_path / "broken"), BASE, MICRO_BATCH)
    assert mended is not None
    assert mended.resumed_from == step // 3 * 3
    assert_identical(mended, whole(1))


def test_transformer_with_dropout_on_three_ranks(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = replace(BASE, kind="transformer", noisy_items=False)
    whole = gloo_pool.run(run, str(tmp_path / "whole"), variant, MICRO_BATCH, 0, world=3)[0]
    assert all(gloo_pool.run(run_until_crash, str(tmp_path / "b"), variant, 0, call_in(8, 0, 3), world=3))
    mended = gloo_pool.run(run, str(tmp_path / "b"), variant, MICRO_BATCH, 0, world=3)[0]
    assert mended.resumed_from == 6
    assert_identical(mended, whole)


def test_another_world_goes_on_with_the_same_samples(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """2 → 1 → 3 ranks: the same losses to rounding, in float64, without randomness inside the model."""
    variant = replace(BASE, dtype=torch.float64, dropout=0.0)
    whole = gloo_pool.run(run, str(tmp_path / "whole"), variant, MICRO_BATCH, 0, world=1)[0]
    folder = str(tmp_path / "moved")
    assert all(gloo_pool.run(run_until_crash, folder, variant, 0, call_in(4, 0, 2), world=2))
    assert all(gloo_pool.run(run_until_crash, folder, variant, 0, call_in(7, 0, 1) - call_in(3, 0, 1) + 2, world=1))
    moved = gloo_pool.run(run, folder, variant, MICRO_BATCH, 0, world=3)[0]
    assert moved.resumed_from == 6
    assert moved.losses == pytest.approx(whole.losses, abs=1e-10)
    assert [row["samples"] for row in moved.rows] == [row["samples"] for row in whole.rows]
    for key, value in whole.weights.items():
        assert np.allclose(moved.weights[key], value, rtol=0, atol=1e-10)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = run(str(tmp_path), BASE)
    again = run(str(tmp_path), BASE)
    assert first is not None
    assert again is not None
    assert again.resumed_from == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("suite")) == ["suite", "suite-2"]
    assert_identical(first, again)


def test_a_run_whose_job_is_damaged_can_be_taken_up(whole: Callable[[int], Trained], tmp_path: Path) -> None:
    """What the error says works: the file that the same job has under another name, or --fresh."""
    assert run_until_crash(str(tmp_path / "cut"), BASE, 0, call_in(8, 1, 1))
    folder = tmp_path / "cut" / "suite"
    for damage in ("{", "", "- a list\n"):
        (folder / "job.yaml").write_text(damage)
        with pytest.raises(DrivetrainError, match=r"job\.yaml") as caught:
            run(str(tmp_path / "cut"), BASE, MICRO_BATCH, 0)
        assert "--fresh moves the run aside" in caught.value.remedy
        assert "the same job gets the same file under another --name" in caught.value.remedy
    assert run_until_crash(str(tmp_path / "other"), BASE, 0, call_in(1, 1, 1))
    (folder / "job.yaml").write_bytes((tmp_path / "other" / "suite" / "job.yaml").read_bytes())
    found = run(str(tmp_path / "cut"), BASE, MICRO_BATCH, 0)
    assert found is not None
    assert found.resumed_from == 6
    assert_identical(found, whole(1))


class DropsLate(torch.nn.Module):
    """A dropout that begins after the warm-up: the first batch shows nothing that is drawn."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += self.training
        return self.layer(torch.dropout(x, 0.5 if self.seen > 4 else 0.0, self.training))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_model_that_begins_to_draw_later(tmp_path: Path, num_workers: int) -> None:
    """Its draws were not keyed: a resumed run drew other numbers than the run that went on."""
    variant = replace(BASE, noisy_items=False, save_every=6)

    def trained(folder: str, stop: int = 0) -> Trained:
        loss = CrashingLoss(lambda model, batch: model(batch[0]).square().mean(), stop)
        return run(str(tmp_path / folder), variant, 16, num_workers, model=DropsLate, loss=loss)

    expected = trained("whole")
    with pytest.raises(PlantedError):
        trained("broken", 9)
    assert_identical(trained("broken"), expected)

"""The data path by measuring: really reading, then training on what was decided."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from drivetrain.config import configure
from drivetrain.data.division import Division
from drivetrain.plan.rules import DataPath
from drivetrain.planning.probe import measure_data, measured_data_path
from drivetrain.run import Session
from drivetrain.run.assemble import make_loader
from tests.api.jobs import Variant, Vectors, make_job, run
from tests.data.test_resident_training import events
from tests.data.test_training import Stream

VARIANT = Variant(global_batch=8, steps=6, num_samples=40)
ITEM_SECONDS = 0.004


class Slow(Vectors):
    """As slow to read as a small picture."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(ITEM_SECONDS)
        return super().__getitem__(index)


class Raising(Vectors):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise OSError("the disk is gone")


@pytest.fixture
def setup_on(tmp_path: Path) -> Iterator[Any]:
    made: list[Session] = []

    def make(data: Any, **settings: Any) -> Session:
        job = make_job(VARIANT, data=data, **({"global_batch": None} if isinstance(data, DataLoader) else {}))
        made.append(Session.join(job, configure(output_dir=tmp_path, gpu_mode="cpu", **settings), quiet=True))
        return made[-1]

    yield make
    for setup in made:
        setup.close_loaders()
        setup.world.close()


def loader_of(setup: Session) -> Any:
    job = setup.job
    return make_loader(setup, Division(job.num_samples or 0, 8, 8, 1), job.source, shuffle=True)


def decided(setup: Session, **figures: Any) -> Any:
    """Return what is decided for a run, which then follows it."""
    choice = measured_data_path(setup, setup.way.micro_batch, **figures)
    setup.follow(replace(setup.planned, data_path=None if choice is None else choice.value))
    return choice


def test_figures_are_those_of_the_data(setup_on: Any) -> None:
    setup = setup_on(Slow(VARIANT))
    random_state = torch.get_rng_state()
    figures = measure_data(setup, 8, 0.01, 100)
    assert figures is not None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert ITEM_SECONDS * 8 <= figures.read_seconds < ITEM_SECONDS * 8 * 100
    assert figures.slowest_read_seconds >= figures.read_seconds
    assert figures.num_bytes == 40 * (6 * 8 + 8)
    assert figures.batch_bytes == 8 * (6 * 8 + 8)
    assert figures.steps_per_epoch == 5
    assert not figures.is_in_memory
    assert figures.why_not_resident == ""


def test_slow_items_are_held_where_the_job_is_long_enough(setup_on: Any) -> None:
    setup = setup_on(Slow(VARIANT))
    choice = decided(setup, step_seconds=1e-4, steps_left=1000)
    assert choice.value.resident, choice.reason
    assert loader_of(setup).resident is not None
    setup = setup_on(Slow(VARIANT))
    choice = decided(setup, step_seconds=1e-4, steps_left=3)
    assert not choice.value.resident, choice.reason
    assert loader_of(setup).resident is None
    assert loader_of(setup).num_workers == choice.value.num_workers


def test_random_items_are_fetched(setup_on: Any) -> None:
    noisy = Vectors(Variant(global_batch=8, steps=6, num_samples=40, noisy_items=True))
    setup = setup_on(noisy)
    choice = decided(setup, step_seconds=1e-6, steps_left=10_000)
    assert not choice.value.resident
    assert "not resident: its items draw random numbers" in choice.reason
    assert loader_of(setup).resident is None


def test_tensors_under_a_sampler(setup_on: Any) -> None:
    tensors = TensorDataset(torch.randn(40, 6), torch.zeros(40, dtype=torch.long))
    setup = setup_on(DataLoader(tensors, 8, sampler=WeightedRandomSampler([1.0] * 40, 40)))
    choice = decided(setup, step_seconds=1e-4, steps_left=10_000)
    assert choice.value.resident, choice.reason
    assert "to copy it once" in choice.reason


@pytest.mark.parametrize("data", [Stream(), Raising(VARIANT)], ids=["iterable", "raising"])
def test_what_cannot_be_measured_goes_by_rule(setup_on: Any, data: Any) -> None:
    setup = setup_on(data)
    assert decided(setup, step_seconds=1e-4, steps_left=10_000) is None
    assert setup.planned.data_path is None


def test_a_refusal_that_only_shows_when_all_is_read_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner saw a few items; one of the others draws."""

    class SeldomNoisy(Vectors):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            inputs, label = super().__getitem__(index)
            return (inputs + torch.rand(6) if index == 4 else inputs), label

    original = Session.__init__

    def planned(self: Session, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.follow(replace(self.planned, data_path=DataPath(resident=True)))

    off = run(str(tmp_path / "off"), VARIANT, data=SeldomNoisy(VARIANT), settings={"resident": "off"})
    monkeypatch.setattr(Session, "__init__", planned)
    on = run(str(tmp_path / "planned"), VARIANT, data=SeldomNoisy(VARIANT))
    assert off is not None
    assert on is not None
    assert on.losses == off.losses
    (event,) = events(tmp_path / "planned" / "suite", "data")
    assert event["notes"][0].startswith("not resident on cpu: its items draw random numbers (seen in items 0 to 39)")

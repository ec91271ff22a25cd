"""Training on resident data: the bits of the run that fetches its items, whole, divided, stopped and gone on with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from drivetrain import ConfigError, evaluate
from drivetrain.api.driving import drive
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.data.loader import Loader
from tests.api.jobs import Trained, Variant, Vectors, make_job, run
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.gloo_pool import GlooPool

VARIANT = Variant(global_batch=16, steps=12, num_samples=59, save_every=3)  # 4 steps per epoch, the last of 11 samples
MICRO_BATCH = 5


def make_data(kind: str) -> Any:
    vectors = Vectors(VARIANT)
    tensors = TensorDataset(vectors.inputs, vectors.labels)
    return {
        "items": vectors,
        "tensors": tensors,
        "subset": Subset(tensors, range(59)),
        "sampler": DataLoader(tensors, 16, sampler=WeightedRandomSampler([1.0] * 59, 59)),
    }[kind]


def run_on(folder: str, kind: str, resident: str, at_call: int = 0, **changes: Any) -> Trained | None:
    if kind == "sampler":
        changes["global_batch"] = None
    loss = CrashingLoss(make_job(VARIANT).loss, at_call)
    settings = {"resident": resident}
    try:
        return run(folder, VARIANT, MICRO_BATCH, data=make_data(kind), loss=loss, settings=settings, **changes)
    except PlantedError:
        return None


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.parametrize("kind", ["items", "tensors", "subset", "sampler"])
def test_the_same_bits(tmp_path: Path, kind: str) -> None:
    off = run_on(str(tmp_path / "off"), kind, "off")
    on = run_on(str(tmp_path / "on"), kind, "on")
    assert off is not None
    assert on is not None
    assert_identical(on, off)
    (start,) = events(tmp_path / "on" / "suite", "start")
    assert start["data_path"].startswith("resident on cpu: ")
    (start,) = events(tmp_path / "off" / "suite", "start")
    assert start["data_path"] == "in the training process"


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits_in_a_world(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    off = gloo_pool.run(run_on, str(tmp_path / "off"), "items", "off", world=world)[0]
    on = gloo_pool.run(run_on, str(tmp_path / "on"), "items", "on", world=world)[0]
    assert_identical(on, off)


@pytest.mark.parametrize("kind", ["items", "sampler"])
@pytest.mark.parametrize(("before", "after"), [("on", "off"), ("off", "on"), ("on", "on")])
def test_a_stopped_run_goes_on_either_way(tmp_path: Path, kind: str, before: str, after: str) -> None:
    """In the middle of an epoch, and of what was computed ahead."""
    whole = run_on(str(tmp_path / "whole"), kind, "off")
    calls_per_step = 4
    assert run_on(str(tmp_path / "broken"), kind, before, at_call=1 + 7 * calls_per_step + 2) is None
    mended = run_on(str(tmp_path / "broken"), kind, after)
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from == 6
    assert_identical(mended, whole)


def test_random_items_are_never_resident(tmp_path: Path) -> None:
    noisy = Variant(global_batch=16, steps=4, num_samples=59, noisy_items=True)
    with pytest.raises(ConfigError) as caught:
        run(str(tmp_path / "on"), noisy, settings={"resident": "on"})
    (problem,) = caught.value.problems
    assert problem.key == "--resident"
    assert "its items draw random numbers" in problem.message
    assert "--resident off" in problem.remedy
    automatic = run(str(tmp_path / "auto"), noisy)
    off = run(str(tmp_path / "off"), noisy, settings={"resident": "off"})
    assert automatic is not None
    assert off is not None
    assert_identical(automatic, off)


def loaders_of(monkeypatch: pytest.MonkeyPatch) -> list[Loader]:
    made: list[Loader] = []
    original = Loader.__init__

    def noted(self: Loader, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Loader, "__init__", noted)
    return made


@pytest.mark.parametrize(
    ("kind", "settings", "is_resident"),
    [
        ("tensors", {}, True),
        ("subset", {}, True),
        ("items", {}, False),  # for the planner to decide: it has to be read first
        ("tensors", {"resident": "off"}, False),
        ("tensors", {"num_workers": 1}, False),  # workers that were asked for are used
        ("items", {"num_workers": 1, "resident": "on"}, True),
    ],
)
def test_what_automatic_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any], is_resident: bool
) -> None:
    made = loaders_of(monkeypatch)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, **settings)
    train(make_job(VARIANT, data=make_data(kind), max_steps=2), config, quiet=True)
    assert [loader.resident is not None for loader in made] == [is_resident]
    assert made[0].num_workers == (1 if settings.get("num_workers") and not is_resident else 0)


def test_it_is_said_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    result = train(make_job(VARIANT, data=make_data("tensors")), config)
    shown = " ".join(capsys.readouterr().out.split())
    assert "loader resident on cpu: 3.3 kB, gathered there" in shown
    assert "data_path: 'resident on cpu: 3.3 kB, gathered there'" in (result.folder / "plan.yaml").read_text()


def test_why_tensors_are_not_resident_is_said(tmp_path: Path) -> None:
    def backwards(items: list[Any]) -> Any:
        return torch.utils.data.default_collate(items[::-1])

    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    result = train(make_job(VARIANT, data=make_data("tensors"), collate=backwards), config, quiet=True)
    (event,) = events(result.folder, "data")
    assert event["notes"] == [
        "not resident on cpu: its collate function backwards does something else than stack items"
    ]


def test_a_validation_set_is_decided_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident beside items that are not, and the other way round; the figures are the same."""
    made = loaders_of(monkeypatch)
    vectors, texts = Vectors(VARIANT), [(*Vectors(VARIANT)[index], "name") for index in range(21)]
    found = {}
    for name, data, valid, resident in (
        ("neither", vectors, vectors, "off"),
        ("valid alone", vectors, make_data("tensors"), "auto"),
        ("both", vectors, vectors, "on"),
    ):
        config = configure(output_dir=tmp_path, gpu_mode="cpu", resident=resident, report=False, batch_size=4)
        result = train(make_job(VARIANT, name=name.replace(" ", "-"), data=data, valid=valid), config, quiet=True)
        found[name] = result.metrics["valid_loss"]
        job = make_job(VARIANT, name=name, data=data, valid=valid)
        assert evaluate(job, result, config)["valid_loss"] == found[name]
    assert [loader.resident is not None for loader in made] == [
        False, False, False,  # training, its validation, evaluation
        False, True, True,
        True, True, True,
    ]  # fmt: skip
    assert len(set(found.values())) == 1
    made.clear()
    config = configure(output_dir=tmp_path, gpu_mode="cpu", resident="on", report=False)
    result = train(make_job(VARIANT, name="texts", data=vectors, valid=texts), config, quiet=True)
    assert [loader.resident is not None for loader in made] == [True, False]
    assert "valid_loss" in result.metrics


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for resident in ("off", "on"):
        torch.manual_seed(0)
        model = nn.Linear(6, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = configure(output_dir=tmp_path / resident, gpu_mode="cpu", resident=resident, report=False)
        loop = drive(model, optimizer, Vectors(VARIANT), global_batch=16, epochs=2, config=config, quiet=True)
        for inputs, labels in loop:
            loss = functional.cross_entropy(model(inputs), labels)
            losses.setdefault(resident, []).append(loss.item())
            loop.backward(loss)
            loop.step()
    assert losses["on"] == losses["off"]
    assert len(losses["on"]) == 8


def test_a_loss_that_changes_its_batch_does_not_change_the_data(tmp_path: Path) -> None:
    def changing(model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(2)
        return functional.cross_entropy(model(batch[0]), batch[1])

    runs = [
        run(
            str(tmp_path / resident), VARIANT, data=make_data("tensors"), loss=changing, settings={"resident": resident}
        )
        for resident in ("on", "off")
    ]
    assert runs[0] is not None
    assert runs[1] is not None
    assert_identical(runs[0], runs[1])

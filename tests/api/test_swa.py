"""Stochastic weight averaging: equal to torch's own in a plain loop; exact through a crash; the same on all ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, update_bn

import drivetrain as dt
from drivetrain.data.division import SampleStream
from tests.api.jobs import Trained, Variant, Vectors, make_job, run, vector_loss
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.gloo_pool import GlooPool

# 4 steps per epoch. The mean begins after 6 of 16 steps, so at the end of the second epoch: 3 sets of weights.
VARIANT = Variant("mlp", torch.float64, global_batch=16, steps=16, num_samples=64, save_every=3)
SWA = dt.SWA(start=0.375, every="epoch")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.layers(inputs))
        return result


CHANGES: dict[str, Any] = {
    "model": lambda: Normed().double(),
    "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "schedule": dt.Constant(),
    "clip_norm": None,
    "weight_decay": None,
    "swa": SWA,
}


def by_hand(first: int, period: int, changes: dict[str, Any] = CHANGES) -> tuple[AveragedModel, nn.Module]:
    """Train a plain loop with torch's own averaging."""
    data = Vectors(VARIANT)
    torch.manual_seed(VARIANT.seed)
    model = changes["model"]()
    averaged = AveragedModel(model)
    optimizer = changes["optimizer"](model.parameters())
    stream = SampleStream(64, VARIANT.seed)
    for step in range(VARIANT.steps):
        order = stream.samples(step // 4, step % 4 * 16, step % 4 * 16 + 16)
        optimizer.zero_grad()
        functional.cross_entropy(model(data.inputs[order]), data.labels[order]).backward()
        optimizer.step()
        if step + 1 >= first and (step + 1) % period == 0:
            averaged.update_parameters(model)
    order = stream.samples(0, 0, 64)
    update_bn([data.inputs[order[start : start + 16]] for start in range(0, 64, 16)], averaged)
    return averaged, model


def config(folder: Path, **settings: Any) -> dt.Config:
    return dt.configure(
        **{
            "output_dir": folder,
            "gpu_mode": "cpu",
            "loss_weighting": "samples",
            "report": False,
            "batch_size": 16,
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("swa", "first", "period"),
    [(SWA, 6, 4), (dt.SWA(start=10, every=3), 10, 3), (dt.SWA(start=0.0, every=1), 1, 1)],
)
def test_it_is_torchs_own(tmp_path: Path, swa: dt.SWA, first: int, period: int) -> None:
    averaged, model = by_hand(first, period)
    result = dt.train(make_job(VARIANT, **{**CHANGES, "swa": swa}), config(tmp_path), quiet=True)
    found, expected = result.model.state_dict(), averaged.module.state_dict()
    for name in expected:
        if "num_batches" not in name:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
    exported = load_file(dt.export(result, tmp_path / "mean.safetensors"))
    assert all(torch.equal(exported[name], found[name]) for name in expected if "num_batches" not in name)
    plain = load_file(dt.export(result, tmp_path / "plain.safetensors", average=False))
    for name, value in model.state_dict().items():  # the training itself is untouched, its statistics too
        torch.testing.assert_close(plain[name], value, rtol=0, atol=1e-12)


def test_the_mean_is_validated_and_tested(tmp_path: Path) -> None:
    data = Vectors(Variant(num_samples=40))
    job = make_job(VARIANT, **CHANGES, valid=data, valid_every=16, test=data)
    result = dt.train(job, config(tmp_path), quiet=True)
    averaged, _ = by_hand(6, 4)
    averaged.eval()
    with torch.no_grad():
        expected = float(functional.cross_entropy(averaged(data.inputs), data.labels))
    assert result.metrics["valid_loss"] == pytest.approx(expected, abs=1e-12)
    assert result.test["test_loss"] == pytest.approx(expected, abs=1e-12)
    again = dt.evaluate(job, result.folder, config(tmp_path))
    assert again["valid_loss"] == pytest.approx(expected, abs=1e-12)


def test_before_the_first_weights_there_is_no_mean(tmp_path: Path) -> None:
    stopping = dt.every(4, lambda context: dt.Verdict(stop=True))
    result = dt.train(make_job(VARIANT, **CHANGES, hooks=[stopping]), config(tmp_path), quiet=True)
    assert result.steps == 4
    mean, plain = (load_file(dt.export(result, tmp_path / f"{way}.safetensors", average=way)) for way in (True, False))
    assert all(torch.equal(mean[name], plain[name]) for name in plain)


def test_part_of_the_samples_gives_the_statistics(tmp_path: Path) -> None:
    swa = dt.SWA(start=0.375, every="epoch", batch_norm_samples=32)
    result = dt.train(make_job(VARIANT, **{**CHANGES, "swa": swa}), config(tmp_path), quiet=True)
    averaged, _ = by_hand(6, 4)
    data, order = Vectors(VARIANT), SampleStream(64, VARIANT.seed).samples(0, 0, 32)
    update_bn([data.inputs[order[:16]], data.inputs[order[16:]]], averaged)
    found = result.model.state_dict()
    for name, value in averaged.module.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def train_with(folder: str, strategy: str, at_call: int, normed: bool = True, validated: bool = True) -> Trained | None:
    changes = {**CHANGES, "valid": Vectors(VARIANT) if validated else None}
    if not normed:
        del changes["model"]
    if at_call:
        changes["loss"] = CrashingLoss(vector_loss, at_call)
    try:
        return run(folder, VARIANT, 4, settings={"parallel_strategy": strategy}, **changes)
    except PlantedError:
        return None


@pytest.mark.parametrize(("strategy", "world"), [("auto", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_crash_changes_nothing(gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int) -> None:
    whole = gloo_pool.run(train_with, str(tmp_path / "whole"), strategy, 0, world=world)[0]
    # Per step and per validation as many calls as micro-batches; the statistics are computed twice by then.
    at_call = 1 + (14 * 4 + 3 * 16 + 2 * 16) // world
    assert gloo_pool.run(train_with, str(tmp_path / "same"), strategy, at_call, world=world)[0] is None
    again = gloo_pool.run(train_with, str(tmp_path / "same"), strategy, 0, world=world)[0]
    assert again.resumed_from == 12, "its mean is of the weights of two epochs"
    assert_identical(again, whole)
    assert any(key.startswith("ema/") and "running_mean" in key for key in whole.state)


def test_a_crash_before_the_statistics_are_computed(tmp_path: Path) -> None:
    whole = train_with(str(tmp_path / "whole"), "auto", 0, validated=False)
    assert train_with(str(tmp_path / "same"), "auto", 1 + 10 * 4, validated=False) is None
    again = train_with(str(tmp_path / "same"), "auto", 0, validated=False)
    assert whole is not None
    assert again is not None
    assert again.resumed_from == 9
    assert_identical(again, whole)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_average_the_same(gloo_pool: GlooPool, tmp_path: Path, strategy: str) -> None:
    one = train_with(str(tmp_path / "one"), "auto", 0, normed=False)
    two = gloo_pool.run(train_with, str(tmp_path / "two"), strategy, 0, False, world=2)[0]
    assert one is not None
    keys = [key for key in one.state if key.startswith("ema/")]
    assert keys
    for key in keys:
        np.testing.assert_allclose(two.state[key], one.state[key], rtol=0, atol=1e-10)


def test_the_statistics_of_ranks_are_their_mean(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """The batches of two ranks of 8 samples each are other ones than those of one rank, and as many count."""
    found = gloo_pool.run(train_with, str(tmp_path), "ddp", 0, world=2)[0]
    model = Normed().double()
    state = {key.removeprefix("ema/"): torch.from_numpy(value) for key, value in found.state.items() if "ema/" in key}
    model.load_state_dict(state, strict=False)
    data, order = Vectors(VARIANT), SampleStream(64, VARIANT.seed).samples(0, 0, 64)
    update_bn([data.inputs[order[start : start + 4]] for start in range(0, 64, 4)], model)
    for name, value in model.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"swa": 0.75}, "expected dt.SWA"),
        ({"swa": dt.SWA(start=1.0)}, "a fraction from 0 to below 1"),
        ({"swa": dt.SWA(every=0)}, "a whole number of steps from 1"),
        ({"swa": dt.SWA(batch_norm_samples=1)}, "a whole number from 2"),
        ({"swa": SWA, "ema": 0.9}, "both ema and swa are given"),
    ],
)
def test_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(dt.ConfigError, match=match):
        make_job(VARIANT, **given)


def test_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="averages nothing"):
        dt.train(make_job(VARIANT, swa=dt.SWA(start=15, every=10)), config(tmp_path / "late"), quiet=True)
    data = Vectors(VARIANT)
    items = (data[index] for index in range(64))
    job = make_job(VARIANT, **{**CHANGES, "data": items, "swa": dt.SWA(start=2, every=1), "max_steps": 3})
    with pytest.raises(dt.DrivetrainError, match="can only be iterated"):
        dt.train(job, config(tmp_path / "read"), quiet=True)


def test_a_longer_run_begins_its_mean_anew(tmp_path: Path) -> None:
    """The run that was made longer is the one that was begun longer, to the bit."""
    changes = {**CHANGES, "max_steps": None}
    dt.train(make_job(VARIANT, **changes, epochs=4), config(tmp_path), quiet=True)
    longer = make_job(VARIANT, **{**changes, "swa": dt.SWA(start=0.375)}, epochs=12)
    extended = dt.train(longer, config(tmp_path), quiet=True, extend=True)
    begun = dt.train(longer, config(tmp_path / "longer"), quiet=True)
    assert json.loads((extended.folder / "steps.jsonl").read_text().splitlines()[-1])["step"] == 48
    for name, value in begun.model.state_dict().items():
        assert torch.equal(extended.model.state_dict()[name], value), name

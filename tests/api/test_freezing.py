"""Weights that a hook freezes and thaws: equal to a plain loop that does it, on any number of ranks, after a crash."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import drivetrain as dt
from drivetrain.data.division import SampleStream
from tests.api.jobs import Trained, Variant, Vectors, make_job, make_model, run, vector_loss
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.gloo_pool import GlooPool

VARIANT = Variant("mlp", torch.float64, global_batch=16, steps=10, num_samples=64, save_every=3)


class Schedule(dt.Hook):
    """The first layer is trained from the fifth step on; the last one rests from the eighth."""

    every = 1

    def check(self, context: dt.StepContext) -> None:
        if context.step == 0:
            context.freeze("layers.0.*")

    def __call__(self, context: dt.StepContext) -> None:
        if context.step == 4:
            context.unfreeze("layers.0.*")
        if context.step == 7:
            context.freeze("layers.5.weight")


def by_hand() -> tuple[list[float], dict[str, Any]]:
    data = Vectors(VARIANT)
    torch.manual_seed(VARIANT.seed)
    model: Any = make_model(VARIANT)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    stream, losses = SampleStream(64, VARIANT.seed), []
    for step in range(10):
        model.layers[0].requires_grad_(step >= 4)
        model.layers[5].weight.requires_grad_(step < 7)
        order = stream.samples(step // 4, step % 4 * 16, step % 4 * 16 + 16)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data.inputs[order]), data.labels[order])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 5) / 5))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 5 if step < 5 else cosine)
        optimizer.step()
        losses.append(loss.item())
    return losses, {f"model/{name}": value.detach().numpy() for name, value in model.state_dict().items()}


def train_with(folder: str, strategy: str, at_call: int = 0) -> Trained | None:
    loss = CrashingLoss(vector_loss, at_call) if at_call else vector_loss
    try:
        return run(folder, VARIANT, 4, settings={"parallel_strategy": strategy}, loss=loss, hooks=[Schedule()])
    except PlantedError:
        return None


@pytest.mark.parametrize(("strategy", "world"), [("auto", 1), ("ddp", 2), ("fsdp", 2)])
def test_it_is_the_plain_loop(gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int) -> None:
    losses, weights = by_hand()
    found = gloo_pool.run(train_with, str(tmp_path), strategy, world=world)[0]
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-10)
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("at_step", [3, 9])
def test_a_crash_changes_nothing(tmp_path: Path, at_step: int) -> None:
    whole = train_with(str(tmp_path / "whole"), "auto")
    assert train_with(str(tmp_path / "same"), "auto", 1 + 4 * at_step + 2) is None
    again = train_with(str(tmp_path / "same"), "auto")
    assert whole is not None
    assert again is not None
    assert again.resumed_from == at_step
    assert_identical(again, whole)


@pytest.mark.parametrize(
    ("pattern", "words"), [("bodies.*", "no weight that the optimizer has matches"), ("*", "nothing would be left")]
)
def test_mistakes(tmp_path: Path, pattern: str, words: str) -> None:
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False, loss_weighting="samples")
    hook = dt.every(2, lambda context: context.freeze(pattern))
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.train(make_job(VARIANT, hooks=[hook]), config, quiet=True)


def test_clearing_requires_grad_names_the_remedy(tmp_path: Path) -> None:
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False, loss_weighting="samples")
    hook = dt.every(2, lambda context: context.model.layers[0].requires_grad_(False))
    with pytest.raises(dt.DrivetrainError, match="was cleared") as raised:
        dt.train(make_job(VARIANT, hooks=[hook]), config, quiet=True)
    assert 'context.freeze("layers.0.weight")' in raised.value.remedy

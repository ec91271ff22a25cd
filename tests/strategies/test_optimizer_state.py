"""Whatever an optimizer keeps survives a resume, or the run is refused after its first step."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.config import configure
from drivetrain.strategies import StrategyParts
from drivetrain.strategies.optimizer_state import (
    ON_HOST,
    Decoder,
    Encoder,
    are_rounded,
    attributes_of,
    put_rates_on_device,
    rounded,
    set_rate,
)
from drivetrain.strategies.replicated import whole_state
from tests.api.jobs import Vectors, make_job, make_model
from tests.api.test_resume import assert_identical
from tests.gloo_pool import GlooPool
from tests.strategies import optimizer_state_runs
from tests.strategies.optimizer_state_runs import VARIANT, Hoarder


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_it_goes_on_as_if_never_stopped(gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int) -> None:
    whole = gloo_pool.run(optimizer_state_runs.run_hoarder, str(tmp_path / "1"), strategy, world=world)[0]
    folder = str(tmp_path / "2")
    at_call = 1 + 5 * (4 // world) + 1  # the trial, five steps
    assert all(gloo_pool.run(optimizer_state_runs.crash_hoarder, folder, strategy, at_call, world=world))
    mended = gloo_pool.run(optimizer_state_runs.run_hoarder, folder, strategy, world=world)[0]
    assert mended.resumed_from == 4
    assert_identical(mended, whole)


def train(folder: Path, make: Any, steps: int = 4, **changes: Any) -> dt.Result:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False)
    return dt.train(make_job(VARIANT, optimizer=make, max_steps=steps, **changes), config, quiet=True)


class Stop:
    """Asks for the end after a step, so that the run can go on."""

    every = 1

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, context: dt.StepContext) -> None:
        if context.step == self.at:
            raise RuntimeError("planted")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_what_cannot_be_saved_is_refused_after_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="attribute 'logger' is a object, which a checkpoint cannot hold"):
        train(tmp_path / "object", lambda groups: Hoarder(groups, logger=object()))
    with pytest.raises(dt.DrivetrainError, match="attribute 'inner' is an optimizer of its own"):
        train(tmp_path / "inner", lambda groups: Hoarder(groups, inner=torch.optim.SGD))


def test_what_is_named_as_unsaved_is_left_out(tmp_path: Path) -> None:
    def make(groups: Any) -> Hoarder:
        made = Hoarder(groups, logger=object())
        made.unsaved_attributes = ("logger",)  # type: ignore[attr-defined]
        return made

    assert train(tmp_path, make).finished


def test_other_attributes_than_it_was_made_with_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, Hoarder, hooks=[Stop(3)])
    with pytest.raises(dt.DrivetrainError, match=r"other attributes: rho is 0\.1 now and was 0\.05"):
        train(tmp_path, lambda groups: Hoarder(groups, rho=0.1), hooks=[Stop(0)])
    assert train(tmp_path, Hoarder, hooks=[Stop(0)]).resumed_from == 2


def test_drive_leaves_text_in_a_state_that_is_handed_in(tmp_path: Path) -> None:
    model = make_model(VARIANT)
    optimizer = Hoarder(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    data = Vectors(VARIANT)
    driven = dt.drive(model, optimizer, data, global_batch=12, max_steps=1, config=config, quiet=True)
    assert {state["mode"] for key, state in optimizer.state.items() if isinstance(key, torch.Tensor)} == {"up"}
    driven.close()


def test_encoding_gives_back_what_it_was_given() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": (1, [2.5, None, "text"], {3: True}), "nan": float("nan"), "t": [torch.arange(3), ()]}
    stored = Encoder(tensors.__setitem__).encode(value, "it", "key")
    found = Decoder(tensors.__getitem__, torch.device("cpu")).decode(stored)
    assert found["a"] == value["a"]
    assert found["nan"] != found["nan"]
    assert torch.equal(found["t"][0], torch.arange(3))
    assert found["t"][1] == ()


def test_torchs_own_optimizers_have_no_attributes_to_save() -> None:
    made = [torch.nn.Parameter(torch.zeros(2, 2))]
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS, torch.optim.Adafactor):
        assert attributes_of(kind(made, lr=0.1)) == {}


@given(some.floats(0, 100, allow_nan=False))
def test_rounding_is_that_of_float32(rate: float) -> None:
    assert rounded(rate) == float(np.float32(rate))


def learned(on_device: bool, make: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = make(model.parameters())
    if on_device:
        put_rates_on_device(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for step in range(20):
        set_rate(optimizer.param_groups[0], rounded(0.1 / (step // 3 + 1)))
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
    if on_device:
        assert optimizer.param_groups[0]["lr"] is rates[0], "a replay reads it where it was"
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    ],
)
def test_the_same_steps_as_with_numbers(make: Any) -> None:
    assert all(map(torch.equal, learned(True, make), learned(False, make)))


def test_a_save_takes_the_value_that_the_host_knows() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    put_rates_on_device(optimizer)
    set_rate(optimizer.param_groups[0], 0.25)
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    with mock.patch.object(Tensor, "item", side_effect=AssertionError("the device was asked")):
        _, meta = whole_state(StrategyParts(model, lambda *_: torch.zeros(()), optimizer))
    values = meta["optimizer_groups"][0]["values"]
    assert values["lr"] == 0.25
    assert ON_HOST not in values


def test_on_a_cpu_nothing_is_rounded() -> None:
    assert not are_rounded(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))

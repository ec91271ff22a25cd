"""Hooks of users: from a function, from a class with one member; what they see and what they may ask for."""

from pathlib import Path

import pytest
from torch import nn

import drivetrain as dt
from drivetrain.core.hook import ExpertAccess
from drivetrain.core.world import World
from tests.api.jobs import Variant, make_job

SMALL = Variant(steps=6, num_samples=60, global_batch=20)


def trained(folder: Path, *hooks: dt.Hook) -> dt.Result:
    job = make_job(SMALL, hooks=hooks)
    return dt.train(job, dt.configure(output_dir=folder, gpu_mode="cpu", quiet=True, report=False))


def test_a_function_is_called_every_so_many_steps(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []
    epochs: list[int] = []
    result = trained(
        tmp_path,
        dt.every(2, lambda context: seen.append((context.step, context.loss == context.loss))),
        dt.every("epoch", lambda context: epochs.append(context.epoch)),
        dt.every(2, lambda context: "no verdict"),
    )
    assert seen == [(2, True), (4, True), (6, True)]
    assert epochs == [1, 2]
    assert result.finished


def test_a_function_may_end_the_run(tmp_path: Path) -> None:
    assert trained(tmp_path, dt.every(2, lambda context: dt.Verdict(stop=context.step == 4))).steps == 4


class AtEpochs(dt.Hook):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __call__(self, context: dt.StepContext) -> None:
        self.epochs.append(context.epoch)


def test_a_class_needs_one_member(tmp_path: Path) -> None:
    hook = AtEpochs()
    trained(tmp_path, hook)
    assert hook.epochs == [1, 2]
    assert hook.state_dict() == {}


@pytest.mark.parametrize("period", [0, -3, True, 2.5, "day"])
def test_a_wrong_period_is_refused_at_once(period: object) -> None:
    with pytest.raises(dt.ConfigError, match="whole number of steps"):
        dt.every(period, print)  # type: ignore[arg-type]


def test_what_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(dt.ConfigError, match="cannot be called"):
        dt.every(3, "print")  # type: ignore[arg-type]


def test_the_older_names_of_what_only_experts_need() -> None:
    access = ExpertAccess(lambda parameter: {"average": parameter})
    context = dt.StepContext(1, 0, nn.Linear(1, 1), World(), Path(), experts=access)
    assert context.companions is access.companions
    assert context.rehearsal is None

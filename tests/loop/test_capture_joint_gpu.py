"""On a GPU: DDP over NCCL, with one rank. Captured steps are DDP's eager ones to the bit, a plain loop's to rounding.

The all-reduces and broadcasts of one rank are NCCL's own, and are recorded; with several ranks nothing of this was run.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.world import World
from drivetrain.loop import JointCapturedStepper, capture_joint, trainer
from drivetrain.run import Session, assemble
from drivetrain.strategies.ddp import DdpStrategy
from tests.api.jobs import Variant, plain_loop, vector_loss
from tests.api.test_equivalence import difference
from tests.api.test_resume import PlantedError, assert_identical
from tests.loop.test_capture import Often, halve, less_dropout_once, logging_loss
from tests.loop.test_capture_gpu import (
    OFF,
    ON,
    Crash,
    capture_of,
    counted_loss,
    counting_model,
    events,
    exploding_loss,
    logged_rows,
    normed_model,
    trained,
    waiting_loss,
    waits_when_recorded,
    why_not,
)

pytestmark = pytest.mark.gpu

# 20 steps per epoch, the last of them ragged. Steps are replayed from the 15th on.
BASE = Variant("mlp", torch.float32, global_batch=32, steps=60, num_samples=32 * 19 + 8, save_every=30)
MOST_EAGER = 20  # of the steps of a run


@pytest.fixture(autouse=True)
def one_nccl_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Every run of this process trains with DDP over NCCL, as the only rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    owner = World(device=device)
    world = World(device=device, group=owner.own_group())
    assert dist.get_backend(world.group) == "nccl"
    steppers: list[JointCapturedStepper] = []

    def make_strategy(self: Session, **changes: bool) -> DdpStrategy:
        self.strategy = DdpStrategy.name
        return DdpStrategy(world)

    def make_stepper(strategy: Any, objective: Any, of_run: World, *rest: Any, **options: Any) -> JointCapturedStepper:
        steppers.append(JointCapturedStepper(strategy, objective, world, *rest, **options))
        return steppers[-1]

    monkeypatch.setattr(Session, "make_strategy", make_strategy)
    monkeypatch.setattr(assemble, "JointCapturedStepper", make_stepper)
    yield world
    # An error keeps no graph alive, which the communicator would wait for when it ends.
    assert not any(stepper._record for stepper in steppers)
    steppers.clear()
    torch.cuda.synchronize()
    world.close()
    owner.close()


def num_replayed(folder: Path) -> int:
    """Return how many steps of the last start of a run were replayed."""
    words = capture_of(folder)
    assert "steps replayed" in words, words
    return int(words.split(", ")[-1].split()[0])


def spoilt_loss(model: nn.Module, batch: Any) -> Tensor:
    """Not a number in step 40."""
    model.calls += 1  # type: ignore[operator,assignment]
    return vector_loss(model, batch) / (model.calls != 40)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("variant", "settings", "changes"),
    [
        (BASE, {}, {}),
        (replace(BASE, dropout=0.3), {}, {"clip_norm": None, "ema": 0.9}),
        (replace(BASE, dropout=0.3), {}, {"micro_batch": 10}),
        (BASE, {}, {"micro_batch": 8, "model": normed_model}),
        (replace(BASE, dropout=0.1), {"precision": "bf16"}, {"micro_batch": 8, "loss": counted_loss}),
        (BASE, {"precision": "fp16"}, {"model": counting_model, "loss": exploding_loss}),
        (BASE, {"resident": "on"}, {}),
        (replace(BASE, num_samples=32 * 3 + 8), {}, {}),
        (BASE, {}, {"hooks": [Often(halve)]}),
        (replace(BASE, dropout=0.3), {}, {"hooks": [Often(less_dropout_once)]}),
    ],
    ids=[
        "clipped", "dropout and average", "micro-batches", "buffers that are broadcast", "counted items in bf16",
        "fp16", "resident data", "two shapes", "weights changed between", "dropout changed between",
    ],
)  # fmt: skip
def test_the_same_as_eager_ddp(
    tmp_path: Path, variant: Variant, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    eager = trained(tmp_path / "eager", OFF | settings, variant, **changes)
    captured = trained(tmp_path / "captured", ON | settings, variant, **changes)
    assert why_not(tmp_path / "captured") == ""
    assert num_replayed(tmp_path / "captured") >= variant.steps - MOST_EAGER - 15 * ("hooks" in changes)
    assert_identical(captured, eager)
    (told,) = [event["words"] for event in events(tmp_path / "captured") if event["event"] == "step captured"]
    assert "on all ranks from step" in told
    assert "one NCCL rank only" in told


@pytest.mark.parametrize("micro_batch", [None, 10])
def test_the_same_as_a_plain_loop(tmp_path: Path, micro_batch: int | None) -> None:
    captured = trained(tmp_path, ON, BASE, micro_batch=micro_batch)
    assert num_replayed(tmp_path) >= BASE.steps - MOST_EAGER
    of_losses, of_weights = difference(captured, *plain_loop(BASE))
    assert of_losses < 1e-3
    assert of_weights < 5e-3


def test_a_bad_step_is_skipped(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": counting_model, "loss": spoilt_loss}
    eager = trained(tmp_path / "eager", OFF, BASE, **changes)
    captured = trained(tmp_path / "captured", ON, BASE, **changes)
    assert num_replayed(tmp_path / "captured") >= BASE.steps - MOST_EAGER
    assert [row["step"] for row in captured.rows if row["skipped"]] == [40]
    assert repr(captured.rows) == repr(eager.rows)  # as text, in which what is not a number is equal to itself
    assert_identical(*(replace(each, rows=[], losses=[]) for each in (captured, eager)))


@pytest.mark.parametrize(("first", "second"), [(ON, ON), (ON, OFF), (OFF, ON)])
def test_going_on_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: dict[str, Any], second: dict[str, Any]
) -> None:
    variant = replace(BASE, dropout=0.3, save_every=10)
    whole = trained(tmp_path / "whole", ON, variant, hooks=[Crash()])
    monkeypatch.setattr(Crash, "at", 37)
    with pytest.raises(PlantedError):
        trained(tmp_path / "broken", first, variant, hooks=[Crash()])
    monkeypatch.setattr(Crash, "at", 0)
    mended = trained(tmp_path / "broken", second, variant, hooks=[Crash()])
    assert mended.resumed_from == 30
    if second == ON:
        assert num_replayed(tmp_path / "broken") > 0
    assert_identical(mended, whole)


def test_a_stop_request_is_heard_among_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a number in Python that a graph would repeat for good: in a replay it is read from the device."""
    set_lr = trainer.Trainer._set_lr

    def asking(self: trainer.Trainer, step: int, num_steps: int | None) -> float:
        if step == 40:
            self.stop()
        return set_lr(self, step, num_steps)

    monkeypatch.setattr(trainer.Trainer, "_set_lr", asking)
    eager, captured = (trained(tmp_path / name, way, BASE) for name, way in (("eager", OFF), ("captured", ON)))
    assert num_replayed(tmp_path / "captured") > 20
    assert len(captured.rows) == len(eager.rows) < 45
    assert_identical(captured, eager)


def test_logged_values_are_those_of_each_step(tmp_path: Path) -> None:
    trained(tmp_path / "eager", OFF, BASE, loss=logging_loss)
    trained(tmp_path / "captured", ON, BASE, loss=logging_loss)
    assert num_replayed(tmp_path / "captured") >= BASE.steps - MOST_EAGER
    found, expected = logged_rows(tmp_path / "captured"), logged_rows(tmp_path / "eager")
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert len({row["double"] for row in found}) == len(found)


def test_what_cannot_be_recorded_runs_as_ever(tmp_path: Path) -> None:
    """It is found out before the other ranks are part of the recording. The next run captures again."""
    eager = trained(tmp_path / "eager", OFF, BASE, loss=waits_when_recorded)
    failed = trained(tmp_path / "failed", ON, BASE, loss=waits_when_recorded)
    assert "recording the step failed" in why_not(tmp_path / "failed")
    assert_identical(failed, eager)
    trained(tmp_path / "after", ON, BASE)
    assert num_replayed(tmp_path / "after") >= BASE.steps - MOST_EAGER


def test_a_step_that_waits_is_not_recorded(tmp_path: Path) -> None:
    trained(tmp_path, ON, replace(BASE, steps=20), loss=waiting_loss)
    assert "waits for the device" in why_not(tmp_path)


@pytest.mark.parametrize("num_eager", [94, 95, 96, 97])
def test_an_iteration_that_ddp_would_time_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_eager: int
) -> None:
    """DDP times every hundredth, and the host waits for that in the one after it."""
    monkeypatch.setattr(capture_joint, "EAGER_STEPS", num_eager)
    trained(tmp_path, ON, replace(BASE, steps=115, num_samples=32 * 20))
    assert why_not(tmp_path) == ""
    assert num_replayed(tmp_path) > 10

"""Ranks that capture their steps together come to what they come to without, and none waits for another in vain.

A recorder that computes again stands in for CUDA's, and gloo for NCCL: what the ranks agree on is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.loop import JointCapturedStepper, capture_joint, schedule, trainer
from drivetrain.run import Session, assemble
from drivetrain.strategies.ddp import DdpStrategy
from tests.api.jobs import Trained, Variant, make_job, make_model, read, token_loss, vector_loss
from tests.api.test_resume import assert_identical
from tests.gloo_pool import GlooPool
from tests.loop.rerun import Rerun
from tests.loop.test_capture import events

# 4 steps per epoch, the last of them ragged. First come 11 eager ones, two that are watched, and one for its shapes.
BASE = Variant("mlp", torch.float32, global_batch=16, steps=40, dropout=0.3, num_samples=60, save_every=20)
FIRST_REPLAY = 15  # the step of it, where no other comes between


@dataclass(frozen=True)
class Ended:
    """What a run came to on one rank."""

    steps: int
    trained: Trained | None  # on rank 0
    num_replayed: int
    num_recorded: int
    why_not: str
    told: list[tuple[str, str]]


def counting_model() -> nn.Module:
    model = make_model(BASE)
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    return model


def spoilt_loss(model: nn.Module, batch: Any) -> Tensor:
    """Not a number in the thirtieth forward of rank 1."""
    model.calls += 1  # type: ignore[operator,assignment]
    return vector_loss(model, batch) / ((model.calls != 30) | (dist.get_rank() != 1))  # type: ignore[operator]


def make_forgetful_loss() -> Callable[..., Tensor]:
    """Return a loss that changes something in Python, on rank 1 only."""
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            seen.append(1)
        return vector_loss(model, batch)

    return loss


def trimmed(samples: list[Any]) -> Any:
    """Sentences as long as the longest of the batch, which differs between ranks."""
    inputs, targets = default_collate(samples)
    longest = int((targets >= 0).sum(1).max())
    return inputs[:, :longest].clone(), targets[:, :longest].clone()


class TagsModel:
    """A hook that changes an attribute of rank 1's model: what was recorded there may not be what it computes now."""

    every = 20

    def __call__(self, context: StepContext) -> None:
        if dist.get_rank() == 1:
            context.model.tag = context.step  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Unable(Rerun):
    """Records nothing on rank 1."""

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        if dist.get_rank() == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().__call__(body)


class UnableWithOthers(Rerun):
    """Records nothing on rank 1 but what communicates with nobody; it finds out at the end."""

    num_made = 0

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        UnableWithOthers.num_made += 1
        self._number = UnableWithOthers.num_made

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        replay = super().__call__(body)
        if dist.get_rank() == 1 and self._number == 2:
            raise RuntimeError("out of memory in the pool of the graph")
        return replay


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "average": {"ema": 0.9, "clip_norm": None},
    "micro-batches": {"micro_batch": 3},
    "a bad step": {"model": counting_model, "loss": spoilt_loss},
    "resident data": {"settings": {"resident": "on"}},
    "a tag": {"hooks": [TagsModel()]},
}
RECORDERS: dict[str, type[Rerun]] = {"unable": Unable, "unable with others": UnableWithOthers}


@contextmanager
def capturing(capture: str, recorder: type[Rerun], steppers: list[JointCapturedStepper]) -> Iterator[list[Rerun]]:
    made: list[Rerun] = []

    def make(strategy: DdpStrategy, *rest: Any, **options: Any) -> JointCapturedStepper:
        def make_recorder(device: torch.device) -> Rerun:
            made.append(recorder(strategy.parts.model, strategy.parts.optimizer))
            return made[-1]

        steppers.append(JointCapturedStepper(strategy, *rest, make_recorder=make_recorder, **options))
        return steppers[-1]

    UnableWithOthers.num_made = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(schedule, "are_rounded", lambda optimizer: True)  # as on a GPU
        patched.setattr(assemble, "device_reasons", lambda run, *rest: "" if run.way.capture else "not asked for")
        patched.setattr(assemble, "JointCapturedStepper", make)
        yield made


def ended(
    folder: str,
    capture: str,
    variant: Variant,
    changes: dict[str, Any],
    trouble: str = "",
    stop_at: int = 0,
    device_reasons: Callable[..., str] | None = None,
) -> Ended:
    """Train in this world, and return what this rank came to."""
    changes = {**changes}
    if trouble == "forgetful":
        changes["loss"] = make_forgetful_loss()
    micro_batch, settings = changes.pop("micro_batch", None), changes.pop("settings", {})
    given: dict[str, Any] = {
        "report": False,
        "loss_weighting": "samples",
        "auto_optimize": False,
        "parallel_strategy": "ddp",
    }
    config = configure(
        output_dir=folder,
        gpu_mode="cpu",
        num_workers=0,
        batch_size=micro_batch,
        capture=capture,
        **{**given, **settings},
    )
    steppers: list[JointCapturedStepper] = []
    told: list[tuple[str, str]] = []
    set_lr = trainer.Trainer._set_lr

    def asking(self: trainer.Trainer, step: int, num_steps: int | None) -> float:
        if step + 1 == stop_at and dist.get_rank() == 1:
            self.stop()
        for stepper in steppers:
            stepper.tell = lambda event, words: told.append((event, words))
        return set_lr(self, step, num_steps)

    with (
        capturing(capture, RECORDERS.get(trouble, Rerun), steppers) as recorders,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(trainer.Trainer, "_set_lr", asking)
        if device_reasons is not None:
            patched.setattr(assemble, "device_reasons", device_reasons)
        result = train(make_job(variant, **changes), config, quiet=True)
    replayed = sum(recorder.num_replayed for recorder in recorders)
    recorded = sum(recorder.num_recorded for recorder in recorders)
    why_not = steppers[0].why_not if steppers else ""
    trained = read(result.folder, result.resumed_from) if result.is_main else None
    return Ended(result.steps, trained, replayed, recorded, why_not, told)


def both(pool: GlooPool, tmp_path: Path, *of: Any) -> tuple[list[Ended], list[Ended]]:
    """Return what two ranks come to with capture and without."""
    found = [pool.run(ended, str(tmp_path / capture), capture, *of, world=2) for capture in ("on", "off")]
    captured, plain = found
    assert not any(rank.num_recorded for rank in plain)
    assert captured[0].trained is not None
    assert plain[0].trained is not None
    # As text, in which what is not a number is equal to itself.
    one, other = (repr([rank[0].trained.rows, rank[0].trained.losses]) for rank in found)
    assert one == other
    assert_identical(*(replace(rank[0].trained, rows=[], losses=[]) for rank in found))
    return captured, plain


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_eager_ddp(gloo_pool: GlooPool, tmp_path: Path, case: str) -> None:
    captured, plain = both(gloo_pool, tmp_path, BASE, CASES[case])
    assert captured[0].num_replayed == captured[1].num_replayed > 15
    assert captured[0].why_not == captured[1].why_not == ""
    assert captured[0].steps == captured[1].steps == plain[0].steps == BASE.steps
    ((event, words),) = captured[0].told
    assert event == "step captured"
    assert "on all ranks from step" in words
    assert "tried with one NCCL rank only" in words
    if case == "a bad step":
        for capture in ("on", "off"):
            bad = [event for event in events(tmp_path / capture) if event["event"] == "bad step"]
            assert [(event["step"], event["ranks"], event["skipped"]) for event in bad] == [(30, [1], True)]


def test_the_last_smaller_step_of_an_epoch_is_recorded_by_itself(gloo_pool: GlooPool, tmp_path: Path) -> None:
    captured, _ = both(gloo_pool, tmp_path, BASE, {})
    # Each shape is recorded without the other rank first, and then with it.
    assert captured[0].num_recorded == captured[1].num_recorded == 4


def test_counted_items_of_batches_whose_shapes_differ_between_ranks(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """A step is a replay where it can be on both ranks, and eager on both where it cannot."""
    variant = replace(BASE, kind="transformer", dropout=0.0, steps=60)
    captured, _ = both(gloo_pool, tmp_path, variant, {"collate": trimmed, "loss": token_loss})
    assert captured[0].num_replayed == captured[1].num_replayed
    assert 0 < captured[0].num_replayed < variant.steps - FIRST_REPLAY


@pytest.mark.parametrize("stop_at", [5, 25])
def test_a_stop_request_of_one_rank_stops_both_at_the_same_step(
    gloo_pool: GlooPool, tmp_path: Path, stop_at: int
) -> None:
    """And a run that was stopped among replays goes on to what it would have come to."""
    captured, plain = both(gloo_pool, tmp_path, BASE, {}, "", stop_at)
    assert {rank.steps for rank in (*captured, *plain)} == {plain[0].steps}
    assert stop_at < plain[0].steps < stop_at + 4
    again, _ = both(gloo_pool, tmp_path, BASE, {})
    whole = gloo_pool.run(ended, str(tmp_path / "whole"), "off", BASE, {}, world=2)
    assert again[0].trained is not None
    assert again[0].trained.resumed_from == plain[0].steps
    assert whole[0].trained is not None
    for name, value in whole[0].trained.weights.items():
        assert (again[0].trained.weights[name] == value).all()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("forgetful", "changes loss's seen"),
        ("unable", "recording the step failed: RuntimeError: operation not permitted"),
        ("unable with others", "recording the step failed: RuntimeError: out of memory"),
    ],
)
def test_a_rank_that_gives_up_takes_the_others_along(
    gloo_pool: GlooPool, tmp_path: Path, trouble: str, words: str
) -> None:
    captured, _ = both(gloo_pool, tmp_path, BASE, {}, trouble)
    assert [rank.num_replayed for rank in captured] == [0, 0]
    assert words in captured[1].why_not
    assert captured[0].why_not.startswith("on rank 1, ")
    assert words in captured[0].why_not


@pytest.mark.soak  # the other rank waits until it is ended
def test_a_recording_that_fails_while_gradients_are_reduced_ends_the_run(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """DDP cannot go on after that, with or without capture."""
    with pytest.raises(DrivetrainError, match="while DDP reduced its gradients"):
        gloo_pool.run(ended_half_reduced, str(tmp_path), world=2)


def ended_half_reduced(folder: str) -> None:
    def refused(self: DdpStrategy) -> bool:
        return True

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DdpStrategy, "is_reducing", property(refused))
        ended(folder, "on", BASE, {}, "unable with others")


def test_where_it_cannot_be_the_run_says_why_and_goes_on(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(asked_for_in_vain, str(tmp_path), world=2)
    (told,) = [event["words"] for event in events(tmp_path) if event["event"] == "step not captured"]
    assert told == "only CUDA devices replay a step, and this run is on cpu"


def asked_for_in_vain(folder: str) -> None:
    config = configure(output_dir=folder, gpu_mode="cpu", capture="on", report=False, parallel_strategy="ddp")
    train(make_job(replace(BASE, steps=3, save_every=None)), config, quiet=True)


def test_a_reason_that_one_rank_has_is_that_of_all(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """A rank that captures would wait for the others to agree, from the first step that it could replay."""
    captured = gloo_pool.run(refused_on_one, str(tmp_path), world=2)
    assert [rank.num_recorded for rank in captured] == [0, 0]
    (told,) = [event["words"] for event in events(tmp_path) if event["event"] == "step not captured"]
    assert told == "for want of memory"


def refused_on_one(folder: str) -> Ended:
    def reasons(run: Session, *rest: Any) -> str:
        return "for want of memory" if run.world.rank == 1 else ""

    return ended(folder, "on", replace(BASE, steps=20), {}, device_reasons=reasons)


def test_batches_that_are_never_alike_end_the_attempt(gloo_pool: GlooPool, tmp_path: Path) -> None:
    captured = gloo_pool.run(never_alike, str(tmp_path), world=2)
    assert [rank.num_recorded for rank in captured] == [0, 0]
    for rank in captured:
        assert "shapes of the batches have changed" in rank.why_not


def never_alike(folder: str) -> Ended:
    lengths = iter(range(1, 1000))

    def collate(samples: list[Any]) -> Any:
        inputs, labels = default_collate(samples)
        return inputs, labels, torch.zeros(next(lengths))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capture_joint, "MOST_UNLIKE", 10)
        return ended(folder, "on", replace(BASE, num_samples=64), {"collate": collate})

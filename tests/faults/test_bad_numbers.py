"""Numbers that are not finite: the step is skipped by all ranks, three in a row roll back, spikes are reported."""

import errno
import math
import os
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from drivetrain import DrivetrainError, StepContext, every
from drivetrain.core.metrics import StepRecord
from drivetrain.data.division import SampleStream
from drivetrain.loop.bad_numbers import RollBackError, Skips, SpikeWatch
from drivetrain.run import recovery
from drivetrain.run.recovery import saved_steps
from drivetrain.strategies.base import BadStepGate
from tests.api.jobs import Variant, plain_loop, run, vector_loss
from tests.faults.events import events
from tests.gloo_pool import GlooPool

VARIANT = Variant(steps=14, save_every=4)


def trained(folder: str, inject: str, strategy: str = "auto", **settings: Any) -> Any:
    given = {"inject": inject, "parallel_strategy": strategy, **settings}
    return run(folder, VARIANT, settings=given)


def assert_without(found: Any, left_out: Collection[int]) -> None:
    losses, weights = plain_loop(VARIANT, frozenset(left_out))
    assert [row["step"] for row in found.rows] == list(range(1, VARIANT.steps + 1))
    assert {row["step"] for row in found.rows if row["skipped"]} == set(left_out)
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "world", "where"),
    [("single", 1, ""), ("ddp", 2, ":rank1"), ("fsdp", 2, ":rank1"), ("ddp", 3, ":rank2")],
)
def test_a_poisoned_batch_comes_to_what_leaving_it_out_comes_to(
    gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int, where: str
) -> None:
    found = gloo_pool.run(trained, str(tmp_path), f"nan@6{where},nan@8{where}", strategy, world=world)[0]
    assert_without(found, [6, 8])
    told = events(tmp_path / "suite", "bad step")
    assert [row["step"] for row in told] == [6, 8]
    assert all(row["skipped"] for row in told)
    assert [row["ranks"] for row in told] == [[int(where[-1])] if where else []] * 2
    samples = SampleStream(VARIANT.num_samples, VARIANT.seed).samples(1, 0, 32).tolist()  # step 6 begins an epoch
    assert told[0]["samples"] == samples[32 * int(where[-1] if where else 0) // world :]


def test_gradients_that_are_not_finite_beside_a_finite_loss(tmp_path: Path) -> None:
    assert_without(trained(str(tmp_path), "nan@6"), [6])
    (told,) = events(tmp_path / "suite", "bad step")
    assert "the gradient norm of step 6 (epoch 2) is nan" in told["words"]


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2)])
def test_three_in_a_row_go_back_and_past(gloo_pool: GlooPool, tmp_path: Path, strategy: str, world: int) -> None:
    """Steps 10 to 12 are bad, and 8 was saved: 9 to 12 are left out. Then 14 alone is skipped."""
    inject = "nan@10,nan@11,nan@12,nan@14"
    found = gloo_pool.run(trained, str(tmp_path), inject, strategy, world=world)[0]
    assert found.resumed_from == 8
    assert_without(found, [9, 10, 11, 12, 14])
    assert [row["step"] for row in events(tmp_path / "suite", "bad step")] == [10, 11, 12, 14]


def trained_on_a_full_disk(folder: str) -> None:
    def refused(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with mock.patch.object(recovery, "write_atomically", refused):
        trained(folder, "nan@10,nan@11,nan@12", "auto")


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_left_out_has_to_be_kept(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    """A resumed run would not leave it out, and come to something else. All ranks say so, and none waits."""
    words = r"bad_steps\.json cannot be written \(No space left on device\)"
    with pytest.raises(DrivetrainError, match=words) as caught:
        gloo_pool.run(trained_on_a_full_disk, str(tmp_path), world=world)
    assert "the same command goes on" in str(caught.value)


def test_a_resumed_run_leaves_out_the_same_steps(tmp_path: Path) -> None:
    class Interrupted:
        calls = 0

        def __call__(self, model: Any, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 17:  # step 14, after the start that goes back
                raise KeyError("planted")
            return vector_loss(model, batch)

    inject = {"inject": "nan@10,nan@11,nan@12"}
    with pytest.raises(KeyError):
        run(str(tmp_path), VARIANT, settings=inject, loss=Interrupted())
    found = run(str(tmp_path), VARIANT)
    assert_without(found, [9, 10, 11, 12])


def test_it_goes_back_three_times_and_then_stops(tmp_path: Path) -> None:
    done = [0]

    def bad(model: Any, batch: Any) -> Any:
        """Bad from step 9 on: no rollback helps."""
        return vector_loss(model, batch) * (math.nan if done[0] > 7 else 1.0)

    def count(context: StepContext) -> None:
        done[0] = context.step

    with pytest.raises(DrivetrainError, match="the run went back to a checkpoint 3 times already") as raised:
        run(str(tmp_path), Variant(steps=60, save_every=4), loss=bad, hooks=[every(1, count)])
    assert "learning rate" in raised.value.remedy
    assert len(events(tmp_path / "suite", "bad step")) == 12


def test_bad_from_the_start_is_the_datas_or_the_weights_fault(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match=r"the loss of step 3 .* before anything was learned"):
        run(str(tmp_path), VARIANT, loss=lambda model, batch: vector_loss(model, batch) * math.nan)


def test_an_optimizer_that_cannot_skip_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the host does not wait to know."""
    monkeypatch.setattr(BadStepGate, "closes", lambda *_: False)
    found = run(str(tmp_path), VARIANT, settings={"inject": "nan@7"})
    assert found is not None
    assert found.resumed_from == 4
    assert_without(found, [7])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_skips_by_a_flag_on_its_device(kind: Any) -> None:
    """What the gate does on a GPU, with the same kernels' CPU form."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=0.1, fused=True)
    states = []
    for gradient, flag in ((1.0, 0.0), (math.nan, 1.0), (2.0, 0.0)):
        weight.grad = torch.full((4,), gradient)
        optimizer.found_inf = torch.tensor(flag)
        optimizer.step()
        states.append([weight.detach().clone(), *(value.clone() for value in optimizer.state[weight].values())])
    for before, after in zip(states[0], states[1], strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(states[1][0], states[2][0])


def test_stop_stops_at_the_first(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match=r"the loss of step \d+ .* is nan; the run stops before it is saved"):
        run(str(tmp_path), VARIANT, settings={"inject": "nan@6", "bad_steps": "stop"}, clip_norm=None)


def test_steps_that_are_left_out() -> None:
    skips = Skips(frozenset({3, 20}), ((7, 9),))
    assert [step for step in range(25) if step in skips] == [3, 7, 8, 9, 20]
    assert [skips.next_after(step) for step in (0, 3, 7, 9, 20)] == [3, 7, 8, 20, None]


def record(step: int, loss: float, samples: int = 32) -> StepRecord:
    return StepRecord(step, 0, samples, loss, float(samples), 0.1, None, 0.1)


def losses(count: int, seed: int = 0) -> list[float]:
    """A noisy curve that falls, as of small batches."""
    generator = np.random.default_rng(seed)
    return [4 * math.exp(-step / 300) + 1 + 0.2 * generator.standard_normal() for step in range(count)]


def test_a_spike_is_told_and_noise_is_not() -> None:
    told: list[dict[str, Any]] = []
    watch = SpikeWatch("alert", lambda kind, **facts: told.append(facts), lambda words: None)
    for step, loss in enumerate(losses(2000), start=1):
        watch.observe(record(step, loss + (5.0 if step in (700, 705) else 0.0)))
    assert [row["step"] for row in told] == [700], "one line for those that are close"


def test_few_samples_are_noise_and_no_spike() -> None:
    """The last step of an epoch of 5,000 samples has 8, where others have 64."""
    generator = np.random.default_rng(0)
    told: list[dict[str, Any]] = []
    watch = SpikeWatch("alert", lambda kind, **facts: told.append(facts), lambda words: None)
    for step in range(1, 79 * 40 + 1):
        samples = 64 if step % 79 else 8
        of_samples = np.where(generator.random(samples) < 0.06, 3.0 * generator.random(samples), 0.1)  # few are wrong
        watch.observe(record(step, float(of_samples.mean()) + (9.0 if step == 79 * 20 else 0.0), samples))
    assert [row["step"] for row in told] == [79 * 20], "one that is far off even so is told"


def test_a_spike_rolls_back_where_that_is_asked_for() -> None:
    watch = SpikeWatch("rollback", lambda kind, **facts: None, lambda words: None)
    for step, loss in enumerate(losses(699), start=1):
        watch.observe(record(step, loss))
    with pytest.raises(RollBackError) as raised:
        watch.observe(record(700, 20.0))
    assert (raised.value.last, raised.value.single) == (700, False)


def test_a_run_goes_back_before_a_spike(tmp_path: Path) -> None:
    variant = Variant(steps=90, save_every=20, global_batch=16)
    found = run(str(tmp_path), variant, settings={"inject": "spike@70", "spikes": "rollback"})
    assert found is not None
    assert found.resumed_from == 60
    (told,) = events(tmp_path / "suite", "loss spike")
    skipped = [row["step"] for row in found.rows if row["skipped"]]
    assert skipped == list(range(61, told["step"] + 1))
    assert told["step"] in (70, 71)


def test_what_was_set_aside_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(path=tmp_path)
    assert saved_steps(run) == []
    for name in ("step-00000004", "step-00000008.corrupt", ".step-00000012.tmp-0123456789abcdef", "frozen-00"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    assert saved_steps(run) == [4]

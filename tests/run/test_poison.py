"""Numbers that are not finite: they are never saved, and a run that was saved with them goes on from an older state."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.checkpoint import Checkpointer, CheckpointError, Shard
from drivetrain.checkpoint.tensor_file import DTYPES, not_finite
from drivetrain.core.world import World
from drivetrain.run.saver import must_be_finite
from tests.api.jobs import Variant, make_job, make_model, run, vector_loss
from tests.api.test_resume import BASE, assert_identical, call_in, run_until_crash
from tests.checkpoint.test_malice import forge
from tests.gloo_pool import GlooPool
from tests.run.test_saver import events, steps_saved

VARIANT = replace(BASE, save_every=2)


class NanGradientAt:
    """The job's loss; at one call its value is as always, and its gradient is NaN."""

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        loss = vector_loss(model, batch)
        if self.calls != self.call:
            return loss
        return loss + (next(model.parameters()).sum() * 0).sqrt()  # 0, with the gradient 0 * inf


def run_poisoned(folder: str, variant: Variant, at_call: int, settings: dict[str, Any] | None = None) -> str:
    try:
        # Without clipping: the strategy would skip, or find, what is not finite.
        given = {"bad_steps": "stop", **(settings or {})}
        run(folder, variant, loss=NanGradientAt(at_call), clip_norm=None, settings=given)
    except dt.DrivetrainError as error:
        return error.message
    return ""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"async_save": False}], ids=["beside", "waiting"])
def test_weights_that_are_not_finite_are_never_saved(
    gloo_pool: GlooPool, tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    answers = gloo_pool.run(run_poisoned, str(tmp_path), VARIANT, 1 + 4, settings, world=world)
    assert all(answers)
    assert steps_saved(tmp_path) == [2]
    if not settings:
        (failed,) = events(tmp_path, "save failed")
        assert failed["step"] == 4
        assert "step 4 cannot be saved: " in failed["error"]
        assert "holds nan" in failed["error"]
    mended = gloo_pool.run(run_plainly, str(tmp_path), world=world)[0]
    whole = gloo_pool.run(run_plainly, str(tmp_path / "whole"), world=world)[0]
    assert mended.resumed_from == 2
    assert_identical(mended, whole)


def run_plainly(folder: str) -> Any:
    return run(folder, VARIANT, clip_norm=None)


def test_a_resume_that_goes_bad_at_once_falls_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As after an older version, which saved weights of NaN and called them good."""
    poison = {"check_finite": False}
    assert run_poisoned(str(tmp_path), VARIANT, 1 + 4, poison)
    assert steps_saved(tmp_path) == [2, 4]
    mended = run(str(tmp_path), VARIANT, clip_norm=None, settings=poison)
    assert mended is not None
    assert mended.resumed_from == 2
    assert_identical(mended, run(str(tmp_path / "whole"), VARIANT, clip_norm=None))
    told = capfd.readouterr().err
    assert "step-00000004 was set aside as step-00000004.corrupt: the loss of step 7" in told
    assert "going on from step 2 instead" in told


def test_it_falls_back_no_more_often_than_there_are_older_ones(tmp_path: Path) -> None:
    def bad_later(model: nn.Module, batch: Any) -> Tensor:
        return vector_loss(model, batch) * float("nan")

    assert run_until_crash(str(tmp_path), VARIANT, 0, call_in(7, 0, 1))
    with pytest.raises(dt.DrivetrainError, match="right after the run went on from step 2"):
        run(str(tmp_path), VARIANT, loss=bad_later, settings={"bad_steps": "stop"})
    names = sorted(path.name for path in (tmp_path / "suite" / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004.corrupt", "step-00000006.corrupt"]


def driven(folder: Path, factor: float, num_steps: int = 8) -> int:
    model = make_model(VARIANT)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(1)))
    loop = dt.drive(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        name="driven",
        global_batch=16,
        max_steps=8,
        checkpoint_every=2,
        config=dt.configure(output_dir=folder, gpu_mode="cpu", report=False),
        quiet=True,
    )
    done = 0
    for (inputs,) in loop:
        loss = loop.model(inputs).square().mean() * factor
        loop.backward(loss)
        loop.step()
        done += 1
        if done == num_steps:
            break
    return done


def test_a_loop_of_ones_own_goes_on_from_the_older_one_when_it_is_started_again(tmp_path: Path) -> None:
    assert driven(tmp_path, 1.0, 4) == 4
    with pytest.raises(dt.DrivetrainError, match="right after the run went on from step 4"):
        driven(tmp_path, torch.nan)
    assert driven(tmp_path, 1.0) == 6


# What counts


def state(counted: Callable[[Tensor], Tensor]) -> list[Shard]:
    return [
        Shard.whole("model/weight", counted(torch.ones(3))),
        Shard.whole("optimizer/weight/exp_avg", torch.ones(3)),
        Shard.whole("model/mask", torch.full((3,), -torch.inf)),
        Shard.whole("model/frozen", torch.full((3,), torch.nan)),
        Shard.whole("optimizer/weight/step", torch.tensor(torch.inf)),
        Shard.whole("optimizer/weight/best_so_far", torch.full((2,), torch.inf)),
    ]


META = {"optimizer_groups": [{"params": ["weight"]}]}


def test_buffers_frozen_weights_and_other_state_may_hold_anything(tmp_path: Path) -> None:
    shards = state(lambda weight: weight)
    counted = must_be_finite(META, {shard.key: tuple(shard.global_shape) for shard in shards})
    assert counted == {"model/weight", "optimizer/weight/exp_avg"}
    checkpointer = Checkpointer(tmp_path / "c", World(), must_be_finite=must_be_finite)
    checkpointer.save(1, shards, META)
    for number, bad in enumerate((torch.nan, torch.inf, -torch.inf), start=2):
        poisoned = state(lambda weight, bad=bad: weight.index_fill(0, torch.tensor([2]), bad))
        with pytest.raises(CheckpointError, match=f"step {number} cannot be saved: model/weight holds"):
            checkpointer.save(number, poisoned, META)
    assert checkpointer.steps() == [1]
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.is_floating_point or dtype.is_complex])
def test_every_place_and_type_is_looked_at(dtype: torch.dtype) -> None:
    values = torch.arange(1_100_000).remainder(100).to(dtype)
    assert not not_finite(values)
    for place in (0, 524_287, 524_288, 1_099_999):
        for bad in ("nan",) if dtype == torch.float8_e4m3fn else ("nan", "inf", "-inf"):
            spoiled = values.clone()
            spoiled[place] = float(bad)
            assert not_finite(spoiled) == bad.strip("-")
            assert not_finite(spoiled[place:].view(1, -1)) == bad.strip("-")
            assert not not_finite(spoiled[:place])
    assert not not_finite(torch.zeros(0, dtype=dtype))


def test_large_numbers_are_finite_though_their_sum_is_not() -> None:
    assert not not_finite(torch.full((1000,), torch.finfo(torch.float32).max))
    assert not not_finite(torch.full((1000,), torch.finfo(torch.float16).max, dtype=torch.float16))
    assert not_finite(torch.full((4, 3), torch.inf).t()) == "inf"
    assert not not_finite(torch.tensor([1, 2]))


# What an older version saved


def test_what_an_older_version_saved_is_looked_at(tmp_path: Path) -> None:
    old = Checkpointer(tmp_path / "c", World())
    for step in (1, 2):
        old.save(step, state(lambda weight, step=step: weight if step == 1 else weight * torch.nan), META)
        forge(tmp_path / "c" / f"step-{step:08d}", lambda manifest: manifest.update(format_version=2))
    new = Checkpointer(tmp_path / "c", World(), must_be_finite=must_be_finite)
    found = new.latest()
    assert found is not None
    assert found.step == 1
    (problem,) = new.problems
    assert problem.startswith("step-00000002 is damaged and was set aside as step-00000002.corrupt: model/weight in")
    assert problem.endswith("holds nan: it was saved when it was bad")


def test_damage_is_told_on_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(str(tmp_path), replace(VARIANT, steps=6))
    folder = tmp_path / "suite"
    (folder / "finished.json").unlink()
    file = folder / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    capfd.readouterr()
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False, loss_weighting="samples")
    result = dt.train(make_job(replace(VARIANT, steps=6)), config)
    assert result.resumed_from == 4
    assert "step-00000006 is damaged and was set aside as step-00000006.corrupt" in capfd.readouterr().out
    problems = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert len([event for event in problems if event["event"] == "checkpoint problem"]) == 1

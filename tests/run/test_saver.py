"""Saving beside training, in whole runs: the same files, nothing bad saved, failures told, kills at any moment."""

import contextlib
import errno
import gc
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain import DrivetrainError, StepContext, drive, every
from drivetrain.api.training import train
from drivetrain.checkpoint import BackgroundSaver, Checkpoint, Checkpointer, CheckpointError, Files, Shard
from drivetrain.checkpoint.files import Written
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.loop.trainer import Trainer
from drivetrain.monitor.recorder import NoRunRecorder
from drivetrain.run import CheckpointSaver
from tests import warm_python
from tests.api.jobs import Trained, Variant, Vectors, make_job, make_model, read, run, vector_loss
from tests.api.test_resume import BASE as STOPPED
from tests.api.test_resume import MICRO_BATCH, assert_identical, call_in, run_until_crash
from tests.gloo_pool import GlooPool

REPOSITORY = Path(__file__).parents[2]
BASE = replace(STOPPED, steps=14)  # saved at 3, 6, 9, 12 and 14
WAITING = {"async_save": False}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "suite" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def steps_saved(folder: Path) -> list[int]:
    names = [path.name for path in (folder / "suite" / "checkpoints").iterdir()]
    assert all(name.startswith("step-") for name in names), "nothing is left lying about"
    return sorted(int(name.removeprefix("step-")) for name in names)


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_checkpoints_either_way(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    gloo_pool.run(run, str(tmp_path / "beside"), BASE, MICRO_BATCH, world=world)
    gloo_pool.run(run, str(tmp_path / "waiting"), BASE, MICRO_BATCH, 0, "cpu", WAITING, world=world)
    assert steps_saved(tmp_path / "beside") == steps_saved(tmp_path / "waiting") == [9, 12, 14]
    for step in (9, 12, 14):
        names = f"suite/checkpoints/step-{step:08d}"
        for file in ("rank-00000.safetensors", "manifest.json"):
            assert (tmp_path / "beside" / names / file).read_bytes() == (
                tmp_path / "waiting" / names / file
            ).read_bytes()
    for way in ("beside", "waiting"):
        assert [event["step"] for event in events(tmp_path / way, "checkpoint")] == [3, 6, 9, 12, 14]
        assert all(event["seconds"] > 0 for event in events(tmp_path / way, "checkpoint"))


def test_the_state_is_copied_before_and_counts_after_its_step_is_judged(tmp_path: Path) -> None:
    seen: list[str] = []

    def told(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            result = original(self, *args, **options)
            seen.append(f"{name} {result.step if name == 'record' else args[0] if args else ''}".strip())
            return result

        return call

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append("step")
        return vector_loss(model, batch)

    variant = replace(BASE, steps=4, save_every=2, num_samples=64)
    with (
        mock.patch.object(Trainer, "_record", told("record", Trainer._record)),
        mock.patch.object(BackgroundSaver, "begin", told("copy", BackgroundSaver.begin)),
        mock.patch.object(BackgroundSaver, "judged", told("judged", BackgroundSaver.judged)),
    ):
        run(str(tmp_path), variant, loss=loss)
    assert seen[1:] == [
        "step", "step", "record 1", "copy 2", "step", "record 2", "judged", "step", "record 3", "record 4", "copy 4",
        "judged",
    ]  # fmt: skip


class NanAt:
    """The job's loss, not a number at one call; on all ranks alike."""

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        return vector_loss(model, batch) * (float("nan") if self.calls == self.call else 1.0)


def run_into_nan(folder: str, variant: Variant, at_call: int) -> str:
    try:
        run(folder, variant, loss=NanAt(at_call), settings={"bad_steps": "stop"})
    except DrivetrainError as error:
        return error.message
    return ""


@pytest.mark.parametrize("world", [1, 3])
def test_a_bad_step_is_never_saved_though_it_was_copied(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    variant = replace(BASE, save_every=2)
    answers = gloo_pool.run(run_into_nan, str(tmp_path), variant, 1 + 4, world=world)  # the trial, then step 4
    assert all("the loss of step 4 (epoch 1) is nan" in answer for answer in answers)
    assert steps_saved(tmp_path) == [2]
    mended = gloo_pool.run(run, str(tmp_path), variant, world=world)[0]
    whole = gloo_pool.run(run, str(tmp_path / "whole"), variant, world=world)[0]
    assert mended.resumed_from == 2
    assert_identical(mended, whole)


@pytest.mark.parametrize("world", [1, 3])
def test_an_error_in_the_step_after_a_copy_does_not_cost_the_checkpoint(
    gloo_pool: GlooPool, tmp_path: Path, world: int
) -> None:
    assert all(gloo_pool.run(run_until_crash, str(tmp_path), BASE, 0, call_in(6, 0, world), world=world))
    assert steps_saved(tmp_path) == [3, 6]
    rows = [json.loads(line)["step"] for line in (tmp_path / "suite" / "steps.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6]


# Failures and delays


class TroubledFiles(Files):
    """Fails at, or takes its time for, the n-th file of a rank; counted over the life of the process."""

    def __init__(self, *fatal: int, seconds: float = 0.0) -> None:
        self.fatal, self.seconds, self.count = fatal, seconds, 0

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        written = super().write_file(path, chunks)
        if path.name.startswith("rank-"):
            self.count += 1
            time.sleep(self.seconds)
            if self.count in self.fatal:
                raise OSError(errno.ENOSPC, "No space left on device")
        return written


def run_troubled(folder: str, fatal: tuple[int, ...]) -> Trained | str | None:
    files = TroubledFiles(*fatal)
    with mock.patch("drivetrain.checkpoint.checkpointer.Files", return_value=files):
        try:
            return run(folder, BASE, MICRO_BATCH)
        except CheckpointError as error:
            return error.message


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_costs_checkpoints_and_not_the_run(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    whole = gloo_pool.run(run, str(tmp_path / "whole"), BASE, MICRO_BATCH, world=world)[0]
    troubled = gloo_pool.run(run_troubled, str(tmp_path / "full"), (2, 4), world=world)[0]
    assert_identical(troubled, whole)
    assert steps_saved(tmp_path / "full") == [3, 9, 14]
    failed = events(tmp_path / "full", "save failed")
    assert [event["step"] for event in failed] == [6, 12]
    assert all("No space left on device" in event["error"] and event["remedy"] for event in failed)
    assert [event["step"] for event in events(tmp_path / "full", "checkpoint")] == [3, 9, 14]


def test_a_folder_that_is_moved_gets_no_checkpoint_of_its_run_into_the_next_one(tmp_path: Path) -> None:
    here, aside = tmp_path / "suite", tmp_path / "aside"

    def give_the_name_away(context: StepContext) -> None:
        if context.step == 4:
            here.rename(aside)
            (here / "checkpoints").mkdir(parents=True)

    hook = every(1, give_the_name_away)
    with pytest.raises(CheckpointError, match=f"suite was moved to {aside} while its run goes on"):
        run(str(tmp_path), BASE, MICRO_BATCH, settings=WAITING, hooks=[hook])
    assert [path.name for path in here.rglob("*")] == ["checkpoints"]
    assert (aside / "checkpoints" / "step-00000003").is_dir()


def test_a_folder_that_is_deleted_ends_in_words(tmp_path: Path) -> None:
    def delete(context: StepContext) -> None:
        if context.step == 4:
            while (tmp_path / "suite").exists():  # the save of step 3 may be under way
                shutil.rmtree(tmp_path / "suite", ignore_errors=True)

    with pytest.raises(CheckpointError, match="suite was deleted while its run goes on"):
        run(str(tmp_path), BASE, MICRO_BATCH, hooks=[every(1, delete)])


@pytest.mark.parametrize("world", [1, 2])
def test_a_failure_of_the_last_save_ends_in_an_error_and_is_made_good(
    gloo_pool: GlooPool, tmp_path: Path, world: int
) -> None:
    answers = gloo_pool.run(run_troubled, str(tmp_path), (5,), world=world)
    assert all("step 14 cannot be saved" in answer for answer in answers)
    assert not (tmp_path / "suite" / "finished.json").exists()
    assert steps_saved(tmp_path) == [6, 9, 12]
    mended = gloo_pool.run(run, str(tmp_path), BASE, MICRO_BATCH, world=world)[0]
    whole = gloo_pool.run(run, str(tmp_path / "whole"), BASE, MICRO_BATCH, world=world)[0]
    assert mended.resumed_from == 12
    assert_identical(mended, whole)


class AwaitedFiles(TroubledFiles):
    """Files that are done a moment after training has begun to wait for them."""

    def __init__(self, is_awaited: threading.Event) -> None:
        super().__init__(seconds=0.1)
        self.is_awaited = is_awaited

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        assert not path.name.startswith("rank-") or self.is_awaited.wait(120)
        return super().write_file(path, chunks)


def test_a_save_that_is_due_while_one_runs_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_awaited, join = threading.Event(), BackgroundSaver._join

    def joined(saver: BackgroundSaver) -> None:
        is_awaited.set()
        join(saver)
        is_awaited.clear()

    monkeypatch.setattr(BackgroundSaver, "_join", joined)
    with mock.patch("drivetrain.checkpoint.checkpointer.Files", return_value=AwaitedFiles(is_awaited)):
        assert isinstance(run(str(tmp_path), BASE, MICRO_BATCH), Trained)
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [3, 6, 9, 12, 14]
    waits = events(tmp_path, "waited for a save")
    assert [event["step"] for event in waits] == [6, 9, 12, 14]
    assert all(event["seconds"] >= 0.1 for event in waits)
    first = events(tmp_path, "checkpoint")[0]
    assert first["seconds"] >= first["stalled_seconds"] + 0.1  # it had nothing to wait for


def test_an_interrupt_waits_for_the_save_that_counts(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 6:  # in step 5: step 3 was copied, step 4 was run, and so 3 was judged
            raise KeyboardInterrupt
        return vector_loss(model, batch)

    calls: list[int] = []
    files = TroubledFiles(seconds=0.3)
    with mock.patch("drivetrain.checkpoint.checkpointer.Files", return_value=files), pytest.raises(KeyboardInterrupt):
        run(str(tmp_path), BASE, loss=loss)
    assert steps_saved(tmp_path) == [3]


@pytest.mark.parametrize("beside", [True, False])
def test_the_best_stays_until_a_better_one_is_on_the_disk(tmp_path: Path, beside: bool) -> None:
    best: list[int] = [1]
    checkpointer = Checkpointer(tmp_path / "c", World(), keep_last=1, files=TroubledFiles(3))
    state = [Shard.whole("w", torch.ones(3))]
    saves = CheckpointSaver(checkpointer, World(), NoRunRecorder(), lambda: (state, {}), lambda: best[0], beside=beside)

    def save(step: int) -> list[int]:
        with contextlib.suppress(CheckpointError):
            saves.save(step)
            saves.finish()
        saves.report()
        return checkpointer.steps()

    assert save(1) == [1]
    assert save(2) == [1, 2]
    best[0] = 3
    assert save(3) == [1, 2]  # it failed
    assert save(4) == [1, 4]  # the best is not there, so the one that was best before stays
    best[0] = 5
    assert save(5) == [1, 5]  # pruned before it was known to be there
    assert save(6) == [5, 6]
    saves.close()

    restarted = Checkpointer(tmp_path / "c", World(), keep_last=1)
    saves = CheckpointSaver(restarted, World(), NoRunRecorder(), lambda: (state, {}), lambda: best[0], beside=beside)
    saves.save(7)
    saves.finish()
    saves.close()
    assert restarted.steps() == [5, 7]


# Kills


def announcing_loss(model: Any, batch: Any) -> Tensor:
    """Says each step aloud as it begins. A hook would make the host judge every step at once."""
    print("step", flush=True)
    time.sleep(0.003)
    return vector_loss(model, batch)


def train_slowly_written(folder: str) -> None:
    """Files take a while, so that most kills hit a save that is under way, judged or not."""
    files = TroubledFiles(seconds=0.08)
    with mock.patch("drivetrain.checkpoint.checkpointer.Files", return_value=files):
        run(folder, replace(BASE, save_every=2), loss=announcing_loss)


CHILD = "import sys; from tests.run.test_saver import train_slowly_written as t; t(sys.argv[1])"


def kill_until_finished(folder: Path, num_kills: int, seed: int) -> tuple[int, int]:
    """How many kills there were, and how many of them left a save half done."""
    chance = random.Random(seed)
    kills = hits = 0
    while True:
        child = warm_python.WarmProcess(["-c", CHILD, str(folder)], cwd=REPOSITORY, drops_stderr=True)
        assert child.stdout is not None
        steps_to_go = chance.randint(4, 7) if kills < num_kills else 10**9
        for _ in child.stdout:
            steps_to_go -= 1
            if steps_to_go == 0:
                time.sleep(chance.random() * 0.03)
                break
        if steps_to_go > 0:
            assert child.wait(timeout=240) == 0
            return kills, hits
        child.kill()
        child.wait()
        child.stdout.close()
        kills += 1
        hits += any(path.name.startswith(".") for path in (folder / "suite" / "checkpoints").iterdir())


def check_kills(tmp_path: Path, num_kills: int, seed: int) -> int:
    # In a process of its own, as those that are killed: other tests may have set the number of threads in this one,
    # and matrix products round differently with it.
    whole = warm_python.run(["-c", CHILD, str(tmp_path / "whole")], cwd=REPOSITORY)
    assert whole.returncode == 0, whole.stderr
    kills, hits = kill_until_finished(tmp_path / "broken", num_kills, seed)
    assert kills > 0
    assert_identical(read(tmp_path / "broken" / "suite"), read(tmp_path / "whole" / "suite"))
    return hits


def test_killed_while_a_thread_saves(tmp_path: Path) -> None:
    assert check_kills(tmp_path, 3, seed=1) > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_killed_often_while_a_thread_saves(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path, 5, seed)


# Weights to start from


def run_from(folder: str, source: str | None, steps: int = 4) -> Trained | None:
    return run(folder, replace(BASE, steps=steps), init_from=source, settings=None)


@pytest.mark.parametrize("world", [1, 2])
def test_a_new_run_starts_with_the_weights_it_is_given(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    torch.manual_seed(99)
    weights = make_model(BASE).state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    given = gloo_pool.run(run_from, str(tmp_path / "file"), str(tmp_path / "w.safetensors"), world=world)[0]
    fresh = gloo_pool.run(run_from, str(tmp_path / "fresh"), None, world=world)[0]
    by_hand = gloo_pool.run(run_from_instance, str(tmp_path / "hand"), world=world)[0]
    assert given.losses == by_hand.losses != fresh.losses
    (event,) = events(tmp_path / "file", "weights taken")
    assert set(event["taken"]) == set(weights)
    assert event["missing"] == event["unexpected"] == event["other_shape"] == []


def run_from_instance(folder: str) -> Trained | None:
    torch.manual_seed(99)
    return run(folder, replace(BASE, steps=4), model=make_model(BASE))


def test_from_another_run_and_from_the_command_line(tmp_path: Path) -> None:
    first = run(str(tmp_path / "first"), BASE)
    assert first is not None
    given = {"init_from": tmp_path / "first" / "suite", "loss_weighting": "samples", "report": False}
    config = configure(output_dir=tmp_path / "second", gpu_mode="cpu", **given)
    seen: list[dict[str, Tensor]] = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        return vector_loss(model, batch)

    job = make_job(replace(BASE, steps=2), loss=loss, init_from=tmp_path / "not looked at")
    train(job, config, quiet=True)
    for name, value in seen[0].items():
        assert np.array_equal(value.numpy(), first.weights[f"model/{name}"])
    (event,) = events(tmp_path / "second", "weights taken")
    assert event["path"].endswith("step-00000014")


def test_a_run_that_goes_on_does_not_start_again_from_them(tmp_path: Path) -> None:
    source = tmp_path / "w.safetensors"
    torch.manual_seed(99)
    save_file(make_model(BASE).state_dict(), source)
    whole = run(str(tmp_path / "whole"), BASE, MICRO_BATCH, init_from=source)
    broken = str(tmp_path / "broken")
    with pytest.raises(ZeroDivisionError):
        run(broken, BASE, MICRO_BATCH, init_from=source, loss=failing_at(call_in(5, 0, 1)))
    with pytest.raises(DrivetrainError, match="init_from is None now and was"):
        run(broken, BASE, MICRO_BATCH)
    source.unlink()
    mended = run(broken, BASE, MICRO_BATCH, init_from=source)
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from == 3
    assert_identical(mended, whole)


def test_a_loop_of_ones_own_starts_with_them_too(tmp_path: Path) -> None:
    torch.manual_seed(99)
    weights = make_model(BASE).state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    model = make_model(BASE)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, init_from=tmp_path / "w.safetensors")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    own = drive(model, optimizer, Vectors(BASE), name="suite", global_batch=16, max_steps=1, config=config, quiet=True)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for batch in own:
        own.backward(vector_loss(own.model, batch))
        own.step()
    assert len(events(tmp_path, "weights taken")) == 1


def failing_at(call: int) -> Callable[..., Tensor]:
    calls: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == call:
            raise ZeroDivisionError
        return vector_loss(model, batch)

    return loss


def start_from_nothing(folder: str, source: str) -> str:
    try:
        run_from(folder, source)
    except DrivetrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_do_not_fit_are_an_error_on_all_ranks(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    save_file({"other": torch.ones(2)}, tmp_path / "w.safetensors")
    answers = gloo_pool.run(start_from_nothing, str(tmp_path / "run"), str(tmp_path / "w.safetensors"), world=world)
    assert len(set(answers)) == 1
    assert "init_from: no tensor of" in answers[0]
    assert "remedy" in answers[0]
    assert "is not there" in start_from_nothing(str(tmp_path / "other"), str(tmp_path / "nowhere"))


def test_exported_weights_start_another_run(tmp_path: Path) -> None:
    from drivetrain import export

    run(str(tmp_path / "first"), BASE)
    path = export(tmp_path / "first" / "suite")
    run(str(tmp_path / "second"), replace(BASE, steps=1), init_from=str(path))
    (event,) = events(tmp_path / "second", "weights taken")
    assert sorted(event["taken"]) == sorted(load_file(path))
    assert Checkpoint.latest_in(tmp_path / "second" / "suite" / "checkpoints") is not None


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_large_run_sets_objects_aside_for_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_badly: bool
) -> None:
    monkeypatch.setattr("drivetrain.run.saver.LARGE_BYTES", 1)
    counts: list[int] = []

    def looking(model: Any, batch: Any) -> Tensor:
        counts.append(gc.get_freeze_count())
        if ends_badly and len(counts) == 5:
            raise KeyError("planted")
        return vector_loss(model, batch)

    variant = replace(BASE, steps=6)
    with pytest.raises(KeyError) if ends_badly else contextlib.nullcontext():
        run(str(tmp_path), variant, loss=looking)
    assert counts[0] == 0
    assert counts[-1] > 10_000
    assert gc.get_freeze_count() == 0

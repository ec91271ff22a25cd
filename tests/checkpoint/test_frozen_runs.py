"""Training with frozen weights: small checkpoints, and an exact resume in any world and with any strategy."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import drivetrain as dt
from drivetrain.checkpoint import Checkpoint, Checkpointer, load_weights, read_weights
from drivetrain.config import configure
from drivetrain.core.world import World
from tests.api.jobs import Trained, read
from tests.api.test_resume import assert_identical
from tests.checkpoint import frozen_runs
from tests.checkpoint.frozen_runs import VARIANT, Adapted, run_adapted
from tests.checkpoint.test_frozen import FORMAT_1, folders, manifest_of
from tests.gloo_pool import GlooPool

FROZEN = {
    "model/backbone.0.weight",
    "model/backbone.0.bias",
    "model/backbone.2.weight",
    "model/backbone.2.bias",
    "model/backbone.3.weight",
    "model/backbone.3.bias",
    "model/tied.weight",
}
MICRO_STEPS = 4  # of a step of 16 samples in a world of one; the last step of an epoch has 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    folder = tmp_path_factory.mktemp("whole")
    trained = run_adapted(str(folder))
    assert trained is not None
    return folder / "suite", trained


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def test_a_checkpoint_is_as_large_as_what_trains(whole: tuple[Path, Trained]) -> None:
    folder, _ = whole
    (shared,) = folders(folder / "checkpoints")
    model = Adapted()
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    for step in (3, 6, 9):
        path = folder / "checkpoints" / f"step-{step:08d}"
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        assert num_bytes <= 1.1 * (trained + 2 * trained + trained), "weights, two moments of AdamW, the average"
        assert Checkpoint.open(path).frozen == FROZEN, "parameters, never buffers"
    assert sum(file.stat().st_size for file in (folder / "checkpoints" / shared).iterdir()) >= frozen
    (told,) = events(folder, "frozen weights stored")
    assert (told["folder"], told["step"]) == (shared, 3)


def test_readers_have_the_frozen_weights(whole: tuple[Path, Trained], tmp_path: Path) -> None:
    folder, trained = whole
    torch.manual_seed(VARIANT.seed)
    made = {f"model/{name}": value for name, value in Adapted().state_dict().items()}
    for key in FROZEN:
        assert np.array_equal(trained.weights[key], made[key].numpy()), key
    exported = load_file(dt.export(folder, tmp_path / "weights.safetensors"))
    assert exported.keys() == Adapted().state_dict().keys()
    assert torch.equal(exported["backbone.2.weight"], made["model/backbone.2.weight"])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    model = Adapted()
    taken = load_weights(model, read_weights(copy))
    assert not taken.missing
    assert torch.equal(model.tied.weight, made["model/tied.weight"])


@pytest.mark.parametrize("settings", [{}, {"async_save": False}], ids=["beside", "waiting"])
def test_a_stop_is_bit_identical(whole: tuple[Path, Trained], tmp_path: Path, settings: dict[str, Any]) -> None:
    for at_call in (1 + 5 * MICRO_STEPS, 1 + 2 * MICRO_STEPS):
        assert run_adapted(str(tmp_path), at_call=at_call, **settings) is None
    mended = run_adapted(str(tmp_path), **settings)
    assert mended is not None
    assert mended.resumed_from > 0
    assert_identical(mended, whole[1])
    assert len(folders(tmp_path / "suite" / "checkpoints")) == 1
    assert len(events(tmp_path / "suite", "frozen weights stored")) == 1


def test_other_worlds_and_strategies_go_on_with_the_same_files(
    gloo_pool: GlooPool, whole: tuple[Path, Trained], tmp_path: Path
) -> None:
    # Stopped after steps 3 and 6, and finished: one process, two that hold parts, two that hold all.
    assert run_adapted(str(tmp_path), "single", at_call=1 + 4 * MICRO_STEPS) is None
    shared = folders(tmp_path / "suite" / "checkpoints")
    assert len(shared) == 1
    assert gloo_pool.run(run_adapted, str(tmp_path), "fsdp", 1 + 4 * 2, world=2) == [None, None]
    assert folders(tmp_path / "suite" / "checkpoints") == shared
    trained = gloo_pool.run(run_adapted, str(tmp_path), "ddp", world=2)[0]
    assert trained.resumed_from == 6
    assert folders(tmp_path / "suite" / "checkpoints") == shared
    for key in FROZEN:
        assert np.array_equal(trained.weights[key], whole[1].weights[key]), key
    assert trained.losses == pytest.approx(whole[1].losses, rel=1e-4)


def test_parts_of_frozen_weights_are_stored_by_each_rank(
    gloo_pool: GlooPool, whole: tuple[Path, Trained], tmp_path: Path
) -> None:
    assert gloo_pool.run(run_adapted, str(tmp_path), "fsdp", 1 + 4 * 2, world=2) == [None, None]
    (shared,) = folders(tmp_path / "suite" / "checkpoints")
    assert len(list((tmp_path / "suite" / "checkpoints" / shared).iterdir())) == 2
    trained = run_adapted(str(tmp_path), "single")
    assert trained is not None
    assert folders(tmp_path / "suite" / "checkpoints") == [shared]
    for key in FROZEN:
        assert np.array_equal(trained.weights[key], whole[1].weights[key]), key


@pytest.mark.parametrize("kind", ["teacher", "change"])
def test_what_moves_though_no_optimizer_holds_it_is_stored_right(tmp_path: Path, kind: str) -> None:
    """A teacher moves in every step; a hook changes a weight of the backbone once, after step 4."""
    expected = run_adapted(str(tmp_path / "whole"), hooks=kind)
    assert expected is not None
    for at_call in (1 + 4 * MICRO_STEPS, 1 + 4 * MICRO_STEPS):
        assert run_adapted(str(tmp_path / "broken"), at_call=at_call, hooks=kind) is None
    mended = run_adapted(str(tmp_path / "broken"), hooks=kind)
    assert mended is not None
    assert_identical(mended, expected)
    name = "teacher.weight" if kind == "teacher" else "backbone.0.bias"
    for folder in (tmp_path / "whole" / "suite", tmp_path / "broken" / "suite"):
        checkpoints = folder / "checkpoints"
        moved = [manifest_of(checkpoints, step)["moved"] for step in (3, 6, 9)]
        assert moved == [[f"model/{name}"] if kind == "teacher" or step > 4 else [] for step in (3, 6, 9)]
        (told,) = events(folder, "frozen weights changed")
        assert told["names"] == [name]
        before, after = (Checkpoint.open(checkpoints / f"step-{step:08d}").read(f"model/{name}") for step in (3, 9))
        assert not torch.equal(before, after)
        assert len(folders(checkpoints)) == 1


def test_status_does_not_count_a_checkpoint_without_them(whole: tuple[Path, Trained], tmp_path: Path) -> None:
    from drivetrain.commands.monitor import state_of

    shutil.copytree(whole[0], tmp_path / "run")
    assert state_of(tmp_path / "run").checkpoint == 9
    (shared,) = folders(tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / shared)
    state = state_of(tmp_path / "run")
    assert state.checkpoint is None
    assert f"checkpoint 9 cannot be used: {shared}/rank-00000.safetensors is missing" in state.cause


# A run of the format before


def old_job() -> dt.Job:
    """The job that wrote the checkpoints of format 1."""
    return dt.Job(
        name="old",
        model=frozen_runs.Old,
        data=frozen_runs.OldData(),
        loss=frozen_runs.old_loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        global_batch=4,
        max_steps=4,
        checkpoint_every=2,
        seed=1,
    )


def test_a_run_of_format_1_goes_on(tmp_path: Path) -> None:
    """From its step 2, to what the code of that time had made of step 4."""
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False, loss_weighting="samples")
    folder = dt.train(old_job(), config, quiet=True).folder
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints)
    (folder / "finished.json").unlink()
    shutil.copytree(FORMAT_1 / "step-00000002", checkpoints / "step-00000002")
    result = dt.train(old_job(), config, quiet=True)
    assert (result.resumed_from, result.finished) == (2, True)
    newest = Checkpointer(checkpoints, World()).latest()
    assert newest is not None
    assert (newest.step, newest.format_version) == (4, 3)
    assert newest.frozen == {"model/backbone.weight", "model/backbone.bias"}
    reference = Checkpoint.open(FORMAT_1 / "step-00000004")
    assert newest.keys == reference.keys
    for key in reference.keys:
        torch.testing.assert_close(newest.read(key), reference.read(key), rtol=1e-5, atol=1e-6)
    assert read(folder).rows[-1]["step"] == 4

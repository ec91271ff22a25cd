"""What `dt.export` and `run.export` write: which weights, under which names, in which format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import drivetrain as dt
from drivetrain.config import configure
from tests.api.jobs import Variant, Vectors, make_job, make_model, vector_loss
from tests.gloo_pool import GlooPool

VARIANT = Variant("mlp", torch.float32, 12, steps=6, num_samples=24)


def drive(folder: Path | str, **settings: Any) -> Any:
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, report=False, **settings)
    torch.manual_seed(0)
    model = make_model(VARIANT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Vectors(VARIANT)
    return dt.drive(model, optimizer, data, global_batch=12, max_steps=6, config=config, quiet=True)


def test_inside_a_loop_it_is_the_weights_as_they_are(tmp_path: Path) -> None:
    run = drive(tmp_path)
    before = load_file(run.export(tmp_path / "before.safetensors"))
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    for batch in run:
        run.backward(vector_loss(run.model, batch))
        run.step()
        found = load_file(run.export(tmp_path / f"{run.steps}.safetensors"))
        assert found.keys() == run.model.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in run.model.state_dict().items()), run.steps
    last = {name: value.clone() for name, value in run.model.state_dict().items()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()  # the loop is over: what happens to the model now is no part of the run
    found = load_file(run.export(tmp_path / "last.safetensors"))
    assert all(torch.equal(found[name], value) for name, value in last.items())


def test_with_a_moving_average_it_is_the_average(tmp_path: Path) -> None:
    run = drive(tmp_path, ema=0.5)
    for batch in run:
        run.backward(vector_loss(run.model, batch))
        run.step()
        if run.steps == 3:
            found = load_file(run.export(tmp_path / "3.safetensors"))
            assert not torch.equal(found["layers.0.weight"], run.model.state_dict()["layers.0.weight"])
            average = run._driven.parts.average.named()
            assert all(torch.equal(found[name], value) for name, (value, _) in average.items())


def sharded_exports(folder: str) -> list[str]:
    """The notes of a run whose processes hold parts, exported between two checkpoints and after one."""
    run = drive(folder, parallel_strategy="fsdp", async_save=False, checkpoint_every="epoch")
    notes: list[str] = []
    run._driven._note = notes.append
    for batch in run:
        run.backward(vector_loss(run.model, batch))
        run.step()
        if run.steps == 3:
            run.export(Path(folder) / "3.safetensors")
    run.export(Path(folder) / "last.safetensors")
    return notes


def test_where_processes_hold_parts_it_says_which_step_it_wrote(gloo_pool: GlooPool, tmp_path: Path) -> None:
    notes = gloo_pool.run(sharded_exports, str(tmp_path), world=2)[0]
    assert notes == ["export writes the weights of step 2, the last one saved; 3 are done"]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_the_suffix_says_the_format(tmp_path: Path, suffix: str) -> None:
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    result = dt.train(make_job(VARIANT, max_steps=2), config, quiet=True)
    expected = load_file(dt.export(result, tmp_path / "weights.safetensors"))
    path = dt.export(result, tmp_path / f"weights{suffix}")
    found = torch.load(path, weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    make_model(VARIANT).load_state_dict(found)


def test_what_is_not_there_to_choose_is_refused(tmp_path: Path) -> None:
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    job = make_job(VARIANT, max_steps=2, valid=Vectors(VARIANT))
    result = dt.train(job, config, quiet=True)
    which: Any = "latest"
    with pytest.raises(dt.ConfigError, match=r"which: got 'latest'(.|\n)*allowed: 'last' or 'best'"):
        dt.export(result, which=which)
    with pytest.raises(dt.DrivetrainError, match=r"ends in '\.npz'"):
        dt.export(result, tmp_path / "weights.npz")
    assert not (tmp_path / "weights.npz").exists()

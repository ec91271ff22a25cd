"""One plain file for the rest of the world."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from drivetrain.checkpoint import Checkpoint, Checkpointer, CheckpointError, Shard, export
from drivetrain.core.world import World
from tests.checkpoint.thread_world import on_ranks

TENSORS = {
    "model/layers.0.weight": torch.randn(6, 4).bfloat16(),
    "model/layers.0.flags": torch.tensor([True, False, True]),  # three bytes: what follows would not be aligned
    "model/scale": torch.tensor(1.5, dtype=torch.float64),
    "model/empty": torch.empty(0, 3),
    "optimizer/layers.0.weight/exp_avg": torch.randn(6, 4),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Sharded over three ranks by rows, where there are rows for it."""

    def save(world: World) -> None:
        shards = []
        for key, tensor in TENSORS.items():
            if tensor.dim() == 2 and len(tensor):
                shards.append(Shard(key, tensor.chunk(3)[world.rank], tuple(tensor.shape), (2 * world.rank, 0)))
            elif world.is_main:
                shards.append(Shard.whole(key, tensor))
        Checkpointer(tmp_path / "c", world).save(1, shards, {})

    on_ranks(3, save)
    return Checkpoint.open(tmp_path / "c" / "step-00000001")


def test_plain_safetensors_loads_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = export(checkpoint, tmp_path / "model.safetensors")
    loaded = load_file(path)
    expected = {key.removeprefix("model/"): t for key, t in TENSORS.items() if key.startswith("model/")}
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it


def test_plain_pytorch_loads_it_into_a_model(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    Checkpointer(tmp_path / "c", World()).save(
        1, [Shard.whole(f"model/{key}", tensor) for key, tensor in model.state_dict().items()], {}
    )
    other.load_state_dict(
        load_file(export(Checkpoint.open(tmp_path / "c" / "step-00000001"), tmp_path / "m.safetensors"))
    )
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_another_prefix(checkpoint: Checkpoint, tmp_path: Path) -> None:
    loaded = load_file(export(checkpoint, tmp_path / "o.safetensors", prefix="optimizer/"))
    assert list(loaded) == ["layers.0.weight/exp_avg"]
    assert set(load_file(export(checkpoint, tmp_path / "all.safetensors", prefix=""))) == set(TENSORS)


def test_a_prefix_that_fits_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="starts with 'ema/'") as caught:
        export(checkpoint, tmp_path / "x.safetensors", prefix="ema/")
    assert caught.value.remedy == "choose one of these prefixes: model/, optimizer/"
    with pytest.raises(CheckpointError, match="has no name that a safetensors file can hold"):
        export(checkpoint, tmp_path / "x.safetensors", prefix="model/scale")
    assert not (tmp_path / "x.safetensors").exists()


def test_a_file_that_is_there_is_replaced_whole_or_not_at_all(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "model.safetensors"
    path.write_bytes(b"older")
    (checkpoint.path / "rank-00002.safetensors").unlink()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="rank-00002"):
        export(checkpoint, path)
    assert [entry.name for entry in folder.iterdir()] == ["model.safetensors"]
    assert path.read_bytes() == b"older"


def test_a_folder_that_is_not_there(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/x.safetensors cannot be written: No such file") as caught:
        export(checkpoint, tmp_path / "nowhere" / "x.safetensors")
    assert "name a folder that is there" in caught.value.remedy

"""Weights to start from: where they may come from, what is taken, and what is said of the rest."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drivetrain.checkpoint import (
    Checkpoint,
    CheckpointDamagedError,
    Checkpointer,
    CheckpointError,
    Shard,
    export,
    load_weights,
    read_weights,
)
from drivetrain.core.world import World
from tests.checkpoint.thread_world import on_ranks


class Model(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2)


def state_of(seed: int, width: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Model(width).state_dict().items()}


def saved_run(folder: Path, state: dict[str, Tensor], *steps: int) -> Path:
    checkpointer = Checkpointer(folder / "checkpoints", World())
    for step in steps:
        shards = [Shard.whole(f"model/{name}", value + step) for name, value in state.items()]
        shards.append(Shard.whole("optimizer/first.weight/exp_avg", torch.ones(3, 4)))
        checkpointer.save(step, shards, {})
    return folder


@pytest.mark.parametrize("kind", ["file", "run", "checkpoints", "checkpoint"])
def test_every_kind_of_source(tmp_path: Path, kind: str) -> None:
    state = {name: value.float() for name, value in state_of(1).items()}
    path, offset = tmp_path / "model.safetensors", 0
    if kind == "file":
        save_file(state, path)
    else:
        run = saved_run(tmp_path / "run", state, 1, 2)
        paths = {"run": (run, 2), "checkpoints": (run / "checkpoints", 2)}
        path, offset = paths.get(kind, (run / "checkpoints" / "step-00000001", 1))
    model = Model()
    report = load_weights(model, read_weights(path))
    assert set(report.taken) == set(state)
    assert report.missing == report.unexpected == report.other_shape == ()
    for name, value in model.state_dict().items():
        assert torch.equal(value, (state[name] + offset).to(value.dtype)), name


def test_a_part_of_a_model(tmp_path: Path) -> None:
    theirs = state_of(1)
    theirs["head.weight"] = torch.ones(2)
    theirs["last.weight"] = torch.ones(7, 3)
    del theirs["last.bias"]
    save_file(theirs, tmp_path / "w.safetensors")
    torch.manual_seed(2)
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_weights(model, read_weights(tmp_path / "w.safetensors"))
    assert report.missing == ("last.bias",)
    assert report.unexpected == ("head.weight",)
    assert report.other_shape == ("last.weight (7, 3) there, (2, 3) in the model",)
    assert set(report.taken) == set(before) - {"last.bias", "last.weight"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name] if name in report.taken else before[name]), name
    assert report.lines[0].startswith("7 tensors from")
    assert report.lines[1:] == (
        "1 only in the model, and left as they were made: last.bias",
        "1 only there, and not used: head.weight",
        "1 of another shape, and left as the model made them: last.weight (7, 3) there, (2, 3) in the model",
    )


def test_other_types_are_converted(tmp_path: Path) -> None:
    save_file({"weight": torch.full((2, 4), 1.5, dtype=torch.bfloat16)}, tmp_path / "w.safetensors")
    model = nn.Linear(4, 2).double()
    report = load_weights(model, read_weights(tmp_path / "w.safetensors"))
    assert model.weight.dtype == torch.float64
    assert model.weight.eq(1.5).all()
    assert report.missing == ("bias",)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_is_not_missing(tmp_path: Path) -> None:
    save_file({"embedding.weight": torch.ones(5, 3)}, tmp_path / "w.safetensors")
    model = Tied()
    assert load_weights(model, read_weights(tmp_path / "w.safetensors")).missing == ()
    assert model.head.weight.eq(1).all()


def test_nothing_in_common_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    save_file({"module.first.weight": torch.ones(3, 4)}, tmp_path / "names.safetensors")
    save_file({"first.weight": torch.ones(9, 9)}, tmp_path / "shapes.safetensors")
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, words in (
        (
            "names",
            r"no tensor of .* has a name of the model's: there is module\.first\.weight; the model has first\.bias",
        ),
        ("shapes", r"first\.weight is \(9, 9\) there and \(3, 4\) in the model"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            load_weights(model, read_weights(tmp_path / f"{name}.safetensors"))
        assert caught.value.remedy
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("code from a file was run",)


@pytest.mark.parametrize("name", ["w.pt", "w.PTH", "w.bin", "w.ckpt", "w.pkl", "w.safetensors", "w"])
def test_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match=r"is a pickle by its name|is not a safetensors file") as caught:
        read_weights(path)
    assert "safetensors" in caught.value.remedy


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, words in (("nowhere", "is not there"), ("empty", "holds no checkpoint that is whole")):
        with pytest.raises(CheckpointError, match=words) as caught:
            read_weights(tmp_path / name)
        assert ".safetensors" in caught.value.remedy


def test_a_damaged_checkpoint_is_named_and_a_run_falls_back(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", state_of(1), 1, 2)
    newest = run / "checkpoints" / "step-00000002"
    file = newest / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="its hash does not match") as caught:
        read_weights(newest)
    assert caught.value.remedy
    assert read_weights(run).path.name == "step-00000001"
    assert newest.is_dir()  # nothing is set aside: the run is somebody else's


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


def test_what_safetensors_has_no_type_for_is_stored_as_pairs(tmp_path: Path) -> None:
    wide = torch.complex(torch.arange(6.0).view(2, 3).double(), torch.ones(2, 3).double())
    Checkpointer(tmp_path / "c", World()).save(1, [Shard.whole("model/w", wide)], {})
    checkpoint = Checkpoint.open(tmp_path / "c" / "step-00000001")
    path = export(checkpoint, tmp_path / "m.safetensors")
    assert torch.equal(load_file(path)["w"], torch.view_as_real(wide)), "what anybody else reads"
    weights = read_weights(path)
    assert weights.shapes == {"w": (2, 3)}
    assert torch.equal(weights.read("w", (1, 0), (1, 2)), wide[1:, :2])
    assert torch.equal(torch.load(export(checkpoint, tmp_path / "m.pt"))["w"], wide)
    for told in ('{"w": "C128"}', '{"absent": "C128"}', "[1]", "{"):  # another file may say anything
        save_file({"w": torch.ones(3)}, tmp_path / "other.safetensors", {"drivetrain.pairs": told})
        assert read_weights(tmp_path / "other.safetensors").shapes == {"w": (3,)}


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

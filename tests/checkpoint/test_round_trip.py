"""What is saved comes back to the bit, whatever it is; what cannot be saved is refused by name."""

import json
import math
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from drivetrain.checkpoint import Checkpoint, Checkpointer, CheckpointError, Shard
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.tensor_file import DTYPES
from drivetrain.core.world import World
from tests.checkpoint.thread_world import on_ranks


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def saved(folder: Path, shards: list[Shard], meta: dict[str, Any] | None = None) -> Checkpoint:
    checkpointer = Checkpointer(folder, World())
    checkpointer.save(7, shards, meta or {})
    checkpoint = checkpointer.latest()
    assert checkpoint is not None
    assert checkpointer.problems == []
    return checkpoint


def assert_same(checkpoint: Checkpoint, key: str, tensor: Tensor) -> None:
    result = checkpoint.read(key)
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert (checkpoint.keys[key].dtype, checkpoint.keys[key].shape) == (tensor.dtype, tuple(tensor.shape))
    assert as_bytes(result) == as_bytes(tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    # random bytes: NaNs with payloads, denormals and negative zeros among them
    raw = torch.randint(0, 256, (6 * 5 * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    tensors = {
        "many": raw.view(dtype).reshape(6, 5),
        "scalar": raw[: dtype.itemsize].view(dtype).reshape(()),
        "one": raw[: dtype.itemsize].view(dtype),
        "empty": torch.empty(0, dtype=dtype),
        "empty in the middle": torch.empty(2, 0, 3, dtype=dtype),
    }
    checkpoint = saved(tmp_path, [Shard.whole(key, tensor) for key, tensor in tensors.items()])
    assert set(checkpoint.keys) == set(tensors)
    for key, tensor in tensors.items():
        assert_same(checkpoint, key, tensor)
    assert as_bytes(checkpoint.read("many", (1, 2), (3, 2))) == as_bytes(tensors["many"][1:4, 2:4])


def test_views_aliases_and_parameters_come_back_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "base": base,
        "the same": base,
        "turned": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "an end": base[3],
        "flipped": base.flip(0),
        "conjugated": torch.complex(base, -base).conj(),
        "negated": torch.complex(base, base).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    checkpoint = saved(tmp_path, [Shard.whole(key, tensor) for key, tensor in tensors.items()])
    for key, tensor in tensors.items():
        assert_same(checkpoint, key, tensor.detach().resolve_conj().resolve_neg())
    result = checkpoint.read("base")
    result.zero_()
    assert checkpoint.read("the same")[3, 5] == 23.0  # what was read is the reader's own


def test_names_of_any_kind(tmp_path: Path) -> None:
    keys = ["__metadata__", "../x", "a/b", "a", "a#2", "Größe \N{SNOWMAN}", 'quo"te\\', "new\nline", " "]
    shards = [Shard.whole(key, torch.full((2,), float(index))) for index, key in enumerate(keys)]
    checkpoint = saved(tmp_path, shards)
    assert [checkpoint.read(key)[0].item() for key in keys] == list(range(len(keys)))


def test_one_rank_may_hold_several_parts(tmp_path: Path) -> None:
    whole = torch.arange(12).reshape(6, 2)
    shards = [Shard("a", whole[row : row + 2], (6, 2), (row, 0)) for row in (4, 0, 2)]
    assert_same(saved(tmp_path, [*shards, Shard.whole("a#2", whole[:1])]), "a", whole)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [], {"only": "words"})
    assert (checkpoint.meta, dict(checkpoint.keys), checkpoint.files) == ({"only": "words"}, {}, [])


def test_the_facts_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [Shard.whole("a", torch.ones(2))], {"plan": {"lr": 0.1}})
    assert (checkpoint.step, checkpoint.format_version, checkpoint.world_size) == (7, 3, 1)
    assert checkpoint.path == tmp_path / "step-00000007"
    assert sorted(path.name for path in checkpoint.path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert json.loads((checkpoint.path / "manifest.json").read_text())["manifest"]["meta"] == {"plan": {"lr": 0.1}}
    assert torch.equal(load_file(checkpoint.path / "rank-00000.safetensors")["a"], torch.ones(2))


def test_nothing_is_writable_by_everyone_even_without_a_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        checkpoint = saved(tmp_path / "made" / "here", [Shard.whole("a", torch.ones(2))])
    finally:
        os.umask(before)
    for path in [checkpoint.path, *checkpoint.path.iterdir(), checkpoint.path.parent]:
        assert not path.stat().st_mode & stat.S_IWOTH, path


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_meta_comes_back_to_the_bit(meta: dict[str, Any]) -> None:
    manifest = Manifest(format_version=1, step=0, world_size=1, meta=meta, files={}, tensors={})
    result = Manifest.unsealed(manifest.sealed(), Path("manifest.json")).meta
    assert repr(result) == repr(meta)  # repr tells 1 from 1.0 and from True, and -0.0 from 0.0


def test_tuples_and_other_dictionaries_come_back_as_json_has_them(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [], {"betas": (0.9, 0.95), "ordered": OrderedDict(a=1)})
    assert checkpoint.meta == {"betas": [0.9, 0.95], "ordered": {"a": 1}}


@pytest.mark.parametrize(
    ("meta", "named"),
    [
        ({"a": {"b": [1, torch.ones(1)]}}, r"meta\.a\.b\[1\] is a Tensor"),
        ({"best": math.nan}, r"meta\.best is nan"),
        ({"best": {"loss": -math.inf}}, r"meta\.best\.loss is -inf"),
        ({"names": {"x"}}, r"meta\.names is a set"),
        ({"raw": b"x"}, r"meta\.raw is a bytes"),
        ({"f": print}, r"meta\.f is a builtin_function_or_method"),
        ({"a": {3: "x"}}, r"meta\.a has the key 3"),
        ({"a": "\ud800"}, r"meta\.a is a string that is not text"),
        ({"n": 10**5000}, r"meta cannot be saved as JSON"),
        (["a"], r"meta is a list"),
    ],
)
def test_meta_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path, meta: Any, named: str) -> None:
    checkpointer = Checkpointer(tmp_path / "c", World())
    with pytest.raises(CheckpointError, match=named):
        checkpointer.save(1, [], meta)
    assert list((tmp_path / "c").iterdir()) == []


def test_meta_without_end_is_refused(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(CheckpointError, match="nested more than"):
        Checkpointer(tmp_path, World()).save(1, [], endless)


class Distributed(Tensor):
    def to_local(self) -> Tensor:
        return self


@pytest.mark.parametrize(
    ("shard", "named"),
    [
        (
            Shard.whole("opt/x", torch.ones(2, dtype=torch.float8_e4m3fnuz)),
            "'opt/x' cannot be saved: its type is torch.float8_e4m3fnuz",
        ),
        (Shard.whole("opt/x", torch.ones(2).to_sparse()), "'opt/x' cannot be saved: it is torch.sparse_coo"),
        (Shard.whole("opt/x", torch.ones(2, device="meta")), "'opt/x' cannot be saved: it is without data"),
        (Shard.whole("opt/x", torch.ones(2).as_subclass(Distributed)), "'opt/x' .* distributed tensor"),
        (Shard("opt/x", 3, (), ()), "'opt/x' cannot be saved: it is a int, not a tensor"),  # type: ignore[arg-type]
        (Shard.whole("", torch.ones(2)), "its name is empty"),
        (Shard.whole("\ud800", torch.ones(2)), "is not text"),
        (Shard("x", torch.ones(2), (3,), (2,)), r"part of shape \[2\] at \[2\] does not lie in the global shape \[3\]"),
        (Shard("x", torch.ones(2), (3,), (-1,)), "does not lie"),
        (Shard("x", torch.ones(2), (2, 1), (0, 0)), "does not lie"),
        (Shard("x", torch.ones(2), (2,), (0, 0)), "does not lie"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_refused_by_name(tmp_path: Path, shard: Shard, named: str) -> None:
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder, World())
    with pytest.raises(CheckpointError, match=named):
        checkpointer.save(1, [Shard.whole("good", torch.ones(1)), shard], {})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([Shard("w", torch.ones(2), (4,), (0,))], "'w': 2 of its 4 elements are in no part"),
        ([Shard("w", torch.ones(3), (4,), (0,)), Shard("w", torch.ones(3), (4,), (1,))], "overlaps"),
        ([Shard.whole("w", torch.ones(2))] * 2, "'w': the part at .* overlaps"),
        ([Shard.whole("w", torch.tensor(1.0))] * 2, "overlaps"),
        (
            [Shard("w", torch.ones(1), (2,), (0,)), Shard("w", torch.ones(1).half(), (2,), (1,))],
            "F16 .* rank 1, .* F32",
        ),
        ([Shard("w", torch.ones(1), (2,), (0,)), Shard("w", torch.ones(1), (3,), (1,))], r"\[3\] on rank 1, .* \[2\]"),
    ],
)
def test_parts_that_do_not_make_a_whole_fail_on_all_ranks(tmp_path: Path, parts: list[Shard], named: str) -> None:
    folder = tmp_path / "checkpoints"

    def attempt(world: World) -> str:
        checkpointer = Checkpointer(folder, world)
        with pytest.raises(CheckpointError, match=named) as caught:
            checkpointer.save(1, parts[world.rank : world.rank + 1], {})
        return caught.value.message

    assert len(set(on_ranks(2, attempt))) == 1
    assert list(folder.iterdir()) == []


def test_ranges_outside_and_names_that_are_not_there(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [Shard.whole("a", torch.ones(2, 3))])
    with pytest.raises(CheckpointError, match="holds no tensor 'b'"):
        checkpoint.read("b")
    for offsets, shape in [
        ((0, 0), (3, 3)),
        ((-1, 0), (1, 1)),
        ((0,), (1,)),
        ((3, 0), None),
        ((0, 0), (1,)),
        ((1,), None),
    ]:
        with pytest.raises(CheckpointError, match="is not inside the tensor 'a'"):
            checkpoint.read("a", offsets, shape)
    assert checkpoint.read("a", (2, 0)).shape == (0, 3)
    assert checkpoint.read("a", None, (1, 2)).shape == (1, 2)


def test_many_files_do_not_stay_open(tmp_path: Path) -> None:
    on_ranks(
        80, lambda w: Checkpointer(tmp_path, w).save(1, [Shard("a", torch.tensor([w.rank]), (80,), (w.rank,))], {})
    )
    with Checkpoint.open(tmp_path / "step-00000001") as checkpoint:
        assert torch.equal(checkpoint.read("a"), torch.arange(80))
        maps = Path("/proc/self/maps").read_text().count(str(checkpoint.path))
        assert 0 < maps <= 64
    assert str(checkpoint.path) not in Path("/proc/self/maps").read_text()


def test_nothing_after_close(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, World())
    checkpointer.save(1, [], {})
    checkpointer.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.save(2, [], {})
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.latest()
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        Checkpointer(tmp_path, World(), 0)

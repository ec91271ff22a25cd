"""Folders made to harm: hashes that match, content that lies. Clear errors; nothing outside is touched or executed."""

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drivetrain.checkpoint import Checkpoint, CheckpointDamagedError, Checkpointer, NewerFormatError, Shard
from drivetrain.checkpoint import checkpoint as checkpoint_module
from drivetrain.checkpoint.manifest import LARGEST_MANIFEST_BYTES
from drivetrain.core.world import World

RANK_0 = "rank-00000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints; the second lists the part of its tensor, as irregular ones are, and has a plain hash."""
    checkpointer = Checkpointer(tmp_path / "c", World())
    for step in (1, 2):
        checkpointer.save(step, [Shard.whole("w", torch.arange(6.0).reshape(2, 3))], {"step": step})
    forge(tmp_path / "c" / "step-00000002", list_parts)
    restamp(tmp_path / "c" / "step-00000002", (tmp_path / "c" / "step-00000002" / RANK_0).read_bytes())
    return tmp_path / "c"


def list_parts(manifest: dict[str, Any]) -> None:
    assert manifest["tensors"]["w"].pop("over") == [0, 1]
    manifest["tensors"]["w"]["parts"] = [{"file": RANK_0, "name": "w", "offsets": [0, 0], "shape": [2, 3]}]


def divided(*over: Any, **fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"]["w"].pop("parts")
        manifest["tensors"]["w"].update({"over": list(over), **fields})

    return change


def seal(path: Path, body: bytes) -> None:
    (path / "manifest.json").write_bytes(
        b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","manifest":' + body + b"}\n"
    )


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A changed manifest whose own hash is right."""
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    change(manifest)
    seal(path, json.dumps(manifest).encode())


def restamp(path: Path, content: bytes) -> None:
    """Another content of the file, which the manifest is made to vouch for."""
    (path / RANK_0).write_bytes(content)
    stamp = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(path, lambda manifest: manifest["files"].update({RANK_0: stamp}))


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"] = {name: manifest["files"][RANK_0]}
        manifest["tensors"]["w"]["parts"][0]["file"] = name

    return change


def tensor(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["tensors"]["w"].update(fields)


def part(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["tensors"]["w"]["parts"][0].update(fields)


def twice(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["w"]["parts"] *= 2


def huge_and_whole(manifest: dict[str, Any]) -> None:
    """No gap in the manifest, but nothing like it in the file: must not be allocated."""
    manifest["tensors"]["w"]["shape"] = [2**30, 2**30]
    manifest["tensors"]["w"]["parts"][0]["shape"] = [2**30, 2**30]


def top(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(fields)


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path up": (rename_file("../secret.safetensors"), "is not the name of a file in a checkpoint"),
    "a path from the root": (rename_file("/etc/passwd"), "is not the name of a file in a checkpoint"),
    "dots": (rename_file(".."), "is not the name of a file in a checkpoint"),
    "a name with a line end": (rename_file(RANK_0 + "\n"), "is not the name of a file in a checkpoint"),
    "the manifest itself": (rename_file("manifest.json"), "is not the name of a file in a checkpoint"),
    "a file that is not listed": (part(file="rank-00009.safetensors"), "which is not one of the files"),
    "another tensor": (part(name="v"), "does not hold the part 'v'"),
    "a huge shape with a gap": (tensor(shape=[2**40, 3]), "elements are in no part"),
    "a huge shape without": (huge_and_whole, "does not hold the part 'w'"),
    "an impossible shape": (tensor(shape=[2**62, 2**62]), "is impossible"),
    "an impossible empty shape": (tensor(shape=[0, 2**62, 2**62], parts=[]), "is impossible"),
    "a size beyond 64 bits": (tensor(shape=[2**70]), "tensors.w.shape.0"),
    "a negative size": (tensor(shape=[-2, -3]), "tensors.w.shape.0"),
    "a size that is a word": (tensor(shape=["2", 3]), "tensors.w.shape.0"),
    "a size that is true": (tensor(shape=[True, 3]), "tensors.w.shape.0"),
    "a size with a point": (tensor(shape=[2.5, 3]), "tensors.w.shape.0"),
    "a thousand dimensions": (tensor(shape=[1] * 1000), "it has 1000 dimensions"),
    "a negative offset": (part(offsets=[-1, 0]), "tensors.w.parts.0.offsets.0"),
    "an offset too far": (part(offsets=[1, 0]), "reaches out of"),
    "too few offsets": (part(offsets=[0]), "reaches out of"),
    "overlapping parts": (twice, "overlaps"),
    "no parts": (tensor(parts=[]), "6 of its 6 elements are in no part"),
    "more ranks than there were": (divided(0, 2), "divided over more ranks than the 1 that wrote it"),
    "a rank that was not there": (divided(1, 1), "divided over more ranks than the 1 that wrote it"),
    "no ranks": (divided(0, 0), "tensors.w.over.1"),
    "a negative rank": (divided(-1, 1), "tensors.w.over.0"),
    "a world of endless ranks": (
        lambda m: (divided(0, 2**62, shape=[2**60])(m), m.update(world_size=2**62)),
        "'rank-00001.safetensors'",
    ),
    "rules and parts": (lambda m: m["tensors"]["w"].update(over=[0, 1]), "divided over ranks and in parts"),
    "a scalar on two ranks": (
        lambda m: (divided(0, 2, shape=[])(m), m.update(world_size=2)),
        "no rows to be divided",
    ),
    "a folder that is none": (divided(0, 1, folder="../.."), "which is not one of the files"),
    "a huge divided shape": (divided(0, 1, shape=[2**30, 2**30]), "does not hold the part 'w'"),
    "pieces without a length": (lambda m: m["files"][RANK_0].update(piece_bytes=0), "piece_bytes"),
    "endless pieces": (lambda m: m["files"][RANK_0].update(piece_bytes=2**62), "piece_bytes"),
    "another kind of hash": (lambda m: m["files"][RANK_0].update(piece_bytes=2**20), "its hash does not match"),
    "an unknown type": (tensor(dtype="F33"), "its type 'F33' is unknown"),
    "another type": (tensor(dtype="I32"), "does not hold the part 'w'"),
    "a negative file size": (lambda m: m["files"][RANK_0].update(size=-1), "files.rank-00000.safetensors.size"),
    "a hash that is none": (lambda m: m["files"][RANK_0].update(sha256="x"), "files.rank-00000.safetensors.sha256"),
    "an unknown field": (top(surprise=1), "surprise"),
    "no tensors": (lambda m: m.pop("tensors"), "tensors"),
    "tensors that are a list": (top(tensors=[]), "tensors"),
    "meta that is a list": (top(meta=[]), "meta"),
    "version 0": (top(format_version=0), "format_version"),
    "a version that is a word": (top(format_version="1"), "format_version"),
    "no version": (lambda m: m.pop("format_version"), "format_version"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(folder: Path, lie: str) -> None:
    change, words = LIES[lie]
    path = folder / "step-00000002"
    (folder / "secret.safetensors").write_bytes((path / RANK_0).read_bytes())
    forge(path, change)
    with pytest.raises(CheckpointDamagedError) as caught:
        Checkpoint.open(path)
    assert words in caught.value.message
    checkpointer = Checkpointer(folder, World())
    checkpoint = checkpointer.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert words in checkpointer.problems[0]


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"x"', b"{", b'{"format_version": 1e999}', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe"],
    ids=["empty", "null", "list", "word", "torn", "endless number", "deep list", "deep object", "not text"],
)
def test_a_manifest_that_is_none(folder: Path, body: bytes) -> None:
    seal(folder / "step-00000002", body)
    with pytest.raises(CheckpointDamagedError, match="is not a manifest"):
        Checkpoint.open(folder / "step-00000002")


def test_a_manifest_that_is_too_long_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "step-00000002" / "manifest.json").open("r+b") as file:
        file.truncate(LARGEST_MANIFEST_BYTES + 1)  # a hole: it takes no space
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    with pytest.raises(CheckpointDamagedError, match=r"manifest.json has 268435457 bytes"):
        Checkpoint.open(folder / "step-00000002")


class Payload:
    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self._target, "executed")


@pytest.mark.parametrize("kind", ["pickle", "torch", "huge header", "garbage", "plain text"])
def test_a_file_that_is_something_else_executes_nothing(folder: Path, tmp_path: Path, kind: str) -> None:
    target, path = tmp_path / "executed", folder / "step-00000002"
    if kind == "pickle":
        content = pickle.dumps(Payload(target))
    elif kind == "torch":
        torch.save({"w": Payload(target)}, tmp_path / "x.pt")
        content = (tmp_path / "x.pt").read_bytes()
    elif kind == "huge header":
        content = (2**62).to_bytes(8, "little") + b"{}"
    else:
        content = bytes(range(256)) if kind == "garbage" else b"hello, world"
    restamp(path, content)
    with pytest.raises(CheckpointDamagedError, match="is not a safetensors file"):
        Checkpoint.open(path)
    assert not target.exists()
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()  # the payload does work


def test_a_manifest_that_is_a_pickle_executes_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "step-00000002" / "manifest.json").write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    with pytest.raises(CheckpointDamagedError, match="its hash does not match"):
        Checkpoint.open(folder / "step-00000002")
    assert not (tmp_path / "executed").exists()


def test_a_valid_file_with_other_tensors(folder: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3, 2)}, tmp_path / "other")
    restamp(folder / "step-00000002", (tmp_path / "other").read_bytes())
    with pytest.raises(CheckpointDamagedError, match=r"does not hold the part 'w' of 'w' as F32 \[2, 3\]"):
        Checkpoint.open(folder / "step-00000002")


def test_a_newer_format_is_an_error_and_stays_where_it_is(folder: Path) -> None:
    """Fields that this version does not know do not matter: the version is asked first."""
    forge(folder / "step-00000002", lambda m: m.update(format_version=4, shiny=True, tensors="elsewhere"))
    before = (folder / "step-00000002" / "manifest.json").read_bytes()
    for _ in range(2):
        checkpointer = Checkpointer(folder, World())
        with pytest.raises(NewerFormatError, match="has checkpoint format 4; this drivetrain reads formats up to 3"):
            checkpointer.latest()
        assert checkpointer.problems == []
    assert (folder / "step-00000002" / "manifest.json").read_bytes() == before


def test_no_module_of_the_package_can_unpickle() -> None:
    for path in Path(checkpoint_module.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert not any(word in text for word in ("import pickle", "torch.load", "marshal", "shelve", "eval(")), path

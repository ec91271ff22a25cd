"""Frozen weights are stored once, for as long as they do not change; a checkpoint is valid only with them."""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drivetrain.checkpoint import (
    BackgroundSaver,
    Checkpoint,
    CheckpointDamagedError,
    Checkpointer,
    CheckpointError,
    Shard,
    SharedFileError,
    export,
    frozen,
    read_weights,
)
from drivetrain.checkpoint.files import PIECE_BYTES
from drivetrain.checkpoint.frozen import Region, Values, start_checksums
from drivetrain.core.world import World
from tests.checkpoint.test_malice import forge
from tests.checkpoint.thread_world import on_ranks

FORMAT_1 = Path(__file__).parents[1] / "fixtures" / "checkpoints" / "format-1"


def frozen_shard(key: str, tensor: Tensor) -> Shard:
    return Shard(key, tensor, tuple(tensor.shape), (0,) * tensor.dim(), is_untrained=True)


def state(step: int, backbone: Tensor) -> list[Shard]:
    return [Shard.whole("model/head", torch.full((3,), float(step))), frozen_shard("model/backbone", backbone)]


def backbone() -> Tensor:
    return torch.arange(600.0).view(30, 20)


def folders(path: Path) -> list[str]:
    return sorted(found.name for found in path.glob("frozen-*"))


def manifest_of(path: Path, step: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / f"step-{step:08d}" / "manifest.json").read_text())["manifest"]
    return content


def save(path: Path, *steps: int, keep_last: int = 3) -> Checkpointer:
    checkpointer = Checkpointer(path, World(), keep_last)
    for step in steps:
        checkpointer.save(step, state(step, backbone()), {})
    return checkpointer


def test_they_are_written_once(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 1, 2, 3)
    (folder,) = folders(tmp_path)
    file = tmp_path / folder / "rank-00000.safetensors"
    assert torch.equal(load_file(file)["model/backbone"], backbone())
    for step in (1, 2, 3):
        path = tmp_path / f"step-{step:08d}"
        assert list(load_file(path / "rank-00000.safetensors")) == ["model/head"]
        stored = manifest_of(tmp_path, step)["shared"][folder]["rank-00000.safetensors"]
        of_only_piece = hashlib.sha256(file.read_bytes()).digest()
        expected = {"size": file.stat().st_size, "sha256": hashlib.sha256(of_only_piece).hexdigest()}
        assert stored == {**expected, "piece_bytes": PIECE_BYTES}
        checkpoint = Checkpoint.open(path)
        assert torch.equal(checkpoint.read("model/backbone"), backbone())
        assert torch.equal(checkpoint.read("model/backbone", (3, 1), (2, 4)), backbone()[3:5, 1:5])
        assert checkpoint.read("model/head").tolist() == [step] * 3
        assert (checkpoint.format_version, checkpoint.frozen) == (3, {"model/backbone"})
    assert [news.event for news in checkpointer.frozen.take_news()] == ["frozen weights stored"]


def test_a_run_that_goes_on_does_not_write_them_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = folders(tmp_path)
    checkpointer = Checkpointer(tmp_path, World())
    found = checkpointer.latest()
    assert found is not None
    weights = found.read("model/backbone")
    checkpointer.frozen.watch(state(1, weights))
    checkpointer.save(2, state(2, weights), {})
    assert folders(tmp_path) == before
    assert checkpointer.frozen.take_news() == []
    # Of another type they are other weights.
    checkpointer = Checkpointer(tmp_path, World())
    assert checkpointer.latest() is not None
    checkpointer.save(3, state(3, weights.double()), {})
    assert len(folders(tmp_path)) == 2
    assert Checkpoint.open(tmp_path / "step-00000003").keys["model/backbone"].dtype == torch.float64


Change = Callable[[Tensor], None]
UNSEEN: Change = lambda tensor: tensor.data.add_(1)  # noqa: E731  (torch does not count changes through `.data`)
SEEN: Change = lambda tensor: tensor.add_(1)  # type: ignore[assignment, return-value]  # noqa: E731


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("change", [SEEN, UNSEEN])
def test_one_that_changes_is_in_every_checkpoint_from_then_on(tmp_path: Path, beside: bool, change: Change) -> None:
    checkpointer, weights, still = Checkpointer(tmp_path, World(), 9), backbone(), torch.ones(4)
    saver = BackgroundSaver(checkpointer, World())
    for step in range(1, 6):
        shards = [*state(step, weights), frozen_shard("model/still", still)]
        if step == 3:
            change(weights)
        if beside:
            saver.begin(step, shards, {})
            if step >= 3:
                change(weights)  # at once: what was there at the end of the step is what counts
            saver.judged()
            saver.finish()
        else:
            checkpointer.save(step, shards, {})
            if step >= 3:
                change(weights)
    for step, added in enumerate((0, 0, 1, 2, 3), start=1):
        checkpoint = Checkpoint.open(tmp_path / f"step-{step:08d}")
        assert torch.equal(checkpoint.read("model/backbone"), backbone() + added), step
        assert checkpoint.frozen == ({"model/still"} if added else {"model/still", "model/backbone"})
    stored, moved = checkpointer.frozen.take_news()
    assert (stored.event, moved.event) == ("frozen weights stored", "frozen weights changed")
    assert moved.text == (
        "backbone changed by step 3 though no optimizer holds it: stored with every checkpoint from now on"
    )
    # Who goes on knows it.
    checkpointer = Checkpointer(tmp_path, World(), 9)
    assert checkpointer.latest() is not None
    checkpointer.save(6, [*state(6, weights), frozen_shard("model/still", still)], {})
    assert manifest_of(tmp_path, 6)["moved"] == ["model/backbone"]
    assert list(manifest_of(tmp_path, 6)["frozen"]) == ["model/still"]
    assert len(folders(tmp_path)) == 1


def test_one_that_moves_from_the_first_step_on_is_never_shared(tmp_path: Path) -> None:
    checkpointer, teacher, still = Checkpointer(tmp_path, World()), backbone(), torch.ones(4)
    shards = [*state(1, teacher), frozen_shard("model/still", still)]
    checkpointer.frozen.watch(shards)
    UNSEEN(teacher)
    checkpointer.save(1, shards, {})
    (folder,) = folders(tmp_path)
    assert list(load_file(tmp_path / folder / "rank-00000.safetensors")) == ["model/still"]
    assert torch.equal(Checkpoint.open(tmp_path / "step-00000001").read("model/backbone"), backbone() + 1)


class Deferred:
    """Saves as on a GPU, where checksums are known only when training has gone on; with tensors of the CPU."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(frozen, "_are_known_at_once", lambda shards: False)
        monkeypatch.setattr(frozen, "start_checksums", self._start_checksums)
        self.path, self.checkpointer = path, Checkpointer(path, World(), 9)
        self.saver = BackgroundSaver(self.checkpointer, World())
        self._goes_on: threading.Event | None = None

    def _start_checksums(self, regions: Sequence[Region]) -> Values:
        """Computes them at once, and holds the thread that asks for those of a save until training has gone on."""
        values, goes_on = start_checksums(regions), self._goes_on

        def wait() -> list[int]:
            assert goes_on is None or goes_on.wait(120)
            return values()

        return wait

    def save(self, step: int, weights: Tensor, then: Change | None = None) -> None:
        self._goes_on = threading.Event()
        self.saver.begin(step, state(step, weights), {})
        if then is not None:
            then(weights)
        self._goes_on.set()
        self._goes_on = None
        self.saver.judged()
        self.saver.finish()

    def stored(self, step: int) -> Tensor:
        return Checkpoint.open(self.path / f"step-{step:08d}").read("model/backbone")


def test_on_a_gpu_one_change_is_stored_right_though_nobody_saw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = Deferred(tmp_path, monkeypatch), backbone()
    run.save(1, weights)
    UNSEEN(weights)
    run.save(2, weights)
    run.save(3, weights, then=UNSEEN)
    assert [torch.equal(run.stored(step), backbone() + added) for step, added in ((1, 0), (2, 1), (3, 1))] == [True] * 3
    assert manifest_of(tmp_path, 2)["frozen"] == {}


@pytest.mark.parametrize("has_room", [True, False])
def test_what_changes_while_it_is_stored_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """Without room for a copy that checkpoint is given up, and the next one holds it: none is ever wrong."""
    if not has_room:
        monkeypatch.setattr(frozen.FrozenWeights, "_clones", lambda *_: {})
    run, weights = Deferred(tmp_path, monkeypatch), backbone()
    if has_room:
        run.save(1, weights, then=UNSEEN)
        assert torch.equal(run.stored(1), backbone())
    else:
        with pytest.raises(CheckpointError, match="changed while it was being saved"):
            run.save(1, weights, then=UNSEEN)
        assert list(tmp_path.iterdir()) == []
    run.save(2, weights, then=None if has_room else UNSEEN)
    assert torch.equal(run.stored(2), backbone() + 1)


def test_on_a_gpu_what_torch_sees_change_is_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, weights = Deferred(tmp_path, monkeypatch), backbone()
    run.save(1, weights)
    weights.copy_(weights.clone())  # changed by nothing: copied in vain, and still shared
    run.save(2, weights)
    SEEN(weights)
    run.save(3, weights, then=SEEN)
    assert [torch.equal(run.stored(step), backbone() + added) for step, added in ((1, 0), (2, 0), (3, 1))] == [True] * 3
    assert [list(manifest_of(tmp_path, step)["frozen"]) for step in (1, 2, 3)] == [["model/backbone"]] * 2 + [[]]


def test_on_a_gpu_what_begins_to_move_unseen_costs_one_checkpoint_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a wrong one. Here it begins late; what moves in the first step is found out beside that."""
    run, weights = Deferred(tmp_path, monkeypatch), backbone()
    run.save(1, weights)
    UNSEEN(weights)
    with pytest.raises(CheckpointError, match=r"backbone is in no optimizer .* changed while it was being saved"):
        run.save(2, weights, then=UNSEEN)
    run.save(3, weights, then=UNSEEN)
    assert torch.equal(run.stored(3), backbone() + 2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]

    other, weights = Deferred(tmp_path / "from the first step", monkeypatch), backbone()
    other.checkpointer.frozen.watch(state(0, weights))
    UNSEEN(weights)
    other.saver.prepare(state(1, weights), {})
    other.save(1, weights, then=UNSEEN)
    assert torch.equal(other.stored(1), backbone() + 1)


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    weights = backbone()
    checkpointer = Checkpointer(tmp_path, World(), 9)
    for step in (1, 2, 3):
        if step == 3:
            UNSEEN(weights)
        checkpointer.save(step, [*state(step, weights), frozen_shard("model/tied", weights)], {})
    for step, added in ((1, 0), (2, 0), (3, 1)):
        checkpoint = Checkpoint.open(tmp_path / f"step-{step:08d}")
        assert all(torch.equal(checkpoint.read(f"model/{name}"), backbone() + added) for name in ("backbone", "tied"))


# What is missing or damaged


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "flipped": flipped,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-8]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_without_them_a_checkpoint_is_invalid(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1, 2)
    (folder,) = folders(tmp_path)
    file = tmp_path / folder / "rank-00000.safetensors"
    content = file.read_bytes()
    DAMAGE[kind](file)
    for attempt in (
        lambda: Checkpoint.open(tmp_path / "step-00000002"),
        lambda: Checkpoint.latest_in(tmp_path),
        lambda: read_weights(tmp_path),
        lambda: read_weights(tmp_path / "step-00000002"),
        lambda: Checkpointer(tmp_path, World()).latest(),
    ):
        with pytest.raises(SharedFileError) as caught:
            attempt()
        assert f"{folder}/rank-00000.safetensors" in caught.value.message
        assert "step-00000002 cannot be used without it" in caught.value.message
        assert "frozen-" in caught.value.remedy
    # They are not set aside: once the file is back, all is well.
    file.write_bytes(content)
    found = Checkpointer(tmp_path, World()).latest()
    assert found is not None
    assert found.step == 2


def test_an_older_checkpoint_that_does_not_need_them_is_used(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, World())
    checkpointer.save(1, [Shard.whole("model/head", torch.ones(3))], {})
    checkpointer.save(2, state(2, backbone()), {})
    (folder,) = folders(tmp_path)
    shutil.rmtree(tmp_path / folder)
    again = Checkpointer(tmp_path, World())
    found = again.latest()
    assert found is not None
    assert found.step == 1
    (problem,) = again.problems
    assert problem.startswith("step-00000002 is damaged and was set aside as step-00000002.corrupt")
    again.save(2, state(2, backbone()), {})


def test_they_are_written_again_if_they_go_missing_while_training(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 1)
    (folder,) = folders(tmp_path)
    shutil.rmtree(tmp_path / folder)
    checkpointer.save(2, state(2, backbone()), {})
    (other,) = folders(tmp_path)
    assert other != folder
    assert torch.equal(Checkpoint.open(tmp_path / "step-00000002").read("model/backbone"), backbone())
    assert any("are written again" in problem for problem in checkpointer.problems)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(shared={"../elsewhere": {}}), "is not the name of a folder of frozen weights"),
        (lambda m: m.update(shared={"frozen-0123456789abcdef": {"../a": {"size": 1, "sha256": "0" * 64}}}), "'../a'"),
        (lambda m: m["frozen"].update(nobody="0" * 16), "'nobody' is not one of the tensors"),
        (lambda m: m["frozen"].update({"model/backbone": "x"}), "frozen.model/backbone"),
        (lambda m: m.update(shared={}), "which is not one of the files"),
    ],
)
def test_a_manifest_that_lies_about_them(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    save(tmp_path, 1)
    forge(tmp_path / "step-00000001", change)
    with pytest.raises(CheckpointDamagedError) as caught:
        Checkpoint.open(tmp_path / "step-00000001")
    assert words in caught.value.message


# Retention, copies, readers


def test_a_folder_that_no_checkpoint_needs_is_removed(tmp_path: Path) -> None:
    checkpointer, weights = Checkpointer(tmp_path, World(), keep_last=2), backbone()
    checkpointer.save(1, state(1, weights), {})
    (folder,) = folders(tmp_path)
    UNSEEN(weights)
    checkpointer.save(2, state(2, weights), {})
    assert folders(tmp_path) == [folder], "step 1 needs it"
    checkpointer.pin(1)
    for step in (3, 4):
        checkpointer.save(step, state(step, weights), {})
    assert folders(tmp_path) == [folder], "step 1 is pinned"
    checkpointer.unpin(1)
    checkpointer.save(5, state(5, weights), {})
    assert folders(tmp_path) == []
    assert checkpointer.problems == []


def test_a_folder_that_a_crash_left_is_removed_and_that_of_one_set_aside_is_not(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (folder,) = folders(tmp_path)
    (tmp_path / "frozen-0123456789abcdef").mkdir()
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.corrupt")
    shutil.rmtree(tmp_path / "step-00000001")
    checkpointer = Checkpointer(tmp_path, World(), keep_last=1)
    checkpointer.save(3, [Shard.whole("model/head", torch.ones(3))], {})
    assert folders(tmp_path) == [folder]
    flipped(tmp_path / "step-00000002.corrupt" / "manifest.json")
    checkpointer.save(4, [Shard.whole("model/head", torch.ones(3))], {})
    assert folders(tmp_path) == [folder], "nobody knows what the damaged one needs"


def test_copies_and_links(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / folders(tmp_path / "run" / "checkpoints")[0])
    newest = Checkpoint.latest_in(tmp_path / "copy" / "checkpoints")
    assert newest is not None
    assert torch.equal(newest.read("model/backbone"), backbone())
    (tmp_path / "best").symlink_to(tmp_path / "copy" / "checkpoints" / "step-00000001")
    assert torch.equal(Checkpoint.open(tmp_path / "best").read("model/backbone"), backbone())
    shutil.copytree(tmp_path / "copy" / "checkpoints" / "step-00000002", tmp_path / "alone" / "step-00000002")
    with pytest.raises(SharedFileError, match="is missing; step-00000002 cannot be used without it"):
        read_weights(tmp_path / "alone" / "step-00000002")


def test_export_and_init_from_have_them(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1)
    checkpoint = Checkpoint.latest_in(tmp_path / "checkpoints")
    assert checkpoint is not None
    written = load_file(export(checkpoint, tmp_path / "weights.safetensors"))
    assert torch.equal(written["backbone"], backbone())
    weights = read_weights(tmp_path)
    assert torch.equal(weights.read("backbone", (0, 0), (30, 20)), backbone())


# Several ranks


def parts(step: int, world: World, weights: Tensor) -> list[Shard]:
    rows = -(-len(weights) // world.size)
    first = min(len(weights), rows * world.rank)
    own = weights[first : first + rows]
    shards = [Shard("model/backbone", own, tuple(weights.shape), (first, 0), is_part=True, is_untrained=True)]
    return shards + ([Shard.whole("model/head", torch.full((3,), float(step)))] if world.is_main else [])


def save_parts(path: Path, size: int, steps: list[int], change: Callable[[int, World, Tensor], None]) -> list[str]:
    def on_rank(world: World) -> list[str]:
        weights = backbone()
        checkpointer = Checkpointer(path, world, 9)
        found = checkpointer.latest()
        if found is not None:
            weights = found.read("model/backbone")
        checkpointer.frozen.watch(parts(0, world, weights))
        for step in steps:
            change(step, world, weights)
            checkpointer.save(step, parts(step, world, weights), {})
        return [news.event for news in checkpointer.frozen.take_news()]

    return on_ranks(size, on_rank)[0]


def test_another_number_of_ranks_goes_on_with_the_same_files(tmp_path: Path) -> None:
    nothing: Callable[[int, World, Tensor], None] = lambda step, world, weights: None  # noqa: E731
    assert save_parts(tmp_path, 4, [1, 2], nothing) == ["frozen weights stored"]
    (folder,) = folders(tmp_path)
    assert len(list((tmp_path / folder).iterdir())) == 4
    for size, step in ((1, 3), (3, 4), (2, 5)):
        assert save_parts(tmp_path, size, [step], nothing) == []
        assert folders(tmp_path) == [folder]
        assert torch.equal(Checkpoint.open(tmp_path / f"step-{step:08d}").read("model/backbone"), backbone())


def test_a_change_on_one_rank_is_a_change_on_all(tmp_path: Path) -> None:
    def change(step: int, world: World, weights: Tensor) -> None:
        if step >= 2 and world.rank == world.size - 1:
            weights[-1] += 1

    assert save_parts(tmp_path, 3, [1, 2, 3], change) == ["frozen weights stored", "frozen weights changed"]
    for step, added in ((1, 0), (2, 1), (3, 2)):
        expected = backbone()
        expected[-1] += added
        assert torch.equal(Checkpoint.open(tmp_path / f"step-{step:08d}").read("model/backbone"), expected)


def test_a_save_that_fails_leaves_nothing_and_the_next_one_writes_them(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, World())
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match="is there already"):
        checkpointer.save(1, state(1, backbone()), {})
    saver = BackgroundSaver(checkpointer, World())
    saver.begin(2, state(2, backbone()), {})
    saver.abandon()
    saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpointer.save(3, state(3, backbone()), {})
    assert torch.equal(Checkpoint.open(tmp_path / "step-00000003").read("model/backbone"), backbone())


# The format


def test_a_checkpoint_of_format_1_is_read(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1, tmp_path / "c")
    checkpointer = Checkpointer(tmp_path / "c", World())
    found = checkpointer.latest()
    assert found is not None
    assert (found.format_version, found.step, found.frozen) == (1, 4, frozenset())
    stored = load_file(found.path / "rank-00000.safetensors")
    assert found.keys.keys() == stored.keys()
    assert all(torch.equal(found.read(key), value) for key, value in stored.items())
    assert checkpointer.problems == []


def test_a_checkpoint_of_format_2_is_read_and_gone_on_from(tmp_path: Path) -> None:
    """Three ranks wrote it, with uneven rows and frozen weights: another world goes on with the same frozen files."""
    shutil.copytree(FORMAT_1.with_name("format-2"), tmp_path / "c")
    whole, frozen = torch.arange(21.0).reshape(7, 3), torch.arange(10.0).reshape(5, 2).bfloat16()

    def go_on(world: World) -> None:
        checkpointer = Checkpointer(tmp_path / "c", world)
        found = checkpointer.latest()
        assert found is not None
        assert (found.format_version, found.step, found.world_size) == (2, 2, 3)
        assert torch.equal(found.read("model/w"), whole * 2)
        assert torch.equal(found.read("model/w", (2, 1), (4, 2)), (whole * 2)[2:6, 1:])
        assert torch.equal(found.read("model/backbone"), frozen)
        assert found.read("optimizer/w/step") == 2
        rows = [(part, start) for part, start in zip(frozen.chunk(world.size), (0, 3), strict=True)]
        part, start = rows[world.rank]
        own = (whole * 3).chunk(world.size)[world.rank]
        shards = [
            Shard("model/w", own, (7, 3), (4 * world.rank, 0), is_part=True),
            Shard("model/backbone", part, (5, 2), (start, 0), is_part=True, is_untrained=True),
        ]
        checkpointer.save(3, shards, {})

    on_ranks(2, go_on)
    newest = Checkpoint.open(tmp_path / "c" / "step-00000003")
    assert newest.format_version == 3
    assert torch.equal(newest.read("model/w"), whole * 3)
    assert torch.equal(newest.read("model/backbone"), frozen)
    assert sorted(path.name[:7] for path in (tmp_path / "c").iterdir()) == ["frozen-", *["step-00"] * 3]

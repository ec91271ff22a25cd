"""Whatever happens to the files of a checkpoint is found, the one before it is used, and nothing is thrown away."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import Checkpoint, CheckpointDamagedError, Checkpointer, CheckpointError, Shard
from drivetrain.core.world import World
from tests.checkpoint.thread_world import on_ranks
from tests.gloo_pool import GlooPool

FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def fill(folder: Path, steps: int = 2) -> None:
    def save(world: World) -> None:
        checkpointer = Checkpointer(folder, world)
        for step in range(1, steps + 1):
            shards = [Shard("w", torch.full((2, 3), step), (4, 3), (2 * world.rank, 0))]
            checkpointer.save(step, shards, {"step": step, "words": "some text"})

    on_ranks(2, save)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "c")
    return tmp_path / "c"


def latest(folder: Path, size: int = 1) -> tuple[int, int, list[str]]:
    """The step found, a number of its tensor, and the problems, which all ranks agree on."""

    def find(world: World) -> tuple[int, int, list[str]]:
        checkpointer = Checkpointer(folder, world)
        checkpoint = checkpointer.latest()
        assert checkpoint is not None
        values = set(checkpoint.read("w").flatten().tolist())
        assert len(values) == 1, "parts of two checkpoints"
        return checkpoint.step, int(values.pop()), checkpointer.problems

    answers = on_ranks(size, find)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_200_flipped_bits_are_found(tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    fill(pristine)
    newest = pristine / "step-00000002"
    sizes = {name: (newest / name).stat().st_size for name in FILES}
    generator = random.Random(3)
    flipped = set()
    for trial in range(200):
        name = FILES[trial % 3]
        byte, bit = generator.randrange(sizes[name]), generator.randrange(8)
        flipped.add((name, byte, bit))
        folder = tmp_path / f"trial-{trial}"
        shutil.copytree(pristine, folder)
        content = bytearray((folder / "step-00000002" / name).read_bytes())
        content[byte] ^= 1 << bit
        (folder / "step-00000002" / name).write_bytes(content)
        step, value, problems = latest(folder)
        assert (step, value) == (1, 1), (name, byte, bit)
        assert len(problems) == 1
        assert "step-00000002 is damaged and was set aside as step-00000002.corrupt" in problems[0]
        assert name in problems[0]
        assert (folder / "step-00000002.corrupt" / name).read_bytes() == content
    assert len(flipped) > 190


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    import os

    path.unlink()
    os.mkfifo(path)


def swap_with_older(path: Path) -> None:
    """A whole, valid file of another checkpoint."""
    shutil.copy(path.parents[1] / "step-00000001" / path.name, path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [truncate, lengthen, empty, Path.unlink, replace_by_folder, replace_by_pipe, swap_with_older],
    ids=lambda damage: damage.__name__,
)
@pytest.mark.parametrize("size", [1, 3])
def test_a_damaged_file_is_found_by_any_world(
    folder: Path, name: str, damage: Callable[[Path], None], size: int
) -> None:
    damage(folder / "step-00000002" / name)
    step, value, problems = latest(folder, size)
    assert (step, value) == (1, 1)
    assert len(problems) == 1
    assert "step-00000002" in problems[0]
    assert (folder / "step-00000002.corrupt").is_dir()
    assert not (folder / "step-00000002").exists()
    assert latest(folder, size) == (1, 1, [])


def test_the_newest_two_are_bad(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    fill(folder, steps=3)
    truncate(folder / "step-00000003" / "rank-00001.safetensors")
    (folder / "step-00000002" / "manifest.json").unlink()
    step, value, problems = latest(folder)
    assert (step, value) == (1, 1)
    assert [problem.split()[0] for problem in problems] == ["step-00000003", "step-00000002"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000001",
        "step-00000002.corrupt",
        "step-00000003.corrupt",
    ]


def test_the_same_step_damaged_again_gets_another_name(folder: Path) -> None:
    for expected in (".corrupt", ".corrupt-2", ".corrupt-3"):
        shutil.copytree(folder / "step-00000001", folder / "step-00000005")
        _, _, problems = latest(folder)
        assert f"step-00000005{expected}: " in problems[0]
        assert "holds step 1" in problems[0]


def test_if_all_are_damaged_it_does_not_start_anew_in_silence(folder: Path) -> None:
    for step in (1, 2):
        empty(folder / f"step-{step:08d}" / "manifest.json")
    for attempt in range(2):  # the next start still knows
        with pytest.raises(
            CheckpointError, match=r"only damaged ones: step-00000001.corrupt, step-00000002.corrupt"
        ) as e:
            Checkpointer(folder, World()).latest()
        assert ("its hash does not match" in e.value.message) == (attempt == 0)
        assert "move the damaged ones away to start anew" in e.value.remedy
    for path in list(folder.iterdir()):
        shutil.rmtree(path)
    assert Checkpointer(folder, World()).latest() is None


def test_a_file_that_may_not_be_read_is_an_error_and_not_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost permission or a server that is down says nothing of the checkpoint. Planted, as root may read all."""
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if "step-00000002" in str(path):
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(
        CheckpointError, match=r"step-00000002/manifest.json cannot be read: Permission denied"
    ) as caught:
        Checkpointer(folder, World()).latest()
    assert not isinstance(caught.value, CheckpointDamagedError)
    assert (folder / "step-00000002").is_dir()


def test_opening_one_by_its_path(folder: Path) -> None:
    shutil.copytree(folder / "step-00000002", folder / "best")
    assert Checkpoint.open(folder / "best").read("w")[0, 0] == 2
    truncate(folder / "best" / "rank-00001.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"rank-00001.safetensors has \d+ bytes, not \d+"):
        Checkpoint.open(folder / "best")
    with pytest.raises(CheckpointDamagedError, match=r"manifest.json is missing"):
        Checkpoint.open(folder / "nothing")


def test_reading_beside_a_run_changes_nothing(folder: Path) -> None:
    (folder / ".step-00000003.tmp-0123456789abcdef").mkdir()  # a save that is under way
    checkpoint = Checkpoint.latest_in(folder)
    assert checkpoint is not None
    assert checkpoint.step == 2
    truncate(folder / "step-00000002" / "manifest.json")
    before = sorted(path.name for path in folder.iterdir())
    checkpoint = Checkpoint.latest_in(folder)
    assert checkpoint is not None
    assert checkpoint.step == 1
    empty(folder / "step-00000001" / "manifest.json")
    assert Checkpoint.latest_in(folder) is None
    assert sorted(path.name for path in folder.iterdir()) == before
    with pytest.raises(CheckpointError, match="nowhere is missing"):
        Checkpoint.latest_in(folder / "nowhere")


def find_in_processes(folder: str, size: int) -> tuple[int, list[str]]:
    world = World(dist.get_rank(), size, group=dist.group.WORLD)
    checkpointer = Checkpointer(Path(folder), world)
    checkpoint = checkpointer.latest()
    assert checkpoint is not None
    return checkpoint.step, checkpointer.problems


def test_processes_agree_on_the_damage(gloo_pool: GlooPool, folder: Path) -> None:
    truncate(folder / "step-00000002" / "rank-00001.safetensors")
    answers = gloo_pool.run(find_in_processes, str(folder), 3, world=3)
    assert answers == [answers[0]] * 3
    assert answers[0][0] == 1
    assert "rank 1: " in answers[0][1][0]

"""Before a model is made: every way in which ranks can disagree is found, with rank and remedy, on all ranks alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain import DrivetrainError
from drivetrain.config import configure
from drivetrain.core.world import World
from drivetrain.hardware import detect
from drivetrain.run import preflight as module
from drivetrain.run.preflight import is_wanted, preflight
from tests.hardware_fixtures import load

JOB = {"name": "x", "num_samples": 100, "global_batch": 8}


def fly(folder: str, change: dict[str, Any]) -> Any:
    """On every rank; rank 1 differs by `change`. Returns what was found, or the error in words."""
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), group=dist.group.WORLD)
    mine = change if world.rank == 1 else {}
    output = Path(folder) / "other" if "folder" in mine else Path(folder)
    config = configure(output_dir=output, **mine.get("config", {}))
    job = {**JOB, **mine.get("job", {})}
    original = module.code_version
    module.SHOWN_AFTER_SECONDS = 0.2
    if "code" in mine:
        module.code_version = lambda script: {**original(script), **mine["code"]}
    try:
        found = preflight(world, config, detect(output), job, "", 60)
    except DrivetrainError as error:
        return str(error)
    finally:
        module.code_version = original
    return {"rates": found.gigabytes_per_second, "hosts": found.hosts}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_good_world_passes_with_its_figures(gloo_pool, tmp_path: Path, world: int) -> None:
    answers = gloo_pool.run(fly, str(tmp_path), {}, world=world)
    for answer in answers:
        assert set(answer["rates"]) == {"all_reduce", "broadcast", "all_gather", "all_to_all"}
        assert all(rate > 0 for rate in answer["rates"].values())
        assert len(answer["hosts"]) == 1
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"code": {"torch": "1.0"}}, "runs other code than rank 0"),
        ({"config": {"seed": 3}}, "run.seed is 3 there and 0 on rank 0"),
        ({"job": {"num_samples": 99}}, "has another data set than rank 0"),
        ({"job": {"global_batch": 9}}, "global_batch is 9 there and 8 on rank 0"),
        ({"folder": True}, "does not see in"),
    ],
)
def test_a_rank_that_differs_is_named(gloo_pool, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    for answer in gloo_pool.run(fly, str(tmp_path), change, world=2):
        assert isinstance(answer, str), "it passed"
        assert words in answer
        assert "rank 1 on " in answer
        assert "remedy: " in answer


def wrong_numbers(folder: str) -> Any:
    original = dist.all_gather

    def swapped(parts: list[torch.Tensor], own: torch.Tensor, *group: Any, **more: Any) -> Any:
        work = original(parts, own, *group, **more)
        if own.is_floating_point() and dist.get_rank() == 1 and more.get("async_op"):
            work.wait()
            parts.reverse()
        return work

    dist.all_gather = swapped
    try:
        return fly(folder, {})
    finally:
        dist.all_gather = original


def test_wrong_numbers_are_noticed(gloo_pool, tmp_path: Path) -> None:
    for answer in gloo_pool.run(wrong_numbers, str(tmp_path), world=2):
        assert "rank 1 on " in answer
        assert "all_gather over gloo gave wrong numbers" in answer


def test_gpus_that_two_ranks_share_or_that_are_full() -> None:
    """The facts of machines that are not here."""
    gpu = load("4x-l4").gpus[0]
    total = gpu.memory_total_bytes
    one = {"rank": 0, "host": "a", "backend": "nccl", "device": [gpu.uuid, "cuda:0", total, total]}
    two = {**one, "rank": 1}
    problem = module._own_devices([one, two])
    assert problem is not None
    assert "rank 1 on a and rank 0 on a use the same GPU, cuda:0" in str(problem)
    assert module._own_devices([one, {**two, "backend": "gloo"}]) is None
    full = {**two, "device": ["other", "cuda:1", total // 100, total]}
    assert "rank 1 on a: only 0.2 of 22 GiB are free on cuda:1" in str(module._free_memory([one, full]))
    assert module._free_memory([one, two]) is None


def test_when_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    two = World(0, 2, 0, group=object())  # type: ignore[arg-type]
    assert is_wanted(configure(), two)
    assert not is_wanted(configure(), World())
    assert not is_wanted(configure(skip_preflight=True), two)
    monkeypatch.setenv(module.SKIP, "1")
    assert not is_wanted(configure(), two)

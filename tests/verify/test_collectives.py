"""The collectives' check: right on worlds of several sizes, and a wrong result is noticed by the rank that has it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.verify.probe import Probe
from drivetrain.verify.probes import collectives
from drivetrain.verify.probes.collectives import CollectiveFigures, check_collectives, measure_collectives
from drivetrain.verify.runner import run_probes
from tests.gloo_pool import GlooPool
from tests.verify.machines import machine
from tests.verify.test_probes import make_setup

CPU = torch.device("cpu")


def measure_in_world(num_bytes: int) -> CollectiveFigures:
    return measure_collectives(dist.group.WORLD, CPU, num_bytes=num_bytes, num_repeats=3)


def check_in_part_of_the_world() -> list[str]:
    """In a group whose ranks are not the world's."""
    group = dist.new_group([1, 2])
    return list(check_collectives(group, CPU)) if dist.get_rank() in (1, 2) else []


def check_with(collective: str) -> list[str]:
    """With one collective whose result is spoiled on the last rank but one."""
    real = getattr(dist, collective)

    def spoiled(output: torch.Tensor, *args: object, **kwargs: object) -> None:
        real(output, *args, **kwargs)
        if dist.get_rank() == dist.get_world_size() - 2:
            first = output[0] if isinstance(output, list) else output
            first[0] += 1

    setattr(dist, collective, spoiled)
    try:
        return list(check_collectives(dist.group.WORLD, CPU))
    finally:
        setattr(dist, collective, real)


@pytest.mark.parametrize("world", [2, 3])
def test_right_results_and_a_rate(gloo_pool: GlooPool, world: int) -> None:
    for figures in gloo_pool.run(measure_in_world, 1 << 20, world=world):
        assert figures.problems == ()
        assert figures.world == world
        assert figures.num_bytes == 1 << 20
        assert 0.001 < figures.bus_gigabytes < 100


def test_in_a_part_of_the_world(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(check_in_part_of_the_world, world=3) == [[], [], []]


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "all_to_all_single"])
def test_a_wrong_result_is_noticed(gloo_pool: GlooPool, collective: str) -> None:
    problems = gloo_pool.run(check_with, collective, world=3)
    assert [len(found) for found in problems] == [0, 1, 0]
    assert problems[1][0].startswith(f"{collective} gave ")
    assert "on rank 1" in problems[1][0]


def test_bandwidth_of_the_bus() -> None:
    figures = CollectiveFigures(problems=(), seconds_per_all_reduce=0.5, num_bytes=10**9, world=4)
    assert figures.bus_gigabytes == pytest.approx(2 * 3 / 4 * 1 / 0.5)


class TestRanks:
    """With processes of their own, as the command starts them: forked where torch has not computed anything yet."""

    def test_two_ranks_and_their_failures(self, tmp_path: Path) -> None:
        names = ("ranks-right", "ranks-raise", "ranks-die", "ranks-wrong")
        planted = "tests.verify.planted_ranks"
        probes = [
            Probe(name=name, title=name, function=f"{planted}:{name.replace('-', '_')}", time_limit_seconds=200)
            for name in names
        ]
        results = run_probes(probes, hardware=machine(), run_folder=tmp_path / "runs", preload=("torch",))
        found = {result.name: (result.status, result.detail) for result in results}
        assert found["ranks-right"][0] == "passed"
        assert "2 ranks" in results[0].figure
        assert found["ranks-raise"] == ("failed", "rank 1: RuntimeError: planted")
        assert found["ranks-die"] == ("failed", "rank 1 ended with code 9")
        assert found["ranks-wrong"] == ("failed", "planted; planted")
        assert all("--only gloo" in result.remedy for result in results[1:])

    def test_nccl_needs_two_gpus(self, tmp_path: Path) -> None:
        assert collectives.nccl(make_setup(tmp_path)).detail == "no GPU was chosen"
        assert "one GPU" in collectives.nccl(make_setup(tmp_path, num_gpus=1)).detail


def test_the_loopback_is_found() -> None:
    assert collectives.loopback_name().startswith("lo")

"""What the processes of a run tell each other."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drivetrain.core import world
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.world import World, agreed_prefix
from tests.gloo_pool import GlooPool


def do_on_main(error: str) -> tuple[str, list[int]]:
    """Return what `main_does` gave or raised on this rank, and the ranks that did the work."""
    world = World.join([torch.device("cpu")])
    did: list[int] = []

    def work() -> str:
        did.append(world.rank)
        if error == "ours":
            raise DrivetrainError("the folder is full", remedy="empty it")
        if error:
            raise ValueError("of a library")
        return "done"

    try:
        return world.main_does(work), did
    except DrivetrainError as found:
        return f"{found.message}; {found.remedy}", did
    except ValueError as found:
        return f"itself: {found}", did


def test_rank_0_does_it_and_all_have_the_result(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(do_on_main, "", world=2) == [("done", [0]), ("done", [])]


def test_the_error_of_rank_0_is_raised_on_all(gloo_pool: GlooPool) -> None:
    error = "the folder is full; empty it"
    assert gloo_pool.run(do_on_main, "ours", world=2) == [(error, [0]), (error, [])]


def test_another_error_of_rank_0_leaves_no_rank_waiting(gloo_pool: GlooPool) -> None:
    told = ("rank 0 raised ValueError: of a library; see the traceback of rank 0", [])
    assert gloo_pool.run(do_on_main, "another", world=2, time_limit_seconds=60) == [("itself: of a library", [0]), told]


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_torchrun_starts_again_read_nothing_of_the_start_before(first: int) -> None:
    """Its store is kept: a rank that is quicker than another would find the address that it had before."""
    store, before = dist.HashStore(), set[str]()
    store.add("drivetrain-asked", 1)  # by a rank that was killed before it had its answer
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            asking = []
            for rank in (first, *({0, 1, 2} - {first})):
                asking.append(pool.submit(agreed_prefix, store, rank, 3, timedelta(seconds=60)))
                time.sleep(0.03)
            prefixes = {each.result() for each in asking}
        assert len(prefixes) == 1
        assert not prefixes & before
        before |= prefixes


def test_a_rank_that_does_not_come_is_told() -> None:
    with pytest.raises(DrivetrainError, match="not all of the 2 ranks came within"):
        agreed_prefix(dist.HashStore(), 0, 2, timedelta(seconds=0.05))


def open_and_close() -> None:
    for _ in range(3):
        one = World()
        one.own_group()
        one.close()


def test_a_process_that_is_forked_afterwards_can_close_groups_of_its_own() -> None:
    """It has the closed groups of its parent, but not their threads, which their destructor would wait for."""
    open_and_close()
    forked = multiprocessing.get_context("fork").Process(target=open_and_close)
    forked.start()
    forked.join(30)
    is_stuck = forked.is_alive()
    forked.kill()
    assert not is_stuck
    assert forked.exitcode == 0


def test_a_closed_group_stays_referenced() -> None:
    """If the group ended with the last DDP module, its destructor could wait for a thread that waits for it."""
    one = World()
    group = one.own_group()
    one.close()
    assert any(kept is group for kept in world._CLOSED)
    assert not dist.is_initialized()
    for _ in range(world._CLOSED.maxlen or 0):
        one.own_group()
        one.close()
    assert not any(kept is group for kept in world._CLOSED)


def least_of_ranks() -> tuple[int, bool, str]:
    found = World(dist.get_rank(), dist.get_world_size(), group=dist.group.WORLD)
    return found.least(7 - found.rank), found.hosts() is found, found.backend


def test_the_least_number_of_all_ranks(gloo_pool: GlooPool) -> None:
    """Over gloo, hosts need no group of their own for it."""
    assert gloo_pool.run(least_of_ranks, world=3) == [(5, True, "gloo")] * 3
    assert World().least(7) == 7
    assert World().hosts().least(7) == 7
    assert World().backend == ""


@pytest.mark.gpu
def test_hosts_meet_over_gloo_beside_nccl() -> None:
    owner = World(device=torch.device("cuda", torch.cuda.current_device()))
    one = World(device=owner.device, group=owner.own_group())
    assert one.backend == "nccl"
    assert one.hosts() is one.hosts()
    assert one.hosts().backend == "gloo"
    assert one.hosts().least(7) == 7
    one.close()
    owner.close()

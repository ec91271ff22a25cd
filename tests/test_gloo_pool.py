import os
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.gloo_pool import MOST_THREADS, GlooPool, RankError, RankHungError, num_threads


def rank_and_sum(offset: int) -> tuple[int, int, float]:
    tensor = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


def process_id() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("planted")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(5)
    dist.barrier()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.1)


class UnsendableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def start_threads(count: int) -> None:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def raise_unsendable() -> None:
    raise UnsendableError(1, 2)


def return_unsendable() -> object:
    return lambda: None


def test_a_function_sees_a_world_of_the_size_asked_for(gloo_pool: GlooPool) -> None:
    for world in (1, 2, 3, 4, 2, 2):
        total = sum(rank + 10 for rank in range(world))
        assert gloo_pool.run(rank_and_sum, 10, world=world) == [(rank, world, total) for rank in range(world)]


def test_a_function_may_be_named(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(f"{__name__}:rank_and_sum", 0, world=2) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_the_processes_stay(gloo_pool: GlooPool) -> None:
    gloo_pool.run(process_id, world=1)  # those of earlier tests may have to be replaced
    first = gloo_pool.run(process_id, world=4)
    started = time.monotonic()
    for world in (2, 3, 2, 4):
        assert gloo_pool.run(process_id, world=world) == first[:world]
    assert time.monotonic() - started < 60


def test_the_first_error_is_raised_with_its_traceback(gloo_pool: GlooPool) -> None:
    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        gloo_pool.run(fail_on, 1, world=3)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 of 3" in notes
    assert "in fail_on" in notes
    assert gloo_pool.run(rank_and_sum, 0, world=3)[2] == (2, 3, 3.0)


def test_an_error_on_every_rank_keeps_the_processes(gloo_pool: GlooPool) -> None:
    before = gloo_pool.run(process_id, world=2)
    with pytest.raises(RankError, match="raised what cannot be sent"):
        gloo_pool.run(raise_unsendable, world=2)
    with pytest.raises(Exception, match=r"pickle|local object"):
        gloo_pool.run(return_unsendable, world=2)
    assert gloo_pool.run(process_id, world=2) == before


def test_a_rank_that_dies_is_an_error_and_the_pool_mends_itself(gloo_pool: GlooPool) -> None:
    before = gloo_pool.run(process_id, world=4)
    with pytest.raises(RankError, match="ended with code 5"):
        gloo_pool.run(die_on, 1, world=2)
    after = gloo_pool.run(process_id, world=4)
    assert not set(after) & set(before)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in before)


def test_a_rank_that_hangs_is_an_error_within_its_time(gloo_pool: GlooPool) -> None:
    gloo_pool.run(process_id, world=2)
    started = time.monotonic()
    with pytest.raises(RankHungError, match=r"ranks \[1\] did not answer within 3 s") as caught:
        gloo_pool.run(hang_on, 1, world=2, time_limit_seconds=3)
    assert time.monotonic() - started < 60
    assert "hang_on" in "\n".join(caught.value.__notes__)
    assert gloo_pool.run(rank_and_sum, 0, world=2)[1] == (1, 2, 1.0)


def test_ranks_with_many_threads_are_replaced_where_the_world_changes(gloo_pool: GlooPool) -> None:
    before = gloo_pool.run(process_id, world=2)
    gloo_pool.run(start_threads, MOST_THREADS, world=2)
    assert gloo_pool.run(process_id, world=2) == before
    after = gloo_pool.run(process_id, world=3)
    assert not set(after) & set(before)
    assert max(map(num_threads, after)) < MOST_THREADS


def test_paused_ranks_rest_and_go_on(gloo_pool: GlooPool) -> None:
    before = gloo_pool.run(process_id, world=4)
    gloo_pool.pause()
    while {psutil.Process(pid).status() for pid in before} != {"stopped"}:  # until the limit of every test
        time.sleep(0.01)
    assert gloo_pool.run(rank_and_sum, 0, world=4)[3] == (3, 4, 6.0)
    assert gloo_pool.run(process_id, world=2) == before[:2]


def test_more_ranks_than_there_are(gloo_pool: GlooPool) -> None:
    with pytest.raises(ValueError, match="world is 5, but the pool has 4 ranks"):
        gloo_pool.run(process_id, world=5)


def test_closing_leaves_no_process_and_no_file() -> None:
    pool = GlooPool(size=2)
    pids = pool.run(process_id, world=2)
    folder = pool._folder.name
    pool.close()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    assert not os.path.exists(folder)  # noqa: PTH110


def test_nothing_listens_beyond_this_machine(gloo_pool: GlooPool) -> None:
    gloo_pool.run(rank_and_sum, 0, world=4)
    for pid in gloo_pool.pids:
        assert {connection.laddr.ip for connection in psutil.Process(pid).net_connections("inet")} == {"127.0.0.1"}

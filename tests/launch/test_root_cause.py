"""Which of many failures is the first one, and what is said of it."""

import itertools
import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.launch import root_cause as c
from drivetrain.launch.root_cause import Failure, failure_from_error, failure_from_exit, first_cause, in_words

PLACE = {"rank": 1, "node": 0, "host": "here", "pid": 7}


def error(kind: str, message: str, trace: str = "", **more: object) -> dict[str, object]:
    return {"type": kind, "message": message, "traceback": trace or f"Traceback\n{kind}: {message}", "step": 3, **more}


# As gloo, NCCL and the store of torch 2.11 and 2.13 say it.
LOST_A_PEER = [
    (
        "RuntimeError",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]",
    ),
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:540] Read error [127.0.0.1]:5: Connection reset by peer"),
    ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error"),
    ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes. Connection was likely closed."),
    ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 1."),
]
TIMEOUTS = [
    (
        "RuntimeError",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv",
    ),
    ("torch.distributed.DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"),
    ("torch.distributed.DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
]


@pytest.mark.parametrize(("kind", "message"), LOST_A_PEER)
def test_a_lost_peer_follows_from_something(kind: str, message: str) -> None:
    failure = failure_from_error(error(kind, message), **PLACE)
    assert failure.follows
    assert failure.kind == c.EXCEPTION


@pytest.mark.parametrize(("kind", "message"), TIMEOUTS)
def test_a_timeout_is_one(kind: str, message: str) -> None:
    failure = failure_from_error(error(kind, message), **PLACE)
    assert failure.follows
    assert failure.kind == c.TIMEOUT


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("ValueError", "bad", c.EXCEPTION),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", c.EXCEPTION),  # of the user's own download
        ("TimeoutError", "the database timed out", c.EXCEPTION),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", c.DEVICE_MEMORY),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", c.HOST_MEMORY),
        ("MemoryError", "", c.HOST_MEMORY),
    ],
)
def test_what_a_rank_did_by_itself(kind: str, message: str, expected: str) -> None:
    failure = failure_from_error(error(kind, message), **PLACE)
    assert not failure.follows
    assert failure.kind == expected
    assert failure.remedy


@pytest.mark.parametrize(("word", "name"), [("Killed", "SIGKILL"), ("Terminated", "SIGTERM")])
@pytest.mark.parametrize("is_direct", [True, False], ids=["in the handler", "wrapped"])
def test_a_killed_loader_is_killed_from_outside(word: str, name: str, is_direct: bool) -> None:
    """As by the kernel, for want of memory: it may happen twice in the same step, and is no error of the script."""
    origin = f"RuntimeError: DataLoader worker (pid 857) is killed by signal: {word}. "
    message = origin.partition(": ")[2] if is_direct else "DataLoader worker (pid(s) 857) exited unexpectedly"
    failure = failure_from_error(error("RuntimeError", message, origin=origin), **PLACE)
    assert (failure.kind, failure.signal) == (c.SIGNAL, name)
    assert not failure.resembles(failure)
    own = error("RuntimeError", "DataLoader worker (pid 857) is killed by signal: Segmentation fault. ")
    assert failure_from_error(own, **PLACE).kind == c.EXCEPTION


def test_an_error_on_the_way_out_does_not_hide_the_first() -> None:
    """The rank's own exception closed its connections, and closing the saver then complained of a lost peer."""
    kind, message = LOST_A_PEER[0]
    failure = failure_from_error(error(kind, message, origin="ValueError: bad"), **PLACE)
    assert not failure.follows
    wrapped = failure_from_error(error("SaveError", "could not", "gloo", origin=f"{kind}: {message}"), **PLACE)
    assert wrapped.follows


@pytest.mark.parametrize(
    ("code", "oom", "expected", "name"),
    [
        (-signal.SIGKILL, False, c.SIGNAL, "SIGKILL"),
        (-signal.SIGKILL, True, c.HOST_MEMORY, "SIGKILL"),
        (-signal.SIGSEGV, True, c.SIGNAL, "SIGSEGV"),
        (3, False, c.EXIT, ""),
    ],
)
def test_an_end_without_a_word(code: int, oom: bool, expected: str, name: str) -> None:
    failure = failure_from_exit(code, out_of_memory=oom, said="last words", **PLACE)
    assert (failure.kind, failure.signal) == (expected, name)
    assert "last words" in in_words(failure, 0)


def failures() -> st.SearchStrategy[Failure]:
    return st.builds(
        Failure,
        kind=st.sampled_from([c.EXCEPTION, c.SIGNAL, c.TIMEOUT, c.NODE_LOST]),
        rank=st.integers(0, 7),
        node=st.just(0),
        host=st.just("h"),
        pid=st.none(),
        headline=st.just("x"),
        follows=st.booleans(),
        at=st.floats(0, 100),
    )


@given(st.lists(failures(), min_size=1, max_size=4), st.lists(failures(), max_size=2))
def test_the_first_cause_does_not_depend_on_the_order_of_arrival(found: list[Failure], left: list[Failure]) -> None:
    cause = first_cause(found, left)
    for order in itertools.permutations(found):
        again = first_cause(order, left)
        assert (again.follows, again.at) == (cause.follows, cause.at)
    own = [one for one in found if not one.follows and one.kind != c.NODE_LOST]
    if own:
        assert cause.at == min(one.at for one in own)
    elif not any(not one.follows for one in found) and left:
        assert cause in left


def test_the_last_lines_are_cause_and_remedy() -> None:
    failure = failure_from_error(error("ValueError", "bad"), **PLACE)
    lines = in_words(failure, 2, [failure]).splitlines()
    assert lines[0] == "drivetrain: rank 1 (node 0, here, pid 7) failed first after step 3, attempt 3"
    assert lines[-2:] == ["  cause:  exception", f"  remedy: {failure.remedy}"]
    assert "  | ValueError: bad" in lines
    document = json.loads(c.as_json(failure, 2, [failure], "now"))
    assert document["cause"] == "exception"
    assert document["traceback"] == failure.traceback
    assert document["others"] == []


def test_wrong_input_has_the_exit_code_it_has_without_a_launcher() -> None:
    told = error("drivetrain.core.errors.InputError", "2 problems with the input", expected=True, exit_code=2)
    assert failure_from_error(told, **PLACE).exit_code == 2
    assert failure_from_error(error("ValueError", "bad", exit_code=1), **PLACE).exit_code == 1
    assert failure_from_error(error("ValueError", "bad"), **PLACE).exit_code == 1  # told by an older worker


# What NCCL's watchdog leaves in the log of a rank that it aborts: the lines of logs that users of torch 2.6 to 2.9 have
# published, shortened; those of 2.10 to 2.14 are put together from the same words in the source.
WATCHDOG = """
[rank{rank}]:[E1117 10:00:00 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=10000) ran for 10006 milliseconds
[rank{rank}]:[E1117 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure detected by \
watchdog at work sequence id: 9 PG status: last enqueued work: {enqueued}, last completed work: 8
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: \
[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=4, \
NumelOut=4, Timeout(ms)=10000) ran for 10006 milliseconds before timing out.
Fatal Python error: Aborted
"""
# Of a rank that another one told to dump: it did not wait in vain itself.
SIGNALLED = """
[rank{rank}]:[E703 17:54:18 ProcessGroupNCCL.cpp:1922] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Observed flight \
recorder dump signal from another rank via TCPStore.
[rank{rank}]:[E703 17:54:18 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump \
signal due to a collective timeout from  rank 7 and we will try our best to dump the debug info. Last enqueued NCCL \
work: {enqueued}, last completed NCCL work: {enqueued}.This is most likely caused by incorrect usages of collectives
"""
BY_ITSELF = """
[rank1]:[E1218 ProcessGroupNCCL.cpp:1899] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread \
terminated with exception: {what}
terminate called after throwing an instance of 'c10::DistBackendError'
"""


def aborted(rank: int, enqueued: int, at: float, text: str = WATCHDOG) -> Failure:
    place = {**PLACE, "rank": rank, "at": at}
    said = text.format(rank=rank, enqueued=enqueued)
    return failure_from_exit(-signal.SIGABRT, out_of_memory=False, said=said, **place)


def test_a_rank_that_the_watchdog_aborts_is_not_to_blame() -> None:
    waiting = aborted(0, 9, 1.0)
    assert (waiting.kind, waiting.follows) == (c.TIMEOUT, True)
    killed = failure_from_exit(-signal.SIGKILL, out_of_memory=False, said="", **{**PLACE, "rank": 2, "at": 2.0})
    assert first_cause([waiting, killed]).rank == 2
    other = failure_from_exit(-signal.SIGABRT, out_of_memory=False, said="double free or corruption", **PLACE)
    assert (other.kind, other.follows) == (c.SIGNAL, False)


def test_of_ranks_that_were_all_aborted_the_one_behind_is_named() -> None:
    found = first_cause([aborted(0, 9, 1.0), aborted(1, 8, 2.0), aborted(2, 10, 0.5)])
    assert found.rank == 1
    assert "it had enqueued 8 of group 0(default_pg), rank 2 10" in found.headline
    assert first_cause([aborted(0, 9, 1.0), aborted(1, 9, 0.5)]).rank == 1, "where none is, the first"
    assert first_cause([aborted(7, 9, 0.5), aborted(1, 8, 1.0, SIGNALLED), aborted(2, 9, 1.0)]).rank == 1


def test_a_watchdog_that_ends_for_an_error_of_its_own_gpu_is_to_blame() -> None:
    place = {**PLACE, "at": 2.0}
    said = BY_ITSELF.format(what="CUDA error: an illegal memory access was encountered")
    broken = failure_from_exit(-signal.SIGABRT, out_of_memory=False, said=said, **place)
    assert (broken.kind, broken.follows) == (c.EXCEPTION, False)
    assert first_cause([aborted(0, 9, 1.0), broken]).headline.endswith("an illegal memory access was encountered")
    said = BY_ITSELF.format(what="NCCL error: remote process exited or there was a network error, NCCL version 2.27")
    assert failure_from_exit(-signal.SIGABRT, out_of_memory=False, said=said, **place).follows
    held = WATCHDOG + "[PG ID 0 PG GUID 0(default_pg) Rank 1] Could not acquire GIL within 300 ms on exit, possible GIL"
    assert first_cause([aborted(0, 9, 1.0), aborted(1, 9, 5.0, held)]).rank == 1


def test_the_end_of_a_log_is_searched_beyond_the_lines_that_are_shown() -> None:
    shown = "frame #1: <unknown function> + 0xd8198\n" * 40
    log = WATCHDOG.format(rank=0, enqueued=9) + shown
    assert failure_from_exit(-signal.SIGABRT, out_of_memory=False, said=shown, searched=log, **PLACE).follows


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("RuntimeError: Ranks 1, 3 failed to pass monitoredBarrier in 10000 ms", [1, 3]),
        ("RuntimeError: Rank 2 failed to pass monitoredBarrier in 2000 ms", [2]),
        ("Received a dump signal due to a collective timeout from  rank 5 and we will try", []),  # it waited
        ("To our best knowledge, ranks [1, 2] are the lagging ranks that caused this timeout.", [1, 2]),
        ("\n\t     [3] finished collective #7, but didn't join collective #8 (count from 1)", [3]),
        ("Connection closed by peer [127.0.0.1]:9", []),
    ],
)
def test_the_ranks_that_a_text_blames(text: str, ranks: list[int]) -> None:
    assert c.blamed_ranks(text) == ranks

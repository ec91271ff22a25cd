"""Processes that form a gloo world, started once and lent to every test that needs several ranks.

Starting ranks costs seconds per test (each imports torch); joining the ranks that are already there costs milliseconds.
A function sees a default process group of exactly the size that was asked for, as it would in a real run.
"""

import contextlib
import datetime
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.processes import die_with_parent
from tests.warm_python import warm_context

GRACE_SECONDS = 3.0  # for the other ranks, once one has failed: they may be stuck in a collective with it
START_LIMIT_SECONDS = 120.0
# Each process group has three threads, one of which wakes up a hundred times a second. Many groups outlive their world,
# held by caches of torch: a rank with more threads is replaced by a new one where the world changes.
MOST_THREADS = 40


class RankError(Exception):
    """A rank failed in a way that cannot be raised again here."""


class RankHungError(TimeoutError):
    """Not every rank answered in time; the note says where each was last seen."""


@dataclass(frozen=True)
class Job:
    function: str  # `module:function`
    args: tuple[Any, ...]
    world: int
    store: str  # a file that no world used before: another one than last time means to join anew
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    value: Any = None
    error: bytes | None = None  # the exception, pickled
    trace: str = ""  # empty: no error


class GlooPool:
    """Runs functions on ranks. `run` may be called any number of times; a broken pool mends itself at the next call."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._context = warm_context
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-pool-")  # readable by this user only
        self._stores = itertools.count()
        self._store = ""
        self._joined_world = 0
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._ranks if process.pid is not None]

    def run(
        self, function: Callable[..., Any] | str, *args: Any, world: int, time_limit_seconds: float = 240.0
    ) -> list[Any]:
        """What `function(*args)` returned on each of the first `world` ranks.

        The function is named, not sent: it has to stand at the top of a module. The error of the rank that failed first
        is raised here, with the tracebacks of all that failed.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world is {world}, but the pool has {self.size} ranks")
        self._signal(signal.SIGCONT)
        if world != self._joined_world and any(num_threads(pid) > MOST_THREADS for pid in self.pids):
            self._kill()
        self._start()
        if world != self._joined_world:
            self._store = str(Path(self._folder.name) / f"store-{next(self._stores)}")
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        job = Job(name, args, world, self._store, tuple(sys.path))
        self._joined_world = 0  # until all is well
        for _, connection in self._ranks[:world]:
            connection.send(job)
        answers = self._collect(range(world), time_limit_seconds)
        self._raise_failures(answers, world, time_limit_seconds)
        self._joined_world = world
        return [answers[rank].value for rank in range(world)]

    def pause(self) -> None:
        """Stop the ranks until the next call: the threads of their groups wake up a thousand times a second."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._kill()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it ended
                os.kill(pid, number)

    def _start(self) -> None:
        if self._ranks and all(process.is_alive() for process, _ in self._ranks):
            return
        self._kill()
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            traces = Path(self._folder.name) / f"rank-{rank}.traces"
            # Not daemonic: a rank may have children of its own, such as loader workers. It cannot outlive this process.
            process = self._context.Process(target=_rank_main, args=(rank, theirs, str(traces)))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        ready = self._collect(range(self.size), START_LIMIT_SECONDS)
        self._raise_failures(ready, self.size, START_LIMIT_SECONDS)

    def _collect(self, ranks: Sequence[int], time_limit_seconds: float) -> dict[int, Answer]:
        """The answers in the order in which they came; those that did not come in time are missing."""
        waiting = {self._ranks[rank][1]: rank for rank in ranks}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + time_limit_seconds
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), remaining):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    self._ranks[rank][0].join(30)
                    answers[rank] = Answer(trace=f"the process ended with code {self._ranks[rank][0].exitcode}")
                if answers[rank].trace:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _raise_failures(self, answers: dict[int, Answer], world: int, time_limit_seconds: float) -> None:
        failures = {rank: answer for rank, answer in answers.items() if answer.trace}
        missing = [rank for rank in range(world) if rank not in answers]
        if not failures and not missing:
            return
        error: BaseException
        if failures:
            # A process that died is the cause; the others only lost their connection to it, and may have said so first.
            first = next((rank for rank in failures if not self._ranks[rank][0].is_alive()), next(iter(failures)))
            error = _revive(first, failures[first])
        else:
            error = RankHungError(f"ranks {missing} did not answer within {time_limit_seconds:g} s")
        for rank, failure in failures.items():
            error.add_note(f"rank {rank} of {world}:\n{failure.trace}")
        for rank in missing:
            error.add_note(f"rank {rank} of {world} did not answer; it was at:\n{self._where(rank)}")
        if missing or any(not process.is_alive() for process, _ in self._ranks):
            self._kill()
        raise error

    def _where(self, rank: int) -> str:
        """The Python lines at which a rank is, asked for by a signal that works while it computes, too."""
        process, traces = self._ranks[rank][0], Path(self._folder.name) / f"rank-{rank}.traces"
        if process.pid is not None and process.is_alive():
            for number in range(600):
                if number % 50 == 0:  # again: a thread that is not Python's may have got it, and has nothing to say
                    with contextlib.suppress(ProcessLookupError):  # it ended just now
                        os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.02)
                if traces.stat().st_size:
                    break
            time.sleep(0.1)  # the rest of it
        return traces.read_text(encoding="utf-8") if traces.exists() else "(unknown)"

    def _kill(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
        self._joined_world = 0


def num_threads(pid: int) -> int:
    """How many threads a process has; 0 for one that has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208  (fast)
    except OSError:
        return 0


def _revive(rank: int, answer: Answer) -> BaseException:
    if answer.error is not None:
        try:
            error = pickle.loads(answer.error)
            if isinstance(error, BaseException):
                return error
        except Exception as cause:  # noqa: BLE001  (an exception with an __init__ of its own may not come back)
            return RankError(f"rank {rank} raised what cannot be sent: {cause}")
    return RankError(f"rank {rank}: {answer.trace.strip().splitlines()[-1]}")


def _rank_main(rank: int, connection: Connection, traces: str) -> None:
    import torch
    import torch.distributed as dist

    die_with_parent()
    os.setsid()  # Ctrl-C is for pytest, which ends the ranks
    # As in a process that somebody started by hand: children, such as loader workers, are forked.
    multiprocessing.set_start_method("fork", force=True)
    with Path(traces).open("w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", ONEDNN_JIT_PROFILE="0")
        torch.set_num_threads(1)
        connection.send(Answer())
        joined = ""
        while True:
            try:
                job: Job = connection.recv()
            except EOFError:
                return
            try:
                if job.store != joined:
                    if dist.is_initialized():
                        dist.destroy_process_group()
                        gc.collect()  # groups of earlier jobs, which wait in cycles
                    joined = job.store
                    dist.init_process_group(
                        "gloo",
                        store=dist.FileStore(job.store, job.world),  # nothing listens where others could connect
                        rank=rank,
                        world_size=job.world,
                        timeout=datetime.timedelta(seconds=240),
                    )
                sys.path[:] = job.sys_path
                module, _, name = job.function.partition(":")
                answer = Answer(getattr(importlib.import_module(module), name)(*job.args))
                pickle.dumps(answer)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the test has to hear of it)
                answer = Answer(error=_pickled(error), trace=traceback.format_exc())
            connection.send(answer)


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:  # noqa: BLE001  (an exception may hold anything)
        return None


@pytest.fixture(scope="session")
def pool_of_session() -> Iterator[GlooPool]:
    """Four ranks for all tests of a session; they start when the first test uses them."""
    pool = GlooPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gloo_pool(pool_of_session: GlooPool) -> Iterator[GlooPool]:
    """The ranks of the session, which are paused where no test of the file uses them any more."""
    yield pool_of_session
    pool_of_session.pause()

"""Runs a trainer in fresh processes: forked from this one, which never trains, so that nothing carries over.

Forking costs milliseconds where starting Python and importing torch costs seconds, and the user's own functions need
not be importable. What a process had to import, this one imports before it forks the next: libraries load much of
themselves at first use, transformers some 700 modules when it builds a model, 1.5 s of every run. Each rank computes
with one thread: OpenMP's threads do not survive a fork.
"""

import contextlib
import faulthandler
import importlib
import io
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import code_version
from drivetrain.core.processes import die_with_parent, forking, kill_group
from drivetrain.core.run_folder import write_atomically
from drivetrain.proving.case import Case, Trainer
from drivetrain.proving.recorder import Recorder, Trace, read_rank

T = TypeVar("T")
GRACE_SECONDS = 5.0  # for the other ranks once one has failed; they may be stuck in a collective with it
_KILLED = -signal.SIGKILL
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure)\b")


class Workplace:
    """A private folder for traces, checkpoints and logs, and the processes that work in it.

    Args:
        time_limit_seconds: how long one run of a case may take.
    """

    def __init__(self, time_limit_seconds: float = 120.0) -> None:
        if not hasattr(os, "fork"):
            raise DrivetrainError("prove needs a system that can fork", remedy="run it on Linux")
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-prove-"))
        self._count = 0
        self._time_limit = time_limit_seconds

    def __enter__(self) -> "Workplace":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_folder(self) -> Path:
        """Make an empty folder for the checkpoints of one run and its continuations."""
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir()
        return folder

    def run(self, trainer: Trainer, case: Case) -> Trace:
        """Train a case once, from the state of its folder, and return what was seen."""
        if case.folder == Path():
            case = replace(case, folder=self.new_folder())
        self._count += 1
        place = self._folder / f"trace-{self._count}"
        place.mkdir()
        began = time.monotonic()
        error, killed = _run_ranks(trainer, case, place, self._time_limit)
        _import_listed(place / "rank-0.imports")
        ranks = [read_rank(place / f"rank-{rank}") for rank in range(case.world_size)]
        return Trace(ranks, error, killed, time.monotonic() - began)

    def apart(self, function: Callable[[], T]) -> T:
        """Return a function's result, computed in a separate process; its error is raised here."""
        self._count += 1
        path = self._folder / f"answer-{self._count}"
        process = _start(lambda: _answer(function, path), path.with_suffix(".log"), {})
        process.join(self._time_limit)
        if process.is_alive():
            process.kill()
            process.join()
            raise DrivetrainError(
                f"the plain loop took longer than {self._time_limit:g} s", remedy="--time-limit with more seconds"
            )
        if not path.exists():
            log = _tail(path.with_suffix(".log"))
            raise DrivetrainError(f"the plain loop ended with code {process.exitcode}: {log}", remedy="see the cause")
        _import_listed(path.with_suffix(".imports"))
        answer = torch.load(path, weights_only=False)
        if isinstance(answer, BaseException):
            raise answer
        result: T = answer
        return result


def _answer(function: Callable[[], Any], path: Path) -> None:
    try:
        found = function()
    except DrivetrainError as error:
        found = error
    except Exception as error:  # noqa: BLE001  (told where the parent raises it)
        trace = traceback.format_exc()
        found = DrivetrainError(f"{type(error).__name__}: {error}\n{trace}", remedy="see the cause above")
    content = io.BytesIO()
    torch.save(found, content)
    write_atomically(path, content.getvalue())


def _run_ranks(trainer: Trainer, case: Case, place: Path, time_limit: float) -> tuple[str, bool]:
    """Return the error of the rank that failed first, if any; and whether ranks were killed on purpose."""
    world, port = case.world_size, _free_port()
    if world > 1:
        code_version()  # is kept: each rank would read all source files of this package
    processes = []
    for rank in range(world):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        log = place / f"rank-{rank}.log"
        processes.append(_start(partial(_train, trainer, case, place, rank), log, environment))
    deadline = time.monotonic() + time_limit
    failed: list[int] = []
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        ended = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        for rank in ended:
            if rank not in failed:
                failed.append(rank)
                grace = 0.0 if processes[rank].exitcode == _KILLED else GRACE_SECONDS
                deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.005)
    ended = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
    failed += [rank for rank in ended if rank not in failed]
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    where = _where(processes, place, hung) if hung and not failed else ""
    for process in processes:
        _kill_all(process)
    if not failed and not hung:
        return "", False
    if failed and processes[failed[0]].exitcode == _KILLED and case.kill is not None:
        return "", True
    if failed:
        first = failed[0]
        words = _tail(place / f"rank-{first}.log", 40)
        return f"rank {first} of {world}: {_cause(words)}\n{words}", False
    return f"ranks {hung} of {world} were still running after {time_limit:g} s{where}", False


def _train(trainer: Trainer, case: Case, place: Path, rank: int) -> None:
    kill = case.kill
    if kill is not None:
        kill = replace(kill, step=case.num_updates(kill.step) + kill.turn)
    recorder = Recorder(
        place / f"rank-{rank}",
        keep_gradients=case.keep_gradients,
        digests=case.digests,
        kill=kill,
        folder=case.folder,
    )
    recorder.finish(trainer(case.attach(recorder)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(action: Callable[[], None], log: Path, environment: dict[str, str]) -> BaseProcess:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_child, args=(action, log, environment))
    with warnings.catch_warnings(), forking(holds_signals=False):
        warnings.simplefilter("ignore")  # of newer Pythons, about threads: see the module's docstring
        process.start()
    return process


def _child(action: Callable[[], None], log: Path, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # which no trainer takes for itself
    os.environ.update(environment)
    # The parent's OpenMP threads do not exist after a fork: code that asks for more than one here would wait for them
    # for ever. Accelerate does, unless the variable is set.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.set_num_threads = lambda nthreads: None
    known = set(sys.modules)
    try:
        action()
    except BaseException:  # noqa: BLE001  (whatever it is, the parent has to hear of it)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    imported = [name for name in sys.modules if name not in known]
    log.with_suffix(".imports").write_text("\n".join(imported), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _import_listed(path: Path) -> None:
    """Import what an earlier process imported; what cannot be imported here, each process imports for itself."""
    if path.exists():
        for name in path.read_text(encoding="utf-8").split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _kill_all(process: BaseProcess) -> None:
    """Kill a rank and its own children, such as loader workers."""
    if process.pid is not None:
        kill_group(process.pid)
    process.kill()
    process.join()


def _where(processes: Sequence[BaseProcess], place: Path, ranks: Sequence[int]) -> str:
    for rank in ranks:
        pid = processes[rank].pid
        if pid is not None:
            os.kill(pid, signal.SIGQUIT)
    time.sleep(0.3)
    return "".join(f"\nrank {rank} was at:\n{_tail(place / f'rank-{rank}.log', 30)}" for rank in ranks)


def _tail(path: Path, num_lines: int = 15) -> str:
    if not path.exists():
        return "(it left no output)"
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:]) or "(it left no output)"


def _cause(log: str) -> str:
    """Return the line of a traceback that says what is wrong; else the last line."""
    lines = log.splitlines()
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

"""Runs the workers of one machine in one attempt: starts, listens to, signals and ends them.

What the ranks print is kept: each in its own file, some on the screen, and the last lines for the diagnosis.
"""

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.core import MEMORY_KEPT
from drivetrain.core.launchers import CHANNEL, PAGE_FD, ProcessPlace, Progress, ProgressPage
from drivetrain.core.log import printable, say
from drivetrain.core.processes import OrphanGuard, held_back, kill_group
from drivetrain.core.run_folder import path_now
from drivetrain.hardware.host import oom_kills
from drivetrain.launch.layout import LaunchOptions, Layout
from drivetrain.launch.nodes import TOKEN
from drivetrain.launch.root_cause import (
    DUMP_FILES,
    TIMEOUT,
    Failure,
    dump_environment,
    failure_from_error,
    failure_from_exit,
    reached_by_dump,
)
from drivetrain.launch.worker import CORES, ORDERS_FD, STACK_SIGNAL, STACKS, STANDBY_FD, STORE_FD, SUPERVISOR_PID

_KEPT_LINES = 40
_LONGEST_LINE = 2000
_SEARCHED_BYTES = 1 << 18  # of the end of a log: native stacks of all threads may stand behind what matters
Event = dict[str, Any]  # JSON, so that it can cross to another machine
_BOOTSTRAP = "from drivetrain.launch.worker import main; main()"
_STANDBY = "from drivetrain.launch.worker import stand_by; stand_by()"
_MOST_LOST = 3  # processes that ended while they stood by: then no more are started
_LOW_PRIORITY = 19
_CAP_SYS_NICE = 23
STOPPED = 130  # what `drivetrain train` ends with after a clean stop
LOOK_SECONDS = 0.2  # between two looks at how far the workers are
STACK_SECONDS = 2.0  # that a rank may take to say where it is
_PIECE = 1 << 16
_LONGEST_REPORT = 1 << 20


def without(path: Path, error: OSError) -> None:
    """Tell that a job goes on without a file beside it that cannot be written."""
    say(f"drivetrain: {path} cannot be written to ({error.strerror or error}): the job goes on without it")


class RankLogs:
    """The logs of one attempt. They begin in `folder` and move to the run folder once that is known.

    Where they cannot be written, as on a full disk or where the folder was moved, that is told once, and the job goes
    on.
    """

    def __init__(self, folder: Path, attempt: int, shown: str) -> None:
        self._attempt = attempt
        self._shown = shown
        self._folder = folder / f"attempt-{attempt}"
        self._files: dict[int, BinaryIO] = {}
        self._is_told = False  # that logs cannot be written
        self._tails: dict[int, deque[bytes]] = {}
        self._begun: dict[int, bytes] = {}  # a line that has no end yet
        with self._keeping():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what ranks print may hold secrets
            self._folder.mkdir(exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._is_told:
                without(self._folder, error)
            self._is_told = True

    @property
    def folder(self) -> Path:
        return self._folder

    def path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def path_now(self, rank: int) -> Path:
        """Return where a log is, also after the run's folder was moved."""
        file = self._files.get(rank)
        return (None if file is None else path_now(file.fileno())) or self.path(rank)

    def stacks(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.stacks"

    def write(self, rank: int, data: bytes, *, show: bool = True) -> None:
        with self._keeping():
            if rank not in self._files:  # without a buffer, whose rest would have to be written when it is closed
                self._files[rank] = self.path(rank).open("ab", buffering=0)
            left = memoryview(data)
            while left:
                left = left[self._files[rank].write(left) :]
        tail = self._tails.setdefault(rank, deque(maxlen=_KEPT_LINES))
        *lines, rest = (self._begun.get(rank, b"") + data).split(b"\n")
        tail.extend(lines)
        self._begun[rank] = rest[-_LONGEST_LINE:]
        if show and self.shows(rank):
            self._print(rank, data, lines)

    def shows(self, rank: int) -> bool:
        return self._shown == "all" or str(rank) in self._shown.split(",")

    def tail(self, rank: int) -> str:
        lines = [*self._tails.get(rank, ()), self._begun.get(rank, b"")]
        return b"\n".join(line[:_LONGEST_LINE] for line in lines).decode(errors="replace").strip("\n")

    def end_of(self, rank: int) -> str:
        """Return much of the end of a log, to search in."""
        with contextlib.suppress(OSError), self.path(rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _SEARCHED_BYTES))
            return file.read().decode(errors="replace")
        return self.tail(rank)

    def move(self, folder: Path) -> None:
        """Move the logs into the run folder. Where that is on another disk, files are copied."""
        target = folder / f"attempt-{self._attempt}"
        if target == self._folder:
            return
        with contextlib.suppress(OSError):
            target.mkdir(parents=True, exist_ok=True)
            self.close()
            for path in self._folder.iterdir():
                shutil.move(path, target / path.name)
            before, self._folder = self._folder, target
            for empty in (before, before.parent, before.parent.parent):  # up to `launch`, while they are empty
                empty.rmdir()

    def close(self) -> None:
        for file in self._files.values():
            with self._keeping():  # some file systems say only now that there was no room
                file.close()
        self._files = {}

    def _print(self, rank: int, data: bytes, lines: list[bytes]) -> None:
        if "," in self._shown or self._shown == "all":
            shown = (printable(line.decode(errors="replace"), colors=True) for line in lines)
            data = "".join(f"[{rank}] {line}\n" for line in shown).encode()
        if data:
            to_screen(data)


def to_screen(data: bytes) -> None:
    """Write bytes to the screen as the rank wrote them. A screen that went away ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        view = memoryview(data)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]


@dataclass(frozen=True)
class WorkerTask:
    """The command that every worker runs: `script FILE ARGUMENTS` or `command NAME FLAGS`."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """One attempt, as it is described to all machines."""

    attempt: int
    first_rank: int  # of this machine
    world_size: int
    main_address: str
    store_port: int
    place: int = 0  # of this machine among those that take part in the attempt
    num_places: int = 1


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    output: int
    reports: int
    orders: int
    began: bytes = b""  # a report without its end
    is_ready: bool = False
    has_told: bool = False  # has reported its failure or interruption
    has_stopped: bool = False  # its run ended before its end, and was saved
    step: int = 0
    ended: bool = False
    page: ProgressPage | None = None
    seen: tuple[Progress, bool] = (Progress(), False)  # its progress at the last look, and whether it is stopped


def _start_python(
    code: str, task: WorkerTask, environment: dict[str, str], output: int, passed: Collection[int]
) -> subprocess.Popen[bytes]:
    with held_back():  # it is not up yet: no signal may end it
        return subprocess.Popen(
            [sys.executable, "-c", code, *task.words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=list(passed),
            start_new_session=True,  # a separate group: one kill for all its children, no Ctrl-C from the terminal
        )


@dataclass
class _Standby:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    is_ready: bool = False  # has imported everything


class Standbys:
    """Processes that have imported torch and wait, one for each rank here, to become workers of the next attempt.

    A restart then does not wait for imports, which take most of its time. They are started one after another while the
    ranks train, with low priority where it can be raised again, and die with the supervisor as workers do. Where the
    script changes its environment before it trains there are none: libraries read variables when they are imported.
    """

    def __init__(self, task: WorkerTask, options: LaunchOptions, guard: OrphanGuard) -> None:
        self._task, self._guard = task, guard
        self._are_wanted = options.standby and options.max_restarts > 0
        self._waiting: dict[int, _Standby] = {}  # by local rank
        self._num_lost = 0
        self._may_start = False  # a run has begun
        self._lowers_priority = _may_raise_priority()

    def heed(self, changed: Collection[str]) -> None:
        """Learn that a run has begun, and which variables the script has changed before."""
        if changed and self._are_wanted:
            self._are_wanted = False
            names = ", ".join(sorted(changed)[:3]) + (", …" if len(changed) > 3 else "")
            say(f"drivetrain: --standby has no effect: the script changes its environment ({names}) before it trains")
        self._may_start = self._are_wanted

    def tend(self, environments: dict[int, dict[str, str]]) -> None:
        """Start the next process, unless one is still importing.

        Args:
            environments: those of the workers, by local rank. What a process is handed over later may differ in what
                names its place, not in what libraries read.
        """
        for local_rank, standby in list(self._waiting.items()):
            if not standby.is_ready:
                with contextlib.suppress(BlockingIOError):
                    standby.is_ready = bool(standby.channel.recv(1, socket.MSG_DONTWAIT))
            if standby.process.poll() is not None:
                self._end(self._waiting.pop(local_rank))
                self._num_lost += 1
        if not self._may_start or self._num_lost >= _MOST_LOST:
            return
        missing = [local_rank for local_rank in environments if local_rank not in self._waiting]
        if missing and all(standby.is_ready for standby in self._waiting.values()):
            self._waiting[missing[0]] = self._start(environments[missing[0]])

    def take(
        self, local_rank: int, environment: dict[str, str], output: int, handed: dict[str, int]
    ) -> "subprocess.Popen[bytes] | None":
        """Turn a process that stands by into the worker of a rank. Return None where there is none.

        Args:
            local_rank: the rank on this machine.
            environment: its environment, without the numbers of open files.
            output: where it writes what the script prints.
            handed: open files for it, by the variables that name them.
        """
        standby = self._waiting.pop(local_rank, None)
        if standby is None:
            return None
        try:
            with tempfile.TemporaryFile("w") as order:
                json.dump([environment, list(handed)], order)
                order.flush()
                socket.send_fds(standby.channel, [b"!"], [order.fileno(), output, *handed.values()])
        except OSError:  # it is gone, or the disk is full
            self._end(standby)
            return None
        standby.channel.close()
        if self._lowers_priority:
            _set_priority(standby.process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        return standby.process

    def close(self) -> None:
        """End all that still stand by."""
        while self._waiting:
            self._end(self._waiting.popitem()[1])

    def _start(self, environment: dict[str, str]) -> _Standby:
        here, there = socket.socketpair()
        with there, open(os.devnull, "wb") as nothing:  # noqa: PTH123
            numbered = environment | {STANDBY_FD: str(there.fileno())}
            process = _start_python(_STANDBY, self._task, numbered, nothing.fileno(), [there.fileno()])
        self._guard.add(process.pid)
        if self._lowers_priority:
            _set_priority(process.pid, _LOW_PRIORITY)
        return _Standby(process, here)

    def _end(self, standby: _Standby) -> None:
        standby.channel.close()
        kill_group(standby.process.pid)
        standby.process.wait()
        self._guard.remove(standby.process.pid)


def _may_raise_priority() -> bool:
    """Return whether this process may raise a priority that it lowered, which users may not."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(mask >> _CAP_SYS_NICE & 1)


def _set_priority(pid: int, value: int) -> None:
    """Set the priority of all threads of a process."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), value)


class Crew:
    """Emits events: `run`, `step`, `checkpoint`, `end`, `failure`, `left`, `interrupted`; `ended` of a process that had
    reported its failure or interruption before, and `gone` once all ended.
    """

    def __init__(
        self,
        task: WorkerTask,
        layout: Layout,
        start: Start,
        logs: RankLogs,
        guard: OrphanGuard,
        store: socket.socket | None,
        standbys: Standbys,
    ) -> None:
        self._layout, self._logs, self._guard, self._standbys = layout, logs, guard, standbys
        self._environments: dict[int, dict[str, str]] = {}  # of the workers here, by their local ranks
        self._host = socket.gethostname()
        self._selector = selectors.DefaultSelector()
        self._oom_kills = oom_kills()
        self._events: list[Event] = []
        self._gone = False
        self._killed = False
        self._next_look = 0.0
        self._looked_at = time.monotonic()  # when all workers that had not ended were last seen to be there
        # Not among the logs, which may move before anything is dumped. Only NCCL dumps, and it needs GPUs.
        self._dumps = _folder_for_dumps() if layout.gpus else None
        self._workers = [
            self._start(task, start, local_rank, store if local_rank == 0 else None)
            for local_rank in range(layout.num_processes)
        ]

    def _start(self, task: WorkerTask, start: Start, local_rank: int, store: socket.socket | None) -> _Worker:
        rank = start.first_rank + local_rank
        num_here = self._layout.num_processes
        place = ProcessPlace(
            "drivetrain", rank, start.world_size, local_rank, num_here, start.main_address, start.store_port
        )
        output, output_there = os.pipe()
        reports, reports_there = os.pipe()
        orders_there, orders = os.pipe()
        page = ProgressPage.create()
        environment = self._environments[local_rank] = self._environment(task, start, place)
        handed = {CHANNEL: reports_there, ORDERS_FD: orders_there}  # open files, by the variables that name them
        if page is not None:
            handed[PAGE_FD] = page[1]
        if store is not None:
            handed[STORE_FD] = store.fileno()
        process = self._standbys.take(local_rank, environment, output_there, handed)
        if process is None:
            numbers = {name: str(descriptor) for name, descriptor in handed.items()}
            process = _start_python(_BOOTSTRAP, task, environment | numbers, output_there, handed.values())
        self._guard.add(process.pid)
        for end in (output_there, reports_there, orders_there, *(() if page is None else (page[1],))):
            os.close(end)
        for end in (output, reports):
            os.set_blocking(end, False)
        worker = _Worker(rank, process, output, reports, orders, page=None if page is None else page[0])
        self._selector.register(output, selectors.EVENT_READ, (worker, self._read_output))
        self._selector.register(reports, selectors.EVENT_READ, (worker, self._read_reports))
        return worker

    def _environment(self, task: WorkerTask, start: Start, place: ProcessPlace) -> dict[str, str]:
        """Return the environment of a worker, without the numbers of its open files."""
        cores = self._layout.cores[place.local_rank] if self._layout.cores else ()
        environment = {
            **MEMORY_KEPT,
            **os.environ,
            **({} if self._dumps is None else dump_environment(os.environ, f"{self._dumps}/rank-")),
            **self._layout.environment,
            **task.environment,
            **place.environment,
            "NODE_RANK": str(start.place),
            "GROUP_RANK": str(start.place),
            "GROUP_WORLD_SIZE": str(start.num_places),
            "DRIVETRAIN_LAUNCHED": "1",
            # Every rank comes to the store of this attempt as a client; the one that serves it has the socket already.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(start.attempt),
            "PYTHONUNBUFFERED": "1",
            SUPERVISOR_PID: str(os.getpid()),
            STACKS: str(self._logs.stacks(place.rank).absolute()),
            CORES: ",".join(map(str, cores)),
        }
        environment.pop(TOKEN, None)  # the supervisors' own
        return environment

    @property
    def selector(self) -> selectors.BaseSelector:
        return self._selector

    @property
    def is_gone(self) -> bool:
        return all(worker.ended for worker in self._workers)

    def pid_of(self, rank: int) -> int | None:
        """Return the process of a rank; None if it is on another machine."""
        return next((worker.process.pid for worker in self._workers if worker.rank == rank), None)

    @property
    def logs(self) -> RankLogs:
        return self._logs

    def poll(self, seconds: float) -> list[Event]:
        """Return the events that happened, after waiting for at most so long."""
        for key, _ in self._selector.select(seconds):
            worker, read = key.data
            read(worker)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._look()
        now = time.monotonic()
        for worker in self._workers:
            if not worker.ended and (code := worker.process.poll()) is not None:
                self._end(worker, code)
        self._looked_at = now
        if self.is_gone and not self._gone:
            self._gone = True
            self._events.append({"event": "gone"})
        events, self._events = self._events, []
        return events

    def _look(self) -> None:
        """Look how far the workers are, and report it where it has changed."""
        if all(worker.step and not worker.ended for worker in self._workers):
            self._standbys.tend(self._environments)  # once all are training: their own start is not held up
        for worker in self._workers:
            if worker.page is None or worker.ended:
                continue
            progress = worker.page.read()
            # One that makes progress is not stopped, and is not asked.
            seen = progress, progress == worker.seen[0] and _state_of(worker.process.pid) in "Tt"
            if progress.changes and seen != worker.seen:
                worker.seen, worker.step = seen, progress.step
                self._emit("progress", worker, step=progress.step, phase=progress.phase, frozen=seen[1])

    def stop(self, number: int) -> None:
        """Order every worker to save and end, for a signal. One that is not up yet has nothing to save."""
        for worker in self._workers:
            if worker.ended:
                continue
            if worker.is_ready:
                with contextlib.suppress(OSError):  # it has just ended
                    os.write(worker.orders, f"{number}\n".encode())
            else:
                kill_group(worker.process.pid)

    def kill(self) -> None:
        self._killed = True
        for worker in self._workers:
            if not worker.ended:
                kill_group(worker.process.pid)

    def stacks_of(self, ranks: Collection[int]) -> dict[int, str]:
        """Return the stacks of ranks, asked for by a signal that is answered in any state except of a stopped process.

        Ranks of other machines are left out.
        """
        asked = {worker.rank: worker for worker in self._workers if worker.rank in ranks and not worker.ended}
        before = {rank: _size_of(self._logs.stacks(rank)) for rank in asked}
        for worker in asked.values():
            with contextlib.suppress(OSError):
                os.kill(worker.process.pid, STACK_SIGNAL)
        found, deadline = dict.fromkeys(asked, ""), time.monotonic() + STACK_SECONDS
        stopped = {rank for rank, worker in asked.items() if _state_of(worker.process.pid) in "Tt"}  # it cannot answer
        left = set(asked) - stopped
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in list(left):
                text = _read_from(self._logs.stacks(rank), before[rank])
                if text and text == found[rank]:  # all of it is there
                    left.discard(rank)
                found[rank] = text
        for rank in left | stopped:
            state = _state_of(asked[rank].process.pid)
            found[rank] = found[rank] or (
                f"(the process is stopped, state {state})" if state in "Tt" else f"(no answer, state {state})"
            )
        return found

    def close(self) -> None:
        self.kill()
        for worker in self._workers:
            worker.process.wait()
            self._end(worker, worker.process.returncode)
        self._selector.close()
        self._logs.close()
        if self._dumps is not None:
            with contextlib.suppress(OSError):
                for path in self._dumps.iterdir():  # for `torchfrtrace`
                    shutil.move(path, self._logs.folder / f"{path.name}.collectives")
            shutil.rmtree(self._dumps, ignore_errors=True)
            self._dumps = None

    def _read_output(self, worker: _Worker) -> None:
        self._drain(worker.output, lambda data: self._logs.write(worker.rank, data))

    def _read_reports(self, worker: _Worker) -> None:
        def take(data: bytes) -> None:
            *lines, worker.began = (worker.began + data).split(b"\n")
            worker.began = worker.began[:_LONGEST_REPORT]
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._heard(worker, json.loads(line))

        self._drain(worker.reports, take)

    def _drain(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        """Read what a pipe holds, in one round. A pipe at its end is unregistered."""
        for _ in range(64):
            try:
                data = os.read(descriptor, _PIECE)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(descriptor)
                return
            take(data)

    def _heard(self, worker: _Worker, report: Event) -> None:
        kind = report["kind"]
        if kind == "ready":
            worker.is_ready = True
        elif kind == "step":
            worker.step = int(report["step"])
            self._emit("step", worker, step=worker.step)
        elif kind == "run":
            self._standbys.heed(report.get("changed", ()))
            self._emit("run", worker, folder=str(report["folder"]))
        elif kind in ("resumed", "checkpoint", "end", "interrupted", "signal"):
            worker.has_told |= kind == "interrupted"
            worker.has_stopped |= kind == "end" and not report["finished"]
            self._emit(kind, worker, **{name: value for name, value in report.items() if name != "kind"})
        elif kind == "error":
            worker.has_told = True
            if not report.get("expected"):  # into the log, not on the screen: the screen gets the cause, once
                self._logs.write(worker.rank, str(report["traceback"]).encode(), show=False)
            age = max(0.0, time.monotonic() - float(report["at"]))
            self._fail(worker, failure_from_error(report, noticed_after=age, **self._place(worker)), age)

    def _end(self, worker: _Worker, code: int) -> None:
        if worker.ended:
            return
        for descriptor, read in ((worker.reports, self._read_reports), (worker.output, self._read_output)):
            if descriptor in self._selector.get_map():
                read(worker)
            if descriptor in self._selector.get_map():  # a child of the worker still holds the other end
                self._selector.unregister(descriptor)
            os.close(descriptor)
        os.close(worker.orders)
        worker.ended = True
        self._guard.remove(worker.process.pid)
        kill_group(worker.process.pid)  # children it left behind
        stacks = self._logs.stacks(worker.rank)
        with contextlib.suppress(OSError):
            if stacks.stat().st_size == 0:
                stacks.unlink()
        if worker.has_told:
            self._emit("ended", worker)
        if self._killed or worker.has_told:
            return
        if code == 0 or (code == STOPPED and worker.has_stopped):
            self._emit("left", worker)
            return
        unseen = time.monotonic() - self._looked_at  # it ended at some moment since
        place = {**self._place(worker), "step": worker.step, "noticed_after": unseen}
        said = {"said": self._logs.tail(worker.rank), "searched": self._logs.end_of(worker.rank)}
        self._fail(worker, failure_from_exit(code, out_of_memory=oom_kills() > self._oom_kills, **said, **place), 0.0)

    def _fail(self, worker: _Worker, failure: Failure, age: float) -> None:
        if failure.kind == TIMEOUT and self._dumps is not None:
            prefix = next((os.environ[name] for name in DUMP_FILES if name in os.environ), f"{self._dumps}/rank-")
            reached = reached_by_dump(Path(f"{prefix}{worker.rank}"))
            failure = replace(failure, collectives=reached or failure.collectives)
        if not self._killed:
            self._emit("failure", worker, age=age, failure=asdict(failure))

    def _emit(self, event: str, worker: _Worker, **facts: Any) -> None:
        self._events.append({"event": event, "rank": worker.rank, **facts})

    def _place(self, worker: _Worker) -> dict[str, Any]:
        return {
            "rank": worker.rank,
            "node": self._layout.node_rank,
            "host": self._host,
            "pid": worker.process.pid,
            "log": str(self._logs.path(worker.rank)),
        }


def _folder_for_dumps() -> Path | None:
    try:
        return Path(tempfile.mkdtemp(prefix="drivetrain-collectives-"))
    except OSError as error:
        without(Path(tempfile.gettempdir()), error)
        return None


def _state_of(pid: int) -> str:
    """Return the state of a process as the kernel names it: T is stopped, t is traced; `-` where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "-"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, start: int) -> str:
    try:
        return path.read_bytes()[start:].decode(errors="replace").strip()
    except OSError:
        return ""

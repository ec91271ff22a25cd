"""How this process was started, and by which code; and how far it is, as its supervisor reads it. Loads no torch."""

import faulthandler
import hashlib
import ipaddress
import json
import mmap
import os
import platform
import re
import socket
import statistics
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core.errors import GOES_ON_WITH, DrivetrainError
from drivetrain.core.log import notice

# ----------------------------------------------------------------------------------------------------------------------
# How far a process is: a page of memory that its supervisor reads, and a watchdog where there is no supervisor.
#
# The page is written with every step and costs less than a microsecond; nothing is sent and no disk is touched, so that
# it tells where a process is even if that can do nothing any more.

PAGE_FD = "DRIVETRAIN_PROGRESS_FD"
PHASES = ("start", "step", "validation", "hooks", "save", "compile", "end")
LEAST_SECONDS, END_LEAST_SECONDS = 10.0, 60.0  # after which a hang is reported, and ended
FACTOR, END_FACTOR = 5.0, 20.0  # the same in steps
_FORM = struct.Struct("=qqq")


class Progress(NamedTuple):
    """Where a process is: the steps it has read back, its phase, and how often either has changed."""

    step: int = 0
    phase: str = PHASES[0]
    changes: int = 0


class ProgressPage:
    """A page of memory shared by a worker, which writes it, and its supervisor, which reads it."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> tuple["ProgressPage", int] | None:
        """Return a new page and its descriptor, for a child; None where the system has no anonymous files."""
        if not hasattr(os, "memfd_create"):
            return None
        descriptor = os.memfd_create("drivetrain-progress")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor), descriptor

    @classmethod
    def of_environment(cls) -> "ProgressPage | None":
        """Return the page that a supervisor gave this process; None without one."""
        text = os.environ.get(PAGE_FD, "")
        try:
            return cls(int(text)) if text.isdecimal() else None
        except OSError:
            return None

    def write(self, step: int, phase: int, changes: int) -> None:
        """Write how far this process is; `phase` is a number of `PHASES`."""
        _FORM.pack_into(self._map, 0, step, phase, changes)

    def read(self) -> Progress:
        step, phase, changes = _FORM.unpack_from(self._map, 0)
        return Progress(step, PHASES[phase % len(PHASES)], changes)


class StepWatchdog:
    """Reports where a process without a supervisor hangs, while it is in its steps. It ends nothing.

    The stacks are dumped by `faulthandler`'s own thread, which needs no GIL; the words before them come from a thread
    of Python, if that can run. Both begin with the second step.
    """

    EVERY_SECONDS = 1.0  # between two looks
    LEAST_SECONDS_BETWEEN = 0.02  # where something is done between steps: arming takes a tenth of a millisecond

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=64)  # seconds per step
        self._at, self._step, self._next_look = 0.0, 0, 0.0
        self._limit, self._told, self._is_paused = 0.0, False, True
        self._thread: threading.Thread | None = None
        self._armed_by = 0  # the process whose thread would dump; 0: none

    def beat(self, step: int) -> None:
        """Note that a step has ended."""
        now = time.monotonic()
        if now < self._next_look or self._is_forked:
            return
        if not self._is_paused:
            self._rates.append((now - self._at) / max(1, step - self._step))
        self._at, self._step, self._told, self._is_paused = now, step, False, False
        if self._rates:
            self._limit = max(LEAST_SECONDS, FACTOR * statistics.median(self._rates))
            faulthandler.dump_traceback_later(self._limit + self.EVERY_SECONDS, file=2)
            self._armed_by = os.getpid()
            self._next_look = now + self.EVERY_SECONDS
            self._watch()

    def pause(self) -> None:
        """Stop watching until the next step has ended: something else is done, or the run is over."""
        if self._is_paused or self._is_forked:
            return
        self._is_paused = True
        if self._limit:
            self._limit, self._next_look = 0.0, self._at + self.LEAST_SECONDS_BETWEEN
            faulthandler.cancel_dump_traceback_later()
            self._armed_by = 0

    @property
    def _is_forked(self) -> bool:
        """Whether a parent armed this, and was forked then: its thread is not here, and would be awaited for ever."""
        return self._armed_by not in (0, os.getpid())

    def _watch(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="drivetrain-watchdog", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while self._limit:
            seconds = time.monotonic() - self._at
            if seconds > self._limit > 0 and not self._told:
                self._told = True
                notice(
                    f"no step has ended for {seconds:.0f} s, after step {self._step}; one takes "
                    f"{statistics.median(self._rates):.3g} s. Where this process is follows"
                )
            time.sleep(self.EVERY_SECONDS / 2)


# ----------------------------------------------------------------------------------------------------------------------
# Detects the launcher of this process and its ranks from the environment, and reports to ours, without torch.
#
# Each launcher sets its own variables. The first one whose mark is set is used; its values are checked, because a rank
# that is wrong about its place hangs all others. Under `drivetrain launch` a worker reports its run folder, its
# progress and how it ended.

LOOPBACK = "127.0.0.1"
RESTART_OF_JOBSET = "JOBSET_RESTART_ATTEMPT"  # set by the manifests that `drivetrain launch --kubernetes` writes


@dataclass(frozen=True)
class ProcessPlace:
    """One process of a job."""

    launcher: str  # `python`, `drivetrain`, `torchrun`, `accelerate`, `deepspeed`, `srun`, `mpirun`, `flux`
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    main_address: str = ""  # empty: not given, and one process needs none
    main_port: int = 0
    settings: tuple[tuple[str, str], ...] = ()  # options of the launcher that a run may obey
    local_is_guessed: bool = False  # the launcher did not say which ranks share a machine: all of them, it is taken

    @property
    def environment(self) -> dict[str, str]:
        """The standard variables, which torch and most scripts read."""
        names = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
        }
        main = {"MASTER_ADDR": self.main_address, "MASTER_PORT": self.main_port} if self.main_address else {}
        return {name: str(value) for name, value in {**names, **main}.items()}


@dataclass(frozen=True)
class _Names:
    """The names of a launcher's variables for the four numbers, and the variable that identifies it."""

    launcher: str
    mark: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()  # variables that identify a job: equal on all its ranks, and on no other's


_STANDARD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# `accelerate launch` and `deepspeed` may use torchrun below; they come first, so that they are called by their name.
_TABLE = (
    _Names("drivetrain", "DRIVETRAIN_LAUNCHED", *_STANDARD),
    _Names("accelerate", "ACCELERATE_MIXED_PRECISION", *_STANDARD),
    _Names("deepspeed", "CROSS_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    _Names("torchrun", "TORCHELASTIC_RUN_ID", *_STANDARD),
    _Names("torchrun", "RANK", *_STANDARD),  # or anything else that speaks torch's own variables
    _Names(
        "srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    _Names(
        "flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES",
        ("FLUX_JOB_ID",),
    ),
    _Names(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Names(
        "mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE", ("PMI_ID", "MPIEXEC_ID"),
    ),
    _Names(
        "mpirun", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        ("PMI_ID", "HYDI_CONTROL_FD", "PMI_PORT"),
    ),
)  # fmt: skip
_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_USE_CPU")


def find_place(environ: Mapping[str, str] | None = None) -> ProcessPlace:
    """Return this process's place; without a launcher, a world of one under plain `python`."""
    environ = os.environ if environ is None else environ
    for names in _TABLE:
        if environ.get(names.mark):
            place = _read(names, environ)
            if place.launcher == "accelerate":
                told = tuple((name, environ[name]) for name in _ACCELERATE if environ.get(name))
                place = replace(place, settings=told)
            return _with_main(place, names, environ)
    return ProcessPlace("python")


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without any launcher's variables, for a process that runs alone."""
    meant = {"MASTER_ADDR", "MASTER_PORT", _SLURM_TASKS, *_OF_MACHINES}
    for names in _TABLE:
        meant |= {names.mark, names.rank, names.size, names.local_rank, names.local_size}
    return {name: value for name, value in environ.items() if name not in meant}


def _read(names: _Names, environ: Mapping[str, str]) -> ProcessPlace:
    if names.launcher == "accelerate" and not environ.get("RANK"):
        return ProcessPlace("accelerate")  # one process: it sets no ranks
    numbers = {name: _number(name, environ) for name in (names.rank, names.size)}
    rank, size = numbers[names.rank], numbers[names.size]
    missing = [name for name, value in numbers.items() if value is None]
    if rank is None or size is None:
        raise DrivetrainError(
            f"{names.mark} says that {names.launcher} started this process, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            remedy=f"unset {names.mark}, or let a launcher set all of {names.rank}, {names.size}",
        )
    local_rank = _number(names.local_rank, environ)
    local_size = _tasks_on(names, environ) if names.launcher == "srun" else _number(names.local_size, environ)
    if names.launcher == "flux":  # it says how many nodes there are
        local_size = -(-size // (local_size or 1))
    if not 0 <= rank < size:
        raise DrivetrainError(
            f"the environment says rank {rank} ({names.rank}) of {size} ({names.size})",
            remedy="ranks go from 0 to the number of processes less 1; let a launcher set both",
        )
    if local_rank is None and local_size is None:
        machines = find_machines(environ)
        if machines is not None and machines.nodes == size:
            return ProcessPlace(names.launcher, rank, size)  # one process on each
        return ProcessPlace(names.launcher, rank, size, rank, size, local_is_guessed=size > 1)
    return ProcessPlace(names.launcher, rank, size, local_rank or 0, local_size or 1)


def _tasks_on(names: _Names, environ: Mapping[str, str]) -> int | None:
    """Return the number of this node's tasks. `2(x3),1` means two tasks on each of three nodes, one on the fourth."""
    counts = []
    for part in environ.get(names.local_size, "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found:
            counts += [int(found[1])] * int(found[2] or 1)
    node = _number("SLURM_NODEID", environ) or 0
    return counts[node] if node < len(counts) else None


def _with_main(place: ProcessPlace, names: _Names, environ: Mapping[str, str]) -> ProcessPlace:
    """Add the rendezvous address and port: those of the environment, or those that this launcher implies."""
    if place.size == 1 and not environ.get("MASTER_ADDR"):
        return place
    address = environ.get("MASTER_ADDR") or _main_address(place, environ)
    port = _number("MASTER_PORT", environ)
    if port is None and names.job:
        job = " ".join(environ.get(name, "") for name in names.job)
        port = 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 12000
    if port is None:
        raise DrivetrainError(
            f"{place.launcher} started {place.size} processes, but MASTER_PORT does not say where they meet",
            remedy="set MASTER_PORT to the same free port on all nodes, or start them with `drivetrain launch`",
        )
    return replace(place, main_address=address, main_port=port)


def _main_address(place: ProcessPlace, environ: Mapping[str, str]) -> str:
    if place.launcher == "srun":
        hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
        if (_number("SLURM_STEP_NUM_NODES", environ) or 1) == 1:
            return LOOPBACK
        first = first_host(hosts)
        # Names of nodes need not be names of hosts; the node that started the step mostly is the first.
        return first if first and resolves(first) else environ.get("SLURM_LAUNCH_NODE_IPADDR") or first
    if place.local_size == place.size:
        return LOOPBACK
    raise DrivetrainError(
        f"{place.launcher} started {place.size} processes on several nodes, but not where rank 0 is (MASTER_ADDR)",
        remedy="flux run --env=MASTER_ADDR=<address of the first node>"
        if place.launcher == "flux"
        else "mpirun -x MASTER_ADDR=<address of the first node> (MPICH: -genv MASTER_ADDR <address>)",
    )


def first_host(nodelist: str) -> str:
    """Return the first name of SLURM's compressed list: `n[08-10,12],gpu3` begins with n08."""
    found = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return f"{found[1]}{found[2] or ''}{found[3] or ''}" if found else ""


def resolves(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            return False
    return True


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise DrivetrainError(
            f"the environment variable {name} is {text!r}, not a number",
            remedy=f"unset {name}, or let a launcher set it",
        ) from None


@dataclass(frozen=True)
class Machines:
    """The machines of a job, as told by a scheduler that runs the same command once on each of them."""

    scheduler: str
    told_by: str  # the variables, with their values
    nodes: int = 0  # 0: not said
    node_rank: int | None = None
    main_address: str = ""
    main_port: int = 0
    num_processes: int = 0  # on each


_OF_MACHINES = (
    "PET_NNODES", "PET_NODE_RANK", "SM_HOSTS", "SM_CURRENT_HOST", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK",
    "FLUX_JOB_NNODES", "JOB_COMPLETION_INDEX",
)  # fmt: skip


def find_machines(environ: Mapping[str, str] | None = None) -> Machines | None:
    """Return what a scheduler of machines says: Kubeflow, SageMaker, SkyPilot, Flux, or a Job of Kubernetes."""
    environ = os.environ if environ is None else environ
    told = ", ".join(f"{name}={environ[name]}" for name in _OF_MACHINES if environ.get(name))
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if environ.get("PET_NNODES"):
        nodes, each = environ["PET_NNODES"], environ.get("PET_NPROC_PER_NODE", "")
        rank = _number("PET_NODE_RANK", environ)
        rank = _number("JOB_COMPLETION_INDEX", environ) if rank is None else rank
        address, port = environ.get("PET_MASTER_ADDR") or address, environ.get("PET_MASTER_PORT") or port
        return Machines("Kubeflow", told, _count(nodes), rank, address, _count(port), _count(each))
    if environ.get("SM_HOSTS"):
        hosts, here = _hosts(environ["SM_HOSTS"]), environ.get("SM_CURRENT_HOST", "")
        rank = hosts.index(here) if here in hosts else None
        return Machines("SageMaker", told, len(hosts), rank, hosts[0] if hosts else "")
    if environ.get("SKYPILOT_NUM_NODES"):
        nodes, rank = environ["SKYPILOT_NUM_NODES"], _number("SKYPILOT_NODE_RANK", environ)
        first = (environ.get("SKYPILOT_NODE_IPS", "").split() or [""])[0]
        return Machines("SkyPilot", told, _count(nodes), rank, first)
    if environ.get("FLUX_JOB_NNODES") and environ.get("FLUX_JOB_SIZE") == environ["FLUX_JOB_NNODES"]:
        rank = _number("FLUX_TASK_RANK", environ)
        return Machines("Flux", told, _count(environ["FLUX_JOB_NNODES"]), rank, address, _count(port))
    if environ.get("JOB_COMPLETION_INDEX"):
        return Machines("Kubernetes", told, 0, _number("JOB_COMPLETION_INDEX", environ), address, _count(port))
    return None


def refuse_alone(place: ProcessPlace, environ: Mapping[str, str] | None = None) -> None:
    """Refuse to train alone on each of several machines, where a scheduler says that they have one job."""
    machines = find_machines(environ)
    if place.launcher != "python" or machines is None or machines.nodes == 1:
        return
    number = f"on {machines.nodes} machines" if machines.nodes else "as one of several"
    raise DrivetrainError(
        f"{machines.scheduler} runs this {number} ({machines.told_by}), but nothing started its ranks: each would "
        "train alone",
        remedy="run `drivetrain launch train.py` on each machine, which reads these variables (a recipe: `drivetrain "
        "train NAME --num-processes N`); or, for a separate job on each, set RANK=0 and WORLD_SIZE=1",
    )


_SLURM_TASKS = "SLURM_NTASKS"  # of the job, where it asked for a number; a step has a variable of its own
_FIRST_OWN_STEP = 0xFFFFFFF0  # numbers of steps from here on are SLURM's own, such as the shell of `salloc`
_alone = set[str]()  # the jobs of which it was told


def tell_alone(place: ProcessPlace, environ: Mapping[str, str] | None = None) -> None:
    """Tell once that this process trains alone, where SLURM has tasks for more and nothing started them."""
    environ = os.environ if environ is None else environ
    tasks, step = environ.get(_SLURM_TASKS, ""), environ.get("SLURM_STEP_ID", "")
    is_of_step = place.launcher != "python" and not (place.launcher == "srun" and _count(step) >= _FIRST_OWN_STEP)
    job = environ.get("SLURM_JOB_ID", "")
    if is_of_step or place.size > 1 or not job or _count(tasks) < 2 or job in _alone:
        return
    _alone.add(job)
    notice(
        f"the SLURM job {job} has {tasks} tasks ({_SLURM_TASKS}={tasks}), but nothing started them: this process "
        "trains alone, on one of them. `srun python train.py` uses them all"
    )


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _hosts(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise DrivetrainError(
            f"the environment variable SM_HOSTS is {text!r}, not a list of hosts in JSON", remedy="unset SM_HOSTS"
        )
    return [str(host) for host in found]


def is_restart(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this command was started before: after a failure, by SLURM's requeue, or by a JobSet."""
    return any(
        environ.get(name, "0") not in ("", "0")
        for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", RESTART_OF_JOBSET)
    )


CHANNEL = "DRIVETRAIN_REPORT_FD"
_STEP, _HOOKS = PHASES.index("step"), PHASES.index("hooks")
_LONGEST_TRACE = 32_000
_LEAST_SECONDS = 0.2  # between two reports of steps: one costs more than a short step's bookkeeping


class Supervision:
    """The channel of a worker to the supervisor that started it. `step` and `tell` never raise.

    Reports are lines of JSON over a pipe that exists only under `drivetrain launch`; elsewhere every call does nothing.
    A supervisor that has gone away ends nothing here: it takes its workers with it by other means.
    """

    def __init__(self, channel: int | None) -> None:
        self._channel = channel
        self._told_at = 0.0
        self.last_step = 0
        self.run_folder = ""
        self._failed: BaseException | None = None
        self.is_own_loop = False  # a user's, between whose steps anything may happen
        self._page: ProgressPage | None = None
        self._phase = 0  # of `PHASES`
        self._num_changes = 0
        self._watchdog = StepWatchdog()
        self._born_with: dict[str, str] = {}  # the environment that the supervisor gave

    @classmethod
    def of_environment(cls) -> "Supervision":
        text = os.environ.get(CHANNEL, "")
        return cls(int(text) if text.isdecimal() else None)

    def connect(self) -> None:
        """Take the channel from the environment that a worker has now, and remember that environment.

        One that stood by got it after its interpreter had started.
        """
        self._channel = self.of_environment()._channel
        self._born_with = dict(os.environ)

    @property
    def is_there(self) -> bool:
        return self._channel is not None

    def tell(self, kind: str, **facts: Any) -> None:
        if self._channel is None:
            return
        try:
            # One write per line: other threads of this process may report, too.
            os.write(self._channel, json.dumps({"kind": kind, **facts}).encode() + b"\n")
        except OSError:
            self._channel = None

    def failed(self, error: BaseException, *, saving: bool = False, skipped: str = "") -> None:
        """Report the exception that ends this process; once, however often it is called.

        Args:
            error: The exception.
            saving: Whether a checkpoint is still being written, which the supervisor then allows some time for.
            skipped: A file whose frames are never the cause.
        """
        if self._failed is error:
            return
        self._failed = error
        ours = error if isinstance(error, DrivetrainError) else None
        self.tell(
            "error",
            type=_qualified(type(error)),
            message=ours.message if ours else str(error)[:4000],
            remedy=ours.remedy if ours else "",
            expected=ours is not None,  # in words for users: no traceback needed
            exit_code=ours.exit_code if ours else 1,
            origin=_origin(error),
            goes_on_with=str(getattr(error, GOES_ON_WITH, "")),
            traceback=_trace(error, skipped)[-_LONGEST_TRACE:],
            step=self.last_step,
            saving=saving,
            at=time.monotonic(),  # one clock for all processes of a machine
        )

    def step(self, step: int) -> None:
        self.last_step = step
        self._move(step, _HOOKS if self.is_own_loop else _STEP)
        if self._channel is None:
            return
        now = time.monotonic()
        if now - self._told_at >= _LEAST_SECONDS:
            self._told_at = now
            self.tell("step", step=step)

    def _move(self, step: int, phase: int) -> None:
        """Note progress, where the supervisor reads it; without one, a watchdog of this process does."""
        if not self._num_changes:
            self._page = ProgressPage.of_environment()
        self._phase = phase
        self._num_changes += 1
        if self._page is not None:
            self._page.write(step, phase, self._num_changes)
        elif phase == _STEP:
            self._watchdog.beat(step)
        else:
            self._watchdog.pause()

    def phase(self, phase: str) -> None:
        """Say what is done from now on, of `PHASES`: what is not a step has other limits."""
        self._move(self.last_step, PHASES.index(phase))

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Do something in another phase, and go back to the one before."""
        before = PHASES[self._phase]
        self.phase(phase)
        try:
            yield
        finally:
            self.phase(before)

    def run(self, folder: str, resumed_from: int | None = None) -> None:
        self.run_folder, self.is_own_loop = folder, False
        self.last_step = 0  # of this run, and not of the job before
        self.phase("start")
        names = {name for name, _ in os.environ.items() ^ self._born_with.items()}
        self.tell("run", folder=folder, changed=sorted(name for name in names if not name.startswith("DRIVETRAIN_")))


supervision = Supervision.of_environment()


def _origin(error: BaseException) -> str:
    """Return the original exception: one that is raised during cleanup hides it, but does not explain it."""
    seen = {id(error)}
    while (earlier := error.__cause__ or error.__context__) is not None and id(earlier) not in seen:
        error = earlier
        seen.add(id(error))
    return f"{_qualified(type(error))}: {str(error)[:2000]}"


def _qualified(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _trace(error: BaseException, skipped: str) -> str:
    """Return the traceback without the first frames if they are of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == skipped:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


# ----------------------------------------------------------------------------------------------------------------------
# Identifies the code of a run: versions of the packages that matter, and hashes of the script and of this package.


def code_version(script: str = "") -> dict[str, str]:
    """Return the versions by name, ordered by how much a difference matters."""
    found = {"drivetrain": _package(), "python": platform.python_version(), "torch": _version("torch")}
    path = Path(script) if script else None
    if path is not None and path.is_file():
        found = {"script": hashlib.sha256(path.read_bytes()).hexdigest()[:12], **found}
    return found


@cache  # each look parses the metadata file, before every run of several processes
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


@cache
def _package() -> str:
    """Return a hash of this package's source: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]

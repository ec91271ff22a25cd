"""Processes: a run that ends cleanly on a signal, and processes that never outlive what started them."""

import ast
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from drivetrain.core.errors import DrivetrainError

# ----------------------------------------------------------------------------------------------------------------------
# Ends a run cleanly on a signal: the step finishes, a checkpoint is written, and all ranks stop together.
#
# Schedulers signal one process of a job, or every one. A rank without a supervisor stops on each of the signals. A
# worker of a supervisor reports them to it (`follow_supervisor`) and stops on its word alone (`take_order`), which
# reaches all ranks. A supervisor takes the first signal as "save and stop", a later Ctrl-C as "at once". Children that
# load data outlive them all (`held_back`, `outlive_signals`).

# SLURM, submitit and Lightning use different ones to say that time is running out.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# A launcher passes a terminal's Ctrl-C on to workers that got it already. That is not a second, impatient one.
IMPATIENT_AFTER_SECONDS = 1.0
_SAME_PRESS_SECONDS = 0.3  # a scheduler may send a signal to the group and to the leader
_QUIET_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)  # no library ends its processes by these


class _Run(NamedTuple):
    stop: Callable[[], None]
    heed: Callable[[int], None]  # stop, and say why


_pause: ContextVar[Callable[[int], bool] | None] = ContextVar("pause", default=None)
_runs: list[_Run] = []  # of this process that go on now
_orders: list[int] = []  # the signal that the supervisor named, once it gave the order to stop
_ours: list[Callable[[int, FrameType | None], None]] = []  # handlers that are installed here
_reports: list[Callable[[int], None]] = []  # how a worker tells its supervisor of a signal


def request_stop() -> bool:
    """Ask the runs of this process to end cleanly, from any thread, as Ctrl-C does.

    Return False if none is running yet.
    """
    for run in list(_runs):
        run.stop()
    return bool(_runs)


@contextmanager
def pausing(when: Callable[[int], bool]) -> Iterator[None]:
    """Stop runs inside this context after a validation for whose step `when` is true; they can go on later."""
    token = _pause.set(when)
    try:
        yield
    finally:
        _pause.reset(token)


def wants_pause(step: int) -> bool:
    """Return whether a run is to stop here, after the validation of a step."""
    when = _pause.get()
    return when is not None and when(step)


@contextmanager
def stopping_cleanly(stop: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """Call `stop` on the first stop signal, or the supervisor's order; a later Ctrl-C ends the process at once."""
    first: list[float] = []
    replaced = [number for number in STOP_SIGNALS if _is_of_script(signal.getsignal(number))]

    def heed(number: int, frame: FrameType | None = None) -> None:
        if not first:
            first.append(time.monotonic())
            stop()
            again = "" if _reports else ". Ctrl-C again: at once"
            if number in replaced:
                again += ". The script's own handler is not called: `finished` of the result or the run is False then"
            say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint{again}")
        elif number == signal.SIGINT and time.monotonic() - first[0] > IMPATIENT_AFTER_SECONDS:
            raise KeyboardInterrupt

    run = _Run(stop, heed)
    _runs.append(run)
    try:
        with nullcontext() if _reports else _handled(heed):
            if _orders:  # it came before there was anything to stop, and something caught the exception
                heed(_orders[0])
            yield
    finally:
        _runs.remove(run)


def _is_of_script(handler: Any) -> bool:
    """Return whether a handler is one that a script, or a library such as submitit, has set."""
    return callable(handler) and handler is not signal.default_int_handler and handler not in _ours


@contextmanager
def written_first(say: Callable[[str], None]) -> Iterator[None]:
    """Defer the first stop signal inside this context to its end; a later one takes effect at once.

    Used for files that are written when a run is over: a sender of SIGTERM allows for some time.
    """
    waiting: list[tuple[int, float]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not waiting:
            waiting.append((number, time.monotonic()))
            say(f"{signal.Signals(number).name}: the run is over; its report is written first. Again: at once")
        elif time.monotonic() - waiting[0][1] > IMPATIENT_AFTER_SECONDS:
            put_back()
            signal.raise_signal(number)

    with _handled(handle) as put_back:
        yield
    if waiting:
        signal.raise_signal(waiting[0][0])


def restore_handler(number: int, handler: Any) -> None:
    """Put a handler back that `signal.signal` returned. None stands for one that was not set from Python.

    That one cannot be put back: it becomes Python's default.
    """
    if handler is None:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, handler)


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[Callable[[], None]]:
    """Install the handlers and yield a function that restores the previous ones; it is called on exit in any case."""
    before: dict[int, Any] = {}

    def put_back() -> None:
        for handled, handler in before.items():
            restore_handler(handled, handler)
            _ours.remove(handle)
        before.clear()

    if threading.current_thread() is threading.main_thread():  # only it may handle signals
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and the like
                _ours.append(handle)
                before[number] = signal.signal(number, handle)
    try:
        yield put_back
    finally:
        put_back()


# Workers of a supervisor


def follow_supervisor(report: Callable[[int], None]) -> None:
    """Report stop signals to the supervisor instead of obeying them; `take_order` stops this process.

    A scheduler may signal all processes at once. SIGUSR1, SIGUSR2 and SIGHUP stay blocked and ignored, so that they end
    no child either, however it is started; a thread waits for them. A script may still handle them itself.

    Args:
        report: tells the supervisor which signal came; the supervisor then gives its order to all ranks.
    """
    _reports.append(report)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and len(_orders) == 1:
            _orders.append(number)  # obeyed: what comes now comes from elsewhere
            _obey(_orders[0])
        else:
            report(number)

    _ours.append(handle)
    signal.signal(signal.SIGINT, handle)  # even where it was ignored, as behind `&`: the order comes by it
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, handle)
    quiet = [number for number in _QUIET_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, quiet)
    early = signal.sigpending()
    for number in quiet:
        signal.signal(number, signal.SIG_IGN)  # drops what is pending
        if number in early:
            report(number)
    if quiet:
        threading.Thread(target=_wait_for, args=(quiet, report), name="drivetrain-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - set(quiet))


def _wait_for(numbers: list[signal.Signals], report: Callable[[int], None]) -> None:
    while True:
        number = signal.sigwait(numbers)
        if _is_caught(number):  # by a handler of the script
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            signal.raise_signal(number)
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        else:
            report(number)


def _is_caught(number: int) -> bool:
    """Return whether a handler is installed, by Python or by native code such as `faulthandler.register`."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return callable(signal.getsignal(number))
    return bool(caught >> (number - 1) & 1)


def take_order(number: int) -> None:
    """Stop by the supervisor's order, from any thread: runs end cleanly; elsewhere `KeyboardInterrupt` is raised.

    Args:
        number: the signal that made the supervisor give the order.
    """
    if _orders:
        return
    _orders.append(number)
    request_stop()  # even if the script handles Ctrl-C itself
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes it from a system call


def _obey(number: int) -> None:
    if not _runs:
        raise KeyboardInterrupt
    for run in list(_runs):
        run.heed(number)


# Children


def _before_fork() -> None:
    if _ours:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after_fork() -> None:
    if (mask := vars(_forking).pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _with_default_signals() -> None:
    """Handle signals in a forked process as without us, from its first moment: a script may end it by one."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) in _ours:
            restore_handler(number, None)
    _ours.clear()
    _after_fork()


_forking = threading.local()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_with_default_signals)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back the stop signals of this thread; a process that is started inside has them blocked from its birth."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_signals(worker: int = 0) -> None:
    """Keep a process that loads data alive when all processes of a job are signaled. Its parent may end it by SIGTERM.

    Args:
        worker: the number of the loader's worker, as torch gives it to a `worker_init_fn`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if not hasattr(signal, "sigwaitinfo"):  # on macOS nothing says who sent a signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None else parent.pid

    def wait_for_parent() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != pid:
            pass
        os._exit(0)

    threading.Thread(target=wait_for_parent, name="drivetrain-signals", daemon=True).start()


# Supervisors


class StopWish:
    """Holds which signal came, and whether a second Ctrl-C did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_once = False
        self._first_at = 0.0

    def has_come(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        return (self.signal or signal.SIGINT).name

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or signal.SIGINT)

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Take a signal that this process got. A scheduler's second one leaves the time that is left to the save."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._first_at > _SAME_PRESS_SECONDS:
            self.at_once = True

    def share(self, number: int) -> None:
        """Take a signal that another process of the job got: the same one, late, is not a second."""
        if self.signal is None:
            self.hear(number)


@contextmanager
def hearing() -> Iterator[StopWish]:
    """Yield what the stop signals of this process say. After one came the process ends, and others are ignored."""
    wish = StopWish()
    before = {
        number: signal.signal(number, wish.hear)
        for number in STOP_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN  # nohup and the like
    }
    try:
        yield wish
    finally:
        for number, handler in before.items():
            # The same signal, late, must not become the exit code.
            restore_handler(number, signal.SIG_IGN if wish.has_come() else handler)


# ----------------------------------------------------------------------------------------------------------------------
# Supervises processes: none outlives what started it, trees of them can be killed, forks and signals are safe.
#
# Three means work together. The kernel kills a process when its parent dies (`die_with_parent`). A process that adopts
# orphans finds those that a child left behind (`adopt_orphans`, `kill_strays`). What the kernel does not kill, the
# children of workers such as loader processes, an `OrphanGuard` kills by their process groups. Scripts that would train
# again in a process that was started by spawn are refused.

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.02
_REAP_SECONDS = 3.0
MAIN_GUARD_REMEDY = 'put what starts the training below `if __name__ == "__main__":` at the end of the script'
_forks = [False, True]  # whether a process is being started; whether collecting was on before
_inherited = [False]  # whether this process was started so, and has objects that it must not destroy

if TYPE_CHECKING:
    import psutil


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent dies, however that happens.

    Args:
        parent: the parent's process id, where it is known: if it is gone already, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before the line above


def adopt_orphans() -> None:
    """Become the parent of orphans below this process, and so find them even if they left their process group."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list["psutil.Process"]:
    """Return the processes below a process; none where it is gone."""
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_group(leader: int) -> None:
    """Kill a process group. It outlives its leader: this reaches what a process left behind when it ended, too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_tree(pid: int, below: "list[psutil.Process] | None" = None) -> None:
    """Kill a process, its group, and those of its descendants that moved to another group.

    Args:
        pid: the process, which leads a group of its own.
        below: its descendants as they were before it was stopped; None asks for them now.
    """
    kill_processes(descendants(pid) if below is None else below)
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_processes(processes: "list[psutil.Process]") -> None:
    """Kill each process that is still there."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_strays() -> None:
    """Kill and reap everything below this process, adopted or not."""
    kill_processes(descendants(os.getpid()))
    deadline = time.monotonic() + _REAP_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_POLL_SECONDS)


class OrphanGuard:
    """A small process that outlives a killed supervisor just long enough to kill the groups that it started.

    It is forked when made: make it before anything else runs.
    """

    def __init__(self) -> None:
        heard, self._say = os.pipe()
        ready, closed_when_ready = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._say)
            _keep_watch(heard, closed_when_ready)
        os.close(heard)
        os.close(closed_when_ready)
        os.read(ready, 1)  # until then it could be killed together with the supervisor
        os.close(ready)

    def add(self, group: int) -> None:
        """Watch over a process group."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group, before its number can be reused by another."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Kill the groups that are left, and end."""
        os.close(self._say)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed; the kernel still ends the workers
            os.write(self._say, line.encode())


def _keep_watch(heard: int, closed_when_ready: int) -> NoReturn:
    try:
        os.setsid()  # neither a terminal's Ctrl-C nor a kill of the supervisor's group reaches it
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.close(closed_when_ready)
        os.closerange(0, heard)
        os.closerange(heard + 1, 4096)  # a terminal or pipe of the supervisor's must not stay open for its sake
        groups: set[int] = set()
        rest = b""
        while piece := os.read(heard, 4096):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
        for group in groups:
            kill_group(group)
    finally:
        os._exit(0)


def _prctl(option: int, argument: int) -> None:
    """Call prctl on Linux. Elsewhere nothing happens: process groups alone have to do there."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def refuse_while_importing() -> None:
    """Raise in a process that was started by spawn or forkserver and is just importing the script it belongs to."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DrivetrainError(
            "the training was started again by a child process: processes that are started by spawn (loader workers, "
            "mp.spawn) import the script, and it starts the training when it is imported",
            remedy=MAIN_GUARD_REMEDY,
        )


def trains_when_imported() -> bool:
    """Return whether the running script called this from code that importing the script would run as well."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    line = _line_of_main()
    if path is None or line is None:
        return False
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    here = [each for each in statements if each.lineno <= line <= (each.end_lineno or each.lineno)]
    return bool(here) and not any(isinstance(each, ast.If) and _asks_for_name(each.test) for each in here)


def _line_of_main() -> int | None:
    """Return the line that the script's top level is executing; None if it is not being run, as in a notebook."""
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is main:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _asks_for_name(test: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(test))


class SetAside:
    """Freezes all objects from `begin` to `end`, so that garbage collections do not pause the training loop.

    A full collection visits every object: some 300,000 with torch loaded, 100 to 170 ms in which no thread runs Python.
    Any code that allocates objects can trigger it, including a background save. Objects that exist when a run has begun
    live until it ends; once frozen, they are not visited again.

    Only one run holds it at a time; a second `begin` does nothing.
    """

    _held_by: "SetAside | None" = None

    def begin(self) -> None:
        """Collect once, then freeze: garbage must not be kept for the duration of the run."""
        if SetAside._held_by is None:
            SetAside._held_by = self
            gc.collect()
            gc.freeze()

    def end(self) -> None:
        if SetAside._held_by is self:
            SetAside._held_by = None
            if not _inherited[0]:
                gc.unfreeze()


@contextmanager
def forking(*, holds_signals: bool = True) -> Iterator[None]:
    """Keep existing objects out of the garbage collector of a process that may be forked inside this context.

    Signals that ask the job to stop are blocked in it from its birth, unless `holds_signals` is False: they are not
    meant for a process that only reads data.

    The remains of an earlier run, such as a process group in a cycle, have threads that do not exist in the child:
    destroying them there ends in a segmentation fault. Collection is off from before the fork, because other at-fork
    handlers run in the child before the one here.
    """
    _forks[:] = True, gc.isenabled()
    gc.disable()
    try:
        with held_back() if holds_signals else nullcontext():
            yield
    finally:
        _forks[0] = False
        if _forks[1]:
            gc.enable()


def _in_child() -> None:
    if _forks[0]:
        _inherited[0] = True
        gc.freeze()
        if _forks[1]:
            gc.enable()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing is forked
    os.register_at_fork(after_in_child=_in_child)

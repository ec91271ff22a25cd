"""Ends a run cleanly on a signal: the step finishes, a checkpoint is written, and all ranks stop together.

Schedulers signal one process of a job, or every one. A rank without a supervisor stops on each of the signals. A worker
of a supervisor reports them to it (`follow_supervisor`) and stops on its word alone (`take_order`), which reaches all
ranks. A supervisor takes the first signal as "save and stop", a later Ctrl-C as "at once". Children that load data
outlive them all (`held_back`, `outlive_signals`).
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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

    def heed(number: int, frame: FrameType | None = None) -> None:
        if not first:
            first.append(time.monotonic())
            stop()
            again = "" if _reports else ". Ctrl-C again: at once"
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


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[Callable[[], None]]:
    """Install the handlers and yield a function that restores the previous ones; it is called on exit in any case."""
    before: dict[int, Any] = {}

    def put_back() -> None:
        for handled, handler in before.items():
            signal.signal(handled, handler)
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


def _in_child() -> None:
    """Handle signals in a forked process as without us, from its first moment: a script may end it by one."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) in _ours:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _ours.clear()
    _after_fork()


_forking = threading.local()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


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
            signal.signal(number, signal.SIG_IGN if wish.has_come() else handler)

"""Python processes that start with torch and drivetrain imported.

A new interpreter needs seconds to import them, and the suite starts many. These are forked from a server that has
imported them, take the words of a command line as `python` does (`-c CODE`, `-m MODULE`, `SCRIPT`), and otherwise are
processes like others: with a process group, standard streams, signals and an exit code of their own.

Tests of imports, of fresh interpreters and of launchers start real ones.
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import process as process_pools
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

warm_context = multiprocessing.get_context("forkserver")
warm_context.set_forkserver_preload(["tests.preloaded"])


def server_address() -> str:
    """Where the server listens, which is started if it does not run."""
    forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    assert isinstance(address, str)
    return address


def use_server(address: str) -> None:
    """Use that of another process, which lives longer, instead of one more that imports all of it."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # not this process says when the server ends
    server.ensure_running = resource_tracker.ensure_running


class WarmProcess:
    """Much of `subprocess.Popen`: standard output is a pipe, and standard error goes there, too, unless dropped."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        drops_stderr: bool = False,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        reading: Connection | None = None
        if stdout is None:
            reading, writing = warm_context.Pipe(duplex=False)
        else:
            writing = Connection(os.dup(stdout), readable=False)
        errors = None if stderr is None else Connection(os.dup(stderr), readable=False)
        environment = dict(os.environ if env is None else env)
        arguments = (list(words), str(cwd or Path.cwd()), environment, writing, errors, drops_stderr)
        self._process = warm_context.Process(target=_main, args=arguments)
        self._process.start()
        writing.close()
        if errors is not None:
            errors.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout: IO[str] | None = None
        if reading is not None:
            self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8", errors="replace")
            reading.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        assert self.stdout is not None
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(self.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        self.wait(timeout)
        reader.join()
        return "".join(found), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> "WarmProcess":
        return self

    def __exit__(self, *error: object) -> None:
        if self.poll() is None:
            self.kill()
        self._process.join()
        if self.stdout is not None:
            self.stdout.close()


def run(
    words: Sequence[str],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
    stdout: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *words], capture_output=True, text=True)`."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        into = output.fileno() if stdout is None else stdout
        with WarmProcess(words, cwd=cwd, env=env, stdout=into, stderr=errors.fileno()) as process:
            code = process.wait(timeout)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", errors="replace"))
    return subprocess.CompletedProcess(["python", *words], code, *texts)


spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_kept: list[Any] = []


def spawn_by_fork(
    path: bytes, words: Sequence[Any], descriptors: Sequence[int], *, first: Callable[[], object] | None = None
) -> int:
    """`multiprocessing.util.spawnv_passfds`, for processes of the start method "spawn" that have torch imported.

    They are forked from this one, and get what they would: words, descriptors, signal mask and parent. What they do
    arrives pickled.

    Args:
        path: of the interpreter.
        words: of its command line, the first is its name.
        descriptors: to be inherited.
        first: what they do before anything else, in place of imports.
    """
    if "--multiprocessing-fork" not in words:  # the resource tracker, which imports nothing
        return int(spawn(path, words, descriptors))
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        # What the caller would do with its own processes. It is kept: as garbage, it would close descriptors.
        _kept.extend([multiprocessing.process._children, dict(process_pools._threads_wakeups)])  # type: ignore[attr-defined]
        multiprocessing.process._children = set()  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        process_pools._threads_wakeups.clear()  # type: ignore[attr-defined]
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  (as exec closes them)
            if descriptor not in {0, 1, 2, nothing, *descriptors}:
                with suppress(OSError):  # that of the listing itself
                    os.dup2(nothing, descriptor)
        if first is not None:
            first()
        become(words[words.index("-c") :], str(Path.cwd()), os.environ.copy())
    finally:
        os._exit(99)  # never back into what the caller does


def _main(
    words: list[str], folder: str, environment: dict[str, str], writing: Connection, errors: Any, drops_stderr: bool
) -> None:
    os.setsid()
    os.dup2(writing.fileno(), 1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing if drops_stderr else 1 if errors is None else errors.fileno(), 2)
    writing.close()
    if errors is not None:
        errors.close()
    become(words, folder, environment)


def become(words: list[str], folder: str, environment: Mapping[str, str]) -> None:
    """Be `python WORDS` until the process ends: streams, signals and groups are the caller's to set."""
    # The caller removes its temporary folders itself. To take torch's libraries out of the dispatcher takes 0.1 s.
    _kept.append(dict(weakref.finalize._registry))  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=-1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # that is inherited, as behind `&`
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # It is nobody's worker: what it starts is its own.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.set_start_method("fork", force=True)
    code = _run(words)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as the interpreter does
    os._exit(code)


def _run(words: list[str]) -> int:
    """The exit code of what `python WORDS` runs, after threads and `atexit` functions have ended."""
    try:
        try:
            _execute(words)
            code = 0
        except SystemExit as wish:
            code = _exit_code(wish)
        except KeyboardInterrupt:
            traceback.print_exc()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
            code = 130
        except BaseException:  # noqa: BLE001  (as the interpreter does)
            traceback.print_exc()
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as wish:
        code = _exit_code(wish)
    return code


def _exit_code(wish: SystemExit) -> int:
    if wish.code is None or isinstance(wish.code, int):
        return wish.code or 0
    print(wish.code, file=sys.stderr)
    return 1


def _execute(words: list[str]) -> None:
    first, *rest = words
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, "")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).parent.absolute()))
        main.__file__ = first
        exec(compile(Path(first).read_text(encoding="utf-8"), first, "exec"), main.__dict__)

"""The entry point of every worker: bound to its supervisor's life, it runs the script and reports how that ended.

Loads nothing heavy before the script does: a script may set variables that torch reads when it is imported.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import supervision
from drivetrain.core.processes import STOP_SIGNALS, die_with_parent, follow_supervisor, take_order

STORE_FD = "DRIVETRAIN_STORE_FD"
STANDBY_FD = "DRIVETRAIN_STANDBY_FD"
ORDERS_FD = "DRIVETRAIN_ORDERS_FD"
SUPERVISOR_PID = "DRIVETRAIN_SUPERVISOR_PID"
CORES = "DRIVETRAIN_CORES"
STACKS = "DRIVETRAIN_STACKS"
STACK_SIGNAL = signal.SIGRTMIN + 7  # asks for the stack of every thread; no library is known to use it
_RENDEZVOUS = "torch.distributed.rendezvous"
_store: list[Any] = []  # of this process, kept as long as it lives


def main() -> NoReturn:
    """Run one worker.

    Its command is `python -c "from drivetrain.launch.worker import main; main()" script FILE …` or `… command train …`.
    """
    _belong_to_supervisor()
    supervision.connect()
    stacks = os.environ.get(STACKS, "")
    if stacks:
        faulthandler.register(STACK_SIGNAL, file=_append_to(stacks), all_threads=True)
    faulthandler.enable()
    # Signals may come while torch is still being imported; they are blocked since this process was started.
    follow_supervisor(lambda number: supervision.tell("signal", signal=number))
    orders = int(os.environ.pop(ORDERS_FD))
    threading.Thread(target=_take_orders, args=(orders,), name="drivetrain-orders", daemon=True).start()
    supervision.tell("ready", pid=os.getpid())
    kind, *words = sys.argv[1:]
    sys.exit(_guarded(kind, words))


def stand_by() -> NoReturn:
    """Import torch and the training, and wait; become a worker when the supervisor hands over the place of a rank.

    Until then it is no rank: nothing of the script is run, no device is touched, and signals that ask a job to stop
    stay blocked. Its interpreter has the words and the environment of a worker already.
    """
    _belong_to_supervisor()
    with socket.socket(fileno=int(os.environ.pop(STANDBY_FD))) as channel:
        getattr(import_module("drivetrain"), "train")  # noqa: B009  (loads it, and torch with it)
        with contextlib.suppress(OSError):  # its place may be there already, and the other end closed
            channel.send(b"+")
        word, descriptors, *_ = socket.recv_fds(channel, 1, 8)
    if not word:
        os._exit(0)  # the supervisor needs it no more
    order, output, *others = descriptors
    with os.fdopen(order) as file:
        file.seek(0)
        environment, names = json.load(file)
    while late := signal.sigpending() & set(STOP_SIGNALS):  # meant for those that were ranks then
        signal.sigwait(late)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    for name, descriptor in zip(names, others, strict=True):
        os.set_inheritable(descriptor, True)  # as of a process that was started with it
        os.environ[name] = str(descriptor)
    main()


def _belong_to_supervisor() -> None:
    """Die with the supervisor, and use the cores that it allotted: before torch counts them."""
    die_with_parent(int(os.environ.pop(SUPERVISOR_PID, "0")))  # an `OrphanGuard` kills the children
    cores = os.environ.get(CORES, "")
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def _guarded(kind: str, words: list[str]) -> int:
    try:
        _serve_store_later()
        if kind == "script":
            _run_script(words)
            return 0
        dispatch = import_module("drivetrain.cli").dispatch
        return int(dispatch(words))
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        return code if isinstance(code, int) else int(code is not None)
    except KeyboardInterrupt:
        supervision.tell("interrupted")
        return 130
    except BaseException as error:  # noqa: BLE001  (whatever ended the script is the news)
        supervision.failed(error, skipped=__file__)
        return error.exit_code if isinstance(error, DrivetrainError) else 1


def _take_orders(descriptor: int) -> None:
    """Wait for the supervisor's orders: the number of the signal that it stops the job for, one to a line."""
    with os.fdopen(descriptor) as orders:
        for line in orders:
            take_order(int(line))


def _run_script(words: list[str]) -> None:
    """Run a script as `python script.py` does: in the module `__main__`, with the script's folder first on the path."""
    path = words[0]
    sys.argv[:] = words
    sys.path[0] = str(Path(path).absolute().parent)
    code = compile(Path(path).read_bytes(), path, "exec")
    module = sys.modules["__main__"].__dict__
    for name in [name for name in module if not name.startswith("__")]:
        del module[name]
    module.update({"__name__": "__main__", "__file__": path, "__spec__": None, "__cached__": None})
    exec(code, module)


def _serve_store_later() -> None:
    """Start the rendezvous store on rank 0, as soon as the script imports what would look for it.

    All ranks, this one too, come as clients (TORCHELASTIC_USE_AGENT_STORE), in any script. It may be imported already,
    by a `sitecustomize` for instance.
    """
    descriptor = os.environ.pop(STORE_FD, "")
    if descriptor and _RENDEZVOUS in sys.modules:
        _serve_store(int(descriptor))
    elif descriptor:
        sys.meta_path.insert(0, _StoreFinder(int(descriptor)))


class _StoreFinder(MetaPathFinder):
    """Sees the import of torch's rendezvous, once, and starts the store after it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_serve(module: Any) -> None:
                load(module)
                _serve_store(self._descriptor)

            spec.loader.exec_module = load_and_serve  # type: ignore[method-assign]
        return spec


def _serve_store(descriptor: int) -> None:
    """Start the store on the socket that the supervisor bound: it listens on that address and no other."""
    from torch._C._distributed_c10d import TCPStore

    with socket.socket(fileno=os.dup(descriptor)) as listening:
        host, port = listening.getsockname()[:2]
    _store.append(TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor))


def _append_to(path: str) -> Any:
    """Open a file for as long as the process lives; standard error takes its place where the disk is full."""
    try:
        return Path(path).open("a", encoding="utf-8")
    except OSError:
        return sys.stderr

"""Workers of pytest-xdist, forked from one process that has imported all tests.

Each would import torch and transformers, rewrite the asserts of 400 files and collect: half a minute of CPU time in a
fresh clone. One process does that, forked from the server of `warm_python.py`, and every worker from it.

pytest-xdist starts this file as if it were Python: `python warm_workers.py -u -c CODE`. It hands its streams to the
process that collected, and ends when its worker does.
"""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ADDRESS = "WARM_WORKERS"


def may_fork() -> bool:
    """Whether workers can be forked: where there is a GPU, collecting initializes CUDA, which no fork can use."""
    from drivetrain.hardware import detect

    return not os.environ.get("FRESH_WORKERS") and not detect().gpus


def specification(cleanup: Callable[[Callable[[], None]], None]) -> str:
    """How pytest-xdist is told to start a worker, by a process that collects from now on.

    Args:
        cleanup: takes what is to be called in the end.
    """
    from tests.warm_python import WarmProcess

    folder = tempfile.TemporaryDirectory(prefix="warm-workers-")  # readable by this user only
    cleanup(folder.cleanup)
    address = str(Path(folder.name) / "socket")
    process = WarmProcess(["-m", "tests.warm_workers", address])
    cleanup(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    os.environ[ADDRESS] = address
    return f"popen//python={sys.executable} {__file__}"


def be_python(words: list[str]) -> None:
    """Let a worker be forked that runs these words with the streams of this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, pytest-xdist ends its workers itself
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(os.environ[ADDRESS])
        socket.send_fds(asking, [words[-1].encode()], [0, 1, 2])
        while asking.recv(1):  # until the worker ends
            pass


def serve(address: str) -> None:
    """Collect, and fork a worker for each that asks."""
    import pytest

    from drivetrain.core.processes import die_with_parent
    from tests.warm_python import become

    die_with_parent()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("listening", flush=True)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        pytest.main(["--collect-only", "-qq"])
        while True:
            asking, _ = server.accept()
            code, streams, _, _ = socket.recv_fds(asking, 1 << 16, 3)
            if os.fork() == 0:
                server.close()
                os.setsid()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                become(["-c", code.decode()], str(Path.cwd()), os.environ.copy())
            for stream in streams:
                os.close(stream)
            asking.close()


if __name__ == "__main__":
    if sys.argv[1] == "-u":
        be_python(sys.argv[1:])
    else:
        serve(sys.argv[1])

"""Nothing listens beyond loopback on one machine: while a job starts, trains, crashes and is started again."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil

from tests.commands.test_train_integration import SCRIPT, wait_for_step
from tests.launch.jobs import launching


def listening(pid: int) -> set[str]:
    """The addresses that a process and its children listen on, as the kernel has them."""
    sockets: set[str] = set()
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            for path in Path(f"/proc/{one.pid}/fd").glob("*"):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    link = str(path.readlink())
                    sockets |= {link[8:-1]} if link.startswith("socket:[") else set()
    found = set()
    for table, family, width in (("tcp", socket.AF_INET, 8), ("tcp6", socket.AF_INET6, 32)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                words = bytes.fromhex(fields[1].split(":")[0])
                swapped = b"".join(words[at : at + 4][::-1] for at in range(0, width // 2, 4))
                found.add(socket.inet_ntop(family, swapped))
    return found


class Watch(threading.Thread):
    """Looks again and again, until it is told to end."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid, self._over = pid, threading.Event()
        self.seen: set[str] = set()
        self.looks = 0

    def run(self) -> None:
        while not self._over.is_set():
            self.seen |= listening(self._pid)
            self.looks += 1
            time.sleep(0.02)

    def end(self) -> set[str]:
        self._over.set()
        self.join()
        return self.seen


def test_only_loopback_in_every_state(tmp_path: Path) -> None:
    with launching(tmp_path, str(SCRIPT), str(tmp_path), "20", forks=True, PAUSE="0.02") as process:
        watch = Watch(process.pid)
        watch.start()
        _, pid = wait_for_step(tmp_path, 6, rank=1)
        os.kill(pid, signal.SIGSEGV)  # it crashes, and is started again
        _, err = process.communicate(240)
        seen = watch.end()
    assert process.returncode == 0, err
    assert "Starting again" in err
    assert watch.looks > 20
    assert seen  # the store and gloo
    assert seen <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_listener_on_all_addresses_would_be_seen() -> None:
    """Otherwise the test above would show nothing."""
    with socket.create_server(("", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6):
        assert {"0.0.0.0", "::1"} <= listening(os.getpid())

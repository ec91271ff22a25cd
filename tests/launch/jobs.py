"""Starting `drivetrain launch` as a user does, and looking at what it leaves."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

# Nothing of whatever started the tests.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DRIVETRAIN_LAUNCHED")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {**kept, "ONEDNN_JIT_PROFILE": "0", **more}


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_lines(self) -> list[str]:
        return self.err.rstrip().splitlines()


def script(folder: Path, text: str, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def command(folder: Path, *words: str, num_processes: int = 2) -> list[str]:
    flags = ["--cpu", "--num-processes", str(num_processes), "--output-dir", str(folder / "runs")]
    return [sys.executable, "-m", "drivetrain", "launch", *flags, *words]


def launch(folder: Path, *words: str, num_processes: int = 2, timeout: float = 240, **more: str) -> Ended:
    began = time.monotonic()
    done = subprocess.run(
        command(folder, *words, num_processes=num_processes),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(**more),
        cwd=folder,
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@contextmanager
def launching(folder: Path, *words: str, num_processes: int = 2, **more: str) -> Iterator[subprocess.Popen[str]]:
    """In a group of its own, as a shell starts it. Killed at the end, if it is still there."""
    process = subprocess.Popen(
        command(folder, *words, num_processes=num_processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(path: Path, seconds: float = 240) -> str:
    """The content of a file, once it has one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear within {seconds} s")


def wait_for_words(path: Path, words: str, seconds: float = 240) -> str:
    """The content of a file, once the words are in it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and words in (text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} did not say {words!r} within {seconds} s: {path.read_text()}")


def are_gone(pids: list[int], seconds: float = 30) -> list[int]:
    """Those of the processes that are still running after so long. Zombies are gone."""
    deadline = time.monotonic() + seconds

    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]

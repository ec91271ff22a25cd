"""Starting `drivetrain launch` as a user does, and looking at what it leaves."""

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.warm_python import WarmProcess

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


def words_of(folder: Path, *words: str, num_processes: int = 2, forks: bool = False) -> list[str]:
    """What stands behind `python`. Workers are forked where they import torch and that is not what is tested."""
    flags = ["--cpu", "--num-processes", str(num_processes), "--output-dir", str(folder / "runs")]
    return ["-m", "tests.launch.forked_workers" if forks else "drivetrain", "launch", *flags, *words]


class Launching(WarmProcess):
    """In a group of its own, as a shell starts it, with files as its outputs."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str]) -> None:
        with contextlib.ExitStack() as files:
            self._outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            out, err = (file.fileno() for file in self._outputs)
            super().__init__(words, cwd=folder, env=env, stdout=out, stderr=err)
            self._files = files.pop_all()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:  # type: ignore[override]
        """Standard output and error, once it has ended."""
        self.wait(timeout)
        out, err = (os.pread(file.fileno(), 1 << 30, 0).decode(errors="replace") for file in self._outputs)
        return out, err

    def errors_so_far(self) -> str:
        """What it has written to standard error."""
        return os.pread(self._outputs[1].fileno(), 1 << 30, 0).decode(errors="replace")

    def __exit__(self, *error: object) -> None:
        """Killed, if it is still there."""
        super().__exit__(*error)
        self._files.close()


def launching(folder: Path, *words: str, num_processes: int = 2, forks: bool = False, **more: str) -> Launching:
    command = words_of(folder, *words, num_processes=num_processes, forks=forks)
    return Launching(command, folder, environment(**more))


def launch(
    folder: Path, *words: str, num_processes: int = 2, timeout: float = 240, forks: bool = False, **more: str
) -> Ended:
    began = time.monotonic()
    with launching(folder, *words, num_processes=num_processes, forks=forks, **more) as process:
        out, err = process.communicate(timeout)
    return Ended(process.returncode or 0, out, err, time.monotonic() - began)


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

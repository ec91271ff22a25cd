"""The folder that holds all files of one run. Only one process writes to it, and never over another run."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from drivetrain.core.errors import DrivetrainError

LONGEST_NAME_BYTES = 200  # file systems take 255, and a number may follow
ALLOWED_NAMES = f"text of up to {LONGEST_NAME_BYTES} bytes without slashes and control characters, other than . and .."
_JOB, _LOCK, _FINISHED = "job.yaml", ".lock", "finished.json"
CERTIFICATE = "certificate.json"  # of `drivetrain prove`; it may be there before the run


def problem_with_name(name: object) -> str:
    """Return why a run cannot have this name, which is that of its folder as well; empty if it can."""
    if not isinstance(name, str) or not name.strip():
        return "it is empty" if isinstance(name, str) else f"it is a {type(name).__name__}, not text"
    if "/" in name or "\\" in name or name in (".", ".."):
        return "it names another folder, and a run stays below the output folder"
    if not name.isprintable():
        return "it has characters that cannot be printed"
    if len(name.encode()) > LONGEST_NAME_BYTES:
        return f"it is longer than {LONGEST_NAME_BYTES} bytes"
    return ""


class RunFolder:
    """`output_dir/name`, locked for as long as the object lives."""

    def __init__(self, path: Path, lock: int, is_resumed: bool) -> None:
        self.path = path
        self.is_resumed = is_resumed
        self._lock = lock

    @classmethod
    def claim(cls, output_dir: Path, name: str, identity: Mapping[str, Any]) -> "RunFolder":
        """Lock and return a new folder, or the one that holds an unfinished run of the same job.

        Where a finished run has the name, the next free one of `name-2`, `name-3`, … is taken. Another job's unfinished
        run is left as it is, and so is a run that another process is working on.
        """
        problem = problem_with_name(name)
        if problem:
            raise DrivetrainError(
                f"a run cannot be named {name!r}: {problem}", remedy=f"choose another --name: {ALLOWED_NAMES}"
            )
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = output_dir / (name if number == 1 else f"{name}-{number}")
                if not (path / _FINISHED).exists():
                    return cls._claim(path, identity)
                number += 1
        except OSError as error:
            raise DrivetrainError(
                f"the run folder cannot be made below {output_dir}: {error.strerror}",
                remedy="name a folder you can write to with --output-dir",
            ) from None

    @classmethod
    def _claim(cls, path: Path, identity: Mapping[str, Any]) -> "RunFolder":
        if (
            path.exists()
            and not (path / _JOB).exists()
            and any(entry.name not in (_LOCK, CERTIFICATE) for entry in path.iterdir())
        ):
            raise DrivetrainError(
                f"{path} already exists and is not a run of drivetrain; it is left as it is",
                remedy="choose another --name or --output-dir",
            )
        path.mkdir(exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with this process, and not inherited by its workers
        except OSError:
            os.close(lock)
            raise DrivetrainError(
                f"{path} is in use by another run", remedy="wait for it, stop it, or choose another --name"
            ) from None
        folder = cls(path, lock, is_resumed=(path / _JOB).exists())
        if folder.is_resumed:
            folder._check_same(identity)
        else:
            folder.write(_JOB, yaml.safe_dump(dict(identity), sort_keys=False))
        return folder

    def _check_same(self, identity: Mapping[str, Any]) -> None:
        recorded = read_job(self.path)
        differences = [
            f"{key} is {identity.get(key)!r} now and was {recorded.get(key)!r}"
            for key in sorted({*identity, *recorded})
            if json.loads(json.dumps(identity.get(key))) != recorded.get(key)
        ]
        if differences:
            self.close()
            raise DrivetrainError(
                f"{self.path} holds an unfinished run of another job: {'; '.join(differences)}",
                remedy="choose another --name, or use the same settings to go on with that run",
            )

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file atomically: a crash leaves either the whole new file or the old one."""
        return write_atomically(self.path / name, content)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.write(_FINISHED, json.dumps(summary, indent=2) + "\n")

    def log(self, name: str) -> "JsonLines":
        return JsonLines(self.path / name)

    def close(self) -> None:
        """Let other processes claim the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def write_atomically(path: Path, content: str | bytes, writer: str = "") -> Path:
    """Write a file so that a crash leaves either the whole new file or the old one.

    Args:
        path: the file.
        content: all of it.
        writer: a suffix that tells apart processes which may write it at the same time.
    """
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return path


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds, as `yaml.safe_load` does; by libyaml where there is one, ten times as fast."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_job(path: Path) -> dict[str, Any]:
    """Return the identity of the job whose run a folder holds; empty where there is none."""
    try:
        found = read_yaml(path / _JOB)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DrivetrainError(f"{path / _JOB} cannot be read: {error}", remedy="choose another --name") from None
    return found if isinstance(found, dict) else {}


def is_finished(path: Path) -> bool:
    return (path / _FINISHED).exists()


class Record(Protocol):
    """A record that can be written as a line of JSON."""

    def as_json(self) -> str: ...


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a JSON-lines file, and the number of damaged lines that were left out.

    A missing file has no rows. Text after the last newline does not count as a line: a crash, or a power cut that
    leaves zeros behind, can tear it.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return [], 0
    rows = [row for line in lines if (row := as_row(line)) is not None]
    return rows, len(lines) - len(rows)


def as_row(line: bytes) -> dict[str, Any] | None:
    """Parse one line of a JSON-lines file; None if it is damaged: not UTF-8, no JSON, or no object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class JsonLines:
    """A JSON-lines file. Lines are written whole, together with those of the last second.

    Turning a record into text costs a step more than making it; in one go over many it costs a fraction. Call `flush`
    before anything that relies on the lines, such as a checkpoint: steps lost in a crash are then repeated, and their
    lines written again.
    """

    FLUSH_SECONDS = 1.0
    MOST_WAITING = 128  # more at once would hold up a loop of very short steps for longer than the device has work

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._write(b"\n")  # a torn line must not spoil the one that follows
        self._waiting: list[Mapping[str, Any] | Record] = []
        self._flushed = time.monotonic()

    def append(self, record: "Mapping[str, Any] | Record") -> None:
        self._waiting.append(record)
        if len(self._waiting) > self.MOST_WAITING or time.monotonic() - self._flushed > self.FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            lines = [
                json.dumps(record) if isinstance(record, Mapping) else record.as_json() for record in self._waiting
            ]
            self._write("".join(f"{line}\n" for line in lines).encode())
            self._waiting = []
        self._flushed = time.monotonic()

    def hold(self, record: "Mapping[str, Any] | Record") -> None:
        """Buffer a record for the next `flush` without triggering one: a full disk is not retried for every record."""
        self._waiting.append(record)

    def _write(self, data: bytes) -> None:
        """Write all of the data or nothing: a full disk takes what fits, and half a line would spoil the next."""
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def keep_up_to(self, step: int) -> int:
        """Drop the lines of steps that will be repeated, and damaged lines. Return the number of damaged ones."""
        self.flush()
        kept, num_damaged = list[bytes](), 0
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            row = as_row(line)
            at = None if row is None else row.get("step")
            if not isinstance(at, (int, float)):
                num_damaged += 1
            elif at <= step:
                kept.append(line + b"\n")
        write_atomically(self._path, b"".join(kept))
        os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return num_damaged

    def close(self) -> None:
        try:
            self.flush()
        finally:
            os.close(self._file)

"""The folder that holds all files of one run. Only one process writes to it, and never over another run."""

import atexit
import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import yaml
from pydantic_core import from_json

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice

LONGEST_NAME_BYTES = 200  # file systems take 255, and a number may follow
ALLOWED_NAMES = f"text of up to {LONGEST_NAME_BYTES} bytes without slashes and control characters, other than . and .."
_JOB, _LOCK, _FINISHED, _STEPS = "job.yaml", ".lock", "finished.json", "steps.jsonl"
_SCRIPT = ".script"  # in the folder that a script claimed last, until the script ends: see `mark_script`
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # as of Lustre without flock, or NFS without lockd
_LOCK_LAYOUT = "hhqqi"  # struct flock, as Linux has it on 64 bits: type, whence, start, length, pid
SWITCH = "compiled_from.json"  # of a run that went over to code which was compiled in the background
_OF_A_START = (
    "events.jsonl",
    "crash.json",
    "memory.json",
    "bad_steps.json",
    SWITCH,
)  # left by a start that did no step; not for another job
CHECKPOINTS = "checkpoints"  # where a run keeps them
# What a row of steps.jsonl has of itself, and `time`, for readers that add one: no logged value has such a name.
RESERVED_NAMES = (
    *("step", "epoch", "samples", "loss", "num_items", "lr", "grad_norm", "seconds", "skipped"),
    "time",
)
_LENGTH = ("num_steps", "epochs")  # what an extension changes of a job
_HISTORY = "extensions"  # in job.yaml: how a run came to be longer than it was begun
FORK = "fork.json"  # of a run that began with a checkpoint of another one
_UNCHANGED_IN_FORK = ("num_samples", "global_batch", "order")  # a step is a place in the data by these
CERTIFICATE = "certificate.json"  # of `drivetrain prove`; it may be there before the run
_DRAFT = ".{}.tmp"  # the name that a file has while it is written
# In a folder without a job: from before the run, or left by a start that was killed while it made the folder.
_BEFORE_A_JOB = (_LOCK, CERTIFICATE, _DRAFT.format(_JOB), _DRAFT.format(CERTIFICATE))


def path_now(descriptor: int) -> Path | None:
    """Return where an open file or folder is, also after it was moved; None if it was deleted, or that is not known."""
    try:
        found = Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return None
    return None if found.name.endswith(" (deleted)") else found


def problem_with_name(name: object) -> str:
    """Return why a run cannot have this name, which is that of its folder as well; empty if it can."""
    if not isinstance(name, str) or not name.strip():
        return "it is empty" if isinstance(name, str) else f"it is a {type(name).__name__}, not text"
    if "/" in name or "\\" in name or name in (".", ".."):
        return "it names another folder, and a run stays below the output folder"
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return "its bytes are no text in this terminal's encoding; `export LC_ALL=C.UTF-8` sets another"
    if not name.isprintable():
        return "it has characters that cannot be printed"
    if len(name.encode()) > LONGEST_NAME_BYTES:
        return f"it is longer than {LONGEST_NAME_BYTES} bytes"
    return ""


@dataclass(frozen=True)
class Extension:
    """Records how a run was made longer."""

    before: int | None  # its number of steps until then; None: not known beforehand
    after: int | None
    finished_at: int | None = None  # the step at which it had ended; None: it had not
    schedule: str = ""  # how the learning rate goes on: floor, stretch or rewarm; empty: as if begun longer


class RunFolder:
    """`output_dir/name`, locked for as long as the object lives."""

    def __init__(self, path: Path, lock: int, is_resumed: bool) -> None:
        self.path = path
        self.is_resumed = is_resumed
        self.moved_to: Path | None = None  # where the run is now that had this name, with `fresh`
        self.extension: Extension | None = None  # that this start makes, and `keep_extension` records
        self.make_way: Callable[[], None] | None = None  # ends the run here, where this process claims it once more
        self._identity: Mapping[str, Any] = {}
        self._lock = lock
        self._here = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # no other folder gets its inode meanwhile
        _HELD[os.getpid(), path.resolve()] = self

    @classmethod
    def claim(
        cls,
        output_dir: Path,
        name: str,
        identity: Mapping[str, Any],
        *,
        fresh: bool = False,
        extend: bool = False,
        passes_over: Callable[[Path], bool] = lambda path: False,
    ) -> "RunFolder":
        """Lock and return a new folder, or the one that holds an unfinished run of the same job.

        Where a finished run has the name, the next free one of `name-2`, `name-3`, … is taken, except where it is
        passed over: then its folder is returned. Another job's unfinished
        run is left as it is, and so is a run that another process is working on. A loop of this process that was left
        without its end, as a notebook leaves it, makes way. A folder in which no step was done is no run: any job may
        take it.

        Args:
            output_dir: The folder of all runs.
            name: The name of this one.
            identity: What must be equal for a run to be continued.
            fresh: Whether to move a run that has this name aside.
            extend: Whether to continue the run of this name, finished or not, with a job that is longer.
            passes_over: Whether the finished run in a folder is what the caller asks for, and not a new one.
        """
        problem = problem_with_name(name)
        if problem:
            raise DrivetrainError(
                f"a run cannot be named {name!r}: {problem}", remedy=f"choose another --name: {ALLOWED_NAMES}"
            )
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            path, number = output_dir.absolute() / name, 1  # a script may change its working directory later
            _end_own(path)
            if extend:
                return cls._claim(path, identity, extend=True)
            moved_to = _move_aside(path) if fresh else None
            while is_finished(path) and not passes_over(path):
                number += 1
                path = path.with_name(f"{name}-{number}")
            folder = cls._claim(path, identity)
            folder.moved_to = moved_to
            return folder
        except OSError as error:
            raise DrivetrainError(
                f"the run folder cannot be made below {output_dir}: {error.strerror or error}",
                remedy="free space there, make it writable, or name another folder with --output-dir",
            ) from None

    @classmethod
    def _claim(cls, path: Path, identity: Mapping[str, Any], *, extend: bool = False) -> "RunFolder":
        if extend and not has_steps(path):
            raise DrivetrainError(
                f"there is no run to extend in {path}",
                remedy="give the --name and --output-dir of the run; or leave --extend out to begin one",
            )
        if (
            path.exists()
            and not (path / _JOB).exists()
            and any(entry.name not in _BEFORE_A_JOB for entry in path.iterdir())
        ):
            raise DrivetrainError(
                f"{path} already exists and is not a run of drivetrain; it is left as it is",
                remedy="choose another --name or --output-dir",
            )
        path.mkdir(mode=0o700, exist_ok=True)  # records and weights may hold what others must not read
        folder = cls(path, _lock(path), is_resumed=(path / _JOB).exists())
        try:
            if extend:
                folder._check_extends(identity)
            elif (fork := read_fork(path)) is not None and not fork.begun:
                folder._begin_fork(identity, fork)
            elif has_steps(path):
                folder._check_same(identity)
            else:
                folder._begin(identity)
        except BaseException:
            folder.close()
            raise
        return folder

    def _begin(self, identity: Mapping[str, Any]) -> None:
        """Make this the folder of a job, where no step was done. What the last start left stays if the job was it."""
        try:
            changed = {key for key, *_ in differences(identity, read_job(self.path))}
        except DrivetrainError:  # damaged, and of no use to anybody
            changed = {_JOB}
        if not changed and self.is_resumed:
            return
        # Where only the batch was measured anew, what the last start learned of the memory still holds.
        for name in _OF_A_START if self.is_resumed and changed - {"global_batch", "num_steps"} else ():
            (self.path / name).unlink(missing_ok=True)
        self.is_resumed = False
        self.write(_JOB, yaml_text(dict(identity)))

    def _begin_fork(self, identity: Mapping[str, Any], fork: "Fork") -> None:
        """Give a fork to the first job that takes it. Later ones must be the same job."""
        changed = [it for it in differences(identity, read_job(self.path)) if it[0] in _UNCHANGED_IN_FORK]
        if changed:
            raise DrivetrainError(
                f"a fork of {fork.source} goes on at a place in its data, which this job has not: {_in_words(changed)}",
                remedy="keep the data and the global batch, or begin from the weights alone with --init-from",
            )
        self.write(_JOB, yaml_text(dict(identity)))
        self.write(FORK, json.dumps(fork._replace(begun=True)._asdict()) + "\n")

    def _check_same(self, identity: Mapping[str, Any]) -> None:
        changed = differences(identity, read_job(self.path))
        if changed:
            remedy = "choose another --name, use the same settings to go on with that run, or --fresh to move it aside"
            if all(key in _LENGTH for key, *_ in changed) and not _is_shorter(changed):
                remedy = f"--extend goes on with it to the new length; or {remedy}"
            raise DrivetrainError(
                f"{self.path} holds an unfinished run of another job: {_in_words(changed)}", remedy=remedy
            )

    def _check_extends(self, identity: Mapping[str, Any]) -> None:
        """Find out how much longer the job is than the run; raise if it differs in anything else."""
        recorded = read_job(self.path)
        changed = differences(identity, recorded)
        others = [it for it in changed if it[0] not in _LENGTH]
        if others:
            raise DrivetrainError(
                f"{self.path} is a run of another job, and --extend only makes a run longer: {_in_words(others)}",
                remedy="use the settings it was trained with, or another --name for a new run",
            )
        if _is_shorter(changed) or (not changed and is_finished(self.path)):
            length = f"{recorded['num_steps']} steps" if recorded.get("num_steps") else f"{recorded['epochs']} epochs"
            raise DrivetrainError(
                f"{self.path} is not made longer by this job: it has {length} already",
                remedy="ask for more with --epochs or --max-steps, which count from the beginning of the run",
            )
        if changed:
            self._identity = identity
            self.extension = Extension(recorded.get("num_steps"), identity.get("num_steps"), steps_finished(self.path))

    def keep_extension(self) -> None:
        """Record the extension, once the run is known to go on: the folder holds an unfinished run from now on."""
        if self.extension is None:
            return
        history = [asdict(it) for it in (*read_extensions(self.path), self.extension)]
        # In this order: a crash in between leaves an unfinished run that is not yet longer.
        (self.path / _FINISHED).unlink(missing_ok=True)
        self.write(_JOB, yaml_text({**self._identity, _HISTORY: history}))
        self.extension = None

    def refuse_lost(self) -> None:
        """Raise if the folder is not at its path any more: what is there now may be that of another run."""
        try:
            if os.path.samestat(self.path.stat(), os.fstat(self._here)):
                return
        except FileNotFoundError:
            pass
        except OSError:  # says nothing of where it is
            return
        moved_to = path_now(self._here)
        if moved_to is not None:
            raise DrivetrainError(
                f"{self.path} was moved to {moved_to} while its run goes on",
                remedy="move it back, and the next save is tried; if the run has ended, the same command goes on from "
                "the last checkpoint in it",
            )
        raise DrivetrainError(
            f"{self.path} was deleted while its run goes on",
            remedy="stop this run: its records and checkpoints are gone, and the same command begins it anew",
        )

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file atomically: a crash leaves either the whole new file or the old one."""
        self.refuse_lost()
        with self.writing():
            return write_atomically(self.path / name, content)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.write(_FINISHED, json.dumps(summary, indent=2) + "\n")

    def log(self, name: str, *, up_to: int | None = None) -> "JsonLines":
        """Open a file of rows; without those after a step, where one is given."""
        with self.writing():
            log = JsonLines(self.path / name)
            if up_to is not None:
                log.keep_up_to(up_to)
            return log

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raise in the user's terms what keeps a file from being written, such as a full disk."""
        try:
            yield
        except OSError as error:
            raise DrivetrainError(
                f"{self.path} cannot be written to: {error.strerror or error}",
                remedy="free space there, or make it writable; then the same command goes on. "
                "--output-dir names another folder for a new run",
            ) from error

    def close(self) -> None:
        """Let other processes claim the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            os.close(self._here)
            self._lock = self._here = -1


def write_switch(folder: Path, num_steps: int) -> None:
    """Keep after how many steps a run goes over to code that was compiled in the background."""
    write_atomically(folder / SWITCH, json.dumps({"num_eager_steps": num_steps}) + "\n")


def read_switch(folder: Path) -> int | None:
    """Return after how many steps a run went over to compiled code; None if it did not yet."""
    try:
        found = json.loads((folder / SWITCH).read_text(encoding="utf-8"))
        return int(found["num_eager_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_atomically(path: Path, content: str | bytes, writer: str = "") -> Path:
    """Write a file so that a crash leaves either the whole new file or the old one.

    Args:
        path: the file.
        content: all of it.
        writer: a suffix that tells apart processes which may write it at the same time.
    """
    temporary = path.with_name(_DRAFT.format(path.name + writer))
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


def yaml_text(value: Any, **options: Any) -> str:
    """Return a value as YAML with its keys in their order, as `yaml.safe_dump` does; by libyaml where there is one."""
    try:
        return _dumped(value, getattr(yaml, "CSafeDumper", yaml.SafeDumper), options)
    except UnicodeEncodeError:  # half a character, as in a file name that is not UTF-8: libyaml cannot escape it
        return _dumped(value, yaml.SafeDumper, options)


def _dumped(value: Any, dumper: Any, options: Mapping[str, Any]) -> str:
    text: str = yaml.dump(value, Dumper=dumper, sort_keys=False, **options)
    return text


_WITHOUT_A_JOB = (
    "to go on with it, copy a whole one there: the same job gets the same file under another --name; or --fresh moves "
    "the run aside and begins anew, and --init-from takes the weights of its checkpoints"
)


def read_job(path: Path, *, history: bool = False) -> dict[str, Any]:
    """Return the identity of the job whose run a folder holds, with its extensions if asked; empty if there is none."""
    try:
        found = read_yaml(path / _JOB)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())  # YAML says where on lines of their own
        raise DrivetrainError(f"{path / _JOB} cannot be read: {why}", remedy=_WITHOUT_A_JOB) from None
    if not isinstance(found, dict):
        raise DrivetrainError(f"{path / _JOB} is damaged: it holds no job", remedy=_WITHOUT_A_JOB)
    return found if history else {key: value for key, value in found.items() if key != _HISTORY}


def find_run(run: Path, output_dir: Path) -> Path:
    """Return the folder of a run that was named by it, or by its name below the output folder.

    Args:
        run: The folder or the name, as the user gave it.
        output_dir: The folder that holds the run folders.
    """
    for path in (run, output_dir / run):
        if (path / _JOB).exists():
            return path
    known = ", ".join(str(path.parent) for path in sorted(output_dir.glob(f"*/{_JOB}"))[:5])
    raise DrivetrainError(
        f"{run} is no folder of a run",
        remedy=f"name one of {known}" if known else f"`drivetrain status` shows those below {output_dir}",
    )


class Fork(NamedTuple):
    """Names the run and the step that a run was forked from."""

    source: str
    step: int
    begun: bool = False  # whether a job has taken it


def read_fork(path: Path) -> Fork | None:
    """Return where the run in a folder was forked from; None where it was not."""
    try:
        return Fork(**json.loads((path / FORK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_extensions(path: Path) -> list[Extension]:
    """Return how the run in a folder was made longer, the first time first."""
    return [Extension(**it) for it in read_job(path, history=True).get(_HISTORY, [])]


def differences(identity: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the values of a job that are not those recorded: the name of each, and what it is now and was."""
    now = json.loads(json.dumps(identity))
    return [
        (key, now.get(key), recorded.get(key)) for key in sorted({*now, *recorded}) if now.get(key) != recorded.get(key)
    ]


def _is_shorter(changed: Sequence[tuple[str, Any, Any]]) -> bool:
    return any(key in _LENGTH and None not in (now, was) and now < was for key, now, was in changed)


def _in_words(changed: Sequence[tuple[str, Any, Any]]) -> str:
    return "; ".join(f"{key} is {now!r} now and was {was!r}" for key, now, was in changed)


def is_finished(path: Path) -> bool:
    return (path / _FINISHED).exists()


def steps_finished(path: Path) -> int | None:
    """Return the steps that a finished run did; None if it is not finished."""
    try:
        return int(json.loads((path / _FINISHED).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def has_steps(path: Path) -> bool:
    """Return whether the folder holds a run: a step of it was recorded or saved."""
    steps = path / _STEPS
    return (steps.exists() and steps.stat().st_size > 0) or any((path / "checkpoints").glob("step-*"))


# Locks of POSIX do not keep a process from locking twice: the folders that this process has.
_HELD: weakref.WeakValueDictionary[tuple[int, Path], RunFolder] = weakref.WeakValueDictionary()


def _end_own(path: Path) -> None:
    """End the run that this process has in a folder, if it is a loop; raise if it is in the middle of training it."""
    held = _HELD.get((os.getpid(), path.resolve()))
    if held is None or held._lock < 0:
        return
    if held.make_way is None:
        raise DrivetrainError(
            f"{path} is in use by another run of this very process", remedy="give each run a name of its own"
        )
    held.make_way()


def _lock(path: Path) -> int:
    """Lock a run folder for this process. Where the file system has no locks, that is told, and the run goes on."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with this process, and not inherited by its workers
    except OSError as error:
        if error.errno in _NO_LOCKS:
            notice(
                f"the file system of {path} has no locks ({error.strerror}): a second run in this folder at the same "
                "time would not be noticed, so start only one"
            )
            return lock
        os.close(lock)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise DrivetrainError(
            f"{path} is in use by another run", remedy="wait for it, stop it, or choose another --name"
        ) from None
    return lock


def is_held(path: Path) -> bool:
    """Return whether a process works on the run in a folder, by its lock.

    The lock is not taken: a run that starts now must not find it taken.
    """
    own = _HELD.get((os.getpid(), path.resolve()))
    if own is not None and own._lock >= 0:
        return True  # and closing another file of this lock would free it
    return _is_locked(path / _LOCK) is True


def _is_locked(path: Path) -> bool | None:
    """Return whether another process has locked a file; None where that is not known, or there is none."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        asked = struct.pack(_LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found = struct.unpack(_LOCK_LAYOUT, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        return bool(found[0] != fcntl.F_UNLCK)
    except OSError:
        return None
    finally:
        os.close(file)


_marks: dict[Path, int] = {}  # of this process, and the files that hold their locks


def mark_script(path: Path) -> None:
    """Mark a run folder as the last one that the script of this process claimed, until it claims another or ends.

    A process that is killed leaves its mark behind, without the lock: `is_script_killed`. Processes that the script
    forks for its jobs do not mark them: many of them end by a signal.
    """
    if path in _marks or multiprocessing.parent_process() is not None:
        return
    with contextlib.suppress(OSError):  # another process may have it, or the file system no locks
        mark = os.open(path / _SCRIPT, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(mark)
            raise
        _unmark()
        _marks[path] = mark


def is_script_killed(path: Path) -> bool:
    """Return whether the script that claimed a run folder last was killed before it ended or claimed another."""
    return path not in _marks and _is_locked(path / _SCRIPT) is False


@atexit.register
def _unmark() -> None:
    while _marks and multiprocessing.parent_process() is None:
        path, mark = _marks.popitem()
        with contextlib.suppress(OSError):
            (path / _SCRIPT).unlink(missing_ok=True)
        os.close(mark)


def _move_aside(path: Path) -> Path | None:
    """Rename the folder of a run to the first free one of `name.old-1`, `name.old-2`, …; None if it holds no run."""
    if not (path / _JOB).exists() or not has_steps(path):
        return None
    lock = _lock(path)
    try:
        number = 1
        while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
            number += 1
        (path / _SCRIPT).unlink(missing_ok=True)
        path.rename(aside)
        return aside
    finally:
        os.close(lock)


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
        found = from_json(line)  # a third of the time of `json`, which knows halves of characters as well
    except ValueError:
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
        found = os.fstat(self._file)
        size, self._counts_links = found.st_size, found.st_nlink > 0  # some file systems do not count them
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
        found = os.fstat(self._file)
        if self._counts_links and not found.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was deleted", str(self._path))
        size = found.st_size
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

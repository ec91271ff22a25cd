"""A run folder: continued by its own job, never overwritten by another, never shared."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import (
    Extension,
    JsonLines,
    RunFolder,
    is_script_killed,
    read_extensions,
    read_job,
    read_rows,
    yaml_text,
)

JOB = {"seed": 1, "global_batch": 8, "num_steps": 10}


def with_a_step(folder: RunFolder) -> RunFolder:
    folder.write("steps.jsonl", '{"step": 1}\n')
    folder.close()
    return folder


def test_an_unfinished_run_of_the_same_job_is_continued(tmp_path: Path) -> None:
    first = RunFolder.claim(tmp_path, "mine", JOB)
    assert not first.is_resumed
    first.close()
    again = RunFolder.claim(tmp_path, "mine", JOB)
    assert again.is_resumed
    assert again.path == first.path
    assert read_job(again.path) == JOB


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    for expected in ("mine", "mine-2", "mine-3"):
        folder = RunFolder.claim(tmp_path, "mine", JOB)
        assert folder.path.name == expected
        assert not folder.is_resumed
        folder.finish({})
        folder.close()


def test_another_job_is_refused_with_the_difference(tmp_path: Path) -> None:
    with_a_step(RunFolder.claim(tmp_path, "mine", JOB))
    with pytest.raises(DrivetrainError, match="seed is 2 now and was 1") as caught:
        RunFolder.claim(tmp_path, "mine", {**JOB, "seed": 2})
    assert "--name" in caught.value.remedy
    assert RunFolder.claim(tmp_path, "mine", JOB).is_resumed  # and the lock was let go


def test_a_folder_without_a_step_is_no_run(tmp_path: Path) -> None:
    first = RunFolder.claim(tmp_path, "mine", JOB)
    for name in ("events.jsonl", "crash.json", "memory.json", "notes.txt", "certificate.json"):
        first.write(name, "of the first")
    first.close()
    RunFolder.claim(tmp_path, "mine", {**JOB, "global_batch": 4}).close()  # of the same job, measured anew
    assert (first.path / "memory.json").exists()
    other = RunFolder.claim(tmp_path, "mine", {**JOB, "seed": 2})
    assert other.path == first.path
    assert not other.is_resumed
    assert read_job(other.path)["seed"] == 2
    kept = sorted(path.name for path in other.path.iterdir())
    assert kept == [".lock", "certificate.json", "job.yaml", "notes.txt"]


def test_a_checkpoint_alone_is_a_run(tmp_path: Path) -> None:
    first = RunFolder.claim(tmp_path, "mine", JOB)
    (first.path / "checkpoints" / "step-00000003").mkdir(parents=True)
    first.close()
    with pytest.raises(DrivetrainError, match="unfinished run of another job"):
        RunFolder.claim(tmp_path, "mine", {**JOB, "seed": 2})


@pytest.mark.parametrize(("num_steps", "is_longer"), [(20, True), (5, False)])
def test_extend_is_suggested_for_a_longer_run_alone(tmp_path: Path, num_steps: int, is_longer: bool) -> None:
    with_a_step(RunFolder.claim(tmp_path, "mine", {**JOB, "num_steps": 10}))
    with pytest.raises(DrivetrainError, match="unfinished run of another job") as caught:
        RunFolder.claim(tmp_path, "mine", {**JOB, "num_steps": num_steps})
    assert ("--extend" in caught.value.remedy) is is_longer


@pytest.mark.parametrize("text", ["", "garbage", "- 1"])
def test_a_damaged_job_is_not_another_one(tmp_path: Path, text: str) -> None:
    with_a_step(RunFolder.claim(tmp_path, "mine", JOB))
    (tmp_path / "mine" / "job.yaml").write_text(text)
    with pytest.raises(DrivetrainError, match=r"job\.yaml is damaged"):
        RunFolder.claim(tmp_path, "mine", JOB)


def test_fresh_moves_a_run_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        old = with_a_step(RunFolder.claim(tmp_path, "mine", {**JOB, "seed": number}))
        new = RunFolder.claim(tmp_path, "mine", {**JOB, "seed": number + 1}, fresh=True)
        assert new.path == old.path
        assert new.moved_to == tmp_path / f"mine.old-{number}"
        assert read_job(new.moved_to)["seed"] == number
        assert (new.moved_to / "steps.jsonl").exists()
        assert not (new.path / "steps.jsonl").exists()
        new.close()
    assert RunFolder.claim(tmp_path, "mine", JOB, fresh=True).moved_to is None  # there was no step in it
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("work")
    with pytest.raises(DrivetrainError, match="is not a run of drivetrain"):
        RunFolder.claim(tmp_path, "other", JOB, fresh=True)


LONGER = {**JOB, "num_steps": 20}


def test_a_finished_run_is_extended(tmp_path: Path) -> None:
    first = with_a_step(RunFolder.claim(tmp_path, "mine", JOB))
    first.finish({"steps": 10})
    folder = RunFolder.claim(tmp_path, "mine", LONGER, extend=True)
    assert folder.path == first.path
    assert folder.extension == Extension(10, 20, 10)
    assert read_job(folder.path) == JOB  # until the run is known to go on
    folder.keep_extension()
    folder.close()
    assert read_job(folder.path) == LONGER
    assert read_extensions(folder.path) == [Extension(10, 20, 10)]
    for extend in (True, False):  # the same command again, and without the flag
        again = RunFolder.claim(tmp_path, "mine", LONGER, extend=extend)
        assert again.path == first.path
        assert again.extension is None
        again.close()
    longest = RunFolder.claim(tmp_path, "mine", {**JOB, "num_steps": 30}, extend=True)  # while it is unfinished
    longest.keep_extension()
    assert read_extensions(first.path) == [Extension(10, 20, 10), Extension(20, 30, None)]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({**LONGER, "seed": 2}, "only makes a run longer: seed is 2 now and was 1"),
        ({**JOB, "num_steps": 5}, "it has 10 steps already"),
        (JOB, "it has 10 steps already"),
    ],
)
def test_what_is_no_extension_is_refused_and_changes_nothing(tmp_path: Path, job: dict, words: str) -> None:
    first = with_a_step(RunFolder.claim(tmp_path, "mine", JOB))
    first.finish({"steps": 10})
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    with pytest.raises(DrivetrainError, match=words):
        RunFolder.claim(tmp_path, "mine", job, extend=True)
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before
    with pytest.raises(DrivetrainError, match="no run to extend"):
        RunFolder.claim(tmp_path, "another", LONGER, extend=True)
    assert not (tmp_path / "another").exists()


def test_a_longer_job_is_told_of_extend(tmp_path: Path) -> None:
    with_a_step(RunFolder.claim(tmp_path, "mine", JOB))
    with pytest.raises(DrivetrainError, match="num_steps is 20 now and was 10") as caught:
        RunFolder.claim(tmp_path, "mine", LONGER)
    assert "--extend" in caught.value.remedy


def _try_to_claim(folder: Path, answer) -> None:
    try:
        RunFolder.claim(folder, "mine", JOB)
    except DrivetrainError as error:
        answer.send(str(error))
    else:
        answer.send("claimed")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    held = RunFolder.claim(tmp_path, "mine", JOB)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    for expected in ("is in use by another run", "claimed"):
        child = context.Process(target=_try_to_claim, args=(tmp_path, there))
        child.start()
        assert expected in here.recv()
        child.join()
        held.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_a_folder_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def without_locks(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", without_locks)
    folder = RunFolder.claim(tmp_path, "mine", JOB)
    assert folder.finish({"steps": 10}) is None
    assert "has no locks" in capsys.readouterr().err


def test_a_lock_that_fails_is_told_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(DrivetrainError, match=r"cannot be made below .*: Input/output error"):
        RunFolder.claim(tmp_path, "mine", JOB)


def test_nothing_is_written_where_the_folder_is_not_any_more(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path, "mine", JOB)
    moved = folder.path.rename(tmp_path / "elsewhere")
    with pytest.raises(DrivetrainError, match=f"mine was moved to {moved} while its run goes on") as caught:
        folder.finish({"steps": 10})
    assert "move it back" in caught.value.remedy
    folder.path.mkdir()  # another run has the name
    with pytest.raises(DrivetrainError, match="was moved to"):
        folder.finish({"steps": 10})
    folder.path.rmdir()
    moved.rename(folder.path)
    folder.finish({"steps": 10})
    shutil.rmtree(folder.path)
    with pytest.raises(DrivetrainError, match="mine was deleted while its run goes on"):
        folder.finish({"steps": 10})


def test_lines_of_a_deleted_file_are_not_lost_in_silence(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"step": 1})
    log.flush()
    (tmp_path / "log.jsonl").unlink()
    log.append({"step": 2})
    with pytest.raises(FileNotFoundError, match="it was deleted"):
        log.flush()


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("work")
    with pytest.raises(DrivetrainError, match="is not a run of drivetrain"):
        RunFolder.claim(tmp_path, "mine", JOB)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


# Claims a folder, and is killed before the n-th thing that it does to files.
CLAIM_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from drivetrain.core.run_folder import RunFolder
left = int(sys.argv[1])
def kill(event, arguments):
    global left
    left -= event in ("open", "os.mkdir", "os.rename", "os.remove", "fcntl.lockf")
    if left == 0:
        left = -1  # the kill is such an event, too
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
RunFolder.claim(Path(sys.argv[1]), "mine", {"seed": 1, "global_batch": 8, "num_steps": 10})
os._exit(0)
"""


def test_a_kill_while_a_folder_is_made_does_not_keep_its_name(tmp_path: Path) -> None:
    left = set[tuple[str, ...]]()
    for moment in range(1, 100):
        command = [sys.executable, "-c", CLAIM_UNTIL_KILLED, str(moment)]
        if not (code := subprocess.run(command, cwd=tmp_path, timeout=240, check=False).returncode):
            break
        assert code == -signal.SIGKILL
        folder = tmp_path / str(moment) / "mine"
        left.add(tuple(sorted(path.name for path in folder.iterdir())) if folder.exists() else ())
        claimed = RunFolder.claim(tmp_path / str(moment), "mine", JOB)
        assert read_job(claimed.path) == JOB
        assert sorted(path.name for path in claimed.path.iterdir()) == [".lock", "job.yaml"]
        claimed.close()
    assert left >= {(), (".lock",), (".job.yaml.tmp", ".lock")}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DrivetrainError, match="cannot be made") as caught:
        RunFolder.claim(tmp_path / "file" / "runs", "mine", JOB)
    assert "--output-dir" in caught.value.remedy


def test_files_are_whole_and_lines_are_json(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path, "mine", JOB)
    folder.write("a.txt", "one")
    folder.write("a.txt", "two")
    assert (folder.path / "a.txt").read_text() == "two"
    log = folder.log("steps.jsonl")
    for step in range(1, 6):
        log.append({"step": step})
    log.flush()
    with (folder.path / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # torn by a crash
    log.keep_up_to(3)
    log.append({"step": 4, "again": True})
    log.close()
    lines = [json.loads(line) for line in (folder.path / "steps.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "a.txt", "job.yaml", "steps.jsonl"]


def test_lines_are_written_within_a_second_and_at_once_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = RunFolder.claim(tmp_path, "mine", JOB).log("steps.jsonl")
    log.append({"step": 1})
    assert (tmp_path / "mine" / "steps.jsonl").read_text() == ""
    log.flush()
    assert (tmp_path / "mine" / "steps.jsonl").read_text() == '{"step": 1}\n'
    now += JsonLines.FLUSH_SECONDS + 0.05
    log.append({"step": 2})
    assert (tmp_path / "mine" / "steps.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("tail", [b"\0" * 300, b"\xff\xfe{x", b'{"step": 7, "lo', b"\xff\n", b"7\n", b"{}\n\0"])
def test_what_a_power_cut_leaves_behind_is_no_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    rows = [{"step": 1}, {"step": 2}, {"step": 3}]
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + tail)
    whole, _ = read_rows(path)
    assert [row for row in whole if row] == rows
    log = JsonLines(path)
    log.append({"step": 4})
    log.flush()
    assert [row for row in read_rows(path)[0] if row] == [*rows, {"step": 4}]  # not glued to what was torn
    assert log.keep_up_to(2) == tail.count(b"\n") + (not tail.endswith(b"\n"))
    log.append({"step": 3})
    log.close()
    assert read_rows(path) == (rows, 0)


@pytest.mark.parametrize("name", ["../up", "/tmp/up", "..", "", "a/b", "a\tb"])
def test_no_run_leaves_the_output_folder(tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.parent.iterdir())
    with pytest.raises(DrivetrainError, match="a run cannot be named"):
        RunFolder.claim(tmp_path / "runs", name, {})
    assert sorted(tmp_path.parent.iterdir()) == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text", ["plain", "ä – 日本", "two\nlines", "yes", "1e-5", " spaces ", "a: b #" * 40, "", "half a character \udcff"]
)
def test_yaml_is_what_pyyaml_writes(text: str) -> None:
    """Also where libyaml writes it, which cannot do half a character."""
    value = {"z": text, "a": [1, 2.5, None, True, float("inf"), {"b": [text]}]}
    assert yaml_text(value, width=120) == yaml.safe_dump(value, sort_keys=False, width=120)


def test_a_script_that_is_killed_leaves_its_mark(tmp_path: Path) -> None:
    """It is that of the folder it claimed last, and holds once the process is gone; its end takes the mark away."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom drivetrain.core.run_folder import is_script_killed, mark_script\n"
        "for name in ('one', 'two', 'two'):\n"
        "    Path(name).mkdir(exist_ok=True)\n    mark_script(Path(name).absolute())\n"
        "assert not is_script_killed(Path('two').absolute())\n"
        "print('marked', flush=True)\nsys.stdin.read()\n"
    )

    def start() -> subprocess.Popen[str]:
        script = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert script.stdout is not None
        assert script.stdout.readline() == "marked\n"
        return script

    def are_killed() -> tuple[bool, bool]:
        return is_script_killed(tmp_path / "one"), is_script_killed(tmp_path / "two")

    with start() as script:
        assert are_killed() == (False, False)
        script.kill()
    assert are_killed() == (False, True)
    with start() as script:
        assert are_killed() == (False, False)
        script.communicate("")
    assert script.returncode == 0
    assert are_killed() == (False, False)

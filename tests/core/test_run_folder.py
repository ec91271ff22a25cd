"""A run folder: continued by its own job, never overwritten by another, never shared."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import JsonLines, RunFolder, read_job, read_rows

JOB = {"seed": 1, "global_batch": 8}


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
    RunFolder.claim(tmp_path, "mine", JOB).close()
    with pytest.raises(DrivetrainError, match="seed is 2 now and was 1") as caught:
        RunFolder.claim(tmp_path, "mine", {**JOB, "seed": 2})
    assert "--name" in caught.value.remedy
    assert RunFolder.claim(tmp_path, "mine", JOB).is_resumed  # and the lock was let go


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


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("work")
    with pytest.raises(DrivetrainError, match="is not a run of drivetrain"):
        RunFolder.claim(tmp_path, "mine", JOB)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


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

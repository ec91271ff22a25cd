"""A run folder is never overwritten."""

import json
from pathlib import Path

import pytest

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import RunFolder


def test_the_default_name_gets_a_number(tmp_path: Path) -> None:
    made = [RunFolder.create(tmp_path / "runs", None, "digits").path.name for _ in range(3)]
    assert made == ["digits", "digits-2", "digits-3"]


def test_a_given_name_must_be_free(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "mine", "digits")
    folder.write("kept.txt", "work")
    with pytest.raises(DrivetrainError, match="is there already") as caught:
        RunFolder.create(tmp_path, "mine", "digits")
    assert "--name" in caught.value.remedy
    assert (tmp_path / "mine" / "kept.txt").read_text() == "work"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DrivetrainError, match="cannot be made") as caught:
        RunFolder.create(tmp_path / "file" / "runs", None, "digits")
    assert "--output-dir" in caught.value.remedy


def test_files_are_whole_and_lines_are_json(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, None, "digits")
    folder.write("a.txt", "one")
    folder.write("a.txt", "two")
    assert (folder.path / "a.txt").read_text() == "two"
    for step in range(3):
        folder.append("steps.jsonl", {"step": step})
    lines = (folder.path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert sorted(path.name for path in folder.path.iterdir()) == ["a.txt", "steps.jsonl"]

"""What is wrong with the user's files is reported with file and line: the first ten, and the count of the rest."""

import csv
import gzip
import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from drivetrain import ConfigError
from drivetrain.core.errors import DrivetrainError, InputError
from drivetrain.data.files import BadInput, read_idx, read_image, read_table

COLUMNS = ("text", "label")


def problems(path: Path) -> list[str]:
    """The lines that a user would see of a table, without heading and remedy."""
    bad = BadInput()
    read_table(path, COLUMNS, bad)
    with pytest.raises(InputError) as caught:
        bad.raise_if_any("mend it")
    assert caught.value.exit_code == 2
    return caught.value.message.splitlines()[1:]


def test_the_first_ten_and_the_count_of_the_rest() -> None:
    bad = BadInput()
    bad.raise_if_any("nothing to mend")
    for line in range(2, 1236):
        bad.add("mails.csv", "the text is empty", line=line)
    with pytest.raises(InputError) as caught:
        bad.raise_if_any("fill them in")
    said = str(caught.value).splitlines()
    assert said[0] == "1,234 problems with the input:"
    assert said[1:11] == [f"  mails.csv line {line}: the text is empty" for line in range(2, 12)]
    assert said[11:] == ["  and 1,224 more", "  remedy: fill them in"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "text,tag\nhello,1\n", ["line 1: there is no column 'label'; the columns are 'text', 'tag'"]),
        ("a.csv", "text,label\nhello, world,1\n", ["line 2: it has 3 fields, and the header has 2"]),
        ("a.csv", 'text,label\n"a\nb",0\n\nhello\n', ["line 5: it has 1 field, and the header has 2"]),
        (
            "a.csv",
            'text,label\nfine,0\n"open,1\nmore,1\n',
            ["line 3: this row cannot be parsed: unexpected end of data"],
        ),
        ("a.csv", b"text,label\ncaf\xe9,1\n", ["line 2: it is not UTF-8"]),
        ("a.csv", "text,label\n", ["the table has no rows"]),
        ("a.csv", "", ["the table has no rows"]),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', ["line 2: there is no value for 'label'"]),
        ("a.jsonl", '{"text": "a", "label": null}\n', ["line 1: there is no value for 'label'"]),
        ("a.jsonl", '{"text": ["a"], "label": 1}\n', ["line 1: 'text' holds a list or an object"]),
        ("a.jsonl", '{"text": "a"\n[1]\n', ["line 1: it is not JSON", "line 2: it is a JSON list"]),
        ("a.jsonl", b'{"text": "caf\xe9", "label": 1}\n', ["line 1: it is not UTF-8"]),
    ],
)
def test_rows_that_cannot_be_read(tmp_path: Path, name: str, content: str | bytes, expected: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = problems(path)
    assert len(found) == len(expected)
    for line, words in zip(found, expected, strict=True):
        place = f"  {path} {words}" if words.startswith("line") else f"  {path}: {words}"
        assert line.startswith(place)


def test_good_rows_stay_beside_bad_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("﻿label,text\n1,one\ntwo\n3,three\n".encode())  # with the mark that spreadsheets write
    bad = BadInput()
    rows = read_table(path, COLUMNS, bad)
    assert [(row.line, row["text"], row["label"]) for row in rows] == [(2, "one", "1"), (4, "three", "3")]
    assert bad.count == 1


@pytest.mark.parametrize(("name", "words"), [("a.xlsx", "ends in .csv, .tsv, .jsonl"), ("gone.csv", "No such file")])
def test_a_file_that_is_no_table(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_table(tmp_path / name, COLUMNS, BadInput())


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=8), kind=st.sampled_from(["csv", "tsv", "jsonl"]))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list, kind: str) -> None:
    path = tmp_path_factory.mktemp("table") / f"a.{kind}"
    if kind == "jsonl":
        text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    else:
        file = io.StringIO()
        writer = csv.writer(file, delimiter="," if kind == "csv" else "\t", quoting=csv.QUOTE_ALL)
        writer.writerows([COLUMNS, *rows])
        text = file.getvalue()
    path.write_bytes(text.encode())
    bad = BadInput()
    found = read_table(path, COLUMNS, bad)
    assert bad.count == 0
    assert [(row["text"], row["label"]) for row in found] == rows


def test_numbers_of_json_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 1.50, "label": 1}\n{"text": "x", "label": true}\n')
    rows = read_table(path, COLUMNS, BadInput())
    assert [dict(row.values) for row in rows] == [{"text": "1.5", "label": "1"}, {"text": "x", "label": "true"}]


def test_images_decode_or_are_reported(tmp_path: Path) -> None:
    pixels = np.zeros((64, 96, 3), dtype=np.uint8)
    pixels[..., 0] = 200
    Image.fromarray(pixels).save(tmp_path / "red.png")
    noise = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    whole = (tmp_path / "noise.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("not an image")
    bad, table = BadInput(), tmp_path / "pairs.csv"
    image = read_image(tmp_path / "red.png", 8, bad)
    assert image is not None
    assert image.dtype == torch.uint8
    assert torch.equal(image, torch.tensor([200, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8))
    gray = read_image(tmp_path / "red.png", 8, bad, mode="L")
    assert gray is not None
    assert gray.shape == (1, 8, 8)
    assert read_image(tmp_path / "torn.png", 8, bad, named_in=(table, 3)) is None
    assert read_image(tmp_path / "text.png", 8, bad) is None
    assert read_image(tmp_path / "gone.png", 8, bad, named_in=(table, 5)) is None
    with pytest.raises(InputError) as caught:
        bad.raise_if_any("replace them")
    _, torn, text, gone = caught.value.message.splitlines()
    assert torn.startswith(f"  {table} line 3: {tmp_path / 'torn.png'}: it does not decode")
    assert text == f"  {tmp_path / 'text.png'}: it is not an image of a known format"
    assert gone == f"  {table} line 5: {tmp_path / 'gone.png'}: there is no such image"


SHORTS = bytes([0, 0, 0x0B, 2]) + struct.pack(">II6h", 2, 3, 1, -2, 3, 300, -400, 5)


@pytest.mark.parametrize("compressed", [False, True])
def test_numbers_come_back(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(SHORTS) if compressed else SHORTS)
    found = read_idx(path)
    assert found.dtype == torch.int16
    assert found.tolist() == [[1, -2, 3], [300, -400, 5]]


def test_bytes_and_reals(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 0, 128, 255]))
    assert read_idx(path).tolist() == [0, 128, 255]
    path.write_bytes(bytes([0, 0, 0x0E, 1]) + struct.pack(">Id", 1, 0.1))
    assert read_idx(path).tolist() == [0.1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (SHORTS[:-1], "is torn: 11 bytes"),
        (SHORTS + b"x", "is torn: 13 bytes"),
        (b"\x89PNG....", "is not an IDX file"),
        (b"", "is not an IDX file"),
        (gzip.compress(SHORTS, mtime=0)[:-12], "cannot be read"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DrivetrainError, match=words):
        read_idx(path)
    with pytest.raises(DrivetrainError, match="cannot be read"):
        read_idx(tmp_path / "missing")

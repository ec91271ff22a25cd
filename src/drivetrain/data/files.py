"""Reads the user's files: tables (CSV, TSV, JSON lines), images, and arrays in the IDX format of MNIST.

What cannot be read is collected with its file and line, and reported all at once, before anything is written.
"""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError, DrivetrainError, InputError, Problem

SHOWN = 10  # problems that are printed in full; the rest is counted


class BadInput:
    """Keeps the first ten problems with their file and line, and counts the rest.

    Example:
        >>> bad = BadInput()
        >>> bad.add("mails.csv", "the text is empty", line=7)
        >>> bad.count
        1
        >>> bad.raise_if_any(remedy="fill in the rows, or remove them")
        Traceback (most recent call last):
            ...
        drivetrain.core.errors.InputError: 1 problem with the input:
          mails.csv line 7: the text is empty
          remedy: fill in the rows, or remove them
    """

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, file: Path | str, message: str, *, line: int | None = None) -> None:
        """Record one problem.

        Args:
            file: The file that holds it, as the user would write its path.
            message: What is wrong there, with the value that was found and what is allowed.
            line: The line in the file, from 1; None where the whole file is meant, such as an image.
        """
        self.count += 1
        if len(self._shown) < SHOWN:
            place = f"{file}" if line is None else f"{file} line {line}"
            self._shown.append(f"  {place}: {message}")

    def raise_if_any(self, remedy: str) -> None:
        """Raise an `InputError` (exit code 2) that lists the problems, if there are any.

        Args:
            remedy: What the user can do about them.
        """
        if not self.count:
            return
        heading = "1 problem with the input:" if self.count == 1 else f"{self.count:,} problems with the input:"
        rest = self.count - len(self._shown)
        more = [f"  and {rest:,} more"] if rest else []
        raise InputError("\n".join([heading, *self._shown, *more]), remedy=remedy)


DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
_UNDECODED = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of bytes that are not UTF-8
_LARGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """One row of a table, with the line it begins on."""

    line: int
    values: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.values[column]


def read_table(path: Path, columns: Sequence[str], bad: BadInput, *, key: str = "--data") -> list[Row]:
    """Read the named columns of a `.csv`, `.tsv`, `.jsonl` or `.ndjson` file, as text.

    Rows that cannot be read are left out and added to `bad`: a missing column or value, a wrong number of fields, bytes
    that are not UTF-8, JSON that is not an object. Numbers and booleans of JSON are taken as they are written.

    Args:
        path: The file.
        columns: The columns that are needed; others are passed over.
        bad: Gets every problem with its line; the caller raises it.
        key: The flag or key that named the file, for the error if it cannot be opened.

    Example:
        >>> bad = BadInput()
        >>> Path("mails.csv").write_text("text,label\\nhello,0\\n")
        19
        >>> read_table(Path("mails.csv"), ("text", "label"), bad)[0]["text"]
        'hello'
    """
    kind = path.suffix.lower()
    if kind not in (*DELIMITERS, *JSON_LINES):
        allowed = f"a file that ends in {', '.join((*DELIMITERS, *JSON_LINES))}"
        raise ConfigError([Problem(key, f"{path} is not a table", str(path), allowed=allowed, remedy="convert it")])
    before = bad.count
    try:
        if kind in JSON_LINES:
            rows = list(_json_rows(path, columns, bad))
        else:
            rows = _delimited_rows(path, columns, bad, DELIMITERS[kind])
    except OSError as error:
        problem = Problem(key, f"{path}: {error.strerror}", str(path), remedy="give the path of a table")
        raise ConfigError([problem]) from None
    if not rows and bad.count == before:
        bad.add(path, "the table has no rows")
    return rows


def _delimited_rows(path: Path, columns: Sequence[str], bad: BadInput, delimiter: str) -> list[Row]:
    limit = csv.field_size_limit(_LARGEST_FIELD)  # a process-wide setting, and a mail can be longer than its default
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            return list(_parsed(csv.reader(file, delimiter=delimiter, strict=True), path, columns, bad))
    finally:
        csv.field_size_limit(limit)


def _parsed(reader: Any, path: Path, columns: Sequence[str], bad: BadInput) -> Iterator[Row]:
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:  # such as a quote that is never closed; what follows cannot be told apart
            bad.add(path, f"this row cannot be parsed: {error}", line=line)
            return
        if fields is None:
            return
        if not fields:
            continue  # a blank line
        if header is None:
            header = [field.strip() for field in fields]
            missing = [column for column in columns if column not in header]
            if missing:
                words = ", ".join(map(repr, missing))
                bad.add(path, f"there is no column {words}; the columns are {', '.join(map(repr, header))}", line=line)
                return
            places = {column: header.index(column) for column in columns}
        elif len(fields) != len(header):
            found = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            bad.add(path, f"it has {found}, and the header has {len(header)}", line=line)
        elif any(map(_UNDECODED.search, fields)):
            bad.add(path, "it is not UTF-8", line=line)
        else:
            yield Row(line, {column: fields[place] for column, place in places.items()})


def json_objects(path: Path, bad: BadInput) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON-lines file, each with its line; lines that are none are added to `bad`."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            if _UNDECODED.search(text):
                bad.add(path, "it is not UTF-8", line=line)
                continue
            try:
                found = json.loads(text)
            except (ValueError, RecursionError) as error:
                bad.add(path, f"it is not JSON: {error}", line=line)
                continue
            if isinstance(found, dict):
                yield line, found
            else:
                bad.add(path, f"it is a JSON {type(found).__name__}, and a row is an object", line=line)


def _json_rows(path: Path, columns: Sequence[str], bad: BadInput) -> Iterator[Row]:
    for line, found in json_objects(path, bad):
        missing = [column for column in columns if found.get(column) is None]
        nested = [column for column in columns if isinstance(found.get(column), (list, dict))]
        if missing:
            words = ", ".join(map(repr, missing))
            bad.add(path, f"there is no value for {words}; its keys are {', '.join(map(repr, found))}", line=line)
        elif nested:
            bad.add(path, f"{nested[0]!r} holds a list or an object, and a text or a number is needed", line=line)
        else:
            yield Row(line, {column: _as_text(found[column]) for column in columns})


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_image(
    path: Path, size: int, bad: BadInput, *, mode: Literal["L", "RGB"] = "RGB", named_in: tuple[Path, int] | None = None
) -> Tensor | None:
    """Decode an image to a `uint8` tensor of (channels, size, size); None on failure, which is added to `bad`.

    Args:
        path: The image, in any format that Pillow reads.
        size: Height and width of the result; the image is stretched to it.
        bad: Gets the problem if the image is missing, torn or of an unknown format.
        mode: `RGB` for three channels, `L` for one.
        named_in: The table and its line that name the image, for the message.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)  # cameras store photographs lying on their side
            pixels = np.asarray(upright.convert(mode).resize((size, size), Image.Resampling.BILINEAR))
    except FileNotFoundError:
        problem = "there is no such image"
    except UnidentifiedImageError:
        problem = "it is not an image of a known format"
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        problem = f"it does not decode: {error}"
    else:
        tensor = torch.from_numpy(pixels.copy())
        return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.permute(2, 0, 1).contiguous()
    if named_in is None:
        bad.add(path, problem)
    else:
        bad.add(named_in[0], f"{path}: {problem}", line=named_in[1])
    return None


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Tensor:
    """Read the array of a file: two zero bytes, its type, the number of dimensions, each of them, then its elements."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, f"cannot be read: {error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise _bad(path, "is not an IDX file: it begins with other bytes")
    kind, num_dims = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * num_dims
    shape = [int.from_bytes(content[place : place + 4], "big") for place in range(4, start, 4)]
    if len(content) != start + math.prod(shape) * kind.itemsize:
        found = len(content) - start
        raise _bad(path, f"is torn: {found} bytes of elements where {shape} needs {math.prod(shape) * kind.itemsize}")
    values = np.frombuffer(content, kind, offset=start).reshape(shape)
    return torch.from_numpy(values.astype(kind.newbyteorder("=")))


def _bad(path: Path, what: str) -> DrivetrainError:
    return DrivetrainError(f"{path} {what}", remedy="delete it and fetch it again")

"""Reads the user's tables: CSV, TSV, and JSON lines. Rows that do not fit are collected with their line."""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.bad_input import BadInput

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
    that are not UTF-8, JSON that is no object. Numbers and booleans of JSON are taken as they are written.

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
        raise ConfigError([Problem(key, f"{path} is none", str(path), allowed=allowed, remedy="convert it")])
    before = bad.count
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if kind in JSON_LINES:
                rows = list(_json_rows(file, path, columns, bad))
            else:
                rows = _delimited_rows(file, path, columns, bad, DELIMITERS[kind])
    except OSError as error:
        problem = Problem(key, f"{path}: {error.strerror}", str(path), remedy="give the path of a table")
        raise ConfigError([problem]) from None
    if not rows and bad.count == before:
        bad.add(path, "the table has no rows")
    return rows


def _delimited_rows(file: Any, path: Path, columns: Sequence[str], bad: BadInput, delimiter: str) -> list[Row]:
    limit = csv.field_size_limit(_LARGEST_FIELD)  # a process-wide setting, and a mail can be longer than its default
    try:
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


def _json_rows(file: Any, path: Path, columns: Sequence[str], bad: BadInput) -> Iterator[Row]:
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
        if not isinstance(found, dict):
            bad.add(path, f"it is a JSON {type(found).__name__}, and a row is an object", line=line)
            continue
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

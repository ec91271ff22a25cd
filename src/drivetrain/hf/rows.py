"""Opens what a job is given as data: samples, a data set of `datasets`, or a JSON-lines or Parquet file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from drivetrain.core.errors import DrivetrainError, InputError
from drivetrain.data.division import Indices
from drivetrain.data.files import JSON_LINES, BadInput, json_objects

PARQUET = (".parquet", ".pq")


class ParquetRows(Dataset[dict[str, Any]]):
    """The rows of a Parquet file, kept as an Arrow table and made into dictionaries one by one."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import ArrowInvalid, parquet
        except ImportError:
            raise DrivetrainError(f"{path} is read by pyarrow", remedy="pip install pyarrow") from None
        try:
            self._table = parquet.read_table(path)
        except ArrowInvalid as error:
            raise InputError(f"{path} is not a Parquet file: {error}", remedy="write it again") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def lengths(self, column: str) -> Indices | None:
        """Return how many entries a column's lists have, without making the rows; None if there are no lists."""
        return list_lengths(self._table, column) if column in self._table.column_names else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row


def list_lengths(table: Any, column: str) -> Indices | None:
    """Return how many entries the lists of an Arrow column have; None if it has no lists, or some are missing."""
    from pyarrow import ArrowInvalid, ArrowNotImplementedError, compute

    try:
        found = compute.list_value_length(table.column(column)).to_numpy()
    except (ArrowInvalid, ArrowNotImplementedError):
        return None
    return None if np.isnan(found).any() else np.asarray(found, dtype=np.int64)


def open_rows(data: Any) -> Any:
    """Return data that a `Job` takes: that of a file if it is a path, else what was given."""
    if isinstance(data, (str, Path)):
        return _of_file(Path(data))
    if isinstance(data, Mapping) and type(data).__module__.partition(".")[0] == "datasets":
        splits = list(data)
        raise DrivetrainError(
            f"the data has the splits {', '.join(splits)}, and a job trains on one", remedy=f"data[{splits[0]!r}]"
        )
    return data


def _of_file(path: Path) -> Any:
    kind = path.suffix.lower()
    if kind not in (*JSON_LINES, *PARQUET):
        allowed = ", ".join((*JSON_LINES, *PARQUET))
        raise DrivetrainError(
            f"data={str(path)!r}: a path has to end in {allowed}",
            remedy="convert the file, or open it and give its samples; nothing is downloaded",
        )
    if not path.is_file():
        raise DrivetrainError(f"there is no file {path}", remedy="give the path of the samples; nothing is downloaded")
    return ParquetRows(path) if kind in PARQUET else _json_lines(path)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    bad = BadInput()
    rows = [row for _, row in json_objects(path, bad)]
    if not rows and not bad.count:
        bad.add(path, "it has no rows")
    bad.raise_if_any(remedy='a line holds one sample: {"input_ids": [5, 7, 2], "labels": [5, 7, 2]}')
    return rows

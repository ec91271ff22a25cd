"""Opens what a job is given as data: samples, a data set of `datasets`, or a JSON-lines or Parquet file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from drivetrain.core.errors import DrivetrainError, InputError
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

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row


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

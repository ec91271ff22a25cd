"""Data of `dt.hf.job` from files and from `datasets`."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

import drivetrain as dt
from tests.hf.samples import Package, samples, tiny_llama

datasets = Package("datasets")


def trained_weights(data: Any, folder: Path) -> bytes:
    job = dt.hf.job(tiny_llama(), data, max_steps=2, global_batch=4, lr=0.01)
    result = dt.train(job, dt.configure(output_dir=folder, quiet=True, report=False))
    return dt.export(result).read_bytes()


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_json_lines_train_like_a_list(tmp_path: Path) -> None:
    path = written(tmp_path / "train.jsonl", samples())
    assert trained_weights(path, tmp_path / "file") == trained_weights(samples(), tmp_path / "list")


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"input_ids": [5, 6]}\nnothing\n[5]\n', encoding="utf-8")
    with pytest.raises(dt.DrivetrainError, match=r"(?s)2 problems.*line 2: it is not JSON.*line 3: it is a JSON list"):
        dt.hf.job(tiny_llama(), path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(dt.DrivetrainError, match="it has no rows"):
        dt.hf.job(tiny_llama(), path)


def test_a_missing_column_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "valid.jsonl", [{"tokens": [5, 6], "text": "a"}])
    with pytest.raises(dt.DrivetrainError, match="no column 'input_ids'; the columns are 'tokens', 'text'"):
        dt.hf.job(tiny_llama(), samples(), valid=path)
    renamed: Any = dt.hf.job(tiny_llama(), path, columns={"input_ids": "tokens"})
    assert renamed.collate(renamed.source.dataset)["input_ids"].tolist() == [[5, 6]]


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"input_ids": [5]}\n{"input_ids": [5], "text": "caf\xe9"}\n')
    with pytest.raises(dt.DrivetrainError, match=r"train.jsonl line 2: it is not UTF-8"):
        dt.hf.job(tiny_llama(), path)


@pytest.mark.parametrize(("data", "words"), [("train.csv", "has to end in"), ("train.jsonl", "there is no file")])
def test_paths_that_are_not_data(data: str, words: str) -> None:
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.hf.job(tiny_llama(), data)


def test_parquet_trains_like_a_list(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(samples()), tmp_path / "train.parquet")
    found = trained_weights(tmp_path / "train.parquet", tmp_path / "file")
    assert found == trained_weights(samples(), tmp_path / "list")
    (tmp_path / "torn.parquet").write_bytes(b"nothing")
    with pytest.raises(dt.DrivetrainError, match="is not a Parquet file"):
        dt.hf.job(tiny_llama(), tmp_path / "torn.parquet")


def test_a_data_set_of_datasets_trains_like_a_list(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(samples())
    assert trained_weights(data, tmp_path / "set") == trained_weights(samples(), tmp_path / "list")
    with pytest.raises(dt.DrivetrainError, match="no column 'target'; the columns are 'text', 'input_ids', 'labels'"):
        dt.hf.job(tiny_llama(), data, columns={"labels": "target"})
    with pytest.raises(dt.DrivetrainError, match="the data has the splits train, test"):
        dt.hf.job(tiny_llama(), datasets.DatasetDict(train=data, test=data))

"""`drivetrain continual` and `drivetrain train digits-continual`, as somebody would type them."""

import gzip
import json
import struct
from pathlib import Path

import pytest
import torch
from studies.continual.data import load_images

from drivetrain.cli import main


def continual(folder: Path, *flags: str) -> int:
    return main(["continual", "--gpu-mode", "cpu", "--output-dir", str(folder), *flags])


def test_a_table_a_file_and_pictures(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.yaml").write_text("budget:\n  epochs: 2\n  max_steps: 7\n")  # of other jobs: tasks have a length
    flags = ["--steps", "20", "--num-tasks", "2", "--seeds", "2", "--methods", "dense,growing"]
    assert continual(tmp_path, *flags, "--config", str(tmp_path / "mine.yaml")) == 0
    out = capsys.readouterr().out
    assert "growing" in out
    assert "What differs: growing." in out
    folder = tmp_path / "continual-digits-rotated"
    assert len(json.loads((folder / "continual.json").read_text())["runs"]) == 4
    for name in ("accuracy_matrices.png", "accuracy_over_tasks.png", "experts_over_time.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert name in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods", "dense,growin"], "growing"),
        (["--tasks", "turned"], "rotated"),
        (["--tasks", "split", "--num-tasks", "6"], "10 classes cannot be split into 6 tasks"),
        (["--data", "mnist", "--data-dir", "nowhere"], "there is no such folder"),
    ],
)
def test_wrong_words(tmp_path: Path, capsys, flags: list[str], words: str) -> None:
    assert continual(tmp_path, *flags) in (1, 2)
    assert words in capsys.readouterr().err


def test_mnist_from_its_files(tmp_path: Path) -> None:
    pictures = torch.randint(256, (24, 28, 28), dtype=torch.uint8)
    labels = torch.arange(24, dtype=torch.uint8) % 10
    for part in ("train", "t10k"):
        images = struct.pack(">BBBBIII", 0, 0, 8, 3, 24, 28, 28) + pictures.numpy().tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">BBBBI", 0, 0, 8, 1, 24) + labels.numpy().tobytes()
        )
    train, test = load_images("mnist", tmp_path)
    assert train.pixels.shape == test.pixels.shape == (24, 784)
    assert torch.equal(test.pixels, pictures.flatten(1).float() / 255)
    assert torch.equal(train.labels.sort().values, labels.long().sort().values)


def test_the_recipe_tells_what_it_kept(tmp_path: Path, capsys) -> None:
    assert main([
        "train", "digits-continual", "--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--epochs", "1",
        "--batch-size", "64", "--num-threads", "1", "--no-auto-optimize",
    ]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "after task 5" in out
    assert "over all tasks in the end" in out
    events = [json.loads(line) for line in (tmp_path / "digits-continual" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "task"] == [20, 40, 60, 80, 100]
    for name in ("expert_lifecycle.png", "expert_activations.png"):
        assert (tmp_path / "digits-continual" / name).read_bytes().startswith(b"\x89PNG"), name

"""The demo: it learns, it is repeatable, accumulation changes nothing, and its files are what they say."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from drivetrain.cli import main
from drivetrain.recipes.digits import DEFAULT_LEARNING_RATE, DigitNet, MicroBatches, load_digits


def train(folder: Path, name: str, *flags: str) -> Path:
    assert main(["train", "digits", "--gpu-mode", "cpu", "--output-dir", str(folder), "--name", name, *flags]) == 0
    return folder / name


def steps(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def test_it_learns_and_leaves_its_files(tmp_path: Path, capsys) -> None:
    run = train(tmp_path, "whole", "--epochs", "6")
    out = capsys.readouterr().out
    assert str(run) in out.replace("\n", "")
    epochs = [json.loads(line) for line in (run / "epochs.jsonl").read_text().splitlines()]
    assert len(epochs) == 6
    assert epochs[-1]["valid_accuracy"] > 0.95
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "hardware.json",
        "steps.jsonl",
        "epochs.jsonl",
        "model.safetensors",
        "training_metrics.png",
        "performance_summary.txt",
    }
    assert (run / "training_metrics.png").read_bytes().startswith(b"\x89PNG")
    assert "compilation           not asked for" in (run / "performance_summary.txt").read_text()

    model = DigitNet()  # the weights load into plain PyTorch, and reach the accuracy that was claimed
    model.load_state_dict(load_file(run / "model.safetensors"))
    _, images, labels = load_digits()
    accuracy = float((model.eval()(images).argmax(1) == labels).double().mean())
    assert accuracy == pytest.approx(epochs[-1]["valid_accuracy"])


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first = train(tmp_path, "first", "--max-steps", "8", "--seed", "3")
    again = train(tmp_path, "again", "--config", str(first / "config.yaml"), "--max-steps", "8")
    other = train(tmp_path, "other", "--max-steps", "8", "--seed", "4")
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_accumulation_equals_a_plain_loop(tmp_path: Path) -> None:
    """Against a loop written out by hand over whole batches: 64 samples a step, as 64×1 and as 24×2 + a ragged 16."""
    data, _, _ = load_digits()
    images, labels = data.tensors
    torch.manual_seed(5)
    model: nn.Module = DigitNet()
    order = list(MicroBatches(len(data), 64, 1, seed=5))[:4]
    optimizer = torch.optim.AdamW(model.parameters(), lr=DEFAULT_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    expected = []
    for indices in order:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[indices]), labels[indices])
        loss.backward()
        optimizer.step()
        schedule.step()
        expected.append(float(loss))

    whole = train(tmp_path, "whole", "--max-steps", "4", "--seed", "5", "--batch-size", "64")
    parts = train(
        tmp_path, "parts", "--max-steps", "4", "--seed", "5", "--batch-size", "16", "--accumulation-steps", "4"
    )
    assert [row["loss"] for row in steps(whole)] == pytest.approx(expected, rel=1e-5)
    assert [row["loss"] for row in steps(parts)] == pytest.approx(expected, rel=1e-4)


def test_the_last_step_of_an_epoch_counts_its_own_samples(tmp_path: Path) -> None:
    """1,437 samples in steps of 100×7: the third step has 37 samples, and its loss is their mean."""
    run = train(
        tmp_path,
        "ragged",
        "--epochs",
        "1",
        "--batch-size",
        "100",
        "--accumulation-steps",
        "7",
        "--learning-rate",
        "1e-9",
    )
    losses = [row["loss"] for row in steps(run)]
    assert len(losses) == 3
    assert all(loss == pytest.approx(2.3, abs=0.1) for loss in losses)  # an untrained ten-way guess: ln 10


@given(st.integers(1, 500), st.integers(1, 70), st.integers(1, 6), st.integers(0, 2**40), st.integers(0, 50))
def test_each_sample_once_per_epoch(
    num_samples: int, micro_batch: int, accumulation: int, seed: int, epoch: int
) -> None:
    batches = MicroBatches(num_samples, micro_batch, accumulation, seed)
    batches.epoch = epoch
    parts = list(batches)
    assert sorted(index for part in parts for index in part) == list(range(num_samples))
    assert sum(batches.step_sizes()) == num_samples
    assert len(batches.step_sizes()) == batches.steps_per_epoch
    assert [index for part in same_order_cut_differently(batches) for index in part] == [
        index for part in parts for index in part
    ]


def same_order_cut_differently(batches: MicroBatches) -> list[list[int]]:
    """The order knows nothing of the micro-batch."""
    other = MicroBatches(batches.num_samples, batches.micro_batch + 3, 1, batches.seed)
    other.epoch = batches.epoch
    return list(other)


def test_workers_device_assertions_and_bf16(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain", "--max-steps", "3")
    workers = train(tmp_path, "workers", "--max-steps", "3", "--num-workers", "1", "--device-assertions")
    assert (plain / "model.safetensors").read_bytes() == (workers / "model.safetensors").read_bytes()
    bf16 = train(tmp_path, "bf16", "--max-steps", "3", "--precision", "bf16")
    assert [row["loss"] for row in steps(bf16)] == pytest.approx([row["loss"] for row in steps(plain)], rel=0.05)
    assert [row["loss"] for row in steps(bf16)] != [row["loss"] for row in steps(plain)]


def test_a_lost_run_stops_with_the_cause(tmp_path: Path, capsys) -> None:
    argv = ["train", "digits", "--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--learning-rate", "1e30"]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "the loss is" in err
    assert "--learning-rate" in err

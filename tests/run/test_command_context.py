"""What a launcher was told is obeyed, or contradicted aloud; GPUs that nobody uses are mentioned."""

from typing import Any

import pytest
import torch

from drivetrain.config import configure
from drivetrain.core.launchers import ProcessPlace, find_place
from drivetrain.run.session import obey_launcher, unused_gpus


def accelerate(**told: str) -> ProcessPlace:
    return find_place(
        {"ACCELERATE_MIXED_PRECISION": "no", **{f"ACCELERATE_{name}": value for name, value in told.items()}}
    )


@pytest.mark.parametrize(
    ("told", "values", "expected", "words"),
    [
        ({}, {}, ("auto", None, "auto"), []),
        (
            {"MIXED_PRECISION": "bf16"},
            {},
            ("bf16", None, "auto"),
            ["mixed precision bf16 of accelerate launch is obeyed"],
        ),
        (
            {"MIXED_PRECISION": "bf16"},
            {"precision": "fp32"},
            ("fp32", None, "auto"),
            ["mixed precision bf16 of accelerate launch is not obeyed: precision.dtype is fp32 here"],
        ),
        ({"MIXED_PRECISION": "bf16"}, {"precision": "bf16"}, ("bf16", None, "auto"), []),
        ({"MIXED_PRECISION": "fp8"}, {}, ("auto", None, "auto"), ["fp8 of accelerate launch is not known here"]),
        ({"GRADIENT_ACCUMULATION_STEPS": "4"}, {}, ("auto", 4, "auto"), ["accumulation over 4 steps"]),
        (
            {"GRADIENT_ACCUMULATION_STEPS": "4"},
            {"accumulation_steps": 2},
            ("auto", 2, "auto"),
            ["is not obeyed: batch.accumulation is 2 here"],
        ),
        ({"GRADIENT_ACCUMULATION_STEPS": "1"}, {}, ("auto", None, "auto"), []),
        ({"USE_CPU": "True"}, {}, ("auto", None, "cpu"), ["use of the CPU"]),
    ],
)
def test_accelerate(told: dict[str, str], values: dict[str, Any], expected: tuple[Any, ...], words: list[str]) -> None:
    config, notes = obey_launcher(configure(**values), accelerate(**told))
    assert (config.precision.dtype, config.batch.accumulation, config.device.mode) == expected
    assert len(notes) == len(words)
    for note, part in zip(notes, words, strict=True):
        assert part in note


def test_other_launchers_say_nothing() -> None:
    config = configure()
    assert obey_launcher(config, ProcessPlace("torchrun", 0, 2)) == (config, [])


def test_plain_python_says_how_to_use_all_gpus() -> None:
    four = [torch.device("cuda", index) for index in range(4)]
    python = ProcessPlace("python")
    assert unused_gpus(python, four, "auto", "train.py") == (
        "4 GPUs are here, and one process uses one: cuda:0. To use all: drivetrain launch train.py"
    )
    assert "drivetrain train digits" in unused_gpus(python, four, "auto", "digits")
    assert unused_gpus(python, four[:1], "auto", "train.py") == ""
    assert unused_gpus(python, four, "data_parallel", "train.py") == ""
    assert unused_gpus(ProcessPlace("torchrun", 0, 4), four, "auto", "train.py") == ""

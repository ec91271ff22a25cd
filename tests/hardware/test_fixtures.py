"""The recorded and made-up machines: readable, consistent, and in step with what builds them."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.hardware import Hardware
from tests.fixtures.hardware.made_up import MACHINES
from tests.hardware.children import child_environ
from tests.hardware_fixtures import FOLDER, load, names


def test_all_are_there() -> None:
    assert {"cpu-2core", *MACHINES} <= set(names())


@pytest.mark.parametrize("name", names())
def test_consistent(name: str) -> None:
    hardware = load(name)
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert [gpu.index for gpu in hardware.gpus] == list(range(len(hardware.gpus)))
    assert len({gpu.uuid for gpu in hardware.gpus}) == len(hardware.gpus)
    assert all(0 < gpu.memory_free_bytes <= gpu.memory_total_bytes for gpu in hardware.gpus)
    pairs = len(hardware.gpus) * (len(hardware.gpus) - 1) // 2
    assert len({(link.a, link.b) for link in hardware.links}) == len(hardware.links) == pairs
    assert hardware.disk.path == "runs"
    assert (hardware.accelerator != "cpu") == bool(hardware.gpus)


@pytest.mark.parametrize("name", MACHINES)
def test_made_up_ones_are_in_step_with_their_builder(name: str) -> None:
    """If not: python -m tests.fixtures.hardware.made_up"""
    assert load(name) == MACHINES[name]()
    assert load(name).notes == ()


def test_a100s_are_joined_by_nvlink() -> None:
    hardware = load("8x-a100-80gb")
    assert {link.kind for link in hardware.links} == {"nvlink"}
    assert all(gpu.peaks["bf16"].value == 312 for gpu in hardware.gpus)


def test_cuda_counts_the_faster_card_first() -> None:
    first, second = load("mixed-3090-1080").gpus
    assert (first.name, first.physical_index) == ("NVIDIA GeForce RTX 3090", 1)
    assert "bf16" in first.precisions
    assert "bf16" not in second.precisions


def test_the_recorder_writes_what_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    command = [sys.executable, str(FOLDER / "record.py"), str(out)]
    subprocess.run(command, env=child_environ(), check=True, timeout=240, capture_output=True)
    recorded = Hardware.from_json(out.read_bytes())
    assert recorded.disk.path == "runs"
    assert recorded.cpu.num_usable >= 1

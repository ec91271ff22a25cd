"""Cards by name, for machines that are not here."""

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.core.units import GIB
from drivetrain.hardware.catalogue import CARDS, GB, machine_named, machine_of_memory
from drivetrain.hardware.peaks import find_chip
from tests.hardware_fixtures import load


@pytest.mark.parametrize(
    ("text", "number", "name", "gigabytes"),
    [
        ("4xL4", 4, "L4", 24),
        ("4×l4", 4, "L4", 24),
        ("8 x A100-80", 8, "A100-80", 80),
        ("8xA100-80GB", 8, "A100-80", 80),
        ("A100-SXM4-40GB", 1, "A100-40", 40),
        ("h200", 1, "H200", 141),
        ("2xNVIDIA GeForce RTX 3090", 2, "RTX 3090", 24),
        ("rtx3090ti", 1, "RTX 3090 Ti", 24),
        ("16xV100_32", 16, "V100-32", 32),
        ("T4", 1, "T4", 16),
    ],
)
def test_what_people_write(text: str, number: int, name: str, gigabytes: float) -> None:
    machine = machine_named(text)
    assert (machine.num_gpus, machine.card.name, machine.card.memory_gb) == (number, name, gigabytes)
    assert [gpu.index for gpu in machine.gpus()] == list(range(number))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4xL44", "`L4`"),
        ("A100", "`A100-80` or `A100-40`"),
        ("2xV100", "`V100-32` or `V100-16`"),
        ("H300", "`H200`"),
        ("0xL4", "1 to"),
        ("", "--gpu-memory"),
        ("abacus", "--gpus N --gpu-memory GB"),
    ],
)
def test_what_is_not_there_is_said_with_the_nearest_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        machine_named(text)
    assert said in str(caught.value)
    assert "--for" in str(caught.value)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_has_rates_and_its_name_finds_it(card) -> None:
    assert find_chip(card.nvml, int(card.memory_gb * GB)) is not None
    assert machine_named(f"2x{card.name}").card is card
    assert machine_named(card.name.upper().replace(" ", "")).card is card


@pytest.mark.parametrize(
    ("fixture", "name"), [("4x-l4", "L4"), ("8x-a100-80gb", "A100-80"), ("2x-rtx3090", "RTX 3090"), ("h200", "H200")]
)
def test_it_is_no_more_than_real_cards_report(fixture: str, name: str) -> None:
    real, tabled = load(fixture).gpus[0], machine_named(name).gpus()[0]
    assert 0.89 * real.memory_total_bytes < tabled.memory_total_bytes <= real.memory_total_bytes
    assert tabled.capability == real.capability
    assert tabled.precisions == real.precisions


def test_a_card_of_which_only_the_memory_is_known() -> None:
    machine = machine_of_memory(8, 24)
    assert str(machine) == "8 × a GPU with 24 GB"
    assert "bf16" in machine.gpus()[0].precisions
    assert machine.gpus()[0].memory_total_bytes == pytest.approx(0.97 * 22.35 * GIB, rel=0.001)
    assert machine.gpus()[0].peaks == {}

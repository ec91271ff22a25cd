"""Cards by name, for machines that are not here."""

import re

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.core.value import GIB
from drivetrain.hardware import Precision
from drivetrain.hardware.catalogue import (
    CARDS,
    CHIPS,
    GB,
    cuda_precisions,
    find_chip,
    machine_named,
    machine_of_memory,
    tabled_rates,
)
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


@pytest.mark.parametrize(
    ("name", "gib", "bf16", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 79, 989.4, 3350),
        ("NVIDIA H100 PCIe", 79, 756, 2039),
        ("NVIDIA H100 NVL", 93, 835.5, 3900),
        ("NVIDIA H200", 140, 989.4, 4800),
        ("NVIDIA GH200 480GB", 95, 989.4, 4000),
        ("NVIDIA B200", 178, 2250, None),
        ("NVIDIA A100-SXM4-40GB", 39, 312, 1555),
        ("A100-SXM4-40GB", 39, 312, 1555),
        ("NVIDIA A100-PCIE-40GB", 39, 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 79, 312, 2039),
        ("NVIDIA A100 80GB PCIe", 79, 312, 1935),
        ("NVIDIA A10", 22, 125, 600),
        ("NVIDIA A10G", 22, 70, 600),
        ("NVIDIA A40", 44, 149.7, 696),
        ("NVIDIA L4", 22, 121, 300),
        ("NVIDIA L40", 44, 181.05, 864),
        ("NVIDIA L40S", 44, 362.05, 864),
        ("NVIDIA RTX A6000", 47, 154.8, 768),
        ("NVIDIA RTX 6000 Ada Generation", 47, 364.2, 960),
        ("NVIDIA GeForce RTX 3090", 24, 71, 936),
        ("NVIDIA GeForce RTX 3080", 10, 59.5, 760),
        ("NVIDIA GeForce RTX 4090", 24, 165.2, 1008),
        ("NVIDIA GeForce RTX 5090", 32, 209.5, 1792),
        ("Tesla T4", 15, None, 320),
        ("Tesla V100-SXM2-16GB", 16, None, 900),
        ("NVIDIA GeForce RTX 2080 Ti", 11, None, 616),
        ("Tesla P100-PCIE-16GB", 16, None, 732),
        ("NVIDIA GeForce GTX 1080", 8, None, 320),
    ],
)
def test_known_cards(name: str, gib: float, bf16: float | None, bandwidth: float | None) -> None:
    peaks, memory = tabled_rates(name, int(gib * GIB))
    assert (peaks["bf16"].value if "bf16" in peaks else None) == bf16
    assert (memory.value if memory else None) == bandwidth
    assert peaks
    assert {rate.origin for rate in peaks.values()} == {"tabled"}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA X9000",
        "NVIDIA H100",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GRID T4-16Q",
    ],
)
def test_no_guess_for_others(name: str) -> None:
    assert tabled_rates(name, 80 * GIB) == ({}, None)


def test_the_12_gb_3080_is_another_chip() -> None:
    assert find_chip("NVIDIA GeForce RTX 3080", 10 * GIB) is not None
    assert find_chip("NVIDIA GeForce RTX 3080", 12 * GIB) is None


def test_no_name_matches_two_chips() -> None:
    for chip in CHIPS:
        name = re.sub(r"\(.*?\) ?|\?", "", chip.name.split("|")[0])
        assert sum(bool(re.fullmatch(other.name, name)) for other in CHIPS) <= 1, name


def test_faster_precisions_are_faster() -> None:
    order: list[Precision] = ["fp32", "tf32", "fp16"]
    for chip in CHIPS:
        rates = [chip.tflops[precision] for precision in order if precision in chip.tflops]
        assert rates == sorted(rates), chip.name
        assert chip.tflops.get("bf16", chip.tflops.get("fp16")) == chip.tflops.get("fp16"), chip.name


@pytest.mark.parametrize(
    ("capability", "extra"),
    [
        (None, ()),
        ((5, 2), ()),
        ((6, 0), ("fp16",)),
        ((6, 1), ()),
        ((7, 0), ("fp16",)),
        ((7, 5), ("fp16",)),
        ((8, 0), ("tf32", "fp16", "bf16")),
        ((12, 0), ("tf32", "fp16", "bf16")),
    ],
)
def test_precisions_by_capability(capability: tuple[int, int] | None, extra: tuple[str, ...]) -> None:
    assert cuda_precisions(capability) == ("fp64", "fp32", *extra)

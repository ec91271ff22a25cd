"""The table of data sheets: the right card, and nothing for a card that is not in it."""

import re

import pytest

from drivetrain.core.units import GIB
from drivetrain.hardware import Precision
from drivetrain.hardware.peaks import CHIPS, cuda_precisions, find_chip, tabled_rates


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

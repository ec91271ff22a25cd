"""Peak rates of chips from their vendors' data sheets. An unknown chip gets no rate: never a guess.

The rates are TFLOP/s of dense matrix products that accumulate in fp32 (GeForce cards run those at half their advertised
fp16 rate), fp64 by tensor cores where the chip has them; GB/s of device memory. Measured rates replace these.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.core.units import GIB
from drivetrain.hardware.facts import Precision, Rate

_SOURCE = "vendor data sheet, dense"


@dataclass(frozen=True)
class Chip:
    """A chip by its NVML name. `memory_gib` distinguishes cards that share a name but not a memory size."""

    name: str  # regular expression for the whole name, without the leading `NVIDIA `
    tflops: Mapping[Precision, float] = field(default_factory=dict)
    bandwidth: float | None = None
    memory_gib: tuple[float, float] = (0, float("inf"))


def _tensor(half: float, tf32: float | None, fp32: float, fp64: float | None = None) -> dict[Precision, float]:
    rates: dict[Precision, float] = {"fp32": fp32, "fp16": half}
    if tf32 is not None:  # the chips that know tf32 know bf16, at the rate of fp16
        rates |= {"tf32": tf32, "bf16": half}
    if fp64 is not None:
        rates["fp64"] = fp64
    return rates


_A100 = _tensor(312, 156, 19.5, 19.5)
_H100_SXM = _tensor(989.4, 494.7, 66.9, 66.9)
_H100_NVL = _tensor(835.5, 417.5, 60, 60)

CHIPS = (
    # Blackwell
    Chip("B200", {"fp16": 2250, "bf16": 2250, "tf32": 1125}),
    Chip("GeForce RTX 5090", _tensor(209.5, 104.8, 104.8), 1792),
    Chip("GeForce RTX 5080", _tensor(112.6, 56.3, 56.3), 960),
    # Hopper
    Chip("H200", _H100_SXM, 4800),
    Chip("H200 NVL", _H100_NVL, 4800),
    Chip("GH200 480GB", _H100_SXM, 4000),
    Chip("GH200 144G HBM3e", _H100_SXM, 4900),
    Chip("H100 80GB HBM3|H100 SXM5 80GB", _H100_SXM, 3350),
    Chip("H100 NVL", _H100_NVL, 3900),
    Chip("H100 PCIe", _tensor(756, 378, 51, 51), 2039),
    Chip("H20", _tensor(148, 74, 44), 4000),
    # Ada
    Chip("L4", _tensor(121, 60, 30.3), 300),
    Chip("L40", _tensor(181.05, 90.5, 90.5), 864),
    Chip("L40S", _tensor(362.05, 183, 91.6), 864),
    Chip("RTX 6000 Ada Generation", _tensor(364.2, 182.1, 91.1), 960),
    Chip("GeForce RTX 4090", _tensor(165.2, 82.6, 82.6), 1008),
    Chip("GeForce RTX 4080", _tensor(97.5, 48.7, 48.7), 716.8),
    Chip("GeForce RTX 4070 Ti", _tensor(80.2, 40.1, 40.1), 504),
    # Ampere
    Chip("A100-SXM4?-40GB|A100-PCIE-40GB", _A100, 1555),
    Chip("A100-SXM4?-80GB", _A100, 2039),
    Chip("A100 80GB PCIe", _A100, 1935),
    Chip("A30", _tensor(165, 82, 10.3, 10.3), 933),
    Chip("A40", _tensor(149.7, 74.8, 37.4), 696),
    Chip("A10", _tensor(125, 62.5, 31.2), 600),
    Chip("A10G", {"tf32": 35, "fp16": 70, "bf16": 70}, 600),
    Chip("A2", _tensor(18, 9, 4.5), 200),
    Chip("RTX A6000", _tensor(154.8, 77.4, 38.7), 768),
    Chip("RTX A5000", _tensor(111.1, 55.6, 27.8), 768),
    Chip("RTX A4000", _tensor(76.7, 38.3, 19.2), 448),
    Chip("GeForce RTX 3090", _tensor(71, 35.6, 35.6), 936),
    Chip("GeForce RTX 3090 Ti", _tensor(80, 40, 40), 1008),
    Chip("GeForce RTX 3080 Ti", _tensor(68.2, 34.1, 34.1), 912),
    Chip("GeForce RTX 3080", _tensor(59.5, 29.8, 29.8), 760, memory_gib=(9, 10.5)),  # the 12 GB card is another chip
    Chip("GeForce RTX 3070", _tensor(40.6, 20.3, 20.3), 448),
    # Turing
    Chip("(Tesla )?T4", _tensor(65, None, 8.1), 320),
    Chip("(Quadro )?RTX [68]000", _tensor(130.5, None, 16.3), 672),
    Chip("TITAN RTX", _tensor(130.5, None, 16.3), 672),
    Chip("GeForce RTX 2080 Ti", _tensor(53.8, None, 13.4), 616),
    # Volta
    Chip("(Tesla )?V100-SXM2-(16|32)GB", _tensor(125, None, 15.7, 7.8), 900),
    Chip("(Tesla )?V100-PCIE-(16|32)GB", _tensor(112, None, 14, 7), 900),
    Chip("(Tesla )?V100S-PCIE-32GB", _tensor(130, None, 16.4, 8.2), 1134),
    # Pascal: fp16 would accumulate in fp16 there, so it is left out
    Chip("(Tesla )?P100-SXM2-16GB", {"fp32": 10.6, "fp64": 5.3}, 732),
    Chip("(Tesla )?P100-PCIE-16GB", {"fp32": 9.3, "fp64": 4.7}, 732),
    Chip("(Tesla )?P100-PCIE-12GB", {"fp32": 9.3, "fp64": 4.7}, 549),
    Chip("GeForce GTX 1080", {"fp32": 8.9}, 320),
    Chip("GeForce GTX 1080 Ti", {"fp32": 11.3}, 484),
)


def tabled_rates(name: str, memory_total_bytes: int) -> tuple[dict[Precision, Rate], Rate | None]:
    """Return peak rates and memory bandwidth of a whole GPU by its NVML name; empty if the chip is not in the table."""
    chip = find_chip(name, memory_total_bytes)
    if chip is None:
        return {}, None
    peaks = {
        precision: Rate(value=value, unit="TFLOP/s", origin="tabled", source=_SOURCE)
        for precision, value in chip.tflops.items()
    }
    if chip.bandwidth is None:
        return peaks, None
    return peaks, Rate(value=chip.bandwidth, unit="GB/s", origin="tabled", source="vendor data sheet")


def find_chip(name: str, memory_total_bytes: int) -> Chip | None:
    # The whole name has to match: `RTX 3080 Laptop GPU` and `A100-SXM4-40GB MIG 1g.5gb` are other devices.
    short = name.removeprefix("NVIDIA ").strip()
    for chip in CHIPS:
        low, high = chip.memory_gib
        if re.fullmatch(chip.name, short) and low <= memory_total_bytes / GIB <= high:
            return chip
    return None


def cuda_precisions(capability: tuple[int, int] | None) -> tuple[Precision, ...]:
    """Return the precisions with fast hardware in a CUDA chip. Unknown capability: only those that every chip has."""
    if capability is None:
        return ("fp64", "fp32")
    if capability >= (8, 0):
        return ("fp64", "fp32", "tf32", "fp16", "bf16")
    # 6.1 has fp16 at a 64th of the rate of fp32, which is as good as none.
    if capability >= (7, 0) or capability in ((5, 3), (6, 0), (6, 2)):
        return ("fp64", "fp32", "fp16")
    return ("fp64", "fp32")

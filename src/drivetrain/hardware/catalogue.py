"""GPUs by their common names, for planning on other machines; and peak rates from their data sheets.

Memory is the data sheet's figure in GB of 10^9 bytes, less what cards with error correction lack of it. Most drivers
report more, none less, so a plan made with it fits. Capability is from NVIDIA's list at developer.nvidia.com/cuda-gpus.
`nvml` is the name by which the table of rates knows the card.

Rates are TFLOP/s of dense matrix products that accumulate in fp32 (GeForce cards run those at half their advertised
fp16 rate), fp64 by tensor cores where the chip has them; GB/s of device memory. Measured rates replace these. A chip
that is not in the table gets no rate: never a guess.

Links are GB/s of one GPU in one direction, half of what data sheets add up: NVLink where cards of this kind are sold on
boards with it, else PCIe with 16 lanes. Bridges between pairs of cards are not counted. Between nodes it is the network
of NVIDIA's DGX of that generation, else 100 Gbit/s for the whole node.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.value import GIB
from drivetrain.hardware.facts import Gpu, Hardware, Precision, Rate

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


GB = 10**9
REPORTED = 0.97  # of the data sheet's figure, at least: an L4 has 24 GB and reports 22.0 GiB
MOST_GPUS = 65536


@dataclass(frozen=True)
class Card:
    name: str
    nvml: str
    memory_gb: float
    capability: tuple[int, int]
    architecture: str


CARDS = (
    # NVIDIA DGX B200 data sheet: 1,440 GB in 8 GPUs
    Card("B200", "NVIDIA B200", 180, (10, 0), "Blackwell"),
    # GeForce RTX 50 series specifications
    Card("RTX 5090", "NVIDIA GeForce RTX 5090", 32, (12, 0), "Blackwell"),
    Card("RTX 5080", "NVIDIA GeForce RTX 5080", 16, (12, 0), "Blackwell"),
    # NVIDIA H200 and H100 Tensor Core GPU data sheets, GH200 data sheet
    Card("H200", "NVIDIA H200", 141, (9, 0), "Hopper"),
    Card("H200-NVL", "NVIDIA H200 NVL", 141, (9, 0), "Hopper"),
    Card("GH200", "NVIDIA GH200 480GB", 96, (9, 0), "Hopper"),
    Card("H100", "NVIDIA H100 80GB HBM3", 80, (9, 0), "Hopper"),
    Card("H100-PCIe", "NVIDIA H100 PCIe", 80, (9, 0), "Hopper"),
    Card("H100-NVL", "NVIDIA H100 NVL", 94, (9, 0), "Hopper"),
    # NVIDIA L4, L40, L40S and RTX 6000 Ada data sheets; GeForce RTX 40 series specifications
    Card("L4", "NVIDIA L4", 24, (8, 9), "Ada"),
    Card("L40", "NVIDIA L40", 48, (8, 9), "Ada"),
    Card("L40S", "NVIDIA L40S", 48, (8, 9), "Ada"),
    Card("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", 48, (8, 9), "Ada"),
    Card("RTX 4090", "NVIDIA GeForce RTX 4090", 24, (8, 9), "Ada"),
    Card("RTX 4080", "NVIDIA GeForce RTX 4080", 16, (8, 9), "Ada"),
    Card("RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti", 12, (8, 9), "Ada"),
    # NVIDIA A100, A30, A40, A10, A2 and RTX A series data sheets; A10G: Amazon EC2 G5 instances; GeForce RTX 30 series
    Card("A100-40", "NVIDIA A100-SXM4-40GB", 40, (8, 0), "Ampere"),
    Card("A100-80", "NVIDIA A100-SXM4-80GB", 80, (8, 0), "Ampere"),
    Card("A30", "NVIDIA A30", 24, (8, 0), "Ampere"),
    Card("A40", "NVIDIA A40", 48, (8, 6), "Ampere"),
    Card("A10", "NVIDIA A10", 24, (8, 6), "Ampere"),
    Card("A10G", "NVIDIA A10G", 24, (8, 6), "Ampere"),
    Card("A2", "NVIDIA A2", 16, (8, 6), "Ampere"),
    Card("RTX A6000", "NVIDIA RTX A6000", 48, (8, 6), "Ampere"),
    Card("RTX A5000", "NVIDIA RTX A5000", 24, (8, 6), "Ampere"),
    Card("RTX A4000", "NVIDIA RTX A4000", 16, (8, 6), "Ampere"),
    Card("RTX 3090", "NVIDIA GeForce RTX 3090", 24, (8, 6), "Ampere"),
    Card("RTX 3090 Ti", "NVIDIA GeForce RTX 3090 Ti", 24, (8, 6), "Ampere"),
    Card("RTX 3080", "NVIDIA GeForce RTX 3080", 10, (8, 6), "Ampere"),
    Card("RTX 3070", "NVIDIA GeForce RTX 3070", 8, (8, 6), "Ampere"),
    # NVIDIA T4, Quadro RTX 6000, TITAN RTX data sheets; GeForce RTX 20 series specifications
    Card("T4", "Tesla T4", 16, (7, 5), "Turing"),
    Card("TITAN RTX", "TITAN RTX", 24, (7, 5), "Turing"),
    Card("RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti", 11, (7, 5), "Turing"),
    # NVIDIA V100 and P100 data sheets; GeForce 10 series specifications
    Card("V100-16", "Tesla V100-SXM2-16GB", 16, (7, 0), "Volta"),
    Card("V100-32", "Tesla V100-SXM2-32GB", 32, (7, 0), "Volta"),
    Card("P100", "Tesla P100-SXM2-16GB", 16, (6, 0), "Pascal"),
    Card("GTX 1080", "NVIDIA GeForce GTX 1080", 8, (6, 1), "Pascal"),
    Card("GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti", 11, (6, 1), "Pascal"),
)


# GB/s of one GPU in one direction over NVLink, and of its part of the network of a DGX (B200, H100, A100, V100).
_NVLINKS: dict[str, tuple[float, float]] = {
    "B200": (900, 50),
    "H200": (450, 50),
    "H100": (450, 50),
    "A100-40": (300, 25),
    "A100-80": (300, 25),
    "V100-16": (150, 6.25),
    "V100-32": (150, 6.25),
    "P100": (80, 6.25),
}
_PCIE_LANES = {"A2": 8}
_PCIE_LANE_GBS = {
    "Blackwell": 4.0,
    "Hopper": 4.0,
    "Ada": 2.0,
    "Ampere": 2.0,
    "Turing": 1.0,
    "Volta": 1.0,
    "Pascal": 1.0,
}
_OTHER_NETWORK = 12.5  # GB/s of a node: 100 Gbit/s
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Wires:
    """The links of a machine, as its data sheets give them, in GB/s of one direction."""

    kind: str  # NVLink or PCIe
    gpu: float  # of each GPU, within a node
    node: float  # of a node, to others


@dataclass(frozen=True)
class Machine:
    """Another machine: a number of cards of one kind, in nodes of at most so many."""

    num_gpus: int
    card: Card
    gpus_per_node: int = GPUS_PER_NODE

    def __str__(self) -> str:
        return f"{self.num_gpus} × {self.card.name}"

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def wires(self) -> Wires:
        """The links between its GPUs and between its nodes."""
        if self.card.name in _NVLINKS:
            gpu, network = _NVLINKS[self.card.name]
            return Wires("NVLink", gpu, network * min(self.num_gpus, self.gpus_per_node))
        lanes = _PCIE_LANES.get(self.card.name, 16)
        return Wires("PCIe", lanes * _PCIE_LANE_GBS.get(self.card.architecture, 1.0), _OTHER_NETWORK)

    def hardware(self, here: Hardware) -> Hardware:
        """Return this machine with the GPUs of that one, and with the host that is here."""
        return here.model_copy(update={"accelerator": "cuda", "gpus": self.gpus(), "links": ()})

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs as `detect()` would find them when idle: figures of the data sheet, marked as tabled."""
        card, memory = self.card, int(self.card.memory_gb * GB * REPORTED)
        peaks, bandwidth = tabled_rates(card.nvml, memory)
        return tuple(
            Gpu(
                index=index,
                physical_index=index,
                uuid=f"elsewhere-{index}",
                name=card.nvml,
                vendor="nvidia",
                architecture=card.architecture,
                capability=card.capability,
                memory_total_bytes=memory,
                memory_free_bytes=memory,
                precisions=cuda_precisions(card.capability),
                peaks=peaks,
                memory_bandwidth=bandwidth,
            )
            for index in range(self.num_gpus)
        )


def machine_named(text: str) -> Machine:
    """Parse `4xL4`, `8 x A100-80`, `H200`, or `2x8xH100`: nodes if there are several, cards in each, and which."""
    found = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(.*?)\s*", text, re.IGNORECASE)
    assert found is not None  # every text matches
    per_node = GPUS_PER_NODE if found[2] is None else int(found[2])
    number = int(found[1] or 1) * (1 if found[2] is None else per_node)
    if not 1 <= number <= MOST_GPUS:
        raise ConfigError([Problem("--for", f"{number} GPUs", text, allowed=f"1 to {MOST_GPUS}", remedy="4xL4")])
    return Machine(number, _card(found[3], text), per_node)


def machine_of_memory(num_gpus: int, memory_gb: float) -> Machine:
    """Return a machine of which only the memory is known. Its cards are assumed to have bf16: capability 8.0."""
    return Machine(num_gpus, Card(f"a GPU with {memory_gb:g} GB", "", memory_gb, (8, 0), ""))


def _card(name: str, text: str) -> Card:
    wanted = _plain(name)
    by_name = {_plain(card.name): card for card in CARDS}
    if wanted in by_name:
        return by_name[wanted]
    sizes = (
        [card.name for key, card in by_name.items() if re.fullmatch(re.escape(wanted) + r"\d+", key)] if name else []
    )
    if sizes and all(size.rsplit("-", 1)[0].lower() == name.lower() for size in sizes):
        raise _unknown(text, f"{name} comes with different memory", f"did you mean `{sizes[-1]}` or `{sizes[0]}`?")
    meant = get_close_matches(wanted, by_name, 1, 0.5)
    remedy = f"did you mean `{by_name[meant[0]].name}`? Or" if meant else "for a card that is not listed:"
    raise _unknown(text, f"there is no card {name!r} in the table", f"{remedy} --gpus N --gpu-memory GB")


def _unknown(text: str, message: str, remedy: str) -> ConfigError:
    allowed = "a number, x, and one of " + ", ".join(_names())
    return ConfigError([Problem("--for", message, text, "command line", allowed, remedy)])


def _names() -> Iterable[str]:
    return (card.name for card in CARDS)


def _plain(name: str) -> str:
    """Normalize a card's name: `NVIDIA A100-SXM4-80GB` and `a100 80` become equal."""
    words = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b|-?sxm\d?|(?<=\d)\s*gb\b", "", name.lower())
    return re.sub(r"[\s_-]", "", words)

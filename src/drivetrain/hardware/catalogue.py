"""GPUs by their common names, for planning on other machines.

Memory is the data sheet's figure in GB of 10^9 bytes, less what cards with error correction lack of it. Most drivers
report more, none less, so a plan made with it fits. Capability is from NVIDIA's list at developer.nvidia.com/cuda-gpus.
`nvml` is the name by which `peaks.py` knows the card's rates.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.hardware.facts import Gpu
from drivetrain.hardware.peaks import cuda_precisions, tabled_rates

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


@dataclass(frozen=True)
class Machine:
    """Another machine: a number of cards of one kind."""

    num_gpus: int
    card: Card

    def __str__(self) -> str:
        return f"{self.num_gpus} × {self.card.name}"

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
    """Parse `4xL4`, `8 x A100-80` or `H200`: a number of cards, and which."""
    found = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.*?)\s*", text, re.IGNORECASE)
    assert found is not None  # every text matches
    number = int(found[1] or 1)
    if not 1 <= number <= MOST_GPUS:
        raise ConfigError([Problem("--for", f"{number} GPUs", text, allowed=f"1 to {MOST_GPUS}", remedy="4xL4")])
    return Machine(number, _card(found[2], text))


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

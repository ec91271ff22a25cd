"""Kernels for running a layer's experts, and the choice of the best one for a size and dtype.

They compute the same: `dense` runs every expert on every token as two large products and weighs with zeros, `grouped`
sorts the tokens by expert and multiplies the groups in one kernel, `loop` multiplies group by group.
"""

from typing import Literal, NamedTuple, get_args

import torch

from drivetrain.core.errors import DrivetrainError

WayName = Literal["dense", "grouped", "loop"]
WAYS: tuple[WayName, ...] = get_args(WayName)

# What sorting, gathering and launching cost on a GPU in any other way is some tenths of a millisecond.
DENSE_GFLOP = {torch.bfloat16: 60.0, torch.float16: 60.0, torch.float32: 20.0, torch.float64: 20.0}
GROUPED_CAPABILITY = (9, 0)  # older GPUs multiply group by group inside, and make the host wait
ALIGNED = 8  # elements of bf16 in the 16 bytes that a row has to start at


class Way(NamedTuple):
    name: WayName
    reason: str


class Work(NamedTuple):
    """The work of a layer in one forward."""

    num_tokens: int
    k: int
    num_slots: int
    weights_per_expert: int
    row_lengths: tuple[int, ...]  # inputs, hidden, outputs
    dtype: torch.dtype
    device: torch.device

    @property
    def dense_gflop(self) -> float:
        return 2e-9 * self.num_tokens * self.num_slots * self.weights_per_expert


def choose_way(work: Work) -> Way:
    name = name_of_way(work)
    if work.device.type != "cuda":
        times = f"{work.num_slots / work.k:.3g}"
        return Way(
            name,
            f"on a {work.device.type} device the products of one expert fill the cores, and all experts on all tokens "
            f"would be {times} × the work",
        )
    if name == "dense":
        return Way(
            name,
            f"all {work.num_slots} experts on all {work.num_tokens} tokens are {work.dense_gflop:.3g} GFLOP: less than "
            "sorting tokens by expert costs",
        )
    would_be = f"all experts on all tokens would be {work.dense_gflop:.3g} GFLOP"
    if name == "grouped":
        return Way(name, f"{would_be}; one kernel has groups")
    return Way(name, f"{would_be}, and {grouped_obstacle(work)}")


def name_of_way(work: Work) -> WayName:
    """Return the name without a reason: compiled for any number of tokens, there is no number to put into one."""
    if work.device.type != "cuda":
        return "loop"
    if work.dense_gflop <= DENSE_GFLOP.get(work.dtype, 20.0):
        return "dense"
    return "grouped" if grouped_obstacle(work) is None else "loop"


def grouped_obstacle(work: Work) -> str | None:
    """Return why the grouped product is unavailable or slow; None if it is neither."""
    if work.dtype != torch.bfloat16:
        return f"grouped products are for bf16, not {str(work.dtype).removeprefix('torch.')}"
    odd = [length for length in work.row_lengths if length % ALIGNED]
    if odd:
        return f"grouped products need sizes that {ALIGNED} divides, not {odd[0]}"
    if work.device.type == "cuda" and torch.cuda.get_device_capability(work.device) < GROUPED_CAPABILITY:
        return "grouped products are fast from compute capability 9.0 on"
    return None


def check_way(name: str) -> None:
    if name not in (*WAYS, "auto"):
        raise DrivetrainError(f"way is {name!r}", remedy=f"one of auto, {', '.join(WAYS)}")

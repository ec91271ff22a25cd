"""Dispatches tokens to their chosen experts, and combines the results."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from drivetrain.moe.layer.experts import Experts
from drivetrain.moe.layer.kernel_choice import Way, WayName, Work, choose_way, name_of_way
from drivetrain.moe.layer.permute import from_rows, order_of, to_rows
from drivetrain.moe.layer.placement import Placement
from drivetrain.moe.layer.router import Routing


class Dispatcher(Protocol):
    """Dispatches tokens without dropping: every token reaches each of its experts, whatever the load."""

    def __call__(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        """Map (tokens, inputs) in the dtype to compute in to (tokens, outputs) in the same."""

    def way(self, experts: Experts, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> Way: ...

    def placement(self, num_slots: int) -> tuple[Placement, Sequence[float]]:
        """Return the rank of each slot, and the capability of each rank's device."""

    def row_of(self, slot: int) -> int | None:
        """Return this rank's row of a slot's expert; None if it is on another rank."""

    def fetch(self, rows: Tensor, slot: int) -> Tensor:
        """Return a slot's row of a tensor of rows, on every rank. All ranks call this together."""


class LocalDispatcher:
    """Runs all experts on this rank."""

    def __init__(self, way: Literal["auto"] | WayName = "auto") -> None:
        self._pinned = way
        self._known: dict[tuple[int, torch.dtype, torch.device], Way] = {}

    def way(self, experts: Experts, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> Way:
        if self._pinned != "auto":
            return Way(self._pinned, "asked for")
        if torch.compiler.is_compiling():
            return Way(name_of_way(work_of(experts, num_tokens, k, dtype, device)), "")
        case = (num_tokens, dtype, device)
        if case not in self._known:
            self._known[case] = choose_way(work_of(experts, num_tokens, k, dtype, device))
        return self._known[case]

    def placement(self, num_slots: int) -> tuple[Placement, Sequence[float]]:
        return (0,) * num_slots, (1.0,)

    def row_of(self, slot: int) -> int | None:
        return slot

    def fetch(self, rows: Tensor, slot: int) -> Tensor:
        return rows[slot]

    def __call__(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        chosen, weights = routing.chosen, routing.weights
        way = self.way(experts, tokens.shape[0], chosen.shape[1], tokens.dtype, tokens.device).name
        if way == "dense":
            return experts.dense(tokens, chosen, weights)
        order = order_of(chosen, experts.num_slots)
        rows = to_rows(tokens, order)
        return from_rows(run_rows(experts, rows, order.ends, way), weights, order)


def run_rows(experts: Experts, rows: Tensor, ends: Tensor, way: WayName) -> Tensor:
    result: Tensor = experts.grouped(rows, ends) if way == "grouped" else _loop(experts, rows, ends)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loop(experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
    stops = ends.tolist()  # the host waits here for the routing
    return experts.loop(rows, [stop - start for start, stop in zip([0, *stops], stops, strict=False)])


def work_of(experts: Experts, num_tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> Work:
    return Work(
        num_tokens,
        k,
        experts.num_slots,
        experts.weights_per_expert,
        (experts.num_inputs, experts.num_hidden, experts.num_outputs),
        dtype,
        device,
    )

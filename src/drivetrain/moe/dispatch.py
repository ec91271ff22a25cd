"""Dispatches tokens to their chosen experts, by the best kernel for the size and dtype, and combines the results.

The kernels compute the same: `dense` runs every expert on every token as two large products and weighs with zeros,
`grouped` sorts the tokens by expert and multiplies the groups in one kernel, `loop` multiplies group by group.

Tokens are permuted to rows sorted by expert, and back. Autograd's backward of `tokens[index]` adds rows into place one
by one, by sorting or with atomics. Each token has exactly k rows and their places are known, so both directions are
gathers: fast, and bitwise reproducible. Where some have fewer than others (`Spread`), first rows are gathered, then
second ones of those that have one, and so on.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from drivetrain.core.errors import DrivetrainError
from drivetrain.moe.experts import Experts, Placement, Routing

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


class Order(NamedTuple):
    """The rows of (token, choice) pairs when they are sorted by expert."""

    pairs: Tensor  # (rows): which pair, token × k + choice, stands in this row
    tokens: Tensor  # (rows): its token
    places: Tensor  # (pairs): in which row a pair stands
    ends: Tensor  # (experts), int32: where each expert's rows end


class Spread(NamedTuple):
    """Items with one copy or more each, and the places of the copies when they are sorted by something else."""

    items: Tensor  # (copies): whose copy stands here
    places: Tensor  # (copies): where the first copies stand, by item; then the second ones of those that have one; ...
    sizes: tuple[int, ...]  # how many items have a first copy, a second one, ...


def order_of(chosen: Tensor, num_experts: int) -> Order:
    """Sort the experts that each token chose, (tokens, k). Stable: an expert's rows are in the order of tokens."""
    flat = chosen.reshape(-1)
    # Fewer bits to sort by; the values are small.
    keys, pairs = (flat.to(torch.int16) if num_experts < 2**15 else flat).sort(stable=True)
    tokens = torch.div(pairs, chosen.shape[1], rounding_mode="floor")
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(pairs.numel(), device=pairs.device)
    slots = torch.arange(num_experts, device=keys.device, dtype=keys.dtype)
    ends = torch.searchsorted(keys, slots, right=True, out_int32=True)
    return Order(pairs, tokens, places, ends)


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order_tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = tokens.shape
        return tokens.index_select(0, order_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        rows = gradients[0].index_select(0, places)
        num_tokens, width = ctx.shape
        return rows.view(num_tokens, places.numel() // max(num_tokens, 1), width).sum(1), None, None


class _FromRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, pairs, places)
        per_choice = places.view(weights.shape).unbind(1)
        # Choice by choice: all of them at once would need k times the output, in the precision of the weights.
        total = rows.index_select(0, per_choice[0]) * weights[:, :1]
        for choice, place in enumerate(per_choice[1:], start=1):
            total = torch.addcmul(total, rows.index_select(0, place), weights[:, choice : choice + 1])
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, pairs, places = ctx.saved_tensors
        num_choices = weights.shape[1]
        gradient = gradients[0].index_select(0, torch.div(pairs, num_choices, rounding_mode="floor"))
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_pairs = (gradient * rows).sum(1, dtype=weights.dtype)
            of_weights = of_pairs.index_select(0, places).view(weights.shape)
        # In place: a product of bf16 and fp32 would be fp32, twice the size.
        of_rows = gradient.mul_(weights.reshape(-1).index_select(0, pairs).unsqueeze(1))
        return of_rows, of_weights, None, None


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, items: Tensor, copies_of: Tensor, places: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(copies_of, places)
        ctx.sizes = sizes
        return items.index_select(0, copies_of)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        copies_of, places = ctx.saved_tensors
        exact = torch.promote_types(gradients[0].dtype, torch.float32)
        return _sum(gradients[0], Spread(copies_of, places, ctx.sizes), exact, None), None, None, None


class _Summed(Function):
    @staticmethod
    def forward(
        ctx: Any,
        copies: Tensor,
        weights: Tensor | None,
        copies_of: Tensor,
        places: Tensor,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        # Without weights backward does not need the copies.
        ctx.save_for_backward(copies_of, *(() if weights is None else (copies, weights)))
        return _sum(copies, Spread(copies_of, places, sizes), dtype, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        copies_of, *weighed = ctx.saved_tensors
        gradient, of_weights = gradients[0].index_select(0, copies_of), None
        if weighed:
            copies, weights = weighed
            if ctx.needs_input_grad[1]:
                of_weights = (gradient * copies).sum(1, dtype=weights.dtype)
            gradient.mul_(weights.unsqueeze(1))  # in place: a product of bf16 and fp32 would be fp32, twice the size
        return gradient, of_weights, None, None, None, None


def _sum(copies: Tensor, spread: Spread, dtype: torch.dtype, weights: Tensor | None) -> Tensor:
    """Sum each item's copies, in order. No item takes part in another's sum, not even with a weight of 0."""
    layers = [places for places in torch.split(spread.places, list(spread.sizes)) if len(places)]
    first, *others = layers or [spread.places]
    total = copies.index_select(0, first)
    if weights is not None:
        total = total * weights.index_select(0, first).unsqueeze(1)
    elif others:
        total = total.to(dtype)
    for places in others:
        more = copies.index_select(0, places)
        scale = None if weights is None else weights.index_select(0, places).unsqueeze(1)
        if len(places) == len(first):
            total = _added(total, more, scale)
        else:
            holders = spread.items.index_select(0, places)  # each of them once, so nothing is added up in any order
            total.index_copy_(0, holders, _added(total.index_select(0, holders), more, scale))
    return total.to(copies.dtype)


def _added(total: Tensor, more: Tensor, weights: Tensor | None) -> Tensor:
    return total + more if weights is None else torch.addcmul(total, more, weights)


def to_rows(tokens: Tensor, order: Order) -> Tensor:
    """Return a row for each (token, choice), sorted by expert."""
    result: Tensor = _ToRows.apply(tokens, order.tokens, order.places)  # type: ignore[no-untyped-call]
    return result


def from_rows(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Return the weighted sum of each token's rows, accumulated in the precision of the weights."""
    result: Tensor = _FromRows.apply(rows, weights, order.pairs, order.places)  # type: ignore[no-untyped-call]
    return result


def copied(items: Tensor, spread: Spread) -> Tensor:
    """Return the copies, in their order."""
    result: Tensor = _Copied.apply(items, *spread)  # type: ignore[no-untyped-call]
    return result


def summed(copies: Tensor, spread: Spread, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each item's copies, accumulated in `dtype`; weighted if there are weights, of that dtype."""
    result: Tensor = _Summed.apply(copies, weights, *spread, dtype)  # type: ignore[no-untyped-call]
    return result


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

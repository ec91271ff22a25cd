"""Permutes tokens to rows sorted by expert, and back; the backwards of both gather instead of adding.

Autograd's backward of `tokens[index]` adds rows into place one by one, by sorting or with atomics. Each token has
exactly k rows and their places are known, so both directions are gathers: fast, and bitwise reproducible. Where some
have fewer than others (`Spread`), first rows are gathered, then second ones of those that have one, and so on.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional


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


class _GatedSilu(Function):
    """Computes silu(gate) × up of one fused tensor.

    Its backward writes both halves in place instead of concatenating.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        gate, up = hidden.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        gate, up = hidden.chunk(2, -1)
        result = torch.empty_like(hidden)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(gradients[0], functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=of_gate)
        return result


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


def gated_silu(hidden: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # it fuses better by itself
        gate, up = hidden.chunk(2, -1)
        return functional.silu(gate) * up
    result: Tensor = _GatedSilu.apply(hidden)  # type: ignore[no-untyped-call]
    return result

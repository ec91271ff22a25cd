"""Attention that repeats bit by bit: flex attention in compiled steps, where deterministic algorithms are on.

With these torch cannot use cuDNN's attention, whose backward adds up in any order, and falls back to flash attention,
which is slower. Flex attention always adds up in the same order, and is faster than that where it is compiled:
`core.precision.numerics` has compiled steps use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

_of_torch = functional.scaled_dot_product_attention
_BLOCK, _LEAST = 128, 512  # tokens: the unit of flex attention's masks; the shortest text for which it was measured
# A causal mask, or none, leaves something to attend to in every row, and its blocks follow each other.
_ANY_HEAD = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
# The backward blocks (two kernels, rows and columns each), warps and stages by head size: the fastest of ten on an
# H200. With torch's own a layer of GPT-2 takes 17 % longer. Chosen here, since autotuning would choose by timing.
_BACKWARD = {64: (32, 64, 64, 32, 4, 3), 128: (64, 64, 64, 64, 4, 2)}
_BACKWARD_OPTIONS = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")
_OPTIONS: dict[int, Any] = {
    head: {**_ANY_HEAD, **{f"bwd_{name}": value for name, value in zip(_BACKWARD_OPTIONS, values, strict=True)}}
    for head, values in _BACKWARD.items()
}


@contextmanager
def repeatable_attention() -> Iterator[None]:
    """Have `torch.nn.functional.scaled_dot_product_attention` call flex attention where a step is compiled."""
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with torch's arguments; cases that flex attention cannot do, or does no faster, go to torch."""
    if not torch.compiler.is_compiling() or attn_mask is not None or dropout_p or not _fits(query, key, value):
        return _of_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    mask = None
    if is_causal:
        mask = create_block_mask(_is_before, None, None, query.size(-2), key.size(-2), device=query.device)
    options = _OPTIONS.get(query.size(-1))
    result = flex_attention(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa, kernel_options=options
    )
    assert isinstance(result, Tensor)
    return result


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether shapes and types are those for which flex attention was measured."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dim() == key.dim() == value.dim() == 4
        and query.size(-1) == value.size(-1)
        and query.size(-1) in _OPTIONS
        and query.size(-2) == key.size(-2)
        and query.size(-2) >= _LEAST
        and query.size(-2) % _BLOCK == 0
    )


def _is_before(batch: Tensor, head: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return one >= other

"""Saves activation memory: recomputes activations in backward, block by block, or keeps them in host memory."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks a model is a stack of: two or more of one class in a list, of several parts, outermost only."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _is_inside(name, found):
            continue
        blocks = {key: child for key, child in module.named_children() if any(True for _ in child.children())}
        kinds = [type(child) for child in blocks.values()]
        prefix = f"{name}." if name else ""
        found |= {prefix + key: child for key, child in blocks.items() if kinds.count(type(child)) > 1}
    return found


def _is_inside(name: str, blocks: dict[str, nn.Module]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def recompute(model: nn.Module) -> list[str]:
    """Make each repeated block drop its activations and compute them again in backward; returns the blocks' names.

    The values are the same, dropout too. Names stay as they are: only the `forward` of each block is wrapped.
    """
    blocks = repeated_blocks(model)
    for block in blocks.values():
        if isinstance(block.forward, partial) and block.forward.func is checkpoint:
            continue  # an instance that was trained before
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return list(blocks)


def offload(pin_memory: bool) -> AbstractContextManager[Any]:
    """Return the context for forward in which the activations that backward needs are kept in host memory."""
    context: AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu(pin_memory=pin_memory)
    return context

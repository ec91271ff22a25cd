"""Changes a model's layers for the way its steps are run; what they compute stays the same.

Activation memory is saved by recomputing activations in backward, block by block, or keeping them in host memory.

Dropout between the layers of `nn.LSTM`, `nn.GRU` and `nn.RNN` is computed outside cuDNN, which keeps a separate random
state for it. Setting the generator's seed, which every step does, throws that state away; making it again waits for the
device, which cannot be captured. Layer by layer with `F.dropout` between them the same is computed, with draws from
torch's generator.

With `--precision fp8` linear layers multiply in FP8. That does change what they compute: it rounds.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from drivetrain.core.precision import compute_in_fp8
from drivetrain.core.value import Fp8Recipe


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


def one_of_each_kind(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return one block of each kind: compiled code fits all blocks of the same class, parts and shapes."""
    found: dict[tuple[Any, ...], nn.Module] = {}
    for block in blocks:
        shapes = tuple((name, tensor.shape) for name, tensor in block.state_dict().items())
        found.setdefault((type(block), repr(block), shapes), block)
    return list(found.values())


def _is_inside(name: str, blocks: dict[str, nn.Module]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def use_fp8(model: nn.Module, recipe: Fp8Recipe | None) -> int:
    """Have the linear layers of repeated blocks multiply in FP8, in place, and no others; returns how many do.

    What comes before and after the blocks, such as the layer that computes logits, is small or sensitive to rounding.
    """
    compute_in_fp8([model], None)  # an instance that was trained before
    return compute_in_fp8(list(repeated_blocks(model).values()), recipe)


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


class _LayerByLayer(nn.RNNBase):
    """Runs a recurrent module's layers one by one. Parameters keep their names and shapes."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002  (as torch has it: it may be given by name)
        self._update_flat_weights()
        directions = 2 if self.bidirectional else 1
        outputs, last = input, []
        for index in range(self.num_layers):
            rows = slice(index * directions, (index + 1) * directions)
            initial = None if hx is None else tuple(each[rows] for each in hx) if isinstance(hx, tuple) else hx[rows]
            if index:
                outputs = self._dropped(outputs)
            with self._one_layer(index):
                outputs, state = super().forward(outputs, initial)
            last.append(state)
        if isinstance(last[0], tuple):
            return outputs, tuple(torch.cat(states) for states in zip(*last, strict=True))
        return outputs, torch.cat(last)

    def flatten_parameters(self) -> None:
        """Give each layer one piece of memory, as cuDNN wants it for a module of one layer."""
        if len(self._flat_weights) != len(self._flat_weights_names):
            return  # while the module is being made
        for index in range(self.num_layers):
            with self._one_layer(index):
                super().flatten_parameters()

    def _dropped(self, outputs: Any) -> Any:
        if isinstance(outputs, PackedSequence):
            return outputs._replace(data=functional.dropout(outputs.data, self.dropout, self.training))
        return functional.dropout(outputs, self.dropout, self.training)

    @contextmanager
    def _one_layer(self, index: int) -> Iterator[None]:
        """Make the module consist of that layer alone inside the context."""
        count = len(self._flat_weights) // self.num_layers
        part = slice(index * count, (index + 1) * count)
        width = (self.proj_size or self.hidden_size) * (2 if self.bidirectional else 1)
        layer = {
            "num_layers": 1,
            "dropout": 0.0,
            "input_size": width if index else self.input_size,
            "_flat_weights": self._flat_weights[part],
            "_flat_weights_names": self._flat_weights_names[part],
            "_flat_weight_refs": self._flat_weight_refs[part],
        }
        own = self.__dict__  # the module's own way of setting attributes looks for parameters of these names
        whole = {name: own[name] for name in layer}
        own.update(layer)
        try:
            yield
        finally:
            own.update(whole)


class LSTM(_LayerByLayer, nn.LSTM):
    """Is `nn.LSTM` with dropout outside cuDNN."""


class GRU(_LayerByLayer, nn.GRU):
    """Is `nn.GRU` with dropout outside cuDNN."""


class RNN(_LayerByLayer, nn.RNN):
    """Is `nn.RNN` with dropout outside cuDNN."""


_SPLIT: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}


def split_recurrent_dropout(model: nn.Module) -> int:
    """Take dropout out of cuDNN, in place, where modules of torch's own classes have it; returns how many do.

    A user's subclass is left alone: what its `forward` does is not known.
    """
    found = [module for module in model.modules() if type(module) in _SPLIT and _has_dropout(module)]
    for module in found:
        module.__class__ = _SPLIT[type(module)]
        module.flatten_parameters()  # type: ignore[operator]
    return len(found)


def _has_dropout(module: Any) -> bool:
    return bool(module.dropout > 0 and module.num_layers > 1)

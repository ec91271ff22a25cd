"""Dropout between the layers of `nn.LSTM`, `nn.GRU` and `nn.RNN`, computed outside cuDNN.

cuDNN keeps a separate random state for it. Setting the generator's seed, which every step does, throws that state away;
making it again waits for the device, which cannot be captured. Layer by layer with `F.dropout` between them the same is
computed, with draws from torch's generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence


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

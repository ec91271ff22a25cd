"""Dropout between recurrent layers outside cuDNN: the same results as torch's own modules, under the same names."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from drivetrain.strategies.layers import split_recurrent_dropout

KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "num_layers": 3}),
    (nn.GRU, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "bias": False}),
]


def make(kind: type[nn.RNNBase], options: dict[str, Any]) -> nn.RNNBase:
    torch.manual_seed(0)
    return kind(4, 5, **{"num_layers": 2, "dropout": 0.4, **options}).double()


def results(module: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    outputs, state = module(*inputs)
    found = [outputs.data, *(state if isinstance(state, tuple) else (state,))]
    sum(each.square().sum() for each in found).backward()  # type: ignore[union-attr]
    return [*found, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_it_computes_what_torch_computes(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    """To the bit on a CPU, where torch draws dropout from the same generator; with an initial state, and packed."""
    plain, split = make(kind, options), make(kind, options)
    assert split_recurrent_dropout(split) == 1
    assert list(plain.state_dict()) == list(split.state_dict())
    assert isinstance(split, kind)
    inputs = torch.randn(6, 3, 4, dtype=torch.float64)
    directions = 2 if plain.bidirectional else 1
    batch = inputs.shape[0 if plain.batch_first else 1]
    state: Any = torch.randn(plain.num_layers * directions, batch, plain.proj_size or 5, dtype=torch.float64)
    if kind is nn.LSTM:
        state = (state, torch.randn(plain.num_layers * directions, batch, 5, dtype=torch.float64))
    packed = pack_sequence([torch.randn(n, 4, dtype=torch.float64) for n in (2, 5, 3)], enforce_sorted=False)
    for given in ((inputs,), (inputs, state), (packed,), (inputs[:, 0],)):
        for expected, found in zip(results(plain, *given), results(split, *given), strict=True):
            assert torch.equal(expected, found)
    for expected, found in zip(results(plain.eval(), inputs), results(split.eval(), inputs), strict=True):
        assert torch.equal(expected, found)


def test_a_copy_computes_with_its_own_weights() -> None:
    split = make(nn.LSTM, {})
    split_recurrent_dropout(split)
    other = copy.deepcopy(split)
    with torch.no_grad():
        for parameter in split.parameters():
            parameter.zero_()
    inputs = torch.randn(6, 3, 4, dtype=torch.float64)
    assert split(inputs)[0].abs().sum() == 0
    assert other(inputs)[0].abs().sum() > 0
    assert other.float()(inputs.float())[0].dtype is torch.float32


def test_what_has_no_dropout_or_is_the_users_own_is_left_alone() -> None:
    class Own(nn.LSTM):
        pass

    model = nn.ModuleList([nn.LSTM(4, 5, 2), Own(4, 5, 2, dropout=0.5), nn.GRU(4, 5, 1), nn.LSTM(4, 5, 2, dropout=0.1)])
    assert split_recurrent_dropout(model) == 1
    assert split_recurrent_dropout(model) == 0, "it was done already"
    assert [type(module) for module in model][:3] == [nn.LSTM, Own, nn.GRU]

"""Draws keyed by sample: the same whichever part of a batch a sample is in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.proving.draws import KeyedDraws, dropout_off, turn_dropout_off

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "rand": lambda inputs: torch.rand(len(inputs), 3),
    "randn": lambda inputs: torch.randn(len(inputs), 2, 5),
    "randint": lambda inputs: torch.randint(0, 50, (len(inputs), 4)),
    "normal_": lambda inputs: torch.empty_like(inputs).normal_(),
    "bernoulli": lambda inputs: torch.bernoulli(inputs.sigmoid()),
    "several rows": lambda inputs: torch.rand(len(inputs) * 2, 3).view(len(inputs), -1),
    "gumbel": lambda inputs: functional.gumbel_softmax(inputs),
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_draw_what_the_whole_batch_draws(name: str) -> None:
    inputs, numbers = torch.linspace(-1, 1, 28).view(7, 4), [5, 0, 9, 3, 2, 8, 1]

    def drawn(places: list[int]) -> Tensor:
        with KeyedDraws([numbers[place] for place in places], 3):
            return DRAWS[name](inputs[places])

    whole = drawn(list(range(7)))
    assert torch.equal(torch.cat([drawn([0, 1]), drawn([2]), drawn([3, 4, 5, 6])]), whole)
    assert torch.equal(drawn([6, 0]), whole[[6, 0]])
    assert len(whole.reshape(7, -1).unique(dim=0)) == 7


def test_a_draw_for_the_whole_batch_is_the_same_in_every_part() -> None:
    values = []
    for numbers in ([1, 2, 3], [1], [2, 3]):
        with KeyedDraws(numbers, 0):
            values.append(float(torch.rand(())))
    assert len(set(values)) == 1


def test_dropout_is_off_in_modules_functions_and_attention() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True)
    lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    inputs = torch.randn(2, 3, 8)
    for model in (layer, lstm):
        turn_dropout_off(model)
    with dropout_off():
        assert torch.equal(layer(inputs), layer(inputs))
        assert torch.equal(lstm(inputs)[0], lstm(inputs)[0])
        assert torch.equal(functional.dropout(inputs, 0.5, True), inputs)
        first, second = (functional.scaled_dot_product_attention(inputs, inputs, inputs, None, 0.5) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(functional.dropout(inputs, 0.5, True), inputs)

"""Muon: torch's to the bit in bf16, and an iteration on singular values in float64 in fp32."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.core import muon
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.muon import _owners

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def by_singular_values(matrix: Tensor) -> Tensor:
    """The same polynomial, of the singular values alone."""
    first, third, fifth = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = first * values + third * values**3 + fifth * values**5
    return left @ values.diag() @ right


class PlainMuon:
    """A plain loop's Muon, in float64."""

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        self.matrices, self.lr, self.momentum, self.weight_decay = matrices, lr, momentum, weight_decay
        self.kept = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self) -> None:
        for number, matrix in enumerate(self.matrices):
            assert matrix.grad is not None
            self.kept[number] = self.momentum * self.kept[number] + (1 - self.momentum) * matrix.grad
            ahead = (1 - self.momentum) * matrix.grad + self.momentum * self.kept[number]
            matrix.mul_(1 - self.lr * self.weight_decay)
            matrix.sub_(by_singular_values(ahead) * self.lr * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1])))


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=drawn, dtype=dtype)) for shape in ((6, 4), (3, 7), (5, 5))]


def stepped(optimizer: Any, weights: list[nn.Parameter], num_steps: int = 5) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=drawn, dtype=weight.dtype)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}], ids=str
)
def test_in_bf16_it_is_torchs(options: dict[str, Any]) -> None:
    ours, torchs = matrices(), matrices()
    found = stepped(dt.Muon(ours, lr=0.02, **options), ours)
    expected = stepped(torch.optim.Muon(torchs, lr=0.02, **options), torchs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_in_fp32_it_is_what_the_formula_says() -> None:
    ours, plain = matrices(torch.float64), matrices(torch.float64)
    found = stepped(dt.Muon(ours, lr=0.02, weight_decay=0.1, dtype="fp32"), ours)
    expected = stepped(PlainMuon(list(plain), 0.02, weight_decay=0.1), plain)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
    rough = matrices(torch.float64)
    assert (stepped(dt.Muon(rough, lr=0.02), rough)[0] - expected[0]).abs().max() > 1e-4, "in bf16 it is not"


def test_matrices_of_one_shape_are_iterated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[nn.Parameter]:
        numbers = torch.Generator().manual_seed(2)
        shapes = ((6, 4), (5, 5), (6, 4), (4, 6), (6, 4), (4, 6))
        return [nn.Parameter(torch.randn(shape, generator=numbers, dtype=torch.float64)) for shape in shapes]

    stacks: list[tuple[int, ...]] = []
    iterated = muon._iterated

    def watched(matrix: Tensor, group: Any) -> Tensor:
        stacks.append(tuple(matrix.shape))
        return iterated(matrix, group)

    monkeypatch.setattr(muon, "_iterated", watched)
    monkeypatch.setattr(muon, "STACK_ELEMENTS", 2 * 24)
    ours, plain = drawn(), drawn()
    found = stepped(dt.Muon(ours, lr=0.02, weight_decay=0.1, dtype="fp32"), ours)
    expected = stepped(PlainMuon(list(plain), 0.02, weight_decay=0.1), plain)
    assert stacks[:4] == [(2, 6, 4), (6, 4), (5, 5), (2, 4, 6)]  # two are as large as a stack may be
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


def test_another_type_is_refused() -> None:
    with pytest.raises(DrivetrainError, match="fp16"):
        dt.Muon(matrices(), dtype="fp16")  # type: ignore[arg-type]


def test_matrices_of_hidden_layers_and_the_rest() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embedding = nn.Embedding(10, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Conv1d(4, 4, 1)])
            self.lm_head = nn.Linear(4, 10)

    chosen = dt.muon_with_adamw()["matrices"]
    found = [name for name, parameter in Model().named_parameters() if chosen.selects(name, parameter)]
    assert found == ["blocks.0.weight"]


def test_the_work_is_shared_out_by_its_size() -> None:
    assert _owners([(8, 8), (4, 4), (4, 4), (8, 8)], 2) == [0, 0, 1, 1]
    assert _owners([(8, 8)] * 4, 3) == [0, 1, 2, 0]
    assert _owners([], 3) == []

"""What a batch counts."""

from typing import Any

import pytest
import torch

from drivetrain.data.batch import candidates

DRAW = torch.Generator().manual_seed(3)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=DRAW)


BATCHES: dict[str, list[Any]] = {
    "rows of one length": [{"labels": tokens(1, 6), "mask": tokens(1, 6) > 0} for _ in range(5)],
    "rows of several lengths": [{"labels": tokens(1, 3 + number)} for number in range(5)],
    "lengths and weights": [
        (torch.tensor([7 + number]), torch.rand(1, 3, generator=DRAW, dtype=torch.float64)) for number in range(4)
    ],
    "other dtypes": [[tokens(1, 2)], [tokens(1, 2).int()], [tokens(1, 2).double()]],
    "targets that are not known": [
        (torch.rand(4, 3, generator=DRAW), torch.tensor([float("nan"), 1.0, number, float("nan")]))
        for number in range(3)
    ],
    "pictures": [(torch.rand(1, 3, 4, 4, generator=DRAW), tokens(1)) for _ in range(3)],
}


@pytest.mark.parametrize("name", BATCHES)
def test_several_batches_are_counted_as_each_is(name: str) -> None:
    batches = BATCHES[name]
    counts = candidates(batches[0])
    assert counts
    for count in counts:
        assert count.numbers(batches) == pytest.approx([count.number(batch) for batch in batches], rel=1e-12), count

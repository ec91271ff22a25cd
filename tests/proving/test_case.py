"""The samples of a case, as trainers and the reference read them."""

import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.proving.case import Case, TaggedData, plain_batch
from tests.proving.planted_data import Noisy


def test_what_an_item_draws_follows_from_its_number_alone() -> None:
    job = dt.Job(
        name="noisy",
        model=lambda: nn.Linear(3, 2),
        data=Noisy(TensorDataset(torch.ones(6, 3), torch.zeros(6, dtype=torch.int64))),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=2,
        max_steps=3,
    )
    case = Case("noisy", job, num_samples=6)
    one_by_one = [TaggedData(case)[number] for number in range(6)]
    together = TaggedData(case).items([4, 0, 3])
    assert [number for number, _, _ in together] == [4, 0, 3]
    for number, digest, (inputs, _) in together:
        assert torch.equal(inputs, one_by_one[number][2][0])
        assert digest == 0
    assert len({float(inputs[0]) for _, _, (inputs, _) in one_by_one}) == 6, "each draws something else"
    before = random.getstate()
    inputs, _ = plain_batch(case, [5, 1])
    assert random.getstate() == before, "whoever reads them goes on with its own numbers"
    assert torch.equal(inputs, torch.stack([one_by_one[5][2][0], one_by_one[1][2][0]]))

"""Processes are forked from one whose OpenMP threads have run: they stay on one thread, whatever a trainer asks for."""

import torch

from drivetrain.proving.processes import Workplace


def many_threads() -> float:
    torch.set_num_threads(2)
    return float(torch.tanh(torch.ones(2_000_000, dtype=torch.float64)).sum())


def test_a_trainer_that_asks_for_threads_does_not_hang() -> None:
    assert many_threads() > 0  # here they start
    with Workplace(20.0) as place:
        assert place.apart(many_threads) > 0

"""What `dt.log` costs on a CPU, in the thread's own CPU time: from the call in the loss to the line of `steps.jsonl`.

Steps with and without values alternate. The model is left out, so that the values are all that differs.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

import drivetrain as dt
from drivetrain.core.metrics import Logged, LoggedTotals, StepRecord, logging_loss
from drivetrain.strategies.loss_parts import StepLog

STEPS, ROUNDS = 2000, 9


def measure() -> dict[str, list[float]]:
    numbers = (1, 4, 16)
    without, with_values = _step(0), {number: _step(number) for number in numbers}
    samples: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        base = _seconds(without)
        for number, step in with_values.items():
            name = f"{number} value{'s' if number > 1 else ''} in a step (µs per value)"
            samples.setdefault(name, []).append((_seconds(step) - base) / number * 1e6)
    return samples


def _step(num_values: int) -> Callable[[], str]:
    values = {f"value {number}": torch.tensor(number / 3, requires_grad=True) for number in range(num_values)}
    result, log = torch.tensor(1.0), StepLog()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        for name, value in values.items():
            dt.log(name, value)
        return result

    called = logging_loss(loss)

    def step() -> str:
        found = called(None, None)
        if type(found) is Logged:
            log.add(found.values, 64)
        logged = log.take()
        if isinstance(logged, LoggedTotals):  # as `loop/read_back.py` reads it
            logged = logged.read(logged.values.tolist())
        return StepRecord(1, 0, 64, 1.0, 64, 0.1, 1.0, 0.01, logged=logged).as_json()

    step()
    return step


def _seconds(step: Callable[[], str]) -> float:
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS

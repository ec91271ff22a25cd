"""What the trainer costs per step, against loops written by hand, on one thread of a CPU.

A small network, data in memory, JSON lines on. Runs of the loops are interleaved, several rounds; what is kept is
each run's median time per step, so that a busy moment of the machine does not count.

Of captured steps, which the host only gives to a device, what is measured is the main thread's own time: with a replay
that does nothing, since there is no device.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.loop import CapturedStepper
from drivetrain.run import assemble

ROUNDS = 7
STEPS = 600
CAPTURED_STEPS = 6_000
BATCH = 128


def measure() -> dict[str, list[float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = TensorDataset(torch.randn(60_000, 64), torch.randint(0, 10, (60_000,)))
        loops: dict[str, Callable[[TensorDataset], float]] = {
            "by hand, tensors indexed (µs per step)": by_hand_indexed,
            "by hand, DataLoader (µs per step)": by_hand_with_loader,
            "drivetrain, steps.jsonl alone (µs per step)": partial(by_drivetrain, log_every=0, monitor_gpu=False),
            "drivetrain, with what is watched by default (µs per step)": by_drivetrain,
        }
        samples = _rounds(loops, data)
        indexed, loader, alone, watched = samples.values()
        for name, against, ours in (
            ("overhead against indexing by hand, steps.jsonl alone", indexed, alone),
            ("overhead against indexing by hand, watched", indexed, watched),
            ("overhead against a DataLoader by hand, watched", loader, watched),
        ):
            samples[f"{name} (µs per step)"] = [b - a for a, b in zip(against, ours, strict=True)]
        only_given: dict[str, Callable[[TensorDataset], float]] = {
            "drivetrain, captured, in stretches (µs of the main thread per step)": captured,
            "drivetrain, captured, step by step (µs of the main thread per step)": partial(captured, stretches=False),
        }
        return samples | _rounds(only_given, data)
    finally:
        torch.set_num_threads(threads)


def _rounds(loops: dict[str, Callable[[TensorDataset], float]], data: TensorDataset) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            samples[name].append(loop(data) * 1e6)
    return samples


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def loss_of(network: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(network(batch[0]), batch[1])


class Stopwatch:
    """Takes the times between the ends of steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._marks: list[float] = []
        self._clock = clock

    def mark(self) -> None:
        self._marks.append(self._clock())

    def median(self) -> float:
        differences = [b - a for a, b in pairwise(self._marks)]
        return statistics.median(differences[50:])


class Extra(NamedTuple):
    """The cost of the loop per step over the leanest one written by hand."""

    lines: float  # of Python that the main thread runs
    share: float  # of the main thread's own time, as a part of the lean step


def extra_per_step(rounds: int) -> Extra:
    """Measure it so that a busy machine does not matter, for a test.

    Lines are counted, which is exact. The clock of the main thread stands still while others use the core, and of each
    loop the quietest of several interleaved rounds counts. What threads beside do is in neither.
    """
    data = TensorDataset(torch.randn(60_000, 64), torch.randint(0, 10, (60_000,)))
    loops = (by_hand_indexed, by_drivetrain)
    lines = [lines_per_step(loop, data) for loop in loops]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for found, loop in zip(times, loops, strict=True):
            found.append(loop(data, time.thread_time))
    hand, ours = map(min, times)
    return Extra(lines[1] - lines[0], ours / hand - 1)


def lines_per_step(loop: Callable[[TensorDataset, Callable[[], float]], float], data: TensorDataset) -> float:
    """Count the lines of Python that a usual step of a loop runs, in whatever module."""
    count = 0

    def at_line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return at_line

    before = sys.gettrace()
    sys.settrace(at_line)
    try:
        return loop(data, lambda: float(count))
    finally:
        sys.settrace(before)


def by_hand_indexed(data: TensorDataset, clock: Callable[[], float] = time.perf_counter) -> float:
    """Train by the leanest loop: a permutation, tensors indexed by it, a fused optimizer, one line of JSON a step."""
    inputs, labels = data.tensors
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    watch = Stopwatch(clock)
    with tempfile.TemporaryDirectory() as folder:
        log = os.open(Path(folder) / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        order = torch.randperm(len(data))
        for step in range(STEPS):
            chosen = order[step * BATCH % 50_000 : step * BATCH % 50_000 + BATCH]
            _step(network, optimizer, [inputs[chosen], labels[chosen]], log, step)
            watch.mark()
        os.close(log)
    return watch.median()


def by_hand_with_loader(data: TensorDataset) -> float:
    """Train as most people write it."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    watch = Stopwatch()
    step = 0
    with tempfile.TemporaryDirectory() as folder:
        log = os.open(Path(folder) / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while step < STEPS:
            for batch in DataLoader(data, BATCH, shuffle=True, drop_last=True):
                _step(network, optimizer, batch, log, step)
                watch.mark()
                step += 1
                if step == STEPS:
                    break
        os.close(log)
    return watch.median()


def _step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor], log: int, step: int) -> None:
    optimizer.zero_grad()
    loss = loss_of(network, batch)
    loss.backward()
    optimizer.step()
    os.write(log, (json.dumps({"step": step, "loss": float(loss.detach())}) + "\n").encode())


def by_drivetrain(data: TensorDataset, clock: Callable[[], float] = time.perf_counter, **settings: Any) -> float:
    watch = Stopwatch(clock)

    def timed_loss(network: nn.Module, batch: list[Tensor]) -> Tensor:
        watch.mark()  # once per step, as there is one micro-batch
        return loss_of(network, batch)

    _train(data, timed_loss, STEPS, **settings)
    return watch.median()


def captured(data: TensorDataset, *, stretches: bool = True) -> float:
    begun: list[float] = []  # by the thread's own clock

    def record(body: Callable[[], None]) -> Callable[[], None]:
        body()
        return lambda: begun.append(time.thread_time())

    with ExitStack() as patches:
        # What keeps steps from being captured on a CPU is that nothing there replays them.
        patches.enter_context(mock.patch.object(assemble, "device_reasons", return_value=""))
        stepper = partial(CapturedStepper, make_recorder=lambda device: record)
        patches.enter_context(mock.patch.object(assemble, "CapturedStepper", stepper))
        if not stretches:
            patches.enter_context(mock.patch.object(CapturedStepper, "may_go_on", False))
        _train(data, loss_of, CAPTURED_STEPS, capture="on", resident="on", auto_optimize=False)
    timed = begun[len(begun) // 4 :]
    return (timed[-1] - timed[0]) / (len(timed) - 1)


def _train(data: TensorDataset, loss: Callable[..., Tensor], steps: int, **settings: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            name="overhead",
            model=model,
            data=data,
            loss=loss,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
            global_batch=BATCH,
            max_steps=steps,
        )
        train(job, configure(output_dir=folder, gpu_mode="cpu", report=False, **settings), quiet=True)

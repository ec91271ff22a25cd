"""What watching costs: the same run with everything on and with everything off, interleaved.

On: phases, speed, TensorBoard, W&B (offline), the sampler every 10 steps, console lines. Off: steps.jsonl alone. Two
cases on one thread of a CPU: the small network of `overhead`, and a step that lasts 10 ms; with a GPU also GPT-2 of
`gpt2`. Runs come in pairs whose order alternates.

Three figures of a run, each the lower quartile over windows of 20 steps, since others may be on the machine: by the
wall clock, which is what a user feels; by the training thread's CPU time; by that of the whole process, which has the
threads beside the loop in it. All are differences of large numbers. A fourth is not: the CPU time spent inside the
calls that the loop makes for being watched (every lap, every record), added up in the run itself.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import gpt2
from benchmarks.overhead import BATCH, loss_of, model
from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.monitor.phases import HostClock, NoClock
from drivetrain.monitor.recorder import RunRecorder

ROUNDS = 5
STEPS = 850
STEPS_OF_10_MS = 250
WARM_UP, WINDOW = 50, 20
OFF = {"log_every": 0, "monitor_gpu": False, "report": False, "quiet": True}
ON = {"gpu_log_interval": 10, "trackers": ["tensorboard", "wandb"], "report": False}


class Times(NamedTuple):
    """The seconds of a step."""

    wall: float
    thread: float
    process: float


class Stopwatch:
    """Looks at three clocks once per step."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float, float]] = []

    def mark(self) -> None:
        self._marks.append((time.perf_counter(), time.thread_time(), time.process_time()))

    def times(self, warm_up: int) -> Times:
        return Times(*map(_quiet_step, zip(*self._marks[warm_up::WINDOW], strict=True)))


def _quiet_step(marks: tuple[float, ...]) -> float:
    windows = [(b - a) / WINDOW for a, b in pairwise(marks)]
    return statistics.quantiles(windows, n=4)[0]


def measure() -> dict[str, list[float]]:
    os.environ["WANDB_MODE"] = "offline"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = TensorDataset(torch.randn(60_000, 64), torch.randint(0, 10, (60_000,)))
        samples = _pairs("small network", lambda settings: on_cpu(data, STEPS, 0.0, settings))
        samples["small network, inside the calls, all on (µs)"] = [inside(data, ON) for _ in range(ROUNDS)]
        samples["small network, inside the calls, all off (µs)"] = [inside(data, OFF) for _ in range(ROUNDS)]
        samples |= _pairs("10 ms step", lambda settings: on_cpu(data, STEPS_OF_10_MS, 0.0078, settings))
    finally:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        text = torch.randint(0, gpt2.VOCABULARY, (gpt2.BATCH * 16, gpt2.CONTEXT + 1))
        tokens = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        samples |= _pairs("GPT-2 on a GPU", lambda settings: on_gpu(tokens, settings))
    return samples


def _pairs(name: str, run: Callable[[dict[str, Any]], Times]) -> dict[str, list[float]]:
    run(ON), run(OFF)
    on: list[Times] = []
    off: list[Times] = []
    for number in range(ROUNDS):
        for settings, found in ((ON, on), (OFF, off)) if number % 2 else ((OFF, off), (ON, on)):
            found.append(run(settings))
    pairs = list(zip(off, on, strict=True))
    return {
        f"{name}, all off: a step (µs)": [1e6 * times.wall for times in off],
        f"{name}, all on: a step (µs)": [1e6 * times.wall for times in on],
        f"{name}, cost by the wall clock (µs)": [1e6 * (b.wall - a.wall) for a, b in pairs],
        f"{name}, cost by the wall clock (%)": [100 * (b.wall / a.wall - 1) for a, b in pairs],
        f"{name}, cost by the training thread's CPU time (µs)": [1e6 * (b.thread - a.thread) for a, b in pairs],
        f"{name}, cost by the process's CPU time (µs)": [1e6 * (b.process - a.process) for a, b in pairs],
    }


def on_cpu(data: TensorDataset, steps: int, pause: float, settings: dict[str, Any]) -> Times:
    watch = Stopwatch()

    def timed_loss(network: nn.Module, batch: list[Tensor]) -> Tensor:
        watch.mark()  # once per step, as there is one micro-batch
        if pause:
            time.sleep(pause)
        return loss_of(network, batch)

    job = Job(
        name="watching",
        model=model,
        data=data,
        loss=timed_loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
        global_batch=BATCH,
        max_steps=steps,
        checkpoint_every=steps,
    )
    _train(job, gpu_mode="cpu", **settings)
    return watch.times(WARM_UP)


def inside(data: TensorDataset, settings: dict[str, Any]) -> float:
    """Return the CPU microseconds per step that the training thread spends on laps and records."""
    spent, calls = [0.0], [0]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*arguments)
            finally:
                spent[0] += time.thread_time() - began
                calls[0] += 1

        return call

    places = [
        (HostClock, "lap"),
        (HostClock, "next_step"),
        (NoClock, "lap"),
        (NoClock, "next_step"),
        (RunRecorder, "write"),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    began = time.thread_time()
    for _ in range(100_000):
        time.thread_time()
    looking = (time.thread_time() - began) / 100_000
    try:
        for owner, name, original in kept:
            if name in vars(owner):
                setattr(owner, name, timed(original))
        on_cpu(data, STEPS, 0.0, settings)
    finally:
        for owner, name, original in kept:
            if name in vars(owner):
                setattr(owner, name, original)
    return 1e6 * (spent[0] - calls[0] * looking) / STEPS


def on_gpu(data: TensorDataset, settings: dict[str, Any]) -> Times:
    watch = Stopwatch()

    def timed_loss(network: nn.Module, batch: Any) -> Tensor:
        watch.mark()
        return gpt2.loss_of(network, batch)

    job = Job(
        name="watching",
        model=gpt2.Gpt2,
        data=data,
        loss=timed_loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
        global_batch=gpt2.BATCH,
        max_steps=3 * gpt2.STEPS,
        checkpoint_every=3 * gpt2.STEPS,
    )
    _train(job, gpu_mode="single_gpu", precision="bf16", **settings)
    return watch.times(WINDOW)


def _train(job: Job, **settings: Any) -> None:
    """Train with a console that works as it does for a user, and prints to nowhere."""
    kept = os.dup(1)
    try:
        with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            train(job, configure(output_dir=folder, **settings))
    finally:
        os.dup2(kept, 1)
        os.close(kept)

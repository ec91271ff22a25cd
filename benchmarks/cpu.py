"""No flags on a CPU, against the best of a plain loop, compiling, bf16, one thread, and loader processes.

Three small networks: a perceptron, a convolutional network, a transformer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks import gpt2, rivals
from benchmarks.contest import Aim, Competitor, Contest, Measured
from benchmarks.rivals import Pace, Stopwatch, Workload, by_hand, with_no_flags
from drivetrain.hardware.host import find_cpu

CPU = torch.device("cpu")


def perceptron(smoke: bool) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    return _classifier(model, (784,), 128, Pace(5, 5, 2) if smoke else Pace(200, 100, 10), 60 if smoke else 60_000)


def convolutions(smoke: bool) -> Workload:
    width = 8 if smoke else 32

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 16, 10))

    return _classifier(model, (3, 32, 32), 64, Pace(2, 2, 2) if smoke else Pace(20, 10, 8), 20 if smoke else 2_000)


def transformer(smoke: bool) -> Workload:
    width, depth, context = (16, 1, 16) if smoke else (128, 4, 64)

    def data() -> tuple[Tensor, ...]:
        text = torch.randint(0, 256, (1024, context + 1), generator=torch.Generator().manual_seed(0))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Workload(
        model=lambda: gpt2.Gpt2(width, depth, 4, context, 256),
        loss=gpt2.loss_of,
        data=data,
        global_batch=16,
        pace=Pace(2, 2, 2) if smoke else Pace(20, 10, 8),
        job_steps=20 if smoke else 2_000,
    )


def _classifier(
    model: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, pace: Pace, job_steps: int
) -> Workload:
    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(4096, *shape, generator=generator), torch.randint(0, 10, (4096,), generator=generator)

    def loss(network: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(network(batch[0]), batch[1])

    return Workload(
        model=model, loss=loss, data=data, global_batch=batch, learning_rate=1e-3, pace=pace, job_steps=job_steps
    )


WORKLOADS = {"cpu-mlp": perceptron, "cpu-cnn": convolutions, "cpu-transformer": transformer}
NAMES = tuple(WORKLOADS)


def contest(name: str, smoke: bool = False) -> Contest:
    work = WORKLOADS[name](smoke)
    size = work.global_batch
    ways: dict[str, tuple[str, Callable[[], Measured]]] = {
        "hand-plain": ("by hand: eager, fp32, fused AdamW", partial(_hand, work, size)),
        "hand-one-thread": ("the same on one thread", lambda: _on_threads(1, partial(_hand, work, size))),
        "hand-channels-last": ("the same, channels-last", partial(_hand, work, size, channels_last=True)),
        "hand-bf16": ("the same in bf16 autocast", partial(_hand, work.paced(**_few(smoke)), size, precision="bf16")),
        "hand-loader": ("by hand, DataLoader in the process", lambda: _with_loader(work, 0)),
        "hand-workers": ("by hand, DataLoader with one process", lambda: _with_loader(work, 1)),
    }
    if not smoke:
        ways["hand-compiled"] = ("by hand: torch.compile, fp32, fused AdamW", partial(_hand, work, size, compiled=True))
    if name != "cpu-cnn":
        del ways["hand-channels-last"]
    # Without such instructions bf16 was measured a hundred times slower, or not done after 180 s.
    why_not = {} if "bf16" in find_cpu().precisions else {"hand-bf16": "this CPU has no instructions for bf16"}
    rivals_ = tuple(
        Competitor(
            way,
            what,
            lambda _, measure=measure: measure(),  # type: ignore[misc]
            cap_seconds=180,
            why_not=why_not.get(way, ""),
        )
        for way, (what, measure) in ways.items()
    )
    return Contest(
        name=name,
        module=__name__,
        workload={"model": name.removeprefix("cpu-"), "global_batch": size, "job": f"{work.job_steps} steps"},
        unit="samples/s",
        units_per_step=size,
        competitors=(
            with_no_flags(work, cap_seconds=300, device="cpu"),
            *rivals_,
        ),
        # The machine may be busy at times: both sides are measured at several times.
        order=("ours", *ways) if smoke else ("ours", *ways, "ours", "best:hand-", "ours"),
        aims=(Aim("best of the loops by hand", tuple(ways), 0.95),),
    )


def _few(smoke: bool) -> dict[str, int]:
    """Return a pace of few steps: bf16 may be many times slower here."""
    return {} if smoke else {"warm_steps": 3, "window_steps": 3, "num_windows": 3}


def _hand(
    work: Workload,
    size: int,
    *,
    precision: str = "fp32",
    compiled: bool = False,
    channels_last: bool = False,
) -> Measured:
    return by_hand(
        work,
        micro_batch=size,
        precision=precision,  # type: ignore[arg-type]
        compiled=compiled,
        channels_last=channels_last,
        device=CPU,
    )


def _on_threads(count: int, measure: Callable[[], Measured]) -> Measured:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return measure()
    finally:
        torch.set_num_threads(before)


def _with_loader(work: Workload, num_workers: int) -> Measured:
    return by_loader(work, rivals.loader_of(work, work.data(), work.global_batch, {"num_workers": num_workers}))


def by_loader(work: Workload, loader: DataLoader[Any]) -> Measured:
    """Train by a plain loop over a loader."""
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(model.parameters(), fused=True)
    watch = Stopwatch(CPU, work.pace)
    while True:
        for batch in loader:
            optimizer.zero_grad()
            work.loss(model, batch).backward()
            optimizer.step()
            if watch.step():
                return watch.measured()

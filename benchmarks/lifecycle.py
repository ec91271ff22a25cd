"""What it costs that experts may come and go: the same mixture fixed, with the lifecycle, and with its graph too.

Rules that never act: what is measured is looking (samples kept in every step; every 100 steps novelty, loads, outputs
of candidates for a merge, the graph), not the work of more experts. The three train in turns, 100 steps with a look,
so that whatever else the machine does meets all alike; on a CPU in CPU time of one thread, on a GPU by the wall clock,
with the device awaited at both ends. Beside the difference of two such windows, which are large numbers: the time
inside the looks, over that of the steps.
"""

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.core.hook import StepContext
from drivetrain.core.world import World
from drivetrain.moe import Knowledge, Lifecycle, MixtureOfExperts, Rules, Settlement

ROUNDS, EVERY = 8, Lifecycle().every
EXPERTS, SLOTS, LABELS = 16, 24, 10
NEVER = Rules(far=1e9, agreement=1.0, idle_looks=10**9)
FIXED, LIFECYCLE, GRAPH = "fixed mixture", "with lifecycle", "with lifecycle and graph"


class Size(NamedTuple):
    tokens: int
    width: int
    hidden: int


ON_CPU, ON_GPU = Size(512, 128, 256), Size(16_384, 1024, 2048)


class Mixture(nn.Module):
    def __init__(self, size: Size, *, is_fixed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, size.width)
        self.mixture = MixtureOfExperts(size.width, EXPERTS, size.hidden, num_slots=SLOTS)
        if is_fixed:  # as large, since the optimizer moves free slots too, but nothing is kept of its tokens
            self.mixture.can_grow = False
        self.last = nn.Linear(size.width, LABELS)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        result: Tensor = self.last(hidden + self.mixture(hidden))
        return result


class Competitor:
    def __init__(self, name: str, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        self._model = Mixture(size, is_fixed=name == FIXED).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._settlement = Settlement(self._model)
        self._batch = (
            torch.randn(size.tokens, 64, device=device),
            torch.randint(0, LABELS, (size.tokens,), device=device),
        )
        knowledge = Knowledge(labels=lambda batch: batch[1]) if name == GRAPH else None
        self._hook = None if name == FIXED else Lifecycle(EVERY, NEVER, knowledge=knowledge)
        self._step = 0

    def window(self) -> tuple[float, float]:
        """Return the seconds of a step, and of the look at their end."""
        began = self._now()
        for _ in range(EVERY):
            with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
                loss = functional.cross_entropy(self._model(self._batch[0]), self._batch[1])
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._settlement.settle()
            self._step += 1
        trained = self._now()
        if self._hook is not None:
            self._hook(StepContext(self._step, 0, self._model, World(), Path(), batch=lambda: self._batch))
        ended = self._now()
        return (ended - began) / EVERY, ended - trained

    def _now(self) -> float:
        if self._device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure() -> dict[str, list[float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        has_gpu = torch.cuda.is_available()
        return _measure(ON_GPU if has_gpu else ON_CPU, torch.device("cuda" if has_gpu else "cpu"))
    finally:
        torch.set_num_threads(threads)


def _measure(size: Size, device: torch.device) -> dict[str, list[float]]:
    competitors = {name: Competitor(name, size, device) for name in (FIXED, LIFECYCLE, GRAPH)}
    steps: dict[str, list[float]] = {name: [] for name in competitors}
    looks: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(ROUNDS + 1):
        order = list(competitors)[:: 1 if number % 2 else -1]
        for name in order:
            step, look = competitors[name].window()
            if number:  # the first is the warm-up
                steps[name].append(step * 1e3)
                looks[name].append(look * 1e3)
    result = {f"{name} (ms per step)": found for name, found in steps.items()}
    for name in (LIFECYCLE, GRAPH):
        result[f"{name}, a look (ms)"] = looks[name]
        result[f"{name}, looks of a step (%)"] = [
            look / EVERY / step * 100 for look, step in zip(looks[name], steps[name], strict=True)
        ]
        result[f"{name}, whole step against fixed (%)"] = [
            (ours / fixed - 1) * 100 for fixed, ours in zip(steps[FIXED], steps[name], strict=True)
        ]
        # Without looks: what keeping the sample costs, and the noise.
        without = [step - look / EVERY for step, look in zip(steps[name], looks[name], strict=True)]
        result[f"{name}, steps without looks against fixed (%)"] = [
            (statistics.median(without) / statistics.median(steps[FIXED]) - 1) * 100
        ]
    return result

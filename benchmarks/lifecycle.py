"""What it costs that experts may come and go: the same mixture fixed, with the lifecycle, and with its graph too.

Rules that never act: what is measured is looking (samples kept in every step; every 50 steps novelty, loads, outputs of
candidates for a merge, the graph), not the work of more experts. Runs take turns. A run's figure is the lower quartile
over windows of 50 steps, each with one look in it; on a CPU in CPU time of one thread, since others may be on the
machine, on a GPU by the wall clock. Beside this difference of large numbers: the time inside a look, over that of 50
steps, added up in the run itself.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api import train
from drivetrain.config import configure
from drivetrain.core.hook import StepContext
from drivetrain.moe import Knowledge, Lifecycle, MixtureOfExperts, Rules

ROUNDS = 3
EVERY, WARM_UP, WINDOWS = 50, 50, 5
EXPERTS, SLOTS, LABELS = 16, 24, 10
NEVER = Rules(far=1e9, agreement=1.0, idle_looks=10**9)


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


class Timed:
    """A hook that knows how long it took."""

    def __init__(self, hook: Lifecycle, clock: Callable[[], float]) -> None:
        self._hook, self._clock, self.seconds = hook, clock, list[float]()
        self.every = hook.every

    def __call__(self, context: StepContext) -> None:
        began = self._clock()
        self._hook(context)
        self.seconds.append(self._clock() - began)

    def state_dict(self) -> Any:
        return self._hook.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._hook.load_state_dict(state)


def measure() -> dict[str, list[float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(ON_GPU if torch.cuda.is_available() else ON_CPU)
    finally:
        torch.set_num_threads(threads)


def _measure(size: Size) -> dict[str, list[float]]:
    steps: dict[str, list[float]] = {"fixed mixture": [], "with lifecycle": [], "with lifecycle and graph": []}
    inside: dict[str, list[float]] = {name: [] for name in list(steps)[1:]}
    for _ in range(ROUNDS):
        for name in steps:
            step, look = run(size, None if name not in inside else Lifecycle(EVERY, NEVER, knowledge=_knowledge(name)))
            steps[name].append(step * 1e3)
            if name in inside:
                inside[name].append(look * 1e3)
    result = {f"{name} (ms per step)": found for name, found in steps.items()}
    fixed = steps["fixed mixture"]
    for name, looks in inside.items():
        result[f"{name}, a look (ms)"] = looks
        shares = [look / EVERY / step * 100 for look, step in zip(looks, steps[name], strict=True)]
        result[f"{name}, looks of a step (%)"] = shares
        result[f"{name}, whole step against fixed (%)"] = [
            (b / a - 1) * 100 for a, b in zip(fixed, steps[name], strict=True)
        ]
    return result


def _knowledge(name: str) -> Knowledge | None:
    return Knowledge(labels=lambda batch: batch[1]) if "graph" in name else None


def run(size: Size, lifecycle: Lifecycle | None) -> tuple[float, float]:
    """Seconds of a step and of a look."""
    has_gpu = torch.cuda.is_available()
    clock = time.perf_counter if has_gpu else time.thread_time
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(4 * size.tokens, 64, generator=generator),
        torch.randint(0, LABELS, (4 * size.tokens,), generator=generator),
    )
    marks: list[float] = []
    hooks = [] if lifecycle is None else [Timed(lifecycle, clock)]

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        marks.append(clock())  # once per step, as there is one micro-batch
        return functional.cross_entropy(model(batch[0]), batch[1])

    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            name="lifecycle",
            model=lambda: Mixture(size, is_fixed=lifecycle is None),
            data=data,
            loss=loss,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
            global_batch=size.tokens,
            max_steps=WARM_UP + WINDOWS * EVERY + 1,
            checkpoint_every=10**6,
            hooks=hooks,
        )
        # A replay would not call the loss: marks are made there.
        settings = {
            "gpu_mode": "single_gpu" if has_gpu else "cpu",
            "batch_size": size.tokens,
            "capture": "off",
            "compile": False,
        }
        train(job, configure(output_dir=folder, report=False, log_every=0, monitor_gpu=False, **settings), quiet=True)
    windows = [(b - a) / EVERY for a, b in pairwise(marks[WARM_UP::EVERY])]
    return statistics.quantiles(windows, n=4)[0], statistics.median(hooks[0].seconds[1:]) if hooks else 0.0

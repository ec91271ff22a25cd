"""Runs a way of doing a step on a throw-away copy of the model, and says what it took.

Nothing of the run is touched: weights, buffers, optimizer, randomness and the place in the data are afterwards what
they were before, also when a probe ran out of memory. Before each probe a line goes to a journal on the disk: after a
crash that takes the process with it, the next start finds the line and leaves that way out.
"""

import copy
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from drivetrain.core.loss import LossSum
from drivetrain.core.precision import Precision, numerics
from drivetrain.core.world import World
from drivetrain.data.batch import to_device
from drivetrain.data.division import Division
from drivetrain.data.loader import Loader
from drivetrain.job import Job
from drivetrain.plan.tune import Measurement, Way
from drivetrain.strategies import SingleStrategy, StrategyParts, Trial

WARM_STEPS, LEAST_STEPS, MOST_STEPS = 2, 3, 20
ENOUGH_SECONDS = 0.4
# How far a loss may be from fp32's: rounding of the type, many times over, but far from a wrong result.
LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2}


class Probe:
    """`measure` for the planner. Collective: all ranks try the same way, and the slowest rank's figures count."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        world: World,
        make_loader: Callable[[Division], Loader],
        journal: "Journal",
    ) -> None:
        self._job, self._model, self._world = job, model, world
        self._make_loader, self._journal = make_loader, journal
        self._alone = World(device=world.device)

    def __call__(self, way: Way) -> Measurement:
        if self._world.any(self._journal.crashed_in(way)):
            return Measurement(problem="the last start crashed while it was tried")
        self._journal.begin(way)
        with _untouched(self._world.device):
            own = self._measured(way)
        self._journal.end(way)
        return self._agreed(own)

    def _agreed(self, own: Measurement) -> Measurement:
        found = [Measurement.model_validate(each) for each in self._world.gather(own.model_dump(mode="json"))]
        failed = next((each for each in found if each.problem), None)
        if failed is not None:
            return failed.model_copy(update={"out_of_memory": any(each.out_of_memory for each in found)})
        return Measurement(
            sample_seconds=max(each.sample_seconds for each in found),
            peak_bytes=max(each.peak_bytes for each in found),
            setup_seconds=max(each.setup_seconds for each in found),
        )

    def _measured(self, way: Way) -> Measurement:
        try:
            return self._run(way)
        except torch.OutOfMemoryError:
            return Measurement(problem="out of memory", out_of_memory=True)
        except MemoryError:
            return Measurement(problem="out of host memory", out_of_memory=True)
        except Exception as error:  # noqa: BLE001  (a way that fails is one that is not used, whatever the reason)
            return Measurement(problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")

    def _run(self, way: Way) -> Measurement:
        job, device = self._job, self._world.device
        share = -(-(job.global_batch or 1) // self._world.size)
        division = Division(job.num_samples or 1, job.global_batch or 1, way.micro_batch, self._world.size)
        first = self._make_loader(division).first(job.max_steps, job.epochs)
        batch = to_device(first.batch, device, channels_last=way.channels_last)
        model = copy.deepcopy(self._model)
        if way.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        precision = Precision(way.precision, device.type)
        with numerics(precision, deterministic=False, cudnn_benchmark=True):
            problem = self._strays(model, batch, way, precision)
            if problem:
                return Measurement(problem=problem)
            called, graphs = None, 0
            if way.compile_mode:
                torch._dynamo.reset()
                graphs = _num_graphs()
                called = torch.compile(model, mode=way.compile_mode)
            optimizer = job.make_optimizer(model)
            parts = StrategyParts(model, job.loss, optimizer, job.clip_norm, precision, called)
            strategy = SingleStrategy(self._alone)
            began = time.perf_counter()
            objective = strategy.prepare(parts, Trial(batch, first.num_samples))

            def step(num_micro_steps: int) -> None:
                for _ in range(num_micro_steps):
                    strategy.backward(objective(batch, first.num_samples, first.num_samples * num_micro_steps, 1))
                strategy.step(False)

            for _ in range(WARM_STEPS):
                step(1)
            _wait(device)
            warm = time.perf_counter() - began
            if way.compile_mode and _num_graphs() == graphs:
                return Measurement(problem="nothing was compiled")
            _reset_peak(device)
            one = _timed(lambda: step(1), device)
            count = -(-share // way.micro_batch)
            more = _timed(lambda: step(2), device) - one if count > 1 else one
            # A step is one micro-step with the optimizer's, and count - 1 more without.
            seconds = one + (count - 1) * max(more, 0.0)
            return Measurement(
                sample_seconds=seconds / share,
                peak_bytes=_peak_bytes(device),
                setup_seconds=max(0.0, warm - (WARM_STEPS + 1) * one) if way.compile_mode else 0.0,
            )

    def _strays(self, model: nn.Module, batch: Any, way: Way, precision: Precision) -> str:
        """Why this way's loss is not to be trusted; empty if it is near what fp32 gives."""
        if way.precision == "fp32":
            return ""
        reference = _loss(self._job, model, batch, Precision("fp32", precision.device_type))
        found = _loss(self._job, model, batch, precision)
        if abs(found - reference) <= LOSS_TOLERANCE[way.precision] * max(abs(reference), 1e-3):
            return ""
        return f"its loss is {found:.5g} where fp32 has {reference:.5g}: more than {way.precision} explains"


def _loss(job: Job, model: nn.Module, batch: Any, precision: Precision) -> float:
    around = precision.around_forward()
    torch.manual_seed(0)  # the same dropout in both
    with torch.no_grad():
        if around is None:
            result = job.loss(model, batch)
        else:
            with around:
                result = job.loss(model, batch)
    return float(result.total / result.count) if isinstance(result, LossSum) else float(result)


class Journal:
    """Which way is being tried right now, on the disk."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._crashed: set[str] = set()
        if path is not None and path.exists():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            ended = {line["way"] for line in lines if line["event"] == "end"}
            self._crashed = {line["way"] for line in lines if line["event"] == "begin"} - ended

    def crashed_in(self, way: Way) -> bool:
        return way.model_dump_json() in self._crashed

    def begin(self, way: Way) -> None:
        self._write("begin", way)

    def end(self, way: Way) -> None:
        self._write("end", way)

    def _write(self, event: str, way: Way) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "way": way.model_dump_json()}) + "\n")
            file.flush()


@contextmanager
def _untouched(device: torch.device) -> Iterator[None]:
    """Afterwards the generators are where they were, and the memory of the probe is given back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            assert on_device is not None
            torch.cuda.set_rng_state(on_device, device)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _timed(step: Callable[[], None], device: torch.device) -> float:
    """The median over enough steps, each with its own wait: a difference of 3 % has to be seen."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < LEAST_STEPS or (len(times) < MOST_STEPS and time.perf_counter() - began < ENOUGH_SECONDS):
        start = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    """On a CPU nobody counts; 0 says so."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def couples_samples(model: nn.Module) -> bool:
    """Whether samples of a batch influence each other: then the micro-batch decides what is learnt."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)) for module in model.modules())

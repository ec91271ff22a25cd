"""Runs the first steps of a job as `train` would, on a copy of its model, and keeps the bits of what came out."""

import copy
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.world import World, synchronize
from drivetrain.data.division import Division
from drivetrain.loop.read_back import Reading
from drivetrain.plan.knobs import Way
from drivetrain.plan.repeat import Bits
from drivetrain.run.assemble import assemble, make_stepper, trial_of
from drivetrain.run.data_loading import make_loader
from drivetrain.run.model_factory import prepare_model
from drivetrain.run.session import Session
from drivetrain.strategies import SingleStrategy
from drivetrain.strategies.loss_parts import LossParts

NUM_STEPS, NUM_STEPS_CAPTURED = 4, 7  # a step is recorded after three, and replayed from there on
ROUNDS, ROUND_SECONDS, MOST_STEPS = 7, 0.15, 50
_CHUNK = 1 << 22
_ODD = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)


class FirstSteps:
    """Runs the first steps of a run, way by way, in one process on one device. The run itself is not changed."""

    def __init__(self, run: Session, built: nn.Module) -> None:
        self._run, self._built = run, built
        self._ready: dict[Way, Callable[[], object]] = {}  # runs one more step, for its time

    def bits(self, way: Way, *, twice: bool = True) -> Bits:
        """Run the first steps of a way and return their results. With `twice`, run them again, already compiled."""
        try:
            run = self._run.trying(way)
            with run.numerics(), run.stream():
                found = self._once(run)
                again = self._once(run) if twice else found
        except torch.OutOfMemoryError:
            return Bits(problem="out of memory")
        except Exception as error:  # noqa: BLE001  (a way that fails is one that is not used, whatever the reason)
            lines = str(error.message if isinstance(error, DrivetrainError) else error).strip().splitlines()
            return Bits(problem=f"{type(error).__name__}: {lines[0][:200] if lines else ''}")
        return found.model_copy(update={"repeats_here": found == again})

    def seconds(self, ways: Iterable[Way]) -> list[float]:
        """Return how long a step of each way takes, measured in turns, so that noise of the machine affects all."""
        ways, device = list(ways), self._run.world.device
        times: dict[Way, list[float]] = {way: [] for way in ways}
        counts: dict[Way, int] = {}
        for _ in range(ROUNDS + 1):
            for way in ways:
                run = self._run.trying(way)
                with run.numerics(), run.stream():
                    step = self._ready[way]
                    step()
                    synchronize(device)
                    began = time.perf_counter()
                    for _ in range(counts.get(way, 1)):
                        step()
                    synchronize(device)
                    seconds = (time.perf_counter() - began) / counts.get(way, 1)
                if way in counts:
                    times[way].append(seconds)
                else:
                    counts[way] = max(1, min(MOST_STEPS, int(ROUND_SECONDS / max(seconds, 1e-6))))
        return [statistics.median(times[way]) for way in ways]

    def _once(self, run: Session) -> Bits:
        way, job, world = run.way, run.job, World(device=run.world.device)
        self._ready.pop(way, None)
        division = Division(job.num_samples or 1, job.global_batch or 1, way.micro_batch, 1)
        loader = make_loader(run, division, job.source, shuffle=job.shuffle)
        first = loader.first(job.max_steps, job.epochs)
        parts = assemble(
            run,
            prepare_model(run, copy.deepcopy(self._built)),
            trial_of(run, first.batch, first.num_samples),
            division,
            make_strategy=lambda: SingleStrategy(world),
            world=world,
            loss_parts=LossParts(job.loss_weights, job.count, world, alone=True),
        )
        stepper = make_stepper(run, parts, world=world)
        num_steps = min(NUM_STEPS_CAPTURED if way.capture else NUM_STEPS, job.num_steps or NUM_STEPS)
        losses: list[str] = []
        batches = loader.batches(0, num_steps, job.epochs)
        try:
            for place, micro_batches in batches:
                micro = list(micro_batches)
                values = Reading(stepper.run(place, micro, False), world.device).values()
                numbers = [*values[:-1], *([] if values.named is None else values.named[1])]
                losses.append(" ".join(str(None if value is None else float(value).hex()) for value in numbers))
        finally:
            loader.close()
        self._ready[way] = lambda: stepper.run(place, micro, False)
        return Bits(
            losses=tuple(losses), tensors=_digests({shard.key: shard.tensor for shard in parts.strategy.save()[0]})
        )


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return a number for the bits of each tensor, computed on its device: only the numbers are copied to the host."""
    with torch.no_grad():
        sums = [_digest(tensor.detach()).cpu() for tensor in tensors.values()]
    return {name: f"{int(total) & (2**64 - 1):016x}" for name, total in zip(tensors, sums, strict=True)}


def _digest(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of all elements, each multiplied by a different odd number, modulo 2^64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().reshape(-1)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(kind)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        numbers = torch.arange(start, start + len(part), device=flat.device)
        total = total + ((part + 1) * (numbers * _signed(_ODD[0]) + _signed(_ODD[1]) | 1)).sum()
    return total


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number

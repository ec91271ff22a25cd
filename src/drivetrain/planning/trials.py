"""Trials on copies of the model, beside those of `probe`: batch sizes that double, and a model that ranks share."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import copied
from drivetrain.core.state import is_distributed, local_part
from drivetrain.core.world import World, synchronize
from drivetrain.data.division import Division
from drivetrain.plan.fitting import count_held, num_bytes
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.plan import PlannedRun
from drivetrain.plan.tune import Measurement
from drivetrain.planning.probe import (
    MOST_STEPS,
    ROUND_SECONDS,
    ROUNDS,
    WARM_STEPS,
    Journal,
    StepProbe,
)
from drivetrain.run.assemble import assemble, make_loader
from drivetrain.run.memory import needs_of, peak_meter
from drivetrain.run.model_factory import build_model, couples_samples, prepare_model
from drivetrain.run.session import Session
from drivetrain.strategies import Trial
from drivetrain.strategies.compiling import num_graphs
from drivetrain.strategies.loss_parts import LossParts
from drivetrain.strategies.turns import turns_in

# ----------------------------------------------------------------------------------------------------------------------
# Finds the fastest batch size here: steps of doubling sizes on a copy of the model, as far as memory and data go.

SECONDS_PER_SIZE, BUDGET_SECONDS = 0.15, 20.0
EQUALLY_FAST = 0.03  # of such sizes the smallest is taken for a step, and the largest to divide one
MOST_SLOWER = 2  # sizes in a row that gain nothing, after which larger ones are not tried


@dataclass(frozen=True)
class BatchSearch:
    """The sizes that were measured, smallest first, and why no larger one was."""

    tried: tuple[tuple[int, Measurement], ...]
    ended: str
    prefers_large: bool = False  # of sizes that are equally fast

    @property
    def _usable(self) -> list[tuple[int, float]]:
        return [(size, found.sample_seconds) for size, found in self.tried if not found.problem]

    @property
    def fastest(self) -> int:
        """The size that is as fast as any: the smallest of those, or the largest if `prefers_large`."""
        least = min(seconds for _, seconds in self._usable)
        as_fast = [size for size, seconds in self._usable if seconds <= least * (1 + EQUALLY_FAST)]
        return as_fast[-1 if self.prefers_large else 0]

    @property
    def largest(self) -> int:
        """The largest size that ran."""
        return self._usable[-1][0]

    def in_words(self) -> str:
        rates = ", ".join(f"{size}: {1 / seconds:,.0f}" for size, seconds in self._usable)
        return f"{self.fastest} is fastest (samples/s by size: {rates}; larger ones not tried: {self.ended})"


def settle_global_batch(run: Session) -> nn.Module | None:
    """Take the fastest batch as a device's part of a step, with --auto-batch-size where the batch size is not given.

    Returns the model that was built for it; None where there was nothing to find. Called by all ranks, before the run
    folder is claimed: the samples of a step are part of what a run is.
    """
    if not run.config.batch.auto or not run.batch_by_rule or not run.config.plan.auto_optimize:
        return None
    model = build_model(run)
    why_not = why_not_searched(run)
    if why_not:
        return model  # told with the plan
    found = search_batch_size(run, model, run.config.memory.gpu_fraction)
    run.set_global_batch(found.fastest * run.num_devices, found.in_words())
    return model


def with_micro_batch(run: Session, model: nn.Module, planned: PlannedRun) -> PlannedRun:
    """Return the same with the fastest micro-batch within a step, with --auto-batch-size. Called by all ranks."""
    if not run.config.batch.auto or planned.batch_size_found:
        return planned
    why_not = why_not_searched(run)
    if why_not:
        return replace(planned, batch_size_found=f"not measured: {why_not}")
    found = search_batch_size(run, model, run.config.memory.gpu_fraction, run.rank_samples, keeps_step=True)
    words = f"{found.in_words()}; a step stays at {run.job.largest_batch} samples"
    return replace(planned.but(micro_batch=found.fastest), batch_size_found=words)


def why_not_read(run: Session) -> str:
    """Say why samples cannot be taken for measuring; empty if they can."""
    if run.job.num_samples is not None and run.job.source.is_keyed:
        return ""
    kind = "can only be iterated" if run.job.source.is_iterable else "a sampler orders"
    return f"data that {kind} is not read for measuring"


def why_not_searched(run: Session) -> str:
    """Say why the batch size of a run cannot be measured; empty if it can. Known once the model is built."""
    if not run.config.plan.auto_optimize:
        return "measuring is switched off (--no-auto-optimize)"
    if unread := why_not_read(run):
        return unread
    if not run.is_whole:
        return "sharded models are not measured yet"
    if len(run.devices) > 1:
        return "several GPUs of one process are not measured"
    if run.weighting.holds_division:
        return f"the whole part of a rank is kept: {run.weighting.holds_division}"
    return ""


def search_batch_size(
    run: Session, model: nn.Module, fraction: float, at_most: int | None = None, *, keeps_step: bool = False
) -> BatchSearch:
    """Measure forward, backward and optimizer step of batches that double in size. Called by all ranks together.

    Args:
        run: the job and its devices; nothing of it is changed.
        model: the model on its device; copies of it are run.
        fraction: the part of the free memory that a step may use; on a CPU the memory is forecast, not measured.
        at_most: largest size to try; None is a rank's part of the data set.
        keeps_step: sizes divide the job's own step, instead of being a step each.
    """
    job, world = run.job, run.world
    if job.num_samples is None or not job.source.is_keyed:
        raise DrivetrainError(
            "the batch size cannot be measured on data that can only be iterated: its items would be used up",
            remedy="give a map-style data set, or a batch size",
        )
    most = min(at_most or job.num_samples, max(1, job.num_samples // world.size))
    limit = min(world.gather(run.free_bytes())) * fraction
    fits = _forecast(run, model, most, limit)
    began, tried = time.monotonic(), list[tuple[int, Measurement]]()
    best, num_slower, ended = float("inf"), 0, "that is all of a step" if keeps_step else "that is all of the data"
    for size in _sizes(2 if couples_samples(model) else 1, most):
        if size > fits:
            ended = f"they need more than {fraction:.0%} of the free memory (forecast)"
            break
        found = _measured(run, model, size, keeps_step=keeps_step)
        if found.out_of_memory or found.peak_bytes > limit:
            ended = "out of memory" if found.out_of_memory else f"they need more than {fraction:.0%} of the free memory"
            break
        tried.append((size, found))
        if found.problem:
            raise DrivetrainError(
                f"a step of {size} samples cannot be run: {found.problem}",
                remedy="train a few steps with --max-steps 2, which shows where",
            )
        num_slower = num_slower + 1 if found.sample_seconds > best * (1 - EQUALLY_FAST) else 0
        best = min(best, found.sample_seconds)
        if num_slower == MOST_SLOWER:
            ended = "they gain nothing any more"
            break
        if world.agree(time.monotonic() - began) > BUDGET_SECONDS:
            ended = f"{BUDGET_SECONDS:.0f} s were spent on it"
            break
    if not tried:
        raise DrivetrainError(
            f"not even one sample fits in {fraction:.0%} of the free memory",
            remedy="allow a larger part, or use a smaller model; `drivetrain plan` says what takes how much",
        )
    return BatchSearch(tuple(tried), ended, prefers_large=keeps_step)


def _measured(run: Session, model: nn.Module, size: int, *, keeps_step: bool) -> Measurement:
    job = run.job if keeps_step else replace(run.job, global_batch=size * run.world.size)
    probe = StepProbe(
        job,
        model,
        run.world,
        lambda division: make_loader(run, division, job.source, shuffle=job.shuffle),
        Journal(None),
        cudnn_benchmark=run.config.kernels.cudnn_benchmark,
    )
    return probe(run.way.but(micro_batch=size, capture=False), SECONDS_PER_SIZE)


def _sizes(least: int, most: int) -> Iterator[int]:
    size = least
    while size < most:
        yield size
        size *= 2
    yield most


def _forecast(run: Session, model: nn.Module, most: int, limit: float) -> int:
    """Return the largest size that is forecast to fit; on a GPU the allocator counts, and nothing is forecast."""
    if run.world.device.type == "cuda":
        return most
    try:
        line = needs_of(run.job, model, run.way.precision, min(most, 16), limit).keep
    except Exception:  # noqa: BLE001 - a step that cannot be followed on shapes alone can still be run
        return most
    return max((size for size in _sizes(1, most) if line.peak_bytes(size) <= limit), default=0)


# ----------------------------------------------------------------------------------------------------------------------
# Runs a way of doing a step on a copy of a model that ranks share, with all ranks together.
#
# A rank cannot run its part alone: every step gathers weights and reduces gradients. So ranks run as many steps as rank
# 0 says, and the slowest rank's time counts. The copy is made where the model was built, in host memory, and is sharded
# and assembled as the run does it.

# What is tried of a sharded model. Other choices need a whole one, or are not made of shards.
TRIED = ("micro_batch", "recompute", "compile_mode", "compile_scope", "reshard", "unit_blocks", "gather_ahead")


def why_not_tried(run: Session, model: nn.Module) -> str:
    """Return why steps of a sharded model are not measured; empty if they are. All ranks call it together."""
    if run.spec.memory != "shards" or run.experts is not None:
        return f"{run.strategy_choice.value} is not measured"
    if run.config.distributed.fsdp_offload:
        return "offloaded shards are not measured"
    own = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    needed, free = sum(run.world.gather(num_bytes(own))), min(run.world.gather(run.hardware.memory.free_bytes))
    return "" if needed <= free else "the host's memory does not hold a second copy of the model"


class ShardedProbe(StepProbe):
    """Measures ways of running a step of a sharded model. Collective: an error of one rank alone would stop all."""

    def __init__(self, run: Session, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._session = run

    def _run(self, way: StepWay, seconds: float, num_parts: int) -> Measurement:
        job, world, device = self._job, self._world, self._world.device
        share = -(-(job.largest_batch or 1) // world.size)
        count = -(-share // way.micro_batch)
        meter = peak_meter(device, may_be_coarse=False)
        meter.reset()
        batch, num_samples = self._batch(way)
        graphs = num_graphs() if way.compile_mode else 0
        run = self._session.trying(way)
        with run.numerics():
            prepared = prepare_model(run, copied(self._model))
            began = time.perf_counter()
            parts = assemble(
                run,
                prepared,
                Trial(batch, num_samples),
                Division(job.num_samples or 1, job.largest_batch or 1, way.micro_batch, world.size),
                loss_parts=LossParts(job.loss_weights, job.count, world),
            )
            strategy, objective = parts.strategy, parts.objective

            def step(num_micro_steps: int) -> None:
                in_all = num_samples * num_micro_steps * world.size
                for turn in turns_in(strategy):
                    with turn:
                        for number in range(num_micro_steps):
                            with nullcontext() if number == num_micro_steps - 1 else strategy.accumulate():
                                strategy.backward(objective(batch, num_samples, in_all, 1))
                strategy.step(0.0)

            at_once = 1 if count == 1 else 2
            for _ in range(WARM_STEPS if seconds else 1):
                step(at_once)
            synchronize(device)
            warm = time.perf_counter() - began
            if way.compile_mode and not self._was_compiled(graphs, blocks_of=prepared.model):
                return Measurement(problem="nothing was compiled")
            one = _seconds_of(lambda: step(1), world, seconds) if seconds or at_once == 1 else 0.0
            both = _seconds_of(lambda: step(2), world, seconds) if at_once == 2 else 2 * one
            first, more = (one, both - one) if one else (both / 2, both / 2)
            return Measurement(
                sample_seconds=(first + (count - 1) * max(more, 0.0)) / share,
                peak_bytes=meter.peak_bytes(),
                setup_seconds=max(0.0, warm - (WARM_STEPS + 1) * first) if way.compile_mode else 0.0,
                is_brief=not seconds,
                **_held(prepared.model, prepared.optimizer),
            )


def _seconds_of(step: Callable[[], None], world: World, seconds: float) -> float:
    """Return the median over some rounds of steps. How many there are is what rank 0 says."""
    times: list[float] = []
    num_steps, began = 1, time.perf_counter()
    while True:
        synchronize(world.device)
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize(world.device)
        times.append((time.perf_counter() - start) / num_steps)
        if not seconds:
            return times[0]
        if len(times) == 1:
            num_steps = int(world.agree(max(1, min(MOST_STEPS, int(ROUND_SECONDS / max(times[0], 1e-6))))))
        is_over = len(times) > ROUNDS and time.perf_counter() - began >= seconds
        if world.agree(is_over):
            timed = sorted(times[1:])  # the first showed how many steps make a round
            return timed[len(timed) // 2]


def _held(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return what this rank holds between steps."""

    def own(tensor: Tensor) -> Tensor:
        return local_part(tensor) if is_distributed(tensor) else tensor

    parameters = num_bytes(own(parameter) for parameter in model.parameters())
    trained = num_bytes(own(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return {
        "parameter_bytes": parameters + num_bytes(model.buffers()),
        "gradient_bytes": trained,
        "optimizer_bytes": count_held(nn.Module(), optimizer).optimizer,
    }

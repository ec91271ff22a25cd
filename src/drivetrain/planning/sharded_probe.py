"""Runs a way of doing a step on a copy of a model that ranks share, with all ranks together.

A rank cannot run its part alone: every step gathers weights and reduces gradients. So ranks run as many steps as rank 0
says, and the slowest rank's time counts. The copy is made where the model was built, in host memory, and is sharded and
assembled as the run does it.
"""

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.state import is_distributed, local_part
from drivetrain.core.world import World, synchronize
from drivetrain.data.division import Division
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.simulate import count_held, num_bytes
from drivetrain.plan.tune import Measurement
from drivetrain.planning.probe import LEAST_ROUNDS, MOST_STEPS, ROUND_SECONDS, WARM_STEPS, StepProbe, has_compiled
from drivetrain.run.assemble import assemble
from drivetrain.run.memory import CudaPeakMeter, NoPeakMeter
from drivetrain.run.model_factory import prepare_model
from drivetrain.run.session import Session
from drivetrain.strategies import Trial
from drivetrain.strategies.compiling import num_graphs
from drivetrain.strategies.layers import repeated_blocks
from drivetrain.strategies.loss_parts import LossParts
from drivetrain.strategies.turns import turns_in

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
        meter = CudaPeakMeter(device) if device.type == "cuda" else NoPeakMeter()
        meter.reset()
        batch, num_samples = self._batch(way)
        graphs = num_graphs() if way.compile_mode else 0
        run = self._session.trying(way)
        with run.numerics():
            prepared = prepare_model(run, copy.deepcopy(self._model))
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
            if way.compile_mode and num_graphs() == graphs and not _blocks_are_compiled(prepared.model):
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
        is_over = len(times) > LEAST_ROUNDS and time.perf_counter() - began >= seconds
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


def _blocks_are_compiled(model: nn.Module) -> bool:
    return any(has_compiled(type(block).forward) for block in repeated_blocks(model).values())

"""Chooses the strategy that fits the processes, the devices and the model."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.core.world import World
from drivetrain.job import Job
from drivetrain.plan import Choice
from drivetrain.plan.rules import choose_strategy
from drivetrain.plan.simulate import Held, forecast_held, num_bytes
from drivetrain.run.job_settings import plan_anew
from drivetrain.strategies.spec import refuse_without_package, strategy_spec

_FLAG = "--parallel-strategy"
_PLENTY = 10  # × its weights: more than any optimizer of torch keeps for a model, with its gradients
_LEAVE_OUT = f"leave {_FLAG} out"


def refuse_strategy(config: Config, world: World, devices: Sequence[torch.device]) -> None:
    """Raise if a strategy contradicts the launcher or the machine. `auto` never does."""
    asked = config.distributed.strategy
    if asked == "auto":
        return
    spec = strategy_spec(asked)
    refuse_without_package(asked, spec)
    if world.size > 1 and spec.processes == "one":
        message = f"{asked} is one process, and a launcher started {world.size}"
        raise _problem(config, message, _others("one"), "use ddp, or start the script with plain python")
    if world.size == 1 and spec.processes == "several":
        message = f"{asked} is several processes, and this is the only one"
        remedy = (
            "start several: drivetrain train TARGET --num-processes 2 (and --cpu where there is no GPU), torchrun or "
            f"srun; or {_LEAVE_OUT}"
        )
        raise _problem(config, message, _others("several"), remedy)
    if spec.devices == "several" and len(devices) < 2:
        message = f"{asked} shares batches between GPUs, and there is only {devices[0]} to use"
        raise _problem(config, message, "auto, single here", _LEAVE_OUT)


def _others(processes: str) -> str:
    """Name the strategies that are not bound to this number of processes."""
    return (
        ", ".join(["auto", *(name for name in STRATEGIES.names() if strategy_facts(name).processes != processes)])
        + " here"
    )


def given_strategy(asked: str, num_processes: int) -> Choice[str]:
    """Return the strategy asked for; else the one by the number of processes, for a model that is not known yet."""
    if asked != "auto":
        return Choice(value=asked, reason="asked for", pinned=True)
    return choose_strategy(None, 0, num_processes)


def strategy_for(asked: str, model: nn.Module, job: Job, world: World) -> Choice[str]:
    """Return the strategy asked for; else by what model and optimizer take, and the least that is free on any rank."""
    if asked != "auto" or world.device.type != "cuda":
        return given_strategy(asked, world.size)
    free = min(world.gather(torch.cuda.mem_get_info(world.device)[0]))
    if world.size == 1 and _PLENTY * num_bytes(model.parameters()) < free:
        return choose_strategy(None, 0, world.size)
    offloaded: int | None = None
    try:
        held = _held(model, job)
        if held is not None and importlib.util.find_spec("deepspeed") is not None:
            offloaded = held.buffers + (held.parameters + held.gradients) // world.size
    except _NotMadeError:  # a user's own loop, whose forward DeepSpeed cannot take over
        held = _as_adam(model)
    return choose_strategy(None if held is None else held.total, free, world.size, offloaded)


class _NotMadeError(Exception):
    """Raised if the job's optimizer existed before, so that it cannot be tried on other parameters."""


def _held(model: nn.Module, job: Job) -> Held | None:
    """Return the bytes of weights, buffers, gradients and optimizer; None where that is not known."""

    def make(ghost: nn.Module) -> Optimizer:
        optimizer, own = job.make_optimizer(ghost), set(ghost.parameters())
        if any(parameter not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise _NotMadeError
        return optimizer

    return forecast_held(model, make)


def _as_adam(model: nn.Module) -> Held:
    """Count what a model takes with an optimizer that keeps two numbers for each weight, as Adam does."""
    trained = num_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    weights, buffers = num_bytes(model.parameters()), num_bytes(model.buffers())
    return Held(parameters=weights, buffers=buffers, gradients=trained, optimizer=2 * trained)


def _problem(config: Config, message: str, allowed: str, remedy: str) -> ConfigError:
    name, asked = "distributed.strategy", config.distributed.strategy
    line = config.plan_pins.lines.get(name)
    if line is None:
        return ConfigError([Problem(_FLAG, message, asked, allowed=allowed, remedy=remedy)])
    remedy = remedy.replace(_LEAVE_OUT, f"take it out of the plan; or {plan_anew(config)}")
    return ConfigError([Problem(name, message, asked, line, allowed, remedy)])

"""Finds why a run's steps cannot be captured, as far as that is known before the first of them."""

import torch
from torch.optim import Optimizer

from drivetrain.core.precision import Precision
from drivetrain.core.strategy_facts import strategy_facts
from drivetrain.core.world import World
from drivetrain.data.keyed_items import Draws


def why_not_captured(
    world: World,
    strategy: str,
    optimizer: Optimizer,
    precision: Precision,
    *,
    num_micro_steps: int = 1,
    activations: str = "keep",
    compile_mode: str = "",  # empty: not compiled
    asserts: bool = False,
    draws: Draws | None = None,
) -> str:
    """Return the reason in words; empty if nothing is known that prevents capture."""
    here = why_not_here(world, asserts=asserts)
    if here:
        return here
    if not strategy_facts(strategy).captures:
        return f"the strategy {strategy} gives work to several devices"
    if num_micro_steps > 1:
        return f"a step has {num_micro_steps} micro-batches, and a replay is one"
    if activations != "keep":
        how = {"recompute": "saves the generators' state", "offload": "copies activations to its own memory"}
        return f"activations: {activations}, for which the host {how[activations]} in every step"
    if compile_mode in ("reduce-overhead", "max-autotune"):
        return f"compiling in mode {compile_mode} captures the model by itself"
    if draws is not None and draws.python:
        return "the model or the loss draws from Python's or numpy's generators, which a replay would not"
    return _why_not_optimizer(optimizer, world.device, precision)


def why_not_here(world: World, *, asserts: bool) -> str:
    """Return the reason that is known before there is a model."""
    if world.device.type != "cuda":
        return f"only CUDA devices replay a step, and this run is on {world.device.type}"
    if world.size > 1:
        return f"{world.size} processes share a step, and a replay cannot wait for the others"
    return "device assertions look at every batch from Python" if asserts else ""


def _why_not_optimizer(optimizer: Optimizer, device: torch.device, precision: Precision) -> str:
    kind = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"functions are hooked to the step of {kind}, and a replay would not call them"
    for group in optimizer.param_groups:
        if any(parameter.device != device for parameter in group["params"]):
            return f"parameters of {kind} are not on {device}"
        if any(parameter.dtype is torch.float64 for parameter in group["params"]):
            return "weights are float64, and a learning rate on the device is float32"
        if not group.get("fused") and "capturable" not in group:
            return f"{kind} has no fused form here, and none that reads the learning rate from the device"
        if group.get("differentiable"):
            return f"{kind} is differentiable"
    if precision.scales_loss and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"fp16: {kind} is not fused, and so asks the host whether gradients are infinite"
    return ""


def make_capturable(optimizer: Optimizer) -> None:
    """Keep the optimizer's step count on the device. Called before its first step and before a checkpoint is loaded."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True

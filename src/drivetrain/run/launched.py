"""Applies what follows from how this process was started: another launcher's settings, and GPUs that are unused."""

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.config import Config
from drivetrain.core.launchers import ProcessPlace
from drivetrain.core.strategy_facts import strategy_facts

_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}


def obey_launcher(config: Config, place: ProcessPlace) -> tuple[Config, list[str]]:
    """Return the configuration with `accelerate launch`'s settings, where nothing else was set; and what to report."""
    told = dict(place.settings)
    changes: dict[str, dict[str, Any]] = {}
    notes: list[str] = []

    def settle(section: str, field: str, value: Any, own: Any, is_free: bool, spelled: str) -> None:
        if is_free:
            changes.setdefault(section, {})[field] = value
            notes.append(f"{spelled} of accelerate launch is obeyed")
        elif own != value:
            notes.append(f"{spelled} of accelerate launch is not obeyed: {section}.{field} is {own} here")

    wished = told.get("ACCELERATE_MIXED_PRECISION", "no")
    if wished in _PRECISIONS:  # `no` is also the default
        is_free = config.precision.dtype == "auto" and config.precision.mixed is None
        own = "fp32" if config.precision.mixed is False else config.precision.dtype
        settle("precision", "dtype", _PRECISIONS[wished], own, is_free, f"mixed precision {wished}")
    elif wished != "no":
        notes.append(f"mixed precision {wished} of accelerate launch is not known here: see --precision")
    steps = told.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps.isdecimal() and int(steps) > 1:
        own_steps = config.batch.accumulation
        settle("batch", "accumulation", int(steps), own_steps, own_steps is None, f"accumulation over {steps} steps")
    if told.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes"):
        own_mode = config.device.mode
        is_free = own_mode == "auto" and config.device.device == "auto"
        settle("device", "mode", "cpu", own_mode, is_free, "use of the CPU")
    if not changes:
        return config, notes
    sections = {name: getattr(config, name).model_copy(update=fields) for name, fields in changes.items()}
    return config.model_copy(update=sections), notes


def share_workers(config: Config, place: ProcessPlace) -> Config:
    """Return the configuration with this process's share of the loader processes that a machine may have in all."""
    total = config.data.total_workers
    if total is None or config.data.num_workers >= 0:
        return config
    own = total // place.local_size + (place.local_rank < total % place.local_size)
    return config.model_copy(update={"data": config.data.model_copy(update={"num_workers": own})})


def unused_gpus(place: ProcessPlace, devices: Sequence[torch.device], strategy: str, target: str) -> str:
    """Return the hint for one process that was started without a launcher beside several GPUs; empty elsewhere."""
    if (
        place.size > 1
        or place.launcher == "drivetrain"
        or len(devices) < 2
        or strategy_facts(strategy).processes == "one"
    ):
        return ""
    command = f"drivetrain launch {target}" if target.endswith(".py") else f"drivetrain train {target or 'TARGET'}"
    return f"{len(devices)} GPUs are here, and one process uses one: {devices[0]}. To use all: {command}"

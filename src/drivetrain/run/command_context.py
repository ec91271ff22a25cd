"""Knows how this process was started: the command with its configuration and target, and the launcher."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import torch

from drivetrain.config import Config
from drivetrain.core.launchers import ProcessPlace, supervision
from drivetrain.core.plugins import strategy_facts
from drivetrain.job import Job

Instead = Callable[[Job], NoReturn]

_command_line: ContextVar[Config | None] = ContextVar("command_line", default=None)
_target: ContextVar[str] = ContextVar("target", default="")
_instead: ContextVar[Instead | None] = ContextVar("instead", default=None)
_runs = [0]
_ended = [True]
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}


@contextmanager
def configured(config: Config, target: str = "", instead: Instead | None = None) -> Iterator[None]:
    """Use this configuration for everything trained inside that is not given another one.

    `target` is what the command line named, kept in the run folder so that the job can be found again. With `instead`,
    `train` calls that with the job, and trains nothing.
    """
    tokens = _command_line.set(config), _target.set(target), _instead.set(instead)
    try:
        yield
    finally:
        _command_line.reset(tokens[0])
        _target.reset(tokens[1])
        _instead.reset(tokens[2])


def given_on_command_line() -> Config | None:
    """Return the configuration of the command that runs this script; None under plain `python`."""
    return _command_line.get()


def done_instead(job: Job) -> None:
    """Do what the command line wants done with a job instead of training it, if anything; it does not return then."""
    action = _instead.get()
    if action is not None:
        action(job)


def target_of_run() -> str:
    """Return the source of the job: what the command line named, or the script that is running; empty in a notebook."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    return _target.get() or (str(Path(script).absolute()) if script.endswith(".py") else "")


def target_to_rerun() -> str:
    """Return what a fresh process can run to get the job that is being trained; empty where there is no such thing.

    A script is run up to its first `dt.train`: a later one cannot be reached. The module of `python -m` is not known.
    """
    main = sys.modules["__main__"]
    if num_trained() != 1 or (not _target.get() and getattr(main, "__spec__", None) is not None):
        return ""
    return target_of_run()


def note_end(finished: bool) -> None:
    """Record how the last run of this process ended; the caller that ran a script asks for it."""
    _ended[0] = finished
    supervision.tell("end", finished=finished)


def last_one_finished() -> bool:
    return _ended[0]


def count_run() -> None:
    """Count a call of `train` or `drive` in this process."""
    _runs[0] += 1


def num_trained() -> int:
    """Return how often `train` or `drive` was called in this process."""
    return _runs[0]


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

"""Launches from Python: a script on several processes, and the environment of one of them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.world import World
from drivetrain.hardware import DeviceManager, detect
from drivetrain.launch.layout import LaunchOptions


def launch_distributed_training(
    script_path: str | Path, world_size: int | None = None, *, arguments: Sequence[str] = (), **options: Any
) -> None:
    """Launch a script as `drivetrain launch` does, with its flags as keywords; returns when the job is done.

    Raises after a failure, whose cause was printed.

    Args:
        script_path: The script to start.
        world_size: The number of processes on this machine. None: one per GPU.
        arguments: What the script gets on its command line.
        options: Flags of `drivetrain launch`, with underscores: `max_restarts=0`.

    Example:
        >>> dt.launch_distributed_training("train.py", world_size=2, cpu=True)  # doctest: +SKIP
    """
    if world_size is not None:
        options["num_processes"] = world_size
    known = {*LaunchOptions.model_fields, "output_dir", "skip_preflight"}
    problems = [
        Problem(name, "there is no such option", value, allowed=", ".join(sorted(known)))
        for name, value in options.items()
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    flags = [f"--{name.replace('_', '-')}={_text(value)}" for name, value in options.items() if value is not None]
    # In a separate process: the supervisor forks, handles signals, and stays free of torch.
    command = [sys.executable, "-m", "drivetrain", "launch", *flags, str(script_path), *arguments]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise DrivetrainError(
            f"{script_path} on several processes ended with exit code {code}",
            remedy="the cause and its remedy stand above, and in crash.json",
        )


def setup_distributed_environment(
    world_size: int | None = None, backend: str | None = None, init_method: str | None = None
) -> World:
    """Join the other processes, under any launcher, and take this one's device. `close()` leaves them.

    Args:
        world_size: How many processes are expected. It is checked, not obeyed: only a launcher can start processes.
        backend: The backend of torch.distributed. Default: nccl where each process has a GPU, else gloo.
        init_method: Where processes meet. Default: as the launcher set it.

    Returns:
        The world: this process's rank and device, and the number of processes.

    Example:
        >>> world = dt.setup_distributed_environment()  # doctest: +SKIP
        >>> world.close()  # doctest: +SKIP
    """
    place = World.detect()
    if world_size is not None and world_size != place.size:
        raise DrivetrainError(
            f"world_size is {world_size}, but {place.launcher} started {place.size} "
            f"process{'es' if place.size > 1 else ''}",
            remedy=f"drivetrain launch --num-processes {world_size} script.py, or leave world_size out",
        )
    config = Config()
    devices = DeviceManager(detect(config.run.output_dir)).devices
    timeout = config.distributed.timeout_seconds
    chosen = None if backend in (None, "auto") else backend
    return World.join(devices, backend=chosen, init_method=init_method, timeout_seconds=timeout)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

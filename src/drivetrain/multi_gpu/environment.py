"""The environment of distributed processes, and starting a script on several of them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.hardware import detect
from drivetrain.launch.layout import LaunchOptions, get_free_port

__all__ = ["get_free_port", "launch_distributed_training", "setup_distributed_environment"]

PREFERRED_PORT = 12355
# What torchrun calls it, and what `drivetrain launch` does.
_TORCHRUN = {
    "nproc_per_node": "num_processes",
    "nnodes": "nodes",
    "master_addr": "main_address",
    "master_port": "main_port",
}


def setup_distributed_environment(
    world_size: int, backend: str = "nccl", init_method: str = "env://"
) -> dict[str, Any]:
    """Set the variables that processes started from here need to meet, and return all of them. Joins nothing.

    What is set already stays, so that a launcher is never overruled. For processes of one machine; `drivetrain launch`
    and torchrun set all of this by themselves. (`drivetrain.setup_distributed_environment` is another function: it
    joins the other processes.)

    Args:
        world_size: how many processes there will be.
        backend: `nccl` or `gloo`; without a GPU it is gloo, whatever is asked for.
        init_method: where processes meet; `env://` is at MASTER_ADDR and MASTER_PORT.

    Example:
        >>> found = setup_distributed_environment(world_size=2, backend="gloo")
        >>> found["backend"], found["WORLD_SIZE"]
        ('gloo', '2')
    """
    problems = []
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        allowed = "a whole number from 1"
        problems.append(Problem("world_size", f"got {world_size!r}", world_size, "Python", allowed, "world_size=2"))
    if backend not in ("nccl", "gloo"):
        problems.append(Problem("backend", f"got {backend!r}", backend, "Python", "nccl, gloo", "backend='gloo'"))
    started = os.environ.get("WORLD_SIZE")
    if not problems and "RANK" in os.environ and started not in (None, str(world_size)):
        message = f"a launcher started {started} processes, and world_size is {world_size}"
        problems.append(Problem("world_size", message, world_size, "Python", remedy=f"world_size={started}"))
    if problems:
        raise ConfigError(problems)
    if "RANK" not in os.environ:
        os.environ["WORLD_SIZE"] = str(world_size)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_port())
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    return {
        **{name: os.environ.get(name) for name in names},
        "backend": backend_here(backend, bool(detect().gpus)),
        "init_method": init_method,
    }


def backend_here(backend: str, has_gpus: bool) -> str:
    """Return the backend to use: NCCL needs GPUs."""
    return backend if has_gpus else "gloo"


def _port() -> int:
    import socket

    with socket.socket() as probe:
        try:
            probe.bind(("localhost", PREFERRED_PORT))
        except OSError:
            return get_free_port()
    return PREFERRED_PORT


def launch_distributed_training(
    script_path: str | Path, world_size: int | None = None, *, arguments: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a script on several processes, and return at once; `wait()` of what is returned gives the exit code.

    `drivetrain launch` does the work: it watches the processes and says why one failed. Without a GPU the processes
    train on the CPU. (`drivetrain.launch_distributed_training` waits for the end and raises after a failure.)

    Args:
        script_path: the Python file.
        world_size: processes on this machine; None is one per GPU.
        arguments: flags of the script.
        options: flags of `drivetrain launch`, such as `nodes=2`; torchrun's `nproc_per_node`, `nnodes`, `node_rank`,
            `master_addr` and `master_port` are known, too.
    """
    given = {_TORCHRUN.get(name, name): value for name, value in options.items()}
    if world_size is not None:
        given["num_processes"] = world_size
    if not detect().gpus:
        given.setdefault("cpu", True)
    known = {*LaunchOptions.model_fields, "output_dir", "skip_preflight"}
    problems = [
        Problem(name, "there is no such option", value, "Python", ", ".join(sorted(known)))
        for name, value in given.items()
        if name not in known
    ]
    if not Path(script_path).is_file():
        problems.append(Problem("script_path", f"{script_path}: there is no such file", remedy="give a Python file"))
    if problems:
        raise ConfigError(problems)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    return subprocess.Popen([sys.executable, "-m", "drivetrain", "launch", *flags, str(script_path), *arguments])

"""Starts a job from its flags: the checks that need no other machine, then the supervisor or its follower."""

import os
import sys
from pathlib import Path

from drivetrain.core.code_version import code_version
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.hardware import Hardware
from drivetrain.launch.follower import Follower
from drivetrain.launch.layout import make_layout
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.supervisor import Supervisor
from drivetrain.launch.workers import WorkerTask

SKIP_PREFLIGHT = "DRIVETRAIN_SKIP_PREFLIGHT"


def start(
    words: tuple[str, ...],
    script: Path | None,
    options: LaunchOptions,
    hardware: Hardware,
    output_dir: Path,
    *,
    skip_preflight: bool,
) -> int:
    """Run `words` in every worker until they end; the exit code is the job's."""
    if script is not None:
        check_script(script)
    layout = make_layout(options, hardware)
    task = WorkerTask(words, {SKIP_PREFLIGHT: "1"} if skip_preflight else {})
    code = {**code_version("" if script is None else str(script)), "arguments": " ".join(words[1:])}
    if layout.node_rank == 0 and os.environ.get("DRIVETRAIN_LAUNCHED"):
        raise DrivetrainError(
            "this process was started by `drivetrain launch` itself", remedy="launch once, from the outside"
        )
    if layout.node_rank == 0:
        machines = f"{layout.nodes} machines, " if layout.nodes > 1 else ""
        number = f"{layout.num_processes} process{'es' if layout.num_processes > 1 else ''}"
        here = " here" if layout.nodes > 1 else ""
        print(f"drivetrain: {machines}{', '.join([number + here, *layout.notes])}", file=sys.stderr, flush=True)
    kind = Supervisor if layout.node_rank == 0 else Follower
    return kind(task, layout, options, output_dir, code).run()


def check_script(path: Path) -> None:
    """Check the script once, here, instead of once per rank."""
    if not path.is_file():
        raise ConfigError([Problem(str(path), "there is no such script", remedy="give the path of a Python file")])
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        shown = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        message = f"{path}{line}: {what}" + (f"\n    {shown}" if shown else "")
        raise DrivetrainError(message, remedy="fix that line; nothing was started") from None

"""Knows what command runs this process: its configuration, the target that it named, and how often a run began."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

from drivetrain.config import Config
from drivetrain.core.launchers import supervision
from drivetrain.job import Job

Instead = Callable[[Job], NoReturn]

_command_line: ContextVar[Config | None] = ContextVar("command_line", default=None)
_target: ContextVar[str] = ContextVar("target", default="")
_instead: ContextVar[Instead | None] = ContextVar("instead", default=None)
_runs = [0]
_ended = [True]


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

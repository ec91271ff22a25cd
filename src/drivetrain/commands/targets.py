"""Finds the job that a command is pointed at: a recipe, `module:name` (a function, job or recipe), or a script."""

import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from drivetrain.api.training import configured, num_trained
from drivetrain.config import Config, nearest
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.plugins import RECIPES
from drivetrain.job import Job
from drivetrain.recipes import Recipe

T = TypeVar("T")


class _Done(BaseException):
    """Carries the outcome of a script's job out of the script, past whatever it would do after training."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome


def with_job(target: str, config: Config, action: Callable[[Job], T], arguments: Sequence[str] = ()) -> T:
    """Return an action's result for a target's job, which is not trained. A script runs up to its first `dt.train`.

    Args:
        target: What the command line named.
        config: The configuration of the command.
        action: What to do with the job.
        arguments: The words that a script finds in `sys.argv` after its name.
    """
    if not target.endswith(".py"):
        with configured(config, target):
            return action(job_of(find(target), target, config))

    def instead(job: Job) -> NoReturn:
        raise _Done(action(job))

    with configured(config, target, instead):
        try:
            run_script(Path(target), arguments)
        except _Done as done:
            outcome: T = done.outcome
            return outcome
    raise _without_training(target)


def train_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Run a script that must train something."""
    before = num_trained()
    run_script(Path(path), arguments)
    if num_trained() == before:
        raise _without_training(path)


def find(target: str) -> Any:
    """Return what a target names, which is no script: a recipe by its name, or whatever `module:name` is."""
    if ":" in target:
        return _imported(target)
    if not RECIPES.target(target):
        meant = nearest(target, RECIPES.names())
        remedy = f"did you mean `{meant}`?" if meant else "drivetrain train digits"
        allowed = f"{', '.join(RECIPES.names())}, module:function, or a script that ends in .py"
        raise ConfigError([Problem(target, "there is no such recipe", allowed=allowed, remedy=remedy)])
    recipe = RECIPES.load(target)
    if not isinstance(recipe, Recipe):
        raise DrivetrainError(
            f"the recipe {target} is a {type(recipe).__name__}, expected a Recipe",
            remedy="assign RECIPE = Recipe(make=…), from drivetrain.recipes",
        )
    return recipe


def job_of(found: Any, target: str, config: Config) -> Job:
    """Return the job of what `find` found."""
    if isinstance(found, Recipe):
        return found.job(config)
    try:
        job = found if isinstance(found, Job) else found()
    except TypeError as error:
        raise DrivetrainError(
            f"{target} cannot be called: {error}", remedy="give a function without arguments"
        ) from error
    if not isinstance(job, Job):
        raise DrivetrainError(f"{target} returned {type(job).__name__}", remedy="return a dt.Job")
    return job


def run_script(path: Path, arguments: Sequence[str]) -> None:
    if not path.is_file():
        raise ConfigError([Problem(str(path), "there is no such script", remedy="give the path of a Python file")])
    sys.path.insert(0, str(path.parent.absolute()))  # as `python script.py` does
    before = sys.argv[:]
    sys.argv[:] = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv[:] = before


def _imported(target: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise DrivetrainError(
            f"{target} cannot be loaded: {error}",
            remedy="give `module:RECIPE` or `module:function`, importable from this folder",
        ) from error


def _without_training(script: str) -> DrivetrainError:
    return DrivetrainError(f"{script} ended without calling dt.train", remedy="call dt.train(job) in it")

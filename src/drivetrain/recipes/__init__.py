"""`drivetrain train TARGET`: a recipe that comes with drivetrain, a user's function, or a script."""

import pkgutil
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, Field

from drivetrain.api.training import Result, configured, num_trained, train
from drivetrain.config import Config, Positional, Resolved, nearest
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.job import Job
from drivetrain.recipes import chest_xray_vqa, digits, digits_continual, digits_moe, email_sequence, gpt, image_pairs
from drivetrain.recipes.darkroom import recipe as darkroom
from drivetrain.run import last_one_finished

T = TypeVar("T")

STOPPED = 130  # as for anything that Ctrl-C ends


@dataclass(frozen=True)
class Recipe:
    """A named function that returns a job, and what to show when it is trained."""

    make: Callable[[Config], Job]
    about: str
    show: Callable[[Result], None] | None = None

    def job(self, config: Config) -> Job:
        """Return the job. Its length follows this configuration; an epoch may be something else there."""
        return replace(self.make(config), length_is_read=True)


RECIPES = {
    "chest-xray-vqa": Recipe(chest_xray_vqa.job, "answers questions about chest X-rays", chest_xray_vqa.show),
    "darkroom": Recipe(darkroom.job, "a transformer that learns in its context to find hidden goals", darkroom.show),
    "digits": Recipe(digits.job, "a small network on handwritten digits", digits.show),
    "digits-moe": Recipe(digits_moe.job, "a mixture of experts that grows and sleeps, on digits", digits_moe.show),
    "digits-continual": Recipe(
        digits_continual.job,
        "digits, turned further task by task, by experts that come as needed",
        digits_continual.show,
    ),
    "email-sequence": Recipe(email_sequence.job, "a bidirectional LSTM that classifies emails", email_sequence.show),
    "gpt": Recipe(gpt.job, "a small language model on a text file (--data FILE)", gpt.show),
    "image-pairs": Recipe(image_pairs.job, "which of two images is better, in whatever order", image_pairs.show),
}


class Options(BaseModel):
    target: Annotated[str, Positional()] = Field(
        description=f"a recipe ({', '.join(RECIPES)}), `module:function` that returns a dt.Job, or a script"
    )


def run(options: Options, resolved: Resolved) -> int:
    target, config = options.target, resolved.config
    with configured(config, str(Path(target).absolute()) if target.endswith(".py") else target):
        return _run(target, config)


def _run(target: str, config: Config) -> int:
    if target in RECIPES:
        recipe = RECIPES[target]
        result = train(recipe.job(config))
        if recipe.show is not None and result.is_main:
            with redirect_stdout(None) if config.watch.quiet else nullcontext():
                recipe.show(result)
        return _exit_code(result)
    if target.endswith(".py"):
        before = num_trained()
        _run_script(Path(target))
        if num_trained() == before:
            raise _without_training(target)
        return 0 if last_one_finished() else STOPPED
    return _exit_code(train(_job_of(target)))


def _exit_code(result: Result) -> int:
    """Return the exit code. A run that was stopped can go on, and is not a failure; but it is not done."""
    return 0 if result.finished else STOPPED


class _Done(BaseException):
    """Carries the outcome of a script's job out of the script, past whatever it would do after training."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome


def with_job(target: str, config: Config, action: Callable[[Job], T]) -> T:
    """Return an action's result for a target's job, which is not trained. A script runs up to its first `dt.train`."""
    if target in RECIPES:
        with configured(config, target):
            return action(RECIPES[target].job(config))
    if not target.endswith(".py"):
        with configured(config, target):
            return action(_job_of(target))

    def instead(job: Job) -> NoReturn:
        raise _Done(action(job))

    with configured(config, target, instead):
        try:
            _run_script(Path(target))
        except _Done as done:
            outcome: T = done.outcome
            return outcome
    raise _without_training(target)


def _without_training(script: str) -> DrivetrainError:
    return DrivetrainError(f"{script} ended without calling dt.train", remedy="call dt.train(job) in it")


def _run_script(path: Path) -> None:
    if not path.is_file():
        raise ConfigError([Problem(str(path), "there is no such script", remedy="give the path of a Python file")])
    sys.path.insert(0, str(path.parent.absolute()))  # as `python script.py` does
    runpy.run_path(str(path), run_name="__main__")


def _job_of(target: str) -> Job:
    if ":" not in target:
        meant = nearest(target, RECIPES)
        remedy = f"did you mean `{meant}`?" if meant else "drivetrain train digits"
        allowed = f"{', '.join(RECIPES)}, module:function, or a script that ends in .py"
        raise ConfigError([Problem(target, "there is no such recipe", allowed=allowed, remedy=remedy)])
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise DrivetrainError(
            f"{target} cannot be loaded: {error}", remedy="give `module:function`, importable from this folder"
        ) from error
    try:
        job = found if isinstance(found, Job) else found()
    except TypeError as error:
        raise DrivetrainError(
            f"{target} cannot be called: {error}", remedy="give a function without arguments"
        ) from error
    if not isinstance(job, Job):
        raise DrivetrainError(f"{target} returned {type(job).__name__}", remedy="return a dt.Job")
    return job

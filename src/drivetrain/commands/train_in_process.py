"""`drivetrain train TARGET` in this process: trains what the target names, and shows what a recipe has to show."""

from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from drivetrain.api.training import Result, configured, train
from drivetrain.commands.targets import find, job_of, train_script
from drivetrain.commands.train import TrainOptions
from drivetrain.config import Config, Resolved
from drivetrain.recipes import Recipe
from drivetrain.run import last_one_finished

STOPPED = 130  # as for anything that Ctrl-C ends


def run(options: TrainOptions, resolved: Resolved) -> int:
    target, config = options.target, resolved.config
    with configured(config, str(Path(target).absolute()) if target.endswith(".py") else target):
        if target.endswith(".py"):
            train_script(target, options.arguments)
            return 0 if last_one_finished() else STOPPED
        return _trained(target, config)


def _trained(target: str, config: Config) -> int:
    """Train what is no script. A run that was stopped can go on, and is not a failure; but it is not done."""
    found = find(target)
    result: Result = train(job_of(found, target, config))
    if isinstance(found, Recipe) and found.show is not None and result.is_main and result.finished:
        with redirect_stdout(None) if config.watch.quiet else nullcontext():
            found.show(result)
    return 0 if result.finished else STOPPED

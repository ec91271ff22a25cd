"""`drivetrain eval RUN`: computes loss and metrics of a run's weights over the validation set of its job."""

import json
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field
from rich.console import Console

from drivetrain.api.measuring import evaluate
from drivetrain.commands.command import Command
from drivetrain.commands.targets import with_job
from drivetrain.config import Config, Flag, Positional, Resolved
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.run_folder import read_job, read_yaml
from drivetrain.core.safe_text import HIDDEN
from drivetrain.job import Job
from drivetrain.run import SOURCE, Which

COMMAND = Command(
    summary="Loss and metrics of a run's weights over its validation set.",
    obeys=(
        "device.mode",
        "device.device",
        "device.ids",
        "precision",
        "kernels",
        "memory.activations",
        "batch.size",
        "data",
        "distributed",
    ),
)
EXAMPLES = (
    "drivetrain eval runs/digits                  the newest checkpoint",
    "drivetrain eval runs/digits --which best     the one that validated best",
    "drivetrain eval runs/mine --data other.txt   with other settings than it was trained with",
)

# Where and how it computes is this machine's matter; what the job is, the run's.
_OF_THIS_MACHINE = ("device", "kernels", "memory", "batch", "distributed", "deepspeed", "compile")


class EvalOptions(BaseModel):
    run: Annotated[Path, Positional()] = Field(description="the folder of a run, such as runs/digits")
    which: Annotated[Which, Flag("which")] = Field("last", description="which checkpoint (default: last)")
    as_json: Annotated[bool, Flag("json")] = Field(False, description="one line of JSON")


def run(options: EvalOptions, resolved: Resolved) -> int:
    target, arguments = _target_of(options.run)
    config = _config_of(options.run, resolved)

    def measured(job: Job) -> dict[str, float]:
        trained = read_job(options.run).get("name")
        if job.name != trained:
            raise DrivetrainError(
                f"{target} trains the job {job.name!r} first, and {options.run} is a run of {trained!r}",
                remedy="call dt.evaluate(job, run) from Python",
            )
        return evaluate(job, options.run, config, which=options.which)

    metrics = with_job(target, config, measured, arguments)
    _show(metrics, options)
    return 0


def _show(metrics: dict[str, float], options: EvalOptions) -> None:
    if options.as_json:
        print(json.dumps(metrics))
        return
    console = Console(highlight=False)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        console.print(f"{name:<{width}}  {value:.6g}")


def _target_of(folder: Path) -> tuple[str, list[str]]:
    """Return what was trained in a folder, and what a script was given."""
    try:
        source = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        target, arguments = str(source["target"]), [str(word) for word in source.get("arguments", ())]
    except FileNotFoundError:
        problem = Problem("RUN", f"{folder} is no run of drivetrain's", str(folder), remedy="give the folder of a run")
        raise ConfigError([problem]) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DrivetrainError(f"{folder / SOURCE} cannot be read: {error}", remedy="dt.evaluate(job, run)") from None
    if not target:
        raise DrivetrainError(
            f"{folder} was trained from an interactive session, so its job cannot be found again",
            remedy="call dt.evaluate(job, run) there",
        )
    if any(HIDDEN in word for word in arguments):
        raise DrivetrainError(
            f"{folder} was trained by a script with a secret among its arguments, which is not recorded",
            remedy="call dt.evaluate(job, run); and give secrets to scripts by an environment variable or a file",
        )
    return target, arguments


def _config_of(folder: Path, resolved: Resolved) -> Config:
    """Return the run's configuration, overridden by this command line; the device is not taken from the run."""
    try:
        stored: dict[str, Any] = read_yaml(folder / "config.yaml")
        values = {section: dict(fields) for section, fields in stored.items() if section not in _OF_THIS_MACHINE}
        for name in resolved.origins:
            section, field = name.split(".")
            values.setdefault(section, {})[field] = getattr(getattr(resolved.config, section), field)
        return Config.model_validate(values)
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise DrivetrainError(
            f"{folder / 'config.yaml'} cannot be read: {error}", remedy="call dt.evaluate(job, run) from Python"
        ) from None

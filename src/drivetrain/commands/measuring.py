"""Commands that measure a job without training it: `benchmark`, `find-lr`, `eval`, `prove`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from drivetrain.api.measuring import LrFinding, Performance, benchmark_performance, evaluate, find_lr
from drivetrain.commands.command import Command, ForScript
from drivetrain.commands.in_process import with_job
from drivetrain.config import Config, Flag, Positional, Resolved
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.log import HIDDEN
from drivetrain.core.run_folder import read_job, read_yaml
from drivetrain.core.value import format_bytes
from drivetrain.job import Job
from drivetrain.proving.adapters import ADAPTERS, find_subject
from drivetrain.proving.classify import Certificate
from drivetrain.proving.prove import prove
from drivetrain.report.picture import draw_range_test
from drivetrain.run import SOURCE, Which

# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain benchmark TARGET`: measures what a step of a job takes here, and its phases. Nothing is trained.

COMMAND_BENCHMARK = Command(
    summary="What a step of a job takes here: forward, backward, optimizer, memory, MFU. Trains nothing.",
    all_but=("watch", "checkpoint", "validation", "plan", "batch"),
    obeys=("batch.size", "batch.accumulation"),
)
EXAMPLES_BENCHMARK = (
    "drivetrain benchmark digits                     forward, backward, optimizer, memory, MFU",
    "drivetrain benchmark train.py --precision bf16  the job of a script, with other settings",
    "drivetrain benchmark digits --json              for a program to read",
)


class BenchmarkOptions(ForScript):
    iterations: Annotated[int, Flag("iterations")] = Field(20, ge=1, description="how many steps are measured")
    as_json: Annotated[bool, Flag("json")] = Field(False, description="all figures as JSON")


def run_benchmark(options: BenchmarkOptions, resolved: Resolved) -> int:
    config = resolved.config
    found = with_job(
        options.target,
        config,
        lambda job: benchmark_performance(job, config, num_iterations=options.iterations),
        options.arguments,
    )
    if options.as_json:
        print(found.model_dump_json(indent=2))
    else:
        show_performance(found, Console(highlight=False))
    return 0


def show_performance(found: Performance, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    table.title = f"A step of {found.job}: {found.global_batch} samples on {found.device} in {found.precision}"
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    phases = {
        "forward": found.forward_seconds,
        "backward": found.backward_seconds,
        "communication": found.communication_seconds,
        "optimizer": found.optimizer_seconds,
        "between them": found.other_seconds,
        "whole step": found.step_seconds,
    }
    for name, seconds in phases.items():
        if seconds:
            table.add_row(name, f"{1e3 * seconds:,.3f}", f"{seconds / found.step_seconds:.0%}")
    console.print(table)
    console.print(f"\nsamples per second  {found.samples_per_second:,.1f}")
    if found.items_per_second != found.samples_per_second:
        console.print(f"{f'{found.items} per second':<19} {found.items_per_second:,.0f}")
    if found.peak_memory_bytes is not None:
        console.print(f"peak memory         {format_bytes(found.peak_memory_bytes)}")
    if found.mfu is not None:
        console.print(f"MFU                 {found.mfu:.1%} ({found.peak_source})")
    else:
        console.print("MFU                 unknown: drivetrain verify --save measures this device's peak")
    console.print(
        f"mean of {found.num_steps} steps of {found.micro_batch} × {found.accumulation} accumulated × "
        f"{found.num_devices} devices; data was on the device already, and nothing was trained"
    )


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain find-lr TARGET`: a range test of the learning rate of a job. Nothing of a run is written.

COMMAND_FIND_LR = Command(
    summary="Suggests a learning rate: the loss of some steps while the rate rises. No run is written.",
    all_but=("watch", "validation", "plan", "budget", "optimizer", "checkpoint"),
    obeys=("optimizer.weight_decay", "optimizer.clip_norm", "checkpoint.init_from"),
)
EXAMPLES_FIND_LR = (
    "drivetrain find-lr digits                       runs/digits.find-lr.png and .json",
    "drivetrain find-lr train.py --highest 1         the job of a script, up to a rate of 1",
    "drivetrain train digits --lr 3e-3               what was found, in training",
)


class FindLrOptions(ForScript):
    lowest: Annotated[float, Flag("lowest")] = Field(1e-7, gt=0, description="learning rate of the first step")
    highest: Annotated[float, Flag("highest")] = Field(10.0, gt=0, description="learning rate of the last step")
    steps: Annotated[int, Flag("steps")] = Field(100, ge=10, description="how many steps are trained")
    out: Annotated[Path | None, Flag("out")] = Field(
        None, description="the picture to write, with a .json beside it (default: NAME.find-lr.png in output_dir)"
    )


def run_find_lr(options: FindLrOptions, resolved: Resolved) -> int:
    config = resolved.config
    found = with_job(
        options.target,
        config,
        lambda job: find_lr(job, config, lowest=options.lowest, highest=options.highest, num_steps=options.steps),
        options.arguments,
    )
    picture = options.out or config.run.output_dir / f"{found.job}.find-lr.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(picture_of(found))
    picture.with_suffix(".json").write_text(found.model_dump_json(indent=2) + "\n")
    show_finding(found, picture, Console(highlight=False))
    return 0


def picture_of(found: LrFinding) -> bytes:
    tenth = None if found.diverged_at is None else found.diverged_at / 10
    marks = (("steepest descent", found.steepest), ("a tenth of divergence", tenth))
    return draw_range_test(f"{found.job}: learning rate", found.rates, found.losses, found.smoothed, marks)


def show_finding(found: LrFinding, picture: Path, console: Console) -> None:
    if found.steepest is None:
        console.print("the loss did not fall: no rate is suggested; try more steps, or a higher highest rate")
    else:
        console.print(f"steepest descent       {found.steepest:.2g}")
    if found.diverged_at is None:
        console.print("divergence             not seen")
    else:
        console.print(f"a tenth of divergence  {found.diverged_at / 10:.2g}")
    if found.suggestion is not None:
        console.print(f"suggestion             --lr {found.suggestion:.2g}, the lower of these")
    console.print(f"picture                {picture}", soft_wrap=True)


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain eval RUN`: computes loss and metrics of a run's weights over the validation set of its job.

COMMAND_EVAL = Command(
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
EXAMPLES_EVAL = (
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


def run_eval(options: EvalOptions, resolved: Resolved) -> int:
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


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain prove TARGET`: proves on a job itself that it is trained correctly. The job's own run is not touched.

COMMAND_PROVE = Command(
    summary="Shows on a job itself that it is trained right: against a plain loop, twice, and after kills.",
    all_but=("watch", "checkpoint", "validation", "plan"),
    obeys=("watch.quiet",),
)
EXAMPLES_PROVE = (
    "drivetrain prove digits            against a plain loop, twice, and after a kill; a minute",
    "drivetrain prove train.py          the job of a script, up to its first dt.train",
    "drivetrain prove train.py --full   three processes, every division, six kills",
    "drivetrain prove mine:job --json   the certificate for a program to read",
    "drivetrain prove train.py --trainer accelerate   the same job, trained by Accelerate",
    "exit code 0: nothing failed; 1: something did. How to read it: docs/guide/prove.md",
)


class ProveOptions(ForScript):
    full: Annotated[bool, Flag("full")] = Field(
        False, description="try everything: micro-batches of 1, 3 processes, six kills, another number of processes"
    )
    trainer: Annotated[str | None, Flag("trainer")] = Field(
        None,
        description=f"prove another trainer on this job: {', '.join(ADAPTERS)}, or `module:name` of your own "
        "(auto: Drivetrain)",
    )
    output: Annotated[Path | None, Flag("output")] = Field(
        None, description="where the certificate is written (auto: certificate.json in the run's folder)"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="print the certificate as JSON and nothing else")


def run_prove(options: ProveOptions, resolved: Resolved) -> int:
    """Run the command. Returns 0 if nothing failed, 1 otherwise."""
    config = resolved.config
    quiet = options.as_json or config.watch.quiet
    progress = Console(stderr=True, highlight=False, quiet=quiet)

    def say(text: str) -> None:
        progress.print(f"proving: {text}")
        sys.stderr.flush()

    trainer = None if options.trainer is None else find_subject(options.trainer)
    certificate: Certificate = with_job(
        options.target,
        config,
        lambda job: prove(job, trainer, config, full=options.full, output=options.output, quiet=quiet, say=say),
        options.arguments,
    )
    if options.as_json:
        print(certificate.to_json())
    return 0 if certificate.ok else 1

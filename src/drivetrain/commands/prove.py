"""`drivetrain prove TARGET`: proves on a job itself that it is trained correctly. The job's own run is not touched."""

import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field
from rich.console import Console

from drivetrain.commands.command import Command, ForScript
from drivetrain.commands.targets import with_job
from drivetrain.config import Flag, Positional, Resolved
from drivetrain.proving.adapters import ADAPTERS, find_subject
from drivetrain.proving.certificate import Certificate
from drivetrain.proving.prove import prove

COMMAND = Command(
    summary="Shows on a job itself that it is trained right: against a plain loop, twice, and after kills.",
    all_but=("watch", "checkpoint", "validation", "plan"),
    obeys=("watch.quiet",),
)
EXAMPLES = (
    "drivetrain prove digits            against a plain loop, twice, and after a kill; a minute",
    "drivetrain prove train.py          the job of a script, up to its first dt.train",
    "drivetrain prove train.py --full   three processes, every division, six kills",
    "drivetrain prove mine:job --json   the certificate for a program to read",
    "drivetrain prove train.py --trainer accelerate   the same job, trained by Accelerate",
    "exit code 0: nothing failed; 1: something did. How to read it: docs/guide/prove.md",
)


class ProveOptions(ForScript):
    target: Annotated[str, Positional()] = Field(description="a recipe, `module:function` or a script, as for `train`")
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


def run(options: ProveOptions, resolved: Resolved) -> int:
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

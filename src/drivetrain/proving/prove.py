"""`dt.prove(job)`: makes a certificate from a job in one call."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.launchers import find_place
from drivetrain.core.run_folder import CERTIFICATE
from drivetrain.job import Job
from drivetrain.proving.case import Subject, Trainer
from drivetrain.proving.certificate import Certificate
from drivetrain.proving.checks import FULL, Extent, Say, prove_subject
from drivetrain.proving.own_trainer import drivetrain_subject


def prove(
    job: Job,
    trainer: Trainer | Subject | None = None,
    config: Config | None = None,
    *,
    full: bool = False,
    output: Path | str | None = None,
    quiet: bool = False,
    extent: Extent | None = None,
    say: Say | None = None,
) -> Certificate:
    """Prove that a job is trained correctly: against a plain loop, twice, and after kills.

    The job's own run is not touched; all work is done in separate processes and folders.

    Args:
        job: the job as it would be trained.
        trainer: what is to be proven: a function `run(case)`, or a `Subject` that says what it can do. Default:
            Drivetrain itself.
        config: the configuration that the job would be trained with.
        full: try every configuration, three processes and six kills, instead of what fits a minute.
        output: where the certificate is written; default: `certificate.json` in the folder of the run.
        quiet: print nothing.
        extent: how much is tried, in detail; `full` is one of them.
        say: is called with what is done, as it is done.

    Returns:
        The certificate. `certificate.ok` says whether anything failed, `certificate.verdicts` what.

    Example:
        >>> certificate = dt.prove(job)  # doctest: +SKIP
        >>> certificate.ok  # doctest: +SKIP
        True
    """
    if find_place().size > 1:
        raise DrivetrainError(
            "prove was started on several processes, and starts its own", remedy="start it once, without a launcher"
        )
    config = config or Config()
    if say is None:
        say = _quiet if quiet else _said
    if trainer is None:
        subject = drivetrain_subject(config, on_gpu=_uses_gpu(config, say))
    else:
        subject = trainer if isinstance(trainer, Subject) else Subject(trainer, getattr(trainer, "__name__", "trainer"))
    chosen = extent or (FULL if full else Extent())
    console = Console(highlight=False, quiet=quiet)
    certificate = prove_subject(job, subject, replace(chosen), say)
    path = Path(output) if output is not None else config.run.output_dir / (config.run.name or job.name) / CERTIFICATE
    certificate.write(path)
    certificate.show(console)
    console.print(f"written to {path}")
    return certificate


def _uses_gpu(config: Config, say: Say) -> bool:
    """Return whether the job is proven on a GPU: only if one is asked for, as a job means the same on any device."""
    if config.device.mode in ("auto", "cpu") and not config.device.device.startswith("cuda"):
        return False
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        say("on the CPU, since CUDA is in use in this process already, and does not survive a fork")
        return False
    return True


def _said(text: str) -> None:
    print(f"proving: {text}", file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass

"""Puts injected faults where they happen in a run: before a step, inside it, in its data, in its checkpoints."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from drivetrain.checkpoint import Files
from drivetrain.checkpoint.files import Written
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.faults import ENVIRONMENT, Faults, parse_faults
from drivetrain.data.loader import Loader
from drivetrain.run.assemble import RunParts
from drivetrain.run.saver import CheckpointSaver
from drivetrain.run.session import Session


class FaultyFiles(Files):
    """The operations on the disk, of which a write may find it full."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        self._faults.at_write()
        return super().write_file(path, chunks)


def faults_of(run: Session) -> Faults:
    """Return the faults to inject on this rank, once the run's folder is claimed. Mostly there are none.

    Args:
        run: The run, whose configuration or launcher names them.
    """
    text = run.config.watch.inject or os.environ.get(ENVIRONMENT, "")
    try:
        faults = parse_faults(text)
    except ValueError as error:
        raise DrivetrainError(f"{ENVIRONMENT}: {error}", remedy="unset it, or name faults that there are") from None
    return Faults(faults, run.world.rank, run.path)


def inject(
    faults: Faults,
    run: Session,
    parts: RunParts,
    loader: Loader,
    saver: CheckpointSaver,
    before_step: Callable[[int], None] | None,
) -> Callable[[int], None] | None:
    """Inject faults around steps, data and saves. Return the function to call before each step.

    Args:
        faults: Those of this rank.
        run: The run.
        parts: Its parts.
        loader: The loader of its steps.
        saver: Saves its checkpoints.
        before_step: What is called before each step anyway; None if nothing is.
    """
    if not faults:
        return before_step
    loader.before_step, saver.when_begun = faults.at_data, faults.at_save

    def called(step: int) -> None:
        faults.at_step(step, parts.model, run.world.barrier)
        if before_step is not None:
            before_step(step)

    return called

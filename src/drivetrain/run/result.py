"""The result of a run: where its files are, how it ended, and its weights in a model again."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.files import step_name
from drivetrain.checkpoint.weights import plainly_named
from drivetrain.core.aims import Aim
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.isolation import generators_kept
from drivetrain.core.records import StepRecord
from drivetrain.core.state import TensorSource, is_distributed, local_part, read_for
from drivetrain.job import Job
from drivetrain.loop.validation import Validation
from drivetrain.run.model_factory import checked, unwrapped
from drivetrain.run.saver import CHECKPOINTS

Which = Literal["last", "best"]


class Best(NamedTuple):
    """The best validation of a run: the value of the metric that `Job.best` names, and the step it was measured at."""

    value: float
    step: int
    metric: str


def best_of(validation: Validation | None, aim: Aim) -> Best | None:
    """Return the best validation so far, by the metric of `aim`."""
    if validation is None or validation.best_step is None:
        return None
    return Best(validation.best_value, validation.best_step, aim.metric)


@dataclass(frozen=True)
class Result:
    """Holds how a run ended, where its files are, and what it learned.

    Args:
        folder: The run's folder.
        steps: Optimizer steps done over the whole life of the run.
        resumed_from: The step that this call went on from; 0 for a new run.
        finished: Whether the job is done; false if the run was asked to stop before its end.
        last: The record of the last step; None if there was nothing left to do.
        compilation: What torch.compile did, in words.
        is_main: Whether this is the process that writes the run's files.
        metrics: The last validation: loss and metrics by name.
        best: The best validation; None where none was done.
        test: Loss and metrics over the test sets, measured when the job was done, with the weights of `model`.
        job: What was trained. It is left out when a result is pickled, since functions often cannot be.

    Example:
        >>> result = dt.train(job, quiet=True)
        >>> result.steps, result.finished
        (2, True)
        >>> result.model
        Linear(in_features=1, out_features=1, bias=True)
    """

    folder: Path
    steps: int
    resumed_from: int
    finished: bool
    last: StepRecord | None
    compilation: str = "not asked for"
    is_main: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Best | None = None
    test: Mapping[str, float] = field(default_factory=dict)
    job: Job | None = field(default=None, repr=False, compare=False)

    @property
    def best_step(self) -> int | None:
        """The step of the best validation; None where none was done."""
        return None if self.best is None else self.best.step

    @property
    def report(self) -> Path | None:
        """The path of the report, a page for a browser; None if it was not written."""
        path = self.folder / "report.html"
        return path if path.is_file() else None

    @cached_property
    def model(self) -> nn.Module:
        """The model with the best weights, or the last ones where nothing was validated, in evaluation mode on the CPU.

        It is made when first asked for, and is another object than the model that was trained. Where a moving average
        was kept, it has the averaged weights: those that were validated. Each process loads its own.
        """
        if self.job is None:
            raise DrivetrainError(
                "this result came from another process, without the job that makes the model",
                remedy="dt.export(result) writes the weights to a file: model.load_state_dict(…)",
            )
        model = new_model(self.job)
        checkpoint = checkpoint_of(self, best_or_last(self.folder))
        load_whole(model, checkpoint, checkpoint.path)
        return model.eval()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "model"} | {"job": None}


def new_model(job: Job) -> nn.Module:
    """Make the job's model on the CPU, as a run does; a copy where the job has the model itself."""
    if isinstance(job.model, nn.Module):
        if any(map(is_distributed, job.model.parameters())):
            raise DrivetrainError(
                "the model was sharded in place, and this process has only a part of it",
                remedy="give the job a function that makes the model: Job(model=lambda: Net())",
            )
        return unwrapped(copy.deepcopy(job.model))[0].cpu()
    with generators_kept():
        torch.manual_seed(job.seed)  # buffers that no checkpoint has are those of the run
        return unwrapped(checked(job.model()))[0].cpu()


def checkpoint_of(run: Path | str | Result, which: Which) -> Checkpoint:
    """Return the newest checkpoint of a run, or the best one. Changes nothing, so a run may go on at the same time."""
    if which not in get_args(Which):
        raise ConfigError(
            [Problem("which", f"got {which!r}", allowed=" or ".join(map(repr, get_args(Which))), remedy="which='last'")]
        )
    folder = folder_of(run)
    newest = _newest(folder)
    if which == "last":
        return newest
    step = _best_step(newest)
    if step is None:
        raise DrivetrainError(
            f"{folder} holds a run that was never validated, so none of it is known to be best",
            remedy="give the job a validation set, or take the last instead of the best",
        )
    return newest if step == newest.step else Checkpoint.open(newest.path.with_name(step_name(step)))


def best_or_last(folder: Path) -> Which:
    """Return the default for which weights of a run to use: the best, or the last of a run without validation."""
    return "last" if _best_step(_newest(folder)) is None else "best"


def folder_of(run: Path | str | Result) -> Path:
    return run.folder if isinstance(run, Result) else Path(run)


def _newest(folder: Path) -> Checkpoint:
    if not (folder / CHECKPOINTS).is_dir():
        raise DrivetrainError(f"{folder} holds no checkpoints", remedy="give the folder of a run, such as runs/digits")
    newest = Checkpoint.latest_in(folder / CHECKPOINTS)
    if newest is None:
        raise DrivetrainError(f"{folder} holds no checkpoint that is whole", remedy="train on under the same name")
    return newest


def _best_step(newest: Checkpoint) -> int | None:
    step: int | None = (newest.meta.get("validation") or {}).get("best_step")
    return step


def load_whole(model: nn.Module, source: TensorSource, path: Path, *, average: bool = True) -> None:
    """Load all of a model's weights from a checkpoint, or raise.

    Args:
        model: The model; of a sharded one, each rank reads its part.
        source: The checkpoint, as this rank sees it.
        path: The checkpoint's path, for an error.
        average: Whether to take the averaged weights where an average was kept, since those were validated.
    """
    state = model.state_dict()
    source = plainly_named(source, state)
    keys: dict[str, Any] = dict(source.keys)
    missing = sorted(name for name in state if f"model/{name}" not in keys)
    others = sorted(
        name for name in state if f"model/{name}" in keys and keys[f"model/{name}"].shape != tuple(state[name].shape)
    )
    if missing or others:
        raise DrivetrainError(
            f"{path} holds another model: {', '.join((missing + others)[:5])} "
            f"{'is not there' if missing else 'has another shape'}",
            remedy="evaluate it with the job that trained it",
        )
    with torch.no_grad():
        for name, target in state.items():
            key = f"ema/{name}" if average and f"ema/{name}" in keys else f"model/{name}"
            local_part(target).copy_(read_for(target, source, key))

"""`dt.evaluate(job, run)`: the job's loss and metrics over its validation set, with the weights of a run."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.weights import plainly_named
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.precision import numerics
from drivetrain.core.state import TensorSource, local_part, read_for
from drivetrain.job import Job
from drivetrain.run import Result, Session, Which, checkpoint_of
from drivetrain.run.data_loading import make_validator
from drivetrain.run.loss_weighting import recorded_weighting
from drivetrain.run.model_factory import callable_model


def evaluate(
    job: Job, run: Path | str | Result, config: Config | None = None, *, which: Which = "last"
) -> dict[str, float]:
    """Changes nothing in the run folder, so the run may go on beside it. Under a launcher processes share the work."""
    if job.valid is None:
        raise DrivetrainError("the job has no validation set", remedy="give it one: Job(valid=…)")
    checkpoint = checkpoint_of(run, which)
    session = Session.join(job, config, quiet=True)
    try:
        session.weighting = recorded_weighting(checkpoint)
        recorded = session.recorded_way(checkpoint)
        if recorded is not None:  # what was validated while it was trained is computed alike
            session.follow(session.planned.but(precision=recorded.precision, channels_last=recorded.channels_last))
        with numerics(session.precision, deterministic=session.config.kernels.deterministic, cudnn_benchmark=False):
            session.loss_parts.step = max(0, checkpoint.step - 1)  # whose weights the loss had
            model, _, called = callable_model(session)
            source = checkpoint if session.experts is None else session.experts.seen(checkpoint)
            _load(model, plainly_named(source, model.state_dict()), checkpoint.path)
            return make_validator(session, session.way.micro_batch).measure(model, called)
    finally:
        session.close_loaders()
        session.close()


def _load(model: nn.Module, checkpoint: TensorSource, path: Path) -> None:
    """The model's own weights; the averaged ones where an average was kept, since those were validated."""
    keys: dict[str, Any] = dict(checkpoint.keys)
    state = model.state_dict()
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
            key = f"ema/{name}" if f"ema/{name}" in keys else f"model/{name}"
            local_part(target).copy_(read_for(target, checkpoint, key))

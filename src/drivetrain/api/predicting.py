"""`dt.predict(run, data)`: what a trained model returns for each sample of a data set."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.api.measuring import job_and_run, loaded_model
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.run_folder import write_atomically
from drivetrain.data.source import Source, source_of
from drivetrain.job import Job
from drivetrain.loop.prediction import ForwardFunction, forward_of, predict_rows, tensors_by_name
from drivetrain.run import Result, Which, best_or_last, folder_of
from drivetrain.run.assemble import whole_set_loader

_SUFFIXES = (".pt", ".pth", ".parquet")


def predict(
    run: Path | str | Result,
    data: Any,
    path: Path | str | None = None,
    *,
    job: Job | None = None,
    forward: ForwardFunction | None = None,
    which: Which | None = None,
    config: Config | None = None,
) -> Any:
    """Return the model's outputs for all samples of a data set, a row for each, in the order of the data set.

    The model is in evaluation mode and in the run's precision. Under a launcher processes share the work, and all of
    them get all rows. Nothing in the run folder is changed, so the run may go on beside it.

    Args:
        run: What `train` returned, or a run's folder; then `job` has to be given, too.
        data: The data set, like `Job.valid`; a single one.
        path: A file to write the outputs to, instead of returning them: `.pt` or `.pth` by `torch.save`, or `.parquet`
            with a column for each tensor, which needs pyarrow.
        job: The job that was trained, where `run` is a folder.
        forward: A function of (model, batch) that returns tensors with a row per sample, in any nesting. Default: what
            the model returns where the job's loss function calls it, which needs data with labels like the job's.
        which: `last`, the newest checkpoint, or `best`, the one that validated best. Default: the best, or the last of
            a run that was not validated.
        config: How to run it, from `configure`.

    Returns:
        The outputs in the host's memory: a tensor, or dictionaries, lists and tuples of tensors as the model returns
        them; with `path`, the path.

    Example:
        >>> result = dt.train(job, quiet=True)
        >>> dt.predict(result, torch.zeros(10, 1), forward=lambda model, batch: model(batch)).shape
        torch.Size([10, 1])
    """
    target = None if path is None else Path(path)
    if target is not None:
        _check_target(target)
    given, _ = job_and_run(job, run)
    source = _checked_source(data)
    folder = folder_of(run)
    # One that packs several samples into a row says how to make a row per sample.
    collate = getattr(given.collate, "by_sample", given.collate)
    with loaded_model(
        replace(given, valid=source, collate=collate), folder, config, which or best_or_last(folder)
    ) as loaded:
        session, model, called = loaded
        size = session.way.micro_batch
        if session.job.valid_batch is not None:
            size = session.job.valid_batch * len(session.devices)
        outputs = predict_rows(
            model,
            model if called is None else called,
            whole_set_loader(session, session.job.valid_sets[""], size),
            session.precision,
            session.world,
            forward or forward_of(given.loss_function),
            given.seed,
        )
        if target is None:
            return outputs
        session.world.main_does(lambda: str(_write(target, outputs)))
        return target


def _checked_source(data: Any) -> Source:
    """Return the data as a source of samples that have numbers."""
    source = source_of(data)
    kind = type(source.dataset).__name__
    if source.is_iterable:
        message = f"{kind} has no length or no items, so its rows have no order"
        raise ConfigError([Problem("data", message, kind, remedy="give a map-style data set, or a list")])
    if len(source.dataset) == 0:
        raise ConfigError([Problem("data", "the data set is empty", 0, remedy="check the path or the filter")])
    return source


def _check_target(path: Path) -> None:
    """Raise before anything is computed if the outputs could not be written."""
    if path.suffix.lower() not in _SUFFIXES:
        raise DrivetrainError(
            f"{path} ends in {path.suffix!r}", remedy=f"end its name in one of {', '.join(_SUFFIXES)}"
        )
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet, if they are installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DrivetrainError(
            f"a .parquet file needs pyarrow, which cannot be imported: {error}",
            remedy="pip install pyarrow, or give a path that ends in .pt",
        ) from None
    return pyarrow, pyarrow.parquet


def _write(path: Path, outputs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    if path.suffix.lower() == ".parquet":
        arrow, parquet = _pyarrow()
        columns = {name: _column(arrow, tensor) for name, tensor in tensors_by_name(outputs)}
        parquet.write_table(arrow.table(columns), buffer)
    else:
        torch.save(outputs, buffer)
    return write_atomically(path, buffer.getvalue())


def _column(arrow: Any, tensor: Tensor) -> Any:
    """Return a tensor as a column: numbers, or for each row a list of them in the order of its elements."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()  # Parquet has no such type, and float32 holds every value of it
    flat = arrow.array(tensor.contiguous().reshape(-1).numpy())
    if tensor.dim() == 1:
        return flat
    return arrow.FixedSizeListArray.from_arrays(flat, tensor[0].numel())

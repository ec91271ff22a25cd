"""Opens the data of a run: how its steps are divided, its loader, and the validator of its validation set."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.data.division import Division, Position
from drivetrain.data.feed import feed_for
from drivetrain.data.keyed_items import Columns
from drivetrain.data.loader import Loader
from drivetrain.data.source import Source, source_of
from drivetrain.loop.validation import Validator
from drivetrain.plan.data_path import DataPath
from drivetrain.run.model_factory import couples_samples
from drivetrain.run.session import Session


def division_of(run: Session, model: nn.Module | None) -> Division:
    """Return how steps are divided in the way that is followed."""
    job, least = run.job, 1
    is_synced = run.config.distributed.sync_batchnorm and run.world.size > 1  # sees the samples of all ranks
    if model is not None and not is_synced and couples_samples(model):
        least = 2  # one sample alone has no variance
    is_fixed = bool(run.weighting.holds_division)
    return Division(job.num_samples or 0, job.global_batch or 0, run.way.micro_batch, run.world.size, least, is_fixed)


def make_loader(run: Session, division: Division, data: Any, *, shuffle: bool, start: Position | None = None) -> Loader:
    """Make a loader by the plan; the run closes it at its end."""
    source = source_of(data)
    wishes, device = source.wishes, run.world.device
    pins_memory = wishes.pin_memory if run.config.data.pin_memory is None else None
    fetched = _path_fetched(run)
    loader = Loader(
        source,
        division,
        run.world.rank,
        run.job.seed,
        run.job.collate,
        shuffle=shuffle,
        num_workers=_num_workers(run, source),
        pin_memory=(pins_memory or run.settings.pin_memory.value) and device.type == "cuda",
        prefetch_factor=run.config.data.prefetch_factor
        or wishes.prefetch_factor
        or (fetched and fetched.prefetch_factor)
        or run.settings.prefetch_factor.value
        or 2,
        start=start,
        feed=feed_for(device, channels_last=run.channels_last),
        may_do_without_workers=run.config.data.num_workers < 0,
        resident=run.residency.of(
            source,
            run.job.collate,
            channels_last=run.channels_last,
            num_workers=_num_workers(run, source),
            planned=None if run.planned.data_path is None else run.planned.data_path.resident,
        ),
    )
    loader.notes += run.residency.take_notes()
    run.loaders.append(loader)
    if run.world.is_main:
        loader.warn_if_inexact()
    return loader


def make_validator(run: Session, micro_batch: int) -> Validator:
    """Make the validator of the job's validation set, in batches of the job's validation size or the given one."""
    valid = source_of(run.job.valid).dataset
    if run.job.valid_batch is not None:
        micro_batch = run.job.valid_batch * len(run.devices)
    whole = Division(len(valid), len(valid), micro_batch, run.world.size)
    loader = make_loader(run, whole, valid, shuffle=False)
    return Validator(run.job, loader, run.precision, run.world, run.weighted(run.job.loss), run.loss_parts)


def _num_workers(run: Session, source: Source) -> int:
    """Return the configuration's number; else the handed-in DataLoader's; else the measured; else by rule."""
    if run.config.data.num_workers >= 0:
        return run.config.data.num_workers
    if source.wishes.num_workers is not None:
        return source.wishes.num_workers
    fetched = _path_fetched(run)
    if fetched is not None:
        return fetched.num_workers
    in_memory = isinstance(source.dataset, (TensorDataset, Columns, list, tuple, torch.Tensor))
    return 0 if in_memory else run.settings.num_workers.value


def _path_fetched(run: Session) -> DataPath | None:
    """Return the measured data path of samples that are fetched batch by batch."""
    path = run.planned.data_path
    return None if path is None or path.resident else path

"""`--debug`: runs the same job on little data, so that the whole path of a run is tried in seconds."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from drivetrain.config import Config
from drivetrain.data.keyed_items import Columns
from drivetrain.data.source import source_of
from drivetrain.job import Job

NUM_SAMPLES = 100  # of the training set, and of the validation set
SAMPLES_PER_DEVICE = 4
NUM_STEPS = NUM_SAMPLES // SAMPLES_PER_DEVICE  # if the length of an epoch is not known


def debugged(job: Job, config: Config, num_devices: int) -> Job:
    """Return the job cut down for a trial, under its own name, with a note on the data that a run reports.

    The batch and the length of the configuration stay. Data whose order is not ours cannot be cut: only the number of
    steps is limited then.
    """
    source, batch, budget = job.source, config.batch_asked, config.budget
    changes: dict[str, Any] = {"name": f"{job.name}-debug"}
    length = job.num_samples if source.is_keyed else None
    if length is not None:
        size = (batch.size or SAMPLES_PER_DEVICE) * (batch.accumulation or 1) * num_devices
        kept = min(length, max(NUM_SAMPLES, size))
        changes["global_batch"] = min(size, kept)
        cut = f"{kept} of {length:,} samples, {changes['global_batch']} per step"
        source = replace(source, dataset=_first(source.dataset, kept), drop_last=False)
    else:
        cut = "the data has an order of its own and is not cut; only the number of steps is limited"
    if job.valid is not None:
        changes["valid"] = _first(source_of(job.valid).dataset, NUM_SAMPLES)
    if not (budget.epochs or budget.max_steps):
        changes["epochs"] = None if job.epochs is None else 1
        is_open = length is None or job.epochs is None
        changes["max_steps"] = min(NUM_STEPS, job.max_steps or NUM_STEPS) if is_open else job.max_steps
    note = f"--debug: {cut}; this tries the path out, its figures say nothing of the job"
    return replace(job, **changes, data=replace(source, notes=(note, *source.notes)))


def _first(dataset: Any, number: int) -> Any:
    """Return the first samples, as the same kind of data where the way it is read depends on that."""
    number = min(number, len(dataset))
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(tensor[:number] for tensor in dataset.tensors))
    if isinstance(dataset, Columns):
        return Columns({name: tensor[:number] for name, tensor in dataset.tensors.items()})
    if isinstance(dataset, (list, tuple, Tensor)):
        return dataset[:number]
    return Subset(dataset, range(number))

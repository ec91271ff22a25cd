"""Measures how long fetching takes, by really reading some batches, and decides how samples reach the device."""

import statistics
import time

from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import generators_kept
from drivetrain.data.batch import leaves
from drivetrain.data.division import Division
from drivetrain.data.loader import Loader
from drivetrain.data.resident import num_bytes_in_memory
from drivetrain.data.resident_copy import probed
from drivetrain.plan import Choice
from drivetrain.plan.data_path import DataFigures, DataPath, choose_data_path
from drivetrain.run.session import Session

MOST_BATCHES, ENOUGH_SECONDS = 9, 0.5


def measured_data_path(
    run: Session, micro_batch: int, step_seconds: float, steps_left: int | None, step_bytes: int = 0
) -> Choice[DataPath] | None:
    """Measure how samples are best fetched, and decide. None where that cannot be measured.

    `step_seconds` is what a step takes when its data is ready, `step_bytes` what it needs on the device beyond what is
    allocated now.
    """
    own = measure_data(run, micro_batch, step_seconds, steps_left, step_bytes)
    agreed = run.world.agree(None if own is None else own.model_dump(mode="json"))  # one plan for all ranks
    figures = None if agreed is None else DataFigures.model_validate(agreed)
    if figures is None:
        return None
    workers = run.config.data.num_workers
    return choose_data_path(figures, run.config.data.resident, None if workers < 0 else workers)


def measure_data(
    run: Session, micro_batch: int, step_seconds: float, steps_left: int | None, step_bytes: int = 0
) -> DataFigures | None:
    """Measure how long reading takes, and what the data takes in memory.

    Returns None for data that reading would use up, and for items that raise: the run reports that when it gets there.
    """
    job, source, hardware = run.job, run.job.source, run.hardware
    if source.is_iterable:
        return None
    # A sampler's order is not asked for: what its items take to read does not depend on it.
    division = Division(len(source.dataset), job.global_batch or 1, micro_batch, run.world.size)
    loader = Loader(source.dataset, division, run.world.rank, job.seed, job.collate)
    known = num_bytes_in_memory(source.dataset)
    try:
        with generators_kept():
            seconds, batch_bytes = _read_some(loader)
        found = probed(source, job.collate, float("inf"))
    except DrivetrainError:
        return None
    share = -(-division.global_batch // run.world.size)
    return DataFigures(
        read_seconds=statistics.median(seconds) * share,
        slowest_read_seconds=max(seconds) * share,
        step_seconds=step_seconds,
        steps_left=steps_left,
        steps_per_epoch=division.steps_per_epoch,
        num_bytes=found.num_bytes,
        batch_bytes=batch_bytes,
        free_bytes=max(0, run.residency.free_bytes() - step_bytes),
        num_spare_cores=_spare_cores(run),
        shm_bytes=hardware.memory.shm_total_bytes,
        is_in_memory=known is not None,
        why_not_resident=found.why_not,
    )


def _spare_cores(run: Session) -> int:
    """Return the CPU cores that this rank can spare for loader processes.

    One stays for the training process; on a CPU most of them are for the model.
    """
    if run.world.device.type != "cuda":
        return run.hardware.cpu.num_usable // run.world.size // 4
    return max(0, run.hardware.cpu.num_usable // min(run.world.size, len(run.hardware.gpus)) - 1)


def _read_some(loader: Loader) -> tuple[list[float], int]:
    """Return the seconds per sample of some micro-batches, spread over an epoch; and the bytes of one."""
    division = loader.division
    count = min(MOST_BATCHES, division.steps_per_epoch)
    began = time.perf_counter()
    seconds: list[float] = []
    num_bytes = 0
    for number in range(count):
        place = division.place(number * division.steps_per_epoch // count)
        start = time.perf_counter()
        micro = loader.micro_batch(place, 0)
        seconds.append((time.perf_counter() - start) / micro.num_samples)
        tensors = [leaf for leaf in leaves(micro.batch) if isinstance(leaf, Tensor)]
        num_bytes = max(num_bytes, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        if time.perf_counter() - began > ENOUGH_SECONDS:
            break
    # The first one opens files and fills caches; where there are others, it does not count.
    return seconds[1:] if len(seconds) > 2 else seconds, num_bytes

"""Decides how samples reach the device: resident there, or fetched batch by batch with so many workers.

A pure decision that does not change what a step sees. Its costs are measured: the seconds to fetch what a step takes,
and the seconds that the device computes.
"""

from math import ceil
from typing import Literal

from drivetrain.core.value import Value, format_bytes, format_count, format_seconds
from drivetrain.plan.rules import LEAST_SHM_BYTES, MAX_WORKERS, Choice

HARMLESS = 0.02  # of a step: reading that takes no more is done in the training process
LEAST_GAIN = 0.02  # of the time that is left: less is not worth the memory
RESIDENT_SHARE = 0.5  # of the memory that the step leaves free; allocators need room to turn
COPY_BYTES_PER_SECOND = 2e9  # of memory that is not pinned, to a device
WORTH_IT, NEARLY_BEST = 1.05, 1.02  # a smaller gain is not worth workers; so near to the best, fewer of them do
WORKER_START_SECONDS = 0.5  # of each, with its first batch
UNEVEN = 2.0  # a slowest batch this many times the usual one needs more fetched ahead


class DataFigures(Value):
    """The figures that were measured on one rank."""

    read_seconds: float  # to fetch what a step takes, in the training process
    slowest_read_seconds: float = 0.0
    step_seconds: float  # that a step takes when its data is there
    steps_left: int | None  # None: no end is known
    steps_per_epoch: int
    num_bytes: int | None = None  # of the whole data set as columns; None: not known
    batch_bytes: int = 0  # of one micro-batch
    free_bytes: int = 0  # on the device, beside what a step takes
    num_spare_cores: int = 0  # of this rank, for workers
    shm_bytes: int = 0
    is_in_memory: bool = False  # nothing has to be read: it is only copied
    why_not_resident: str = ""  # what its items have against it


class DataPath(Value):
    resident: bool = False
    num_workers: int = 0
    prefetch_factor: int = 0  # 0: nothing is fetched ahead


def forecast_step(read: float, rest: float, workers: int, cores: int, busy_cores: int = 1) -> float:
    """Forecast the seconds of a step that reads for so long, and takes `rest` otherwise.

    Workers share the reading in parallel with the rest of the step; without them it comes before it. Either way all of
    it is work for the cores, of which the rest of the step keeps some busy.
    """
    if not workers:
        return read + rest
    return max(rest, read / workers, (read + rest * busy_cores) / cores)


def workers_worth(read: float, rest: float, cores: int, busy_cores: int, steps_left: int | None) -> int:
    """Return how many workers are worth their cores where the model computes on the same ones; 0: none is."""
    alone = forecast_step(read, rest, 0, cores)
    found = {number: forecast_step(read, rest, number, cores, busy_cores) for number in range(1, cores + 1)}
    best = min(found.values(), default=alone)
    if not best or alone / best < WORTH_IT:
        return 0
    number = next(number for number, seconds in found.items() if seconds <= NEARLY_BEST * best)
    saved = float("inf") if steps_left is None else steps_left * (alone - found[number])
    return number if saved > number * WORKER_START_SECONDS else 0


def choose_data_path(
    figures: DataFigures, wanted: Literal["auto", "on", "off"] = "auto", num_workers: int | None = None
) -> Choice[DataPath]:
    """Choose the data path. `wanted` and `num_workers` are what the user pinned; None: workers by the figures."""
    fetched = _fetched(figures, num_workers)
    if wanted == "on":
        return Choice(value=DataPath(resident=True), reason="asked for", pinned=True)
    if wanted == "off":
        return fetched
    if num_workers:
        reason = f"{num_workers} workers were asked for"
        return Choice(value=fetched.value, reason=reason, alternatives=("resident",), pinned=True)
    problem = figures.why_not_resident or _too_large(figures)
    if problem:
        reason = f"{fetched.reason}; not resident: {problem}"
        return Choice(value=fetched.value, reason=reason, alternatives=fetched.alternatives, pinned=fetched.pinned)
    return _cheaper(figures, fetched)


def _too_large(figures: DataFigures) -> str:
    if figures.num_bytes is None:
        return "how much memory it takes is not known"
    limit = figures.free_bytes * RESIDENT_SHARE
    if figures.num_bytes <= limit:
        return ""
    return (
        f"it takes {format_bytes(figures.num_bytes)}, and half of what a step leaves free is {format_bytes(limit)}"
        if figures.free_bytes > 0
        else f"it takes {format_bytes(figures.num_bytes)}, and a step leaves nothing free"
    )


def _cheaper(figures: DataFigures, fetched: Choice[DataPath]) -> Choice[DataPath]:
    """Choose between resident and fetched data by the time that the remaining steps take with each."""
    setup = _setup_seconds(figures, fetched.value.num_workers)
    resident, ordinary = figures.step_seconds, _step_seconds(figures, fetched.value.num_workers)
    where = f"{format_bytes(figures.num_bytes or 0)} on the device"
    if figures.steps_left is None:
        gain, told = 1 - resident / ordinary, f"{ordinary * 1e3:.3g} ms a step against {resident * 1e3:.3g}"
    else:
        total, other = setup + figures.steps_left * resident, figures.steps_left * ordinary
        gain = 1 - total / other if other else 0.0
        told = f"{format_seconds(other)} against {format_seconds(total)} for the {figures.steps_left:,} steps that "
        told += f"are left, {format_seconds(setup)} of it to {'copy' if figures.is_in_memory else 'read'} it once"
    name = format_count(fetched.value.num_workers, "worker")
    if gain > LEAST_GAIN or (figures.is_in_memory and gain >= 0):
        reason = f"{where}: with {name} it would be {told}"
        return Choice(value=DataPath(resident=True), reason=reason, alternatives=(f"{name}: {fetched.reason}",))
    reason = f"{fetched.reason}; {where} would gain too little: {told}"
    return Choice(
        value=fetched.value, reason=reason, alternatives=("resident", *fetched.alternatives), pinned=fetched.pinned
    )


def _setup_seconds(figures: DataFigures, num_workers: int) -> float:
    if figures.is_in_memory:
        return (figures.num_bytes or 0) / COPY_BYTES_PER_SECOND
    return figures.read_seconds * figures.steps_per_epoch / max(1, num_workers)


def _step_seconds(figures: DataFigures, num_workers: int) -> float:
    """Return the seconds of a step. With workers, reading overlaps with computing; without, it comes on top."""
    if num_workers == 0:
        return figures.step_seconds + figures.read_seconds
    return max(figures.step_seconds, figures.read_seconds / num_workers)


def _fetched(figures: DataFigures, pinned: int | None) -> Choice[DataPath]:
    """Choose enough workers to keep up, as far as cores and shared memory go."""
    read, step = figures.read_seconds, figures.step_seconds
    share = read / step if step > 0 else float("inf")
    told = f"a step's data takes {read * 1e3:.3g} ms to read and {step * 1e3:.3g} ms to compute"
    prefetch = 4 if figures.slowest_read_seconds > UNEVEN * read else 2
    if pinned is not None:
        path = DataPath(num_workers=pinned, prefetch_factor=prefetch if pinned else 0)
        return Choice(value=path, reason="asked for", alternatives=(told,), pinned=True)
    if figures.is_in_memory:
        return Choice(value=DataPath(), reason=f"{told}, from memory: handing it over by workers would cost more")
    if share <= HARMLESS:
        return Choice(value=DataPath(), reason=f"{told}: no workers are needed", alternatives=("1 worker",))
    needed = ceil(share) if share < float("inf") else MAX_WORKERS
    limits = {
        f"{figures.num_spare_cores} spare cores": figures.num_spare_cores,
        f"{format_bytes(figures.shm_bytes)} of /dev/shm": _most_by_shm(figures, prefetch),
        "more gain little": MAX_WORKERS,
    }
    words, most = min(limits.items(), key=lambda limit: limit[1])
    count = max(0, min(needed, most))
    path = DataPath(num_workers=count, prefetch_factor=prefetch if count else 0)
    if count == needed:
        reason = f"{told}: {format_count(count, 'worker')} keep{'s' if count == 1 else ''} up"
        return Choice(
            value=path,
            reason=reason,
            alternatives=(format_count(count - 1, "worker"), format_count(count + 1, "worker")),
        )
    left = _step_seconds(figures, count)
    reason = f"{told}: {needed} workers would keep up, and there can be {count} ({words}): {left * 1e3:.3g} ms a step"
    return Choice(value=path, reason=reason)


def _most_by_shm(figures: DataFigures, prefetch: int) -> int:
    """Return how many workers half of shared memory allows: others use it too, and workers die if it is full."""
    if figures.shm_bytes < LEAST_SHM_BYTES:
        return 0
    return int(figures.shm_bytes / 2 // max(1, prefetch * figures.batch_bytes))

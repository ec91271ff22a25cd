"""Turns an order into batches: each rank's micro-batches of each step, from any step on.

There is one pass for the whole job: workers live until its end and prefetch across the ends of epochs. The keyed order
starts at a step's number, so resuming it needs no state and no replay. Every strategy gets its data here, without
exception.
"""

import atexit
import errno
import math
import multiprocessing
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, default_collate

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import generators_kept
from drivetrain.core.precision import num_threads
from drivetrain.core.processes import MAIN_GUARD_REMEDY, forking, outlive_signals, trains_when_imported
from drivetrain.core.value import format_bytes
from drivetrain.data.batch import MicroBatch as MicroBatch
from drivetrain.data.batch import map_tensors, pinned, to_device
from drivetrain.data.division import Division, MicroStep, Place, Position, SampleStream, Stretch, key_of
from drivetrain.data.external_order import Content, ReadOrder, fingerprint
from drivetrain.data.feed import Feed, NoFeed, NumbersAhead, ResidentFeed
from drivetrain.data.keyed_items import (
    Collate,
    Collated,
    Generators,
    ItemError,
    KeyedItems,
    collate_draws,
    exactness_warnings,
    full_shared_memory,
    gather,
    gathers,
    no_shared_memory,
    seed_all,
)
from drivetrain.data.resident import Resident, Rows
from drivetrain.data.source import Source, WorkerWishes, source_of

CountAhead = Callable[[int, list[MicroBatch]], None]
Found = TypeVar("Found")
WORKER_SECONDS = 0.1  # to fork a worker and to end it: 0.05 of a small process, 0.13 of one with 4 GB
IMPORTING_WORKER_SECONDS = 2.5  # to start one that imports torch
LOOKED_AT = 8  # samples of a set, to forecast what all of them take
_OF_BATCH = 2**64 - 1  # in the key of what a batch draws, apart from those of its items
_AGAIN = 2**48  # an epoch that no run reaches: what items draw at random when they are seen again is keyed by it


class RankStep(NamedTuple):
    """One step, as this rank has it."""

    place: Place
    parts: list[MicroStep]
    contents: list[Content]  # per part
    after: Position | None = None  # None: it follows from the place
    fingerprint: str = ""  # of all ranks' entries; only of the first step that was read, in a world of several


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank, up to a last step or epoch. Sent to a worker where items are read there."""

    order: SampleStream | ReadOrder
    division: Division
    rank: int
    start: Position
    last_step: int | None
    last_epoch: int | None

    def __iter__(self) -> Iterator[RankStep]:
        if self.start.is_over(self.last_step, self.last_epoch):
            return iter(())
        return self._keyed(self.order) if isinstance(self.order, SampleStream) else self._read(self.order)

    @property
    def end(self) -> int | None:
        """The step at which the keyed order ends, not included; None without an end."""
        by_epochs = None if self.last_epoch is None else self.division.first_step_of(self.last_epoch)
        return min((end for end in (self.last_step, by_epochs) if end is not None), default=None)

    def without_contents(self, following: Callable[[], int] | None = None) -> Iterator[RankStep]:
        """Yield the steps of the keyed order. `following` returns the next step, where some may have been skipped."""
        division, rank, end, step = self.division, self.rank, self.end, self.start.step
        while end is None or step < end:
            place = division.place(step)
            yield RankStep(place, division.micro_steps(place, rank), [])
            step = max(step + 1, 0 if following is None else following())

    def _keyed(self, stream: SampleStream) -> Iterator[RankStep]:
        samples = stream.samples
        for step in self.without_contents():
            place, parts, contents, *_ = step
            contents += [samples(place.epoch, part.start, part.stop) for part in parts]
            yield step

    def _read(self, order: ReadOrder) -> Iterator[RankStep]:
        checks = self.division.world_size > 1
        for portion in order.steps(self.start):
            parts = self.division.micro_steps(portion.place, self.rank)
            contents: list[Content] = [portion.cut(part.start, part.stop) for part in parts]
            mark = fingerprint(portion.entries) if checks else ""
            yield RankStep(portion.place, parts, contents, portion.after, mark)
            checks = False
            if portion.after.is_over(self.last_step, self.last_epoch):
                return


Fetched = Iterator[tuple[RankStep, Iterable[MicroBatch]]]


class Loader:
    """Yields the batches of one rank: `batches(first_step, last_step)` yields each step's place and its micro-batches.

    `position` is that of the run after the step that was yielded last, whatever was prefetched.
    """

    def __init__(
        self,
        data: Any,
        division: Division,
        rank: int,
        seed: int,
        collate: Collate,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        start: Position | None = None,
        feed: Feed | None = None,
        may_do_without_workers: bool = False,
        resident: Resident | None = None,
        weighs_workers: bool = False,
    ) -> None:
        self.division, self.rank = division, rank
        self.source: Source = source_of(data)
        self._seed, self._position = seed, start or Position()
        self._behind: RankStep | None = None  # the step that was yielded last
        self.notes: list[str] = []  # decisions made while loading
        self.tell: Callable[[str], None] = lambda note: None  # called with each that follows
        # Gets a step's micro-batches while they are on the host, and returns those to run. Not of resident data.
        self.watch: Callable[[Place, list[MicroBatch]], list[MicroBatch]] | None = None
        # Gets a step's number and its micro-batches, before they are copied to the device or gathered there.
        self.count_ahead: CountAhead | None = None
        self.before_step: Callable[[int], None] | None = None  # with each step's number, from 1
        self.fingerprint = ""  # of the first step that was read, over all ranks; to be the same on each
        self.items: KeyedItems | None = None
        if not self.source.is_iterable:
            self.items = KeyedItems(self.source.dataset, seed, is_drawn_after=collate is not default_collate)
        self._order = self.source.order(division.global_batch, seed, shuffle=shuffle)
        self._collate, self._collated = collate, Collated(collate)
        self._pin_memory, self._prefetch_factor = pin_memory, prefetch_factor
        self._feed: Feed = feed or NoFeed()
        self.resident = resident
        if resident is not None:
            self._feed = ResidentFeed(resident.device, channels_last=resident.channels_last)
        num_workers = 0 if resident is not None else num_workers
        self._num_workers = min(num_workers, 1) if self.source.is_iterable else num_workers
        self._may_do_without_workers = may_do_without_workers
        can_gather = self.items is not None and gathers(self.source.dataset, collate)
        self._gathers = can_gather and (num_workers == 0 or weighs_workers)
        self._weighing: _Weighing | None = None
        if weighs_workers and self.items is not None:
            self._weighing = _Weighing(self.items, self._collated, is_gathered=can_gather)
        self._workers: Iterator[Any] | None = None
        self._numbers: NumbersAhead | None = None
        self._begun: Fetched | None = None

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def pins_memory(self) -> bool:
        return self._pin_memory

    @property
    def feed(self) -> Feed:
        return self._feed

    @property
    def path_in_words(self) -> str:
        """A description of how samples reach the device."""
        if self.resident is not None:
            return f"resident on {self.resident.device}: {format_bytes(self.resident.num_bytes)}, gathered there"
        if not self._num_workers:
            return "in the training process"
        return "1 worker process" if self._num_workers == 1 else f"{self._num_workers} worker processes"

    def warn_if_inexact(self) -> list[str]:
        """Warn once of what prevents exact repetition."""
        if self.items is None or gathers(self.source.dataset, self._collate):
            return []
        try:
            found = exactness_warnings(self.items, self._collated)
        except ItemError:
            if self.source.is_keyed:
                raise
            return []  # a sampler's keys need not be numbers from 0
        for text in found:
            warnings.warn(text, stacklevel=2)
        return found

    def collate_draws(self) -> bool:
        """Return whether the collate function was seen to draw (of read items, for the first); False if not tried."""
        if self.items is None:
            return bool(self._collated.first_drew)
        if gathers(self.source.dataset, self._collate):
            return False
        with generators_kept(), suppress(ItemError):  # a sampler's keys need not be numbers from 0
            return collate_draws(self.items, self._collated)
        return False

    @property
    def position(self) -> Position:
        if self._behind is None:
            return self._position
        place = self._behind.place
        return self._behind.after or Position(
            place.step + 1, place.epoch + place.ends_epoch, 0 if place.ends_epoch else place.stop
        )

    def alike(self) -> Stretch | None:
        """Return the next steps whose samples follow those of the last step in the window; None if there are none."""
        numbers, behind, division = self._numbers, self._behind, self.division
        if numbers is None or behind is None or behind.place.ends_epoch or division.world_size > 1:
            return None
        first = division.place(behind.place.step + 1)
        size = first.num_samples
        if len(behind.parts) > 1 or size != behind.place.num_samples:
            return None
        # The epoch's last step is not among them, even where it is of the same size.
        start, at_hand = numbers.at_hand()
        count = min(at_hand // size, division.num_alike(first))
        return Stretch(first, count, start) if count > 0 else None

    def pass_over(self, stretch: Stretch) -> None:
        """Skip the steps of a stretch from `alike`: they are in flight, and are not yielded."""
        assert self._numbers is not None
        place = stretch.last
        self._numbers.pass_over(stretch.num_steps * place.num_samples)
        self._behind = RankStep(place, self.division.micro_steps(place, self.rank), [])

    def samples_of(self, place: Place) -> list[int]:
        """Return the samples of a whole step of the keyed order, all ranks together."""
        found: list[int] = self._stream.samples(place.epoch, place.start, place.stop).tolist()
        return found

    def micro_batch(self, place: Place, number: int) -> MicroBatch:
        """Fetch one micro-batch of the keyed order by itself, in this process."""
        part = (parts := self.division.micro_steps(place, self.rank))[number]
        content = self._stream.samples(place.epoch, part.start, part.stop)
        return _micro_batch(self._fetch(place, content, part), parts, number)

    def beginning(self, num_samples: int) -> MicroBatch:
        """Fetch the first samples of the keyed order, fewer than a micro-batch has, in this process."""
        place = self.division.place(0)
        part = self.division.micro_steps(place, self.rank)[0]
        part = part._replace(stop=part.start + num_samples)
        content = self._stream.samples(place.epoch, part.start, part.stop)
        return _micro_batch(self._fetch(place, content, part), [part], 0)

    def last_of(self, place: Place) -> MicroBatch:
        """Fetch this rank's last micro-batch of a step of the keyed order, in this process."""
        part = self.division.micro_steps(place, self.rank)[-1]
        content = self._stream.samples(place.epoch, part.start, part.stop)
        return _micro_batch(self._fetch(place, content, part), [part], 0)

    @property
    def from_memory(self) -> Callable[[torch.Tensor], Any] | None:
        """A function from sample numbers to their batch, where all samples are in memory as tensors."""
        dataset, resident = self.source.dataset, self.resident
        if resident is not None:
            return lambda numbers: resident.gather(numbers.to(resident.device))
        return (lambda numbers: gather(dataset, numbers)) if self._gathers else None

    @property
    def _stream(self) -> SampleStream:
        if not isinstance(self._order, SampleStream):
            raise TypeError("this order can only be iterated: a step of it cannot be read by its number")
        return self._order

    def first(self, last_step: int | None = None, last_epoch: int | None = None) -> MicroBatch:
        """Return a micro-batch to try a model out on.

        Data that has to be read is read once: the first step gets it again, and so the trial gets a copy.
        """
        if self.source.is_keyed:
            return self.micro_batch(self.division.place(0), 0)
        fetched = self._fetched(self.position, last_step, last_epoch)
        found = next(fetched, None)
        if found is None:  # nothing is left to do
            return next(iter(next(self._fetched_here(self._steps(Position(), 1, None)))[1]))
        step, micro_batches = found
        self.fingerprint = step.fingerprint
        following = iter(micro_batches)
        first = next(following)
        self._begun = chain([(step, chain([first], following))], fetched)
        if isinstance(first.batch, Rows):
            return first._replace(batch=first.batch.gather())
        return first._replace(batch=map_tensors(torch.clone, first.batch))

    def batches(
        self, first_step: int, last_step: int | None, last_epoch: int | None = None
    ) -> Iterator[tuple[Place, Iterable[MicroBatch]]]:
        """Yield every step from `first_step` up to `last_step` or `last_epoch`, which are not included."""
        if self.source.is_keyed:
            self._position, self._behind = Position(first_step, self.division.place(first_step).epoch), None
        elif self.position.step != first_step:
            raise ValueError(f"the data is at step {self.position.step}, and cannot start at {first_step}")
        fetched, self._begun = self._begun or self._fetched(self.position, last_step, last_epoch), None
        if self.watch is not None and self.resident is None:
            fetched = self._watched(fetched)
        if self.count_ahead is not None:
            fetched = self._counted(fetched, self.count_ahead)
        try:
            for step, micro_batches in self._feed.steps(fetched):
                self._behind = step
                if self.before_step is not None:
                    self.before_step(step.place.step + 1)
                yield step.place, micro_batches
        finally:
            self.close()

    def _watched(self, fetched: Fetched) -> Fetched:
        for step, micro_batches in fetched:
            yield step, micro_batches if self.watch is None else self.watch(step.place, list(micro_batches))

    @staticmethod
    def _counted(fetched: Fetched, count: CountAhead) -> Fetched:
        for step, micro_batches in fetched:
            found = list(micro_batches)
            count(step.place.step, found)
            yield step, found

    def _steps(self, start: Position, last_step: int | None, last_epoch: int | None) -> RankSteps:
        return RankSteps(self._order, self.division, self.rank, start, last_step, last_epoch)

    def _fetched(self, start: Position, last_step: int | None, last_epoch: int | None) -> Fetched:
        steps = self._steps(start, last_step, last_epoch)
        if self.resident is not None:
            return self._of_resident(steps, self.resident)
        number = self._num_workers
        if number and self._weighing is not None:
            number = self._weighing.workers_worth(number, self.division, _start_method(self.source))
            if number == 0:
                return self._weighing.read_as_by_workers(self._fetched_here(steps))
        if number:
            keys = _Keys(steps)
            workers = self._start_workers(keys, steps, number)
            if workers is not None:
                return self._taken_from(workers, keys)
        return self._fetched_here(steps)

    def _fetched_here(self, steps: RankSteps) -> Fetched:
        for step in steps:
            if len(step.parts) == 1:
                yield step, (_micro_batch(self._fetch(step.place, step.contents[0], step.parts[0]), step.parts, 0),)
            else:
                yield step, self._one_by_one(step)

    def _of_resident(self, steps: RankSteps, resident: Resident) -> Fetched:
        """Yield steps without fetching: each micro-batch refers to its rows, and is gathered when its turn comes."""
        if not isinstance(steps.order, SampleStream):
            yield from ((step, self._read_rows(step, resident)) for step in steps)
            return
        numbers = NumbersAhead(steps.order, self.division, self.rank, steps.start.step, steps.end, resident)
        self._numbers = numbers
        for step in steps.without_contents(lambda: self.position.step):
            parts = step.parts
            yield step, [_micro_batch(rows, parts, number) for number, rows in enumerate(numbers.take(parts))]

    def _read_rows(self, step: RankStep, resident: Resident) -> Iterator[MicroBatch]:
        for number, content in enumerate(step.contents):
            if _are_rows(content, len(resident)):
                batch: Any = Rows(resident, resident.numbers(content))
            else:
                batch = self._fetch(step.place, content, step.parts[number])
            yield _micro_batch(batch, step.parts, number)

    def _one_by_one(self, step: RankStep) -> Iterator[MicroBatch]:
        for number, content in enumerate(step.contents):
            yield _micro_batch(self._fetch(step.place, content, step.parts[number]), step.parts, number)

    def _fetch(self, place: Place, content: Content, part: MicroStep) -> Any:
        if self._gathers and _are_rows(content, len(self.source.dataset)):
            samples = torch.from_numpy(content) if isinstance(content, np.ndarray) else torch.tensor(content)
            return gather(self.source.dataset, samples, pin_memory=self._pin_memory)
        found = _as_list(content)
        if self.items is not None:
            found = self.items.__getitems__([(place.epoch, sample) for sample in found])
        else:
            _seed_batch(self._seed, place, part)
        batch = self._collated(found)
        return pinned(batch) if self._pin_memory else batch

    def _taken_from(self, workers: Iterator[Any], keys: "_Keys") -> Fetched:
        """Yield what workers deliver, in order; where a worker reads the items, it says which step each belongs to."""
        for first in workers:
            step = first.step if isinstance(first, _Read) else keys.given.popleft()
            if isinstance(first, _Read):
                self._collated.first_drew = first.first_drew
            following = chain([first], islice(workers, len(step.parts) - 1))
            parts = (_micro_batch(_batch(found), step.parts, number) for number, found in enumerate(following))
            yield step, parts
            deque(parts, maxlen=0)  # of a step that was not used up

    def _start_workers(self, keys: "_Keys", steps: RankSteps, number: int) -> Iterator[Any] | None:
        reason = _cannot_be_found_by_workers(self.source, self._collate)
        remedy = "make the data set picklable (no lambdas, no open files), or use --num-workers 0"
        if not reason and _start_method(self.source) != "fork" and trains_when_imported():
            reason = "started by spawn or forkserver, they import the script, and it trains when it is imported"
            remedy = f"{MAIN_GUARD_REMEDY}; or use --num-workers 0"
            reason = f"{reason}; {MAIN_GUARD_REMEDY}" if self._may_do_without_workers else reason
        if not reason:
            try:
                with forking():
                    self._workers = iter(self._torch_loader(keys, steps, number))
            except (AttributeError, TypeError, OSError, RuntimeError, ImportError, pickle.PicklingError) as error:
                reason = str(error)
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # locks are there, too
                    reason, remedy = (full := no_shared_memory()).message, full.remedy
            else:
                _started.update(getattr(self._workers, "_workers", ()))
                return _in_own_words(self._workers)
        if not self._may_do_without_workers:
            raise DrivetrainError(
                f"the loader's {self._num_workers} workers could not be started: {reason}",
                remedy=remedy,
            )
        note = f"loaded in the training process: the {self._num_workers} workers could not start: {reason}"
        self.notes.append(note)
        self.tell(note)
        self._num_workers = 0
        return None

    def _torch_loader(self, keys: "_Keys", steps: RankSteps, number: int) -> DataLoader[Any]:
        wishes: WorkerWishes = self.source.wishes
        common: dict[str, Any] = {
            "num_workers": number,
            "pin_memory": self._pin_memory,
            "prefetch_factor": self._prefetch_factor,
            "worker_init_fn": partial(_begin_worker, wishes.init_function),
            "timeout": wishes.timeout_seconds,
            "multiprocessing_context": wishes.context,
        }
        if self.items is None:
            reading = _ReadByWorker(steps, self._collated, self._seed)
            return DataLoader(reading, batch_size=None, collate_fn=_as_it_is, **common)
        return DataLoader(self.items, batch_sampler=keys, collate_fn=self._collated, **common)

    def close(self) -> None:
        """End the workers now.

        Left to the garbage collector after an error, they would outlive the run for a while, and Python 3.12 would
        close their pipes twice and print a traceback.
        """
        workers, self._workers, self._begun = self._workers, None, None
        if self._numbers is not None:
            self._numbers.close()
        end_workers = getattr(workers, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()
        _kill_stuck(getattr(workers, "_workers", ()))


class _Weighing:
    """Weighs what workers of a whole set save against what starting them costs, each time that it is read.

    Reading in this process leaves the same behind as workers do: items and the model draw the same numbers.
    """

    def __init__(self, items: KeyedItems, collate: Collated, *, is_gathered: bool) -> None:
        self._items, self._collate = items, collate
        # Of this rank's share in this process, the last two times: one may have had to wait for the disk.
        self._read_seconds = deque([0.0] if is_gathered else [], maxlen=2)

    def workers_worth(self, most: int, division: Division, method: str) -> int:
        if not self._read_seconds:
            self._read_seconds.append(-(-division.global_batch // division.world_size) * self._sample_seconds())
        start_seconds = WORKER_SECONDS if method == "fork" else IMPORTING_WORKER_SECONDS
        return cheapest_workers(min(self._read_seconds), most, start_seconds)

    def _sample_seconds(self) -> float:
        """Read a few samples. Infinite for those that are not the same twice: a worker's copy of them always is."""
        own = Generators([self._items.dataset, self._collate.collate])
        with generators_kept(), own.kept(), num_threads(1):
            began = time.perf_counter()
            try:
                if exactness_warnings(self._items, self._collate):
                    return math.inf
                seconds = time.perf_counter() - began
                count = min(LOOKED_AT, len(self._items))
                if seconds < 4 * WORKER_SECONDS:  # of four samples, perhaps the first ones that are read
                    began = time.perf_counter()
                    self._collate(self._items.__getitems__([(0, number) for number in range(count)]))
                    return (time.perf_counter() - began) / count
            except DrivetrainError:  # a worker that comes to that sample says so
                return math.inf
        return seconds / 4

    def read_as_by_workers(self, fetched: Fetched) -> Fetched:
        torch.empty((), dtype=torch.int64).random_()  # torch's DataLoader draws the seed of its workers
        self._taken = 0.0
        for step, micro_batches in self._timed(fetched):
            yield step, self._timed(iter(micro_batches))
        self._read_seconds.append(self._taken)

    def _timed(self, found: Iterator[Found]) -> Iterator[Found]:
        while True:
            began = time.perf_counter()
            with generators_kept(), num_threads(1):  # workers have one thread each, and sums are rounded by it
                each = next(found, None)
            self._taken += time.perf_counter() - began
            if each is None:
                return
            yield each


def cheapest_workers(read_seconds: float, most: int, start_seconds: float) -> int:
    """Return how many workers are worth starting for a set that takes so long to read in this process.

    They share the reading with this process, which computes meanwhile.
    """
    if math.isinf(read_seconds):
        return most
    return min(range(most + 1), key=lambda number: read_seconds / (number + 1) + number * start_seconds)


_started: WeakSet[Any] = WeakSet()  # worker processes


def _kill_stuck(processes: Iterable[Any]) -> None:
    """Kill workers that did not end when torch asked: native code may keep them from hearing it. Python would wait."""
    for process in processes:
        if process.is_alive():
            process.kill()


def _kill_at_exit() -> None:
    if any(process.is_alive() for process in _started):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
        _kill_stuck(list(_started))


atexit.register(_kill_at_exit)  # runs after torch's own of each worker, and before Python waits for them


def _begin_worker(wanted: Callable[[int], Any] | None, worker: int) -> None:
    outlive_signals()
    # By default, a batch that cannot be sent is dropped with a traceback, and the training process waits for ever.
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    if wanted is not None:
        wanted(worker)


def _send_error(queue: "Queue[Any]", error: Exception, unsent: Any) -> None:
    """Send the error instead of a batch that a worker could not send: called in the thread that sends."""
    told = full_shared_memory(error)
    if told is None:
        told = DrivetrainError(
            f"a worker of the loader could not send its batch: {type(error).__name__}: {error}",
            remedy="return tensors, arrays and plain values, which other processes can read; or use --num-workers 0",
        )
    match unsent:
        case (int() as number, _):
            wrapped = ExceptionWrapper((type(told), told, None), "in a loader's worker")  # type: ignore[no-untyped-call]
            queue.put((number, wrapped))
        case _:  # of a queue of the user's own
            traceback.print_exception(error)


def _micro_batch(batch: Any, parts: list[MicroStep], number: int) -> MicroBatch:
    part = parts[number]
    return MicroBatch(batch, part.num_samples, part.weight, number, number == len(parts) - 1)


def _are_rows(content: Content, num_rows: int) -> bool:
    """Return whether the content is row numbers.

    A sampler may yield keys of any kind, even negative numbers: those only the dataset understands.
    """
    if isinstance(content, np.ndarray):
        return True  # of the keyed order
    return all(isinstance(sample, int) and 0 <= sample < num_rows for sample in content)


def _as_list(content: Content) -> list[Any]:
    return content.tolist() if isinstance(content, np.ndarray) else list(content)


class _Keys:
    """The (epoch, sample) keys of each micro-batch of this rank, for torch's DataLoader; and the steps handed out."""

    def __init__(self, steps: RankSteps) -> None:
        self._steps = steps
        self.given: deque[RankStep] = deque()

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        for step in self._steps:
            self.given.append(step)
            for content in step.contents:
                yield [(step.place.epoch, sample) for sample in _as_list(content)]


class _Read(NamedTuple):
    """A micro-batch that a worker read."""

    batch: Any
    step: Any  # a RankStep without its contents; None for all but the first micro-batch of a step
    first_drew: bool | None  # whether the collate function drew for the first of all


class _ReadByWorker(IterableDataset[Any]):
    """Reads iterable data in the one worker of a rank."""

    def __init__(self, steps: RankSteps, collate: Collated, seed: int) -> None:
        self._steps, self._collate, self._seed = steps, collate, seed

    def __iter__(self) -> Iterator[_Read]:
        for step in self._steps:
            for number, content in enumerate(step.contents):
                header = step._replace(contents=[]) if number == 0 else None
                _seed_batch(self._seed, step.place, step.parts[number])
                yield _Read(self._collate(_as_list(content)), header, self._collate.first_drew)


def _seed_batch(seed: int, place: Place, part: MicroStep) -> None:
    """Key what is drawn next by the place of a micro-batch of read items, for the collate function."""
    seed_all(key_of(seed, place.epoch, part.start, _OF_BATCH))


def _batch(found: Any) -> Any:
    return found.batch if isinstance(found, _Read) else found


def _as_it_is(batch: Any) -> Any:
    return batch


def _in_own_words(workers: Iterator[Any]) -> Iterator[Any]:
    """Raise a worker's DrivetrainError as it was raised there, without torch's text around it."""
    try:
        yield from workers
    except RuntimeError as error:
        if (full := full_shared_memory(error)) is None:
            raise
        raise full from None
    except DrivetrainError as error:
        if type(error) is not DrivetrainError:
            raise
        message, _, remedy = error.message.rpartition("DrivetrainError: ")[2].strip().partition("\n  remedy: ")
        raise DrivetrainError(message, remedy=remedy) from None


def _start_method(source: Source) -> str:
    context = source.wishes.context
    return str(context.get_start_method() if context is not None else multiprocessing.get_start_method())


def _cannot_be_found_by_workers(source: Source, collate: Collate) -> str:
    """Return why workers cannot find the dataset or the collate function; empty if they can.

    Definitions of a notebook exist only there: workers that are not forked would die looking for them.
    """
    method = _start_method(source)
    if method == "fork" or hasattr(sys.modules["__main__"], "__file__"):
        return ""
    for thing in (source.dataset, collate):
        named = thing if hasattr(thing, "__qualname__") else type(thing)
        if getattr(named, "__module__", "") == "__main__":
            return f"{named.__qualname__} is defined in this session, where workers started by {method} cannot find it"
    return ""


class SamplesAgain:
    """Reads samples of a run in its keyed order again, in this process, leaving its loader and generators untouched."""

    def __init__(self, loader: Loader, collate: Collated, device: torch.device, *, channels_last: bool = False) -> None:
        assert loader.items is not None, "data that is only iterated has no numbers"
        self._loader, self._collate, self._device, self._channels_last = loader, collate, device, channels_last
        self._items = KeyedItems(loader.items.dataset, loader.items.seed)  # not the loader's: its workers use that

    def of_step(self, step: int) -> Sequence[int]:
        return self._loader.samples_of(self._loader.division.place(step))

    def items(self, numbers: Sequence[int]) -> list[Any]:
        with generators_kept():
            return self._fetch(numbers)

    def _fetch(self, numbers: Sequence[int]) -> list[Any]:
        return self._items.__getitems__([(_AGAIN, number) for number in numbers])

    def batch(self, numbers: Sequence[int]) -> Any:
        with generators_kept():
            batch = self._collate(self._fetch(numbers))
        return to_device(batch, self._device, channels_last=self._channels_last)

"""Copies micro-batches, or the numbers of their samples, to the device, while the current micro-batch computes.

Copies run on a separate stream. The training stream waits for the copy it needs (an event, not the host), and the
allocator is told that the training stream uses the memory, so that it is not given to a later copy too early.

The next micro-batch is fetched before the current one is yielded, across the ends of steps and epochs. So all random
draws of fetching happen before the model's generators are set for the step, as they do without a feed.

Data that is resident on the device needs only the numbers of the sample stream. But a step of resident data takes some
hundred microseconds, and the stream's arithmetic for one step alone would take as long: so a thread computes the
numbers of the next steps, and they are copied in one piece (`NumbersAhead`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from drivetrain.data.batch import MicroBatch, in_format, map_leaves, moved, to_device
from drivetrain.data.division import Division, Indices, MicroStep, Place, SampleStream
from drivetrain.data.resident import Resident, Rows, Window

Step = TypeVar("Step")
Steps = Iterator[tuple[Step, Iterable[MicroBatch]]]
Begun = TypeVar("Begun")
# Positions of an epoch that are computed at once. The first piece is waited for, and so it is a small one.
FIRST_NUMBERS, FOLLOWING_NUMBERS = 8192, 65536


class Feed(Protocol):
    """Takes steps, each with its micro-batches, and yields the same with their data where it is needed."""

    def steps(self, steps: Steps[Step]) -> Steps[Step]: ...


class NoFeed:
    """Passes steps through: the data is where it is needed."""

    def steps(self, steps: Steps[Step]) -> Steps[Step]:
        return steps


class HostFeed:
    """Puts images on a CPU into channels-last layout."""

    def steps(self, steps: Steps[Step]) -> Steps[Step]:
        for step, micro_batches in steps:
            yield step, map(self._in_format, micro_batches)

    @staticmethod
    def _in_format(micro: MicroBatch) -> MicroBatch:
        return micro._replace(batch=to_device(micro.batch, torch.device("cpu"), channels_last=True))


class _Copied(NamedTuple):
    """A micro-batch whose copy has been enqueued."""

    micro: MicroBatch
    tensors: list[Tensor]  # on the device, filled by the side stream
    has_more: bool  # whether some parts are left for the training stream
    done: torch.cuda.Event


class DeviceFeed:
    """Copies micro-batches to a GPU on a side stream."""

    def __init__(self, device: torch.device, *, channels_last: bool = False) -> None:
        self._device, self._channels_last = device, channels_last
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.before_copy: Callable[[], None] = lambda: None  # called when the data is fetched and only the copy is left

    def steps(self, steps: Steps[Step]) -> Steps[Step]:
        return one_ahead(steps, self._begin, self._hand_over)

    def _begin(self, micro: MicroBatch) -> _Copied:
        copied: list[Tensor] = []
        others = False

        def copy(leaf: Any) -> Any:
            nonlocal others
            # Only dense tensors, which `record_stream` covers, are copied here; the rest on the training stream.
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                copied.append(in_format(leaf.to(self._device, non_blocking=True), self._channels_last))
                return copied[-1]
            others = others or isinstance(leaf, Tensor) or hasattr(leaf, "to")
            return leaf

        self.before_copy()
        with torch.cuda.stream(self._side):  # from memory that is not pinned, the host waits here for the copy
            batch = map_leaves(copy, micro.batch)
            done = self._side.record_event()
        return _Copied(micro._replace(batch=batch), copied, others, done)

    def _hand_over(self, copied: _Copied) -> MicroBatch:
        training = torch.cuda.current_stream(self._device)
        training.wait_event(copied.done)
        for tensor in copied.tensors:
            tensor.record_stream(training)
        if not copied.has_more:
            return copied.micro
        rest = map_leaves(lambda leaf: in_format(moved(leaf, self._device), self._channels_last), copied.micro.batch)
        return copied.micro._replace(batch=rest)


class ResidentFeed:
    """Gathers each micro-batch from columns on the device when its turn comes, on the training stream."""

    def __init__(self, device: torch.device, *, channels_last: bool = False) -> None:
        self._device, self._channels_last = device, channels_last
        self.before_copy: Callable[[], None] = lambda: None  # as in the feed above; only the gathering is left
        self.gathers = True  # false: the consumer gets the `Rows` of a batch, and gathers them itself

    def steps(self, steps: Steps[Step]) -> Steps[Step]:
        for step, micro_batches in steps:
            yield step, map(self._gathered, micro_batches)

    def _gathered(self, micro: MicroBatch) -> MicroBatch:
        self.before_copy()
        batch, num_samples, weight, number, is_last = micro
        if isinstance(batch, Rows):
            return MicroBatch(batch.gather(), num_samples, weight, number, is_last) if self.gathers else micro
        return micro._replace(batch=to_device(batch, self._device, channels_last=self._channels_last))


def feed_for(device: torch.device, *, channels_last: bool = False) -> Feed:
    if device.type == "cuda":
        return DeviceFeed(device, channels_last=channels_last)
    return HostFeed() if channels_last else NoFeed()


class _Failure(NamedTuple):
    """The error that fetching the next micro-batch raised."""

    error: Exception


def one_ahead(
    steps: Steps[Step], begin: Callable[[MicroBatch], Begun], finish: Callable[[Begun], MicroBatch]
) -> Steps[Step]:
    """Yield the same steps; each micro-batch is begun before the previous one is yielded.

    An error in fetching the next one is raised when its turn comes: the steps before it are not lost.
    """
    begun = ((step, begin(micro), micro.is_last) for step, micro_batches in steps for micro in micro_batches)
    waiting: list[tuple[Step, Begun, bool] | _Failure] = []  # one, or none at the end

    def look() -> None:
        try:
            waiting.extend(itertools.islice(begun, 1))
        except Exception as error:  # noqa: BLE001  (whatever it is, it belongs to the next step)
            waiting.append(_Failure(error))

    def micro_batches() -> Iterator[MicroBatch]:
        is_last = False
        while not is_last:
            following = waiting.pop()
            if isinstance(following, _Failure):
                raise following.error
            _, this, is_last = following
            look()
            yield finish(this)

    look()
    while waiting:
        if isinstance(waiting[0], _Failure):
            raise waiting[0].error
        parts = micro_batches()
        yield waiting[0][0], parts
        for _ in parts:  # of a step that was not used up
            pass


class NumbersAhead:
    """One rank's sample numbers, micro-step by micro-step, from `first_step` up to, excluding, `last_step`."""

    def __init__(
        self,
        stream: SampleStream,
        division: Division,
        rank: int,
        first_step: int,
        last_step: int | None,
        resident: Resident,
    ) -> None:
        # A separate stream: the loader's caches a block, which two threads must not share.
        self._stream = stream.copy()
        self._division, self._rank, self._resident = division, rank, resident
        self._next_step, self._last_step = first_step, last_step
        self._thread = ThreadPoolExecutor(1, "drivetrain-samples")
        self._coming: Future[Indices] | None = None
        self._window: Window | None = None
        self._taken = self._length = 0

    def take(self, parts: list[MicroStep]) -> list[Rows]:
        """Return the rows for the micro-steps of the next step. They are valid until the step after it is taken."""
        if self._taken == self._length:
            self._turn()
        window, taken, found = self._window, self._taken, []
        for part in parts:
            count = part.stop - part.start
            found.append(Rows(self._resident, None, window, taken, count))
            taken += count
        self._taken = taken
        return found

    def at_hand(self) -> tuple[int, int]:
        """Return where the samples after those taken last begin in the window, and how many there are."""
        return self._taken, self._length - self._taken

    def pass_over(self, num_samples: int) -> None:
        """Skip samples that are in the window: a stretch of replays read them there."""
        self._taken += num_samples

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _turn(self) -> None:
        """Switch to the next piece, and have the thread compute the one after it."""
        coming = self._coming or self._begin(FIRST_NUMBERS)
        assert coming is not None
        numbers = coming.result()
        self._coming = self._begin(FOLLOWING_NUMBERS)
        # Pinned and sent by this thread: a step may just be recorded for replay, and then no other may ask for memory.
        if self._window is None:
            self._window = Window(self._most_numbers(), self._resident.device)
        self._window.fill(self._resident.on_host(numbers))
        self._taken, self._length = 0, len(numbers)

    def _most_numbers(self) -> int:
        """Return the largest size of a piece: this rank's samples of its steps, and those repeated at weight 0."""
        division = self._division
        place = Place(0, 0, 0, min(division.global_batch, division.num_samples))  # the largest
        in_a_step = division.largest_slice(place) + division.least * division.num_micro_steps(place)
        return in_a_step * max(1, max(FIRST_NUMBERS, FOLLOWING_NUMBERS) // division.global_batch)

    def _begin(self, num_positions: int) -> Future[Indices] | None:
        first = self._next_step
        last = first + max(1, num_positions // self._division.global_batch)
        last = last if self._last_step is None else min(last, self._last_step)
        if first >= last:
            return None
        self._next_step = last
        return self._thread.submit(self._computed, first, last)

    def _computed(self, first: int, last: int) -> Indices:
        return np.concatenate(list(chain.from_iterable(self._by_epochs(first, last))))

    def _by_epochs(self, first: int, last: int) -> Iterator[Iterable[Indices]]:
        division = self._division
        while first < last:
            begin = division.place(first)
            end = min(last, division.first_step_of(begin.epoch + 1))
            whole = self._stream.samples(begin.epoch, begin.start, division.place(end - 1).stop)
            # A rank alone takes everything, in order; its micro-steps only cut it.
            yield (whole,) if division.world_size == 1 else self._slices(whole, begin.start, range(first, end))
            first = end

    def _slices(self, whole: Indices, start: int, steps: range) -> Iterator[Indices]:
        for step in steps:
            for part in self._division.micro_steps(self._division.place(step), self._rank):
                yield whole[part.start - start : part.stop - start]

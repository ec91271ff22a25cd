"""Prefetches the sample numbers of many steps to the device that gathers by them.

The numbers are those of the sample stream. But a step of resident data takes some hundred microseconds, and the
stream's arithmetic for one step alone would take as long: so a thread computes the numbers of the next steps, and they
are copied in one piece.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import numpy as np

from drivetrain.data.division import Division, MicroStep
from drivetrain.data.resident import Resident, Rows, Window
from drivetrain.data.stream import Indices, SampleStream

# Positions of an epoch that are computed at once. The first piece is waited for, and so it is a small one.
FIRST, FOLLOWING = 8192, 65536


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
        self._stream = SampleStream(stream.num_samples, stream.seed, shuffle=stream.shuffle)
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
        coming = self._coming or self._begin(FIRST)
        assert coming is not None
        numbers = coming.result()
        self._coming = self._begin(FOLLOWING)
        # Pinned and sent by this thread: a step may just be recorded for replay, and then no other may ask for memory.
        if self._window is None:
            self._window = Window(self._most_numbers(), self._resident.device)
        self._window.fill(self._resident.on_host(numbers))
        self._taken, self._length = 0, len(numbers)

    def _most_numbers(self) -> int:
        """Return the largest size of a piece: this rank's samples of its steps, and those repeated at weight 0."""
        division = self._division
        place = division.place(0)
        in_a_step = division.largest_slice(place) + division.least * division.num_micro_steps(place)
        return in_a_step * max(1, max(FIRST, FOLLOWING) // division.global_batch)

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
        division, per_epoch = self._division, self._division.steps_per_epoch
        while first < last:
            begin = division.place(first)
            end = min(last, (begin.epoch + 1) * per_epoch)
            whole = self._stream.samples(begin.epoch, begin.start, division.place(end - 1).stop)
            # A rank alone takes everything, in order; its micro-steps only cut it.
            yield (whole,) if division.world_size == 1 else self._slices(whole, begin.start, range(first, end))
            first = end

    def _slices(self, whole: Indices, start: int, steps: range) -> Iterator[Indices]:
        for step in steps:
            for part in self._division.micro_steps(self._division.place(step), self._rank):
                yield whole[part.start - start : part.stop - start]

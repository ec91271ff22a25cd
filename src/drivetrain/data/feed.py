"""Copies micro-batches from the host to the device: the next one is copied while the current one computes.

Copies run on a separate stream. The training stream waits for the copy it needs (an event, not the host), and the
allocator is told that the training stream uses the memory, so that it is not given to a later copy too early.

The next micro-batch is fetched before the current one is yielded, across the ends of steps and epochs. So all random
draws of fetching happen before the model's generators are set for the step, as they do without a feed.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from drivetrain.data.batch import MicroBatch, in_format, map_leaves, moved, to_device
from drivetrain.data.resident import Rows

Step = TypeVar("Step")
Steps = Iterator[tuple[Step, Iterable[MicroBatch]]]


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


Begun = TypeVar("Begun")


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

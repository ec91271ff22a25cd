"""The feed on a GPU: right values when memory is used again, no waiting host, copies behind computation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.data.batch import MicroBatch
from drivetrain.data.feed import DeviceFeed, feed_for
from tests.data.test_feed import Custom, Frozen, Pair

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000  # some tenth of a second on any GPU


def gpu() -> torch.device:
    return torch.device("cuda", 0)


def steps_of(batches: Any) -> Any:
    for number, batch in enumerate(batches):
        yield number, (MicroBatch(batch, 1, 1, 0, True),)


def pinned_numbers(count: int, size: int, first: int = 0) -> Any:
    for number in range(first, first + count):
        yield torch.full((size,), float(number)).pin_memory()


def test_values_are_right_when_memory_would_be_used_again() -> None:
    """Each batch is dropped by the host while the device has yet to read it, and copies run far ahead of it."""
    batches = list(pinned_numbers(30, 1 << 20))  # to pin takes time, and the host is to run far ahead
    feed = DeviceFeed(gpu())
    sums = []
    for _, micro_batches in feed.steps(steps_of(batches)):
        for micro in micro_batches:
            torch.cuda._sleep(CYCLES // 20)
            sums.append(micro.batch.sum())
            del micro
    assert [value.item() for value in sums] == [number * float(1 << 20) for number in range(30)]


def test_without_telling_the_allocator_values_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: the same with `record_stream` left out."""
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    batches = list(pinned_numbers(30, 1 << 20))
    feed = DeviceFeed(gpu())
    sums = []
    torch.cuda._sleep(CYCLES)  # the device is far behind, also where others use it
    for _, micro_batches in feed.steps(steps_of(batches)):
        for micro in micro_batches:
            torch.cuda._sleep(CYCLES // 20)
            sums.append(micro.batch.sum())
            del micro
    assert [value.item() for value in sums] != [number * float(1 << 20) for number in range(30)]


def test_without_waiting_for_the_copy_values_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    feed = DeviceFeed(gpu())
    with torch.cuda.stream(feed._side):
        torch.cuda._sleep(CYCLES)  # the copies are late
    sums = []
    for _, micro_batches in feed.steps(steps_of(pinned_numbers(5, 1 << 20, 1000))):  # in no memory from before
        for micro in micro_batches:
            sums.append(micro.batch.clone())
    torch.cuda.synchronize()
    assert [value.sum().item() for value in sums] != [number * float(1 << 20) for number in range(1000, 1005)]


def test_the_host_does_not_wait() -> None:
    batches = list(pinned_numbers(8, 1 << 22))
    feed = DeviceFeed(gpu())
    weight = torch.randn(2048, 2048, device=gpu())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _, micro_batches in feed.steps(steps_of(batches)):
            for micro in micro_batches:
                weight.mm(weight)
                micro.batch.mul_(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The device is kept busy for a while; all steps are handed out long before it is done.
    event = torch.cuda.Event()
    torch.cuda._sleep(CYCLES)
    for _, micro_batches in feed.steps(steps_of(batches)):
        for _ in micro_batches:
            pass
    event.record()
    assert not event.query()
    torch.cuda.synchronize()


def milliseconds(feed: Any, batches: list[Tensor], compute_cycles: int) -> float:
    """Of a step in the middle of a run, by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number, (_, micro_batches) in enumerate(feed.steps(steps_of(batches))):
        if number == 3:
            begin.record()
        for micro in micro_batches:
            torch.cuda._sleep(compute_cycles)
            micro.batch.view(-1)[:1].add_(1)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / (len(batches) - 3)


class InTheTrainingStream:
    """What there was before the feed."""

    def steps(self, steps: Any) -> Any:
        for step, micro_batches in steps:
            yield step, (micro._replace(batch=micro.batch.to(gpu(), non_blocking=True)) for micro in micro_batches)


def test_a_slow_copy_is_hidden_behind_computation() -> None:
    batches = [torch.zeros(1 << 26).pin_memory() for _ in range(10)]  # 256 MB: some milliseconds each
    nothing = milliseconds(InTheTrainingStream(), batches, 1)  # the copy alone
    cycles = 1_000_000
    while (compute := milliseconds(DeviceFeed(gpu()), [torch.zeros(1).pin_memory()] * 10, cycles)) < 2 * nothing:
        cycles = int(cycles * 1.5)
    one_after_the_other = milliseconds(InTheTrainingStream(), batches, cycles)
    beside = milliseconds(DeviceFeed(gpu()), batches, cycles)
    assert one_after_the_other > compute + 0.7 * nothing
    assert beside < compute + 0.3 * nothing


def test_every_structure_arrives() -> None:
    def structure(number: float) -> Any:
        tensor = torch.full((3,), number).pin_memory()
        sparse = torch.eye(3).to_sparse() * number
        on_gpu = torch.full((2,), number, device=gpu())
        return {
            "list": [tensor, "text"],
            "named": Pair(tensor, 3),
            "data": Frozen(tensor, "a"),
            "custom": Custom(tensor),
            "sparse": sparse,
            "there": on_gpu,
            "pageable": torch.full((4,), number),
        }

    for number, micro_batches in DeviceFeed(gpu()).steps(steps_of([structure(float(n)) for n in range(4)])):
        (micro,) = micro_batches
        batch = micro.batch
        tensors = [batch["list"][0], batch["named"].left, batch["data"].image, batch["custom"].tensor]
        tensors += [batch["sparse"].to_dense().diagonal(), batch["there"], batch["pageable"]]
        assert all(tensor.device == gpu() for tensor in tensors)
        assert all((tensor == number).all() for tensor in tensors)
        assert batch["list"][1] == "text"


def test_channels_last_on_the_way() -> None:
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4)
    feed = feed_for(gpu(), channels_last=True)
    _, micro_batches = next(feed.steps(steps_of([{"x": images.pin_memory(), "y": torch.arange(2)}])))
    (micro,) = micro_batches
    assert micro.batch["x"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(micro.batch["x"].cpu(), images)
    assert micro.batch["y"].is_contiguous()

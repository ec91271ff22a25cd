"""The forecast of a step on several devices, against rings and buckets that are played through event by event."""

import math

import pytest

from drivetrain.plan.forecast import BUCKET_BYTES, Interconnect, Pace, StepCost, StepWork, scaling, step_time


def ring_seconds(num_bytes: float, num_devices: int, rate: float, hop: float) -> float:
    """Play an all-reduce: in each of 2 (n - 1) rounds every device passes a part of an n-th on to its neighbor."""
    clock = [0.0] * num_devices
    for _ in range(2 * (num_devices - 1)):
        sent = [now + hop + num_bytes / num_devices / rate for now in clock]
        clock = [max(sent[number], sent[number - 1]) for number in range(num_devices)]
    return max(clock)


def waited_seconds(exchange: float, backward: float, num_buckets: int) -> float:
    """Play a backward whose buckets fill one after the other, and are sent one after the other."""
    end = 0.0
    for number in range(num_buckets):
        full = backward * (number + 1) / num_buckets
        end = max(end, full) + exchange / num_buckets
    return end - backward


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize(("num_buckets", "sample_seconds"), [(1, 0.1), (4, 0.001), (4, 0.4), (16, 0.03)])
def test_whole_copies(num_devices: int, num_buckets: int, sample_seconds: float) -> None:
    num_bytes, rate, hop = num_buckets * BUCKET_BYTES, 1e9, 1e-4
    links = Interconnect(bytes_per_second=rate, hop_seconds=hop)
    pace = Pace(cost=StepCost(sample_seconds=sample_seconds, optimizer_seconds=0.5), links=links)
    work = StepWork(global_batch=12, micro_batch=12, gradient_bytes=num_bytes)
    found = step_time(pace, work, num_devices)
    computing = 12 / num_devices * sample_seconds
    exchange = num_buckets * ring_seconds(BUCKET_BYTES, num_devices, rate, hop)
    assert found.compute == pytest.approx(computing + 0.5)
    assert found.exchange == pytest.approx(exchange)
    assert found.exposed == pytest.approx(waited_seconds(exchange, 2 / 3 * computing, num_buckets))
    assert found.sent_bytes == pytest.approx(2 * (num_devices - 1) / num_devices * num_bytes)


def test_gradients_are_exchanged_once_however_many_micro_steps() -> None:
    pace = Pace(cost=StepCost(sample_seconds=0.0, micro_step_seconds=1.0), links=Interconnect(bytes_per_second=1e9))
    work = StepWork(global_batch=16, micro_batch=2, gradient_bytes=10**9)
    found = step_time(pace, work, 2)
    assert (found.compute, found.sent_bytes) == (4.0, 1e9)
    sharded = step_time(pace, work.model_copy(update={"gathered_bytes": 10**9}), 2)
    assert sharded.sent_bytes == 4 * 3 * 0.5e9  # weights twice and gradients, in each of 4 micro-steps


def test_what_is_shared() -> None:
    """Three or four processes on two cores take twice as long for everything; nodes share their network."""
    work = StepWork(global_batch=8, micro_batch=8, gradient_bytes=10**6)
    cost = StepCost(sample_seconds=1.0)
    free = Pace(cost=cost, links=Interconnect(bytes_per_second=1e9), overlap=0.0)
    crowded = Pace(cost=cost, links=Interconnect(bytes_per_second=1e9, num_cores=2), overlap=0.0)
    assert step_time(crowded, work, 2) == step_time(free, work, 2)
    for number in (3, 4):
        assert step_time(crowded, work, number).total == pytest.approx(2 * step_time(free, work, number).total)
    nodes = Interconnect(bytes_per_second=1e9, devices_per_node=2, node_bytes_per_second=1e8)
    assert nodes.seconds(1e9, 0, 2) == 1.0
    assert nodes.seconds(1e9, 0, 4) == 10.0


def test_rows() -> None:
    pace = Pace(cost=StepCost(sample_seconds=1.0), links=Interconnect(bytes_per_second=math.inf))
    slow = Pace(cost=StepCost(sample_seconds=2.0), links=Interconnect(bytes_per_second=math.inf))
    rows = scaling(pace, pace, slow, StepWork(global_batch=24, micro_batch=24, gradient_bytes=1), 6, 100)
    assert [row.num_devices for row in rows] == [1, 2, 4, 6]
    last = rows[-1]
    assert (last.step_seconds, last.step_seconds_range, last.job_seconds) == (4.0, (4.0, 8.0), 400.0)
    assert (last.speedup, last.efficiency, last.samples_per_second) == (6.0, 1.0, 6.0)
    assert (
        scaling(pace, pace, slow, StepWork(global_batch=1, micro_batch=1, gradient_bytes=1), 1, None)[0].job_seconds
        is None
    )

"""Forecasts: the memory of a micro-batch from a few small ones, and the time of a step on several devices."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

from drivetrain.core.value import Value

# ----------------------------------------------------------------------------------------------------------------------
# Forecasts the memory of a micro-batch from a few small ones: a line beyond a floor, and never a blind doubling.
#
# Weights, gradients and optimizer take the same for any micro-batch; activations grow with it. The peak is reached
# either in backward (a line in the micro-batch) or in the optimizer's step with its temporaries (a floor): peaks of
# small micro-batches may all lie on the floor and say nothing of the line. So the line goes through the two largest
# sizes, and it is trusted where it can be shown that no floor hides behind it:
#
# What is held at any time (weights, optimizer, and gradients where steps accumulate) is counted, not fitted. The line
# starts at that or above. So a step of m samples takes at most `held + m × (peak - held) / n` if one of n ≤ m samples
# took `peak`, wherever that peak was. Nothing is measured that this bound does not allow, and a forecast is settled
# where line and bound are near each other; one that stays open is not used, but the bound. The exception is a floor
# beyond half of the limit: the bound then allows next to nothing however little a sample takes. There sizes are doubled
# until they leave the floor, and one of them may not fit.

FRAGMENTATION = 0.03  # of what is reserved, seen between the peak of what is allocated and of what is reserved
CLOSE = 0.03  # a forecast is settled when two ways to it are this near
MOST_SIZES = 4  # that are measured for the line's sake; those on the floor but the last do not count


class Peak(NamedTuple):
    """The peak memory of a step with this many samples."""

    micro_batch: int
    num_bytes: int


class MemoryModel(Value):
    """Peak = fixed + per sample × micro-batch, but no less than the floor."""

    fixed_bytes: float
    sample_bytes: float
    floor_bytes: float = 0.0

    @classmethod
    def fitted(cls, peaks: Sequence[Peak], held_bytes: float = 0.0) -> Self:
        """Fit the line through the two largest sizes, with the floor so high that no measured peak is above both.

        With one size alone and what is held: the line from there to the peak, which is the most it can be.
        """
        largest = _largest_per_size(peaks)
        if not largest or (len(largest) < 2 and not held_bytes):
            raise ValueError("a line needs peaks of two different micro-batches, or one and what is held without any")
        size, peak = largest[-1]
        before = largest[-2] if len(largest) > 1 else Peak(0, round(held_bytes))
        slope = max(0.0, (peak - before.num_bytes) / (size - before.micro_batch))
        fixed = peak - slope * size
        above = (p.num_bytes for p in largest if p.num_bytes > fixed + slope * p.micro_batch)
        return cls(fixed_bytes=fixed, sample_bytes=slope, floor_bytes=max(above, default=0.0))

    def peak_bytes(self, micro_batch: int) -> int:
        return round(max(self.floor_bytes, self.fixed_bytes + self.sample_bytes * micro_batch))

    def largest(self, limit_bytes: float, at_most: int) -> int:
        """Return the largest micro-batch that fits; 0 if none does."""
        room = _usable(limit_bytes)
        if max(self.floor_bytes, self.fixed_bytes + self.sample_bytes) > room:
            return 0
        return _count(room - self.fixed_bytes, self.sample_bytes, at_most)


def next_size_to_measure(
    peaks: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float = 0.0
) -> int | None:
    """Return a micro-batch that fits and is worth measuring; None where memory up to `at_most` can be forecast.

    Only where a floor hides the line, or even one sample more than the smallest step is not shown to fit, a larger one
    is proposed all the same: it may fit.
    """
    largest = _largest_per_size(peaks)
    if not largest:
        return 1
    size = largest[-1].micro_batch
    if size >= at_most:
        return None
    certain = bound_to_fit(largest, limit_bytes, at_most, held_bytes)
    if len(largest) == 1:
        return max(size + 1, min(certain, -(-at_most // 2)))
    aim = _unsettled(largest, limit_bytes, at_most, held_bytes)
    if aim is None:
        return None
    if _is_flat(largest):
        return max(min(certain, aim), min(2 * size, at_most))
    if _num_off_floor(largest) >= MOST_SIZES:
        return None
    further = min(certain, -(-(size + aim) // 2))
    return further if further > size else None


def largest_that_fits(peaks: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float = 0.0) -> int:
    """Return the largest micro-batch that fits: by the line if it is settled, else by the bound or as seen to fit."""
    largest = _largest_per_size(peaks)
    if largest[-1].micro_batch < at_most and _unsettled(largest, limit_bytes, at_most, held_bytes) is not None:
        return max(largest[-1].micro_batch, bound_to_fit(largest, limit_bytes, at_most, held_bytes))
    return MemoryModel.fitted(largest, held_bytes).largest(limit_bytes, at_most)


def bound_to_fit(peaks: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float = 0.0) -> int:
    """Return the most samples that the bound allows, by the largest step that was run."""
    size, peak = max(peaks)
    return _count(_usable(limit_bytes) - held_bytes, max(0.0, peak - held_bytes) / size, at_most)


def _unsettled(largest: Sequence[Peak], limit_bytes: float, at_most: int, held_bytes: float) -> int | None:
    """Return the target size, where its forecast is still open."""
    model = MemoryModel.fitted(largest, held_bytes)
    size, peak = largest[-1]
    aim = model.largest(limit_bytes, at_most)
    if aim <= size:
        return None
    forecast = model.peak_bytes(aim)
    bound = held_bytes + aim * (peak - held_bytes) / size
    if held_bytes and bound - forecast <= CLOSE * forecast:
        return None
    if len(largest) > 2 and not _is_flat(largest) and not _is_flat(largest[:-1]):
        before = MemoryModel.fitted(largest[:-1], held_bytes)
        if abs(before.sample_bytes - model.sample_bytes) * (aim - size) <= CLOSE * forecast:
            return None
    return aim


def _is_flat(largest: Sequence[Peak]) -> bool:
    """Return whether peaks lie on the floor: they hardly differ, though the sizes do, and do not determine the line."""
    before, last = largest[-2:]
    return last.micro_batch >= 1.5 * before.micro_batch and last.num_bytes - before.num_bytes <= CLOSE * last.num_bytes


def _num_off_floor(largest: Sequence[Peak]) -> int:
    """Return the number of peaks off the floor, plus the last one on it."""
    return next((n for n in range(1, len(largest)) if _is_flat(largest[: len(largest) - n + 1])), len(largest))


def _largest_per_size(peaks: Sequence[Peak]) -> list[Peak]:
    """Return the largest peak of each size, sorted by size."""
    found: dict[int, int] = {}
    for size, num_bytes in peaks:
        found[size] = max(num_bytes, found.get(size, 0))
    return [Peak(size, found[size]) for size in sorted(found)]


def _usable(limit_bytes: float) -> float:
    return limit_bytes * (1 - FRAGMENTATION)


def _count(room: float, each: float, at_most: int) -> int:
    if room < each:
        return 0
    return at_most if each * at_most <= room else min(at_most, math.floor(room / each))


# ----------------------------------------------------------------------------------------------------------------------
# Forecasts the time of a step on several devices, from the cost of one device and the links between them.
#
# Pure functions. A step is the micro-steps of a device's share, the optimizer's step, and what of the exchange is not
# hidden behind the backward. Collectives are rings: of an all-reduce every device sends 2 (n - 1) / n of the gradients,
# of an all-gather or a reduce-scatter half of that. A link has a rate and the time of a hop; between nodes all devices
# of a node share its network. Processes on a CPU share its cores: all wait for the core that has the most of them, so
# work and exchange take as many times longer as that has processes.

FORWARD_SHARE = 1 / 3  # of a step: a backward does twice the work
RECOMPUTING = 4 / 3  # a forward once more, within the backward
BUCKET_BYTES = 25 * 2**20  # of gradients that DDP sends at a time

Basis = Literal["measured", "recorded", "counted"]


class StepCost(Value):
    """Seconds of a step on one device that exchanges nothing."""

    sample_seconds: float  # forward and backward of one sample
    micro_step_seconds: float = 0.0  # of each micro-step, whatever its size
    least_seconds: float = 0.0  # of a micro-step: launching its kernels
    optimizer_seconds: float = 0.0  # of each step
    host_seconds: float = 0.0  # of each micro-step: the device waits for the host, which launches small kernels
    meanwhile_seconds: float = 0.0  # of one sample: what the device does in that time, besides `sample_seconds`

    def of_micro_step(self, num_samples: float) -> float:
        """Return the seconds of a forward and backward over so many samples."""
        waiting = max(self.host_seconds, num_samples * self.meanwhile_seconds)
        return max(self.least_seconds, self.micro_step_seconds + num_samples * self.sample_seconds + waiting)


class Interconnect(Value):
    """The links between devices: rates as reached, of one device in one direction."""

    bytes_per_second: float
    hop_seconds: float = 0.0
    devices_per_node: int = 8
    node_bytes_per_second: float = math.inf  # of all devices of a node, to other nodes
    node_hop_seconds: float = 0.0
    num_cores: int | None = None  # that the devices are processes on; None: each has its own hardware

    def seconds(self, sent_bytes: float, num_hops: int, num_devices: int) -> float:
        """Return the time in which every device sends so many bytes around a ring."""
        rate, hop = self.bytes_per_second, self.hop_seconds
        if num_devices > self.devices_per_node:
            rate, hop = min(rate, self.node_bytes_per_second), max(hop, self.node_hop_seconds)
        return (sent_bytes / rate + num_hops * hop) * self.crowding(num_devices)

    def crowding(self, num_devices: int) -> float:
        """Return how many times longer everything takes, since processes take turns on a core."""
        return 1.0 if self.num_cores is None else float(-(-num_devices // self.num_cores))


class StepWork(Value):
    """What a step does, and what its devices exchange."""

    global_batch: int
    micro_batch: int  # on each device, at most
    gradient_bytes: int  # as they are reduced
    gathered_bytes: int = 0  # weights that are gathered before each forward and backward; 0: every device has them
    num_blocks: int = 1  # in which they are gathered
    recomputes: bool = False


class Pace(Value):
    """One set of assumptions: what a device does in which time, how fast links are, and what they hide."""

    cost: StepCost
    links: Interconnect
    overlap: float = 1.0  # the part of the computing that an exchange can be hidden behind


class StepTime(Value):
    """The seconds of one step."""

    compute: float
    exchange: float = 0.0  # of all collectives, hidden or not
    exposed: float = 0.0  # of these: computing waits for them
    sent_bytes: float = 0.0  # by each device

    @property
    def total(self) -> float:
        return self.compute + self.exposed


class ScalingRow(Value):
    """A forecast for so many devices; ranges are from the best to the worst that is assumed."""

    num_devices: int
    step_seconds: float
    step_seconds_range: tuple[float, float]
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    samples_per_second: float
    speedup: float  # over one such device that does the whole step, if it had room for it
    efficiency: float
    job_seconds: float | None = None
    job_seconds_range: tuple[float, float] | None = None


class TimeForecast(Value):
    """A forecast of time, with what it rests on."""

    basis: Basis
    rows: tuple[ScalingRow, ...]  # by number of devices; the last is the machine that was asked for
    sent_bytes: float  # by each device in a step of that machine
    assumes: tuple[str, ...]
    why_no_job_time: str = ""

    @property
    def row(self) -> ScalingRow:
        """The machine that was asked for."""
        return self.rows[-1]


def step_time(pace: Pace, work: StepWork, num_devices: int) -> StepTime:
    """Return the time of a step of a global batch that so many devices share."""
    share = -(-work.global_batch // num_devices)
    num_micro_steps = -(-share // work.micro_batch)
    slower = (RECOMPUTING if work.recomputes else 1.0) * pace.links.crowding(num_devices)
    micro_step = pace.cost.of_micro_step(share / num_micro_steps) * slower
    is_sharded = work.gathered_bytes > 0
    optimizer = pace.cost.optimizer_seconds * pace.links.crowding(num_devices) / (num_devices if is_sharded else 1)
    compute = num_micro_steps * micro_step + optimizer
    if num_devices == 1:
        return StepTime(compute=compute)
    if is_sharded:
        exchanged = _sharded(pace, work, num_devices, micro_step)
        return StepTime(
            compute=compute,
            exchange=num_micro_steps * exchanged.exchange,
            exposed=num_micro_steps * exchanged.exposed,
            sent_bytes=num_micro_steps * exchanged.sent_bytes,
        )
    return _all_reduced(pace, work, num_devices, micro_step).model_copy(update={"compute": compute})


def _num_hops(num_devices: int) -> int:
    """Return the hops of a ring, or of a tree where that has fewer."""
    return min(num_devices - 1, 2 * math.ceil(math.log2(num_devices)))


def _all_reduced(pace: Pace, work: StepWork, num_devices: int, micro_step: float) -> StepTime:
    """Return the exchange of whole copies: once per step, behind the backward of the last micro-step.

    The last bucket is full when the backward is over, so nothing hides it.
    """
    part = 2 * (num_devices - 1) / num_devices
    num_buckets = max(1, -(-work.gradient_bytes // BUCKET_BYTES))
    sent = part * work.gradient_bytes
    whole = pace.links.seconds(sent, 2 * _num_hops(num_devices) * num_buckets, num_devices)
    backward = micro_step * (1 - FORWARD_SHARE / (RECOMPUTING if work.recomputes else 1.0))
    hidden = pace.overlap * backward * (1 - 1 / num_buckets)  # nothing can be sent before the first bucket is full
    exposed = max(whole / num_buckets, whole - hidden)
    return StepTime(compute=0.0, exchange=whole, exposed=exposed, sent_bytes=sent)


def _sharded(pace: Pace, work: StepWork, num_devices: int, micro_step: float) -> StepTime:
    """Return the exchange of shards in one micro-step: weights are gathered twice, gradients reduced once.

    The first block's weights and the last block's gradients are waited for; the rest is hidden as far as there is work.
    """
    part = (num_devices - 1) / num_devices
    hops = _num_hops(num_devices) * work.num_blocks
    gather = pace.links.seconds(part * work.gathered_bytes, hops, num_devices)
    reduce = pace.links.seconds(part * work.gradient_bytes, hops, num_devices)
    forward = micro_step * FORWARD_SHARE / (RECOMPUTING if work.recomputes else 1.0)
    behind = pace.overlap * (1 - 1 / work.num_blocks)
    in_forward = max(gather / work.num_blocks, gather - behind * forward)
    in_backward = max(reduce / work.num_blocks, gather + reduce - behind * (micro_step - forward))
    sent = part * (2 * work.gathered_bytes + work.gradient_bytes)
    return StepTime(compute=0.0, exchange=2 * gather + reduce, exposed=in_forward + in_backward, sent_bytes=sent)


def scaling(
    expected: Pace, best: Pace, worst: Pace, work: StepWork, num_devices: int, num_steps: float | None
) -> tuple[ScalingRow, ...]:
    """Return a row for 1, 2, 4, ... devices and for the number that was asked for.

    Args:
        expected: What is assumed.
        best: The most favorable assumptions.
        worst: The least favorable ones.
        work: The step.
        num_devices: How many devices share a step.
        num_steps: Of the whole job; None where that is not known.
    """
    alone = step_time(expected, work, 1).total
    rows = []
    for number in _counts(num_devices):
        time = step_time(expected, work, number)
        seconds = (step_time(best, work, number).total, step_time(worst, work, number).total)
        low, high = min(*seconds, time.total), max(*seconds, time.total)
        rows.append(
            ScalingRow(
                num_devices=number,
                step_seconds=time.total,
                step_seconds_range=(low, high),
                compute_seconds=time.compute,
                exchange_seconds=time.exchange,
                exposed_seconds=time.exposed,
                samples_per_second=work.global_batch / time.total,
                speedup=alone / time.total,
                efficiency=alone / time.total / number,
                job_seconds=None if num_steps is None else num_steps * time.total,
                job_seconds_range=None if num_steps is None else (num_steps * low, num_steps * high),
            )
        )
    return tuple(rows)


def _counts(num_devices: int) -> Sequence[int]:
    powers = [2**exponent for exponent in range(num_devices.bit_length())]
    return sorted({*powers, num_devices})

"""The forecast of memory, with made-up allocators: floors, rounding, noise. What is proposed fits, and few steps do."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drivetrain.plan.forecast import (
    FRAGMENTATION,
    MOST_SIZES,
    MemoryModel,
    Peak,
    largest_that_fits,
    next_size_to_measure,
)

GB, MIB = 10**9, 1024**2


@dataclass(frozen=True)
class Allocator:
    """Holds `held` at all times, `floor` on top in the optimizer's step, and `workspace` and the samples in backward.

    Each sample is `num_tensors` tensors, whose sizes are rounded up as an allocator does.
    """

    held: int
    floor: int
    workspace: int
    sample: int
    num_tensors: int = 20
    rounding: int = 512
    noise: Callable[[int], float] = lambda size: 1.0

    def peak(self, size: int) -> int:
        each = self.sample * size / self.num_tensors
        activations = self.num_tensors * -(-int(each) // self.rounding) * self.rounding
        return round(max(self.held + self.floor, self.held + self.workspace + activations) * self.noise(size))


def learn(allocator: Allocator, limit: float, at_most: int) -> tuple[list[Peak], bool]:
    """The peaks that are measured, and whether one of them was out of memory."""
    peaks: list[Peak] = []
    while (size := next_size_to_measure(peaks, limit, at_most, allocator.held)) is not None:
        assert size <= at_most
        assert size not in {peak.micro_batch for peak in peaks}
        peak = allocator.peak(size)
        if peak > limit:
            return peaks, True
        peaks.append(Peak(size, peak))
    return peaks, False


ALLOCATORS = st.builds(
    Allocator,
    held=st.integers(10**6, 20 * GB),
    floor=st.integers(0, 3 * GB),
    workspace=st.integers(0, 2 * GB),
    sample=st.integers(10**5, 4 * GB),
    num_tensors=st.integers(1, 200),
    rounding=st.sampled_from([1, 512, 2 * MIB]),
    noise=st.integers(0, 1000).map(lambda seed: lambda size: 1 + 0.004 * (hash((seed, size)) % 1001 - 500) / 500),
)


@given(ALLOCATORS, st.integers(1, 1024), st.sampled_from([16, 24, 80, 140]))
def test_it_is_within_5_percent_after_at_most_four_steps(allocator: Allocator, at_most: int, limit_gb: int) -> None:
    limit = limit_gb * GB
    assume(allocator.peak(1) < 0.9 * limit)
    # A floor so high that the room above it is small in comparison hides the line for longer than four steps.
    assume(allocator.floor <= (limit - allocator.held) / 16)
    # 2 MiB per tensor may be more than the tensor: then a line in samples is not what the allocator does.
    assume(allocator.rounding <= 512 or allocator.sample / allocator.num_tensors > 4 * MIB)
    peaks, ran_out = learn(allocator, limit, at_most)
    if ran_out:  # one try that the bound could not exclude: of one sample more than the smallest step
        assert len(peaks) == 1
        return
    assert len(peaks) <= MOST_SIZES or allocator.floor + allocator.workspace > (limit - allocator.held) / 16
    if len(peaks) < 2:
        return
    model = MemoryModel.fitted(peaks, allocator.held)
    chosen = largest_that_fits(peaks, limit, at_most, allocator.held)
    assert chosen >= 1
    assert model.peak_bytes(chosen) == pytest.approx(allocator.peak(chosen), rel=0.05)
    assert allocator.peak(chosen) <= limit, "what is forecast to fit fits"


@given(ALLOCATORS, st.integers(1, 4096), st.integers(1, 140))
def test_no_blind_doubling(allocator: Allocator, at_most: int, limit_gb: int) -> None:
    """Whatever the allocator: one step at most, right after the smallest one or from a floor beyond half the room."""
    assume(allocator.rounding <= 512)
    limit, held = limit_gb * GB, allocator.held
    peaks, ran_out = learn(allocator, limit, at_most)
    assert len(peaks) <= MOST_SIZES + math.log2(at_most) + 1
    if len(peaks) > 1 and ran_out:
        assert peaks[-1].num_bytes - held > (limit * (1 - FRAGMENTATION) - held) / 2.1
    elif len(peaks) > 1:
        assert allocator.peak(largest_that_fits(peaks, limit, at_most, held)) <= limit


def test_the_smallest_sizes_on_a_floor_do_not_mislead() -> None:
    """Least squares through 1, 2 and 4 samples would give 0 bytes per sample here, and 64 would run out of memory."""
    allocator = Allocator(held=8 * GB, floor=2 * GB, workspace=0, sample=GB // 4)
    assert [allocator.peak(size) for size in (1, 2, 4)] == [10 * GB] * 3
    peaks, ran_out = learn(allocator, 20 * GB, 64)
    assert not ran_out
    model = MemoryModel.fitted(peaks, allocator.held)
    largest = model.largest(20 * GB, 64)
    assert 40 <= largest <= 48
    assert model.peak_bytes(largest) == pytest.approx(allocator.peak(largest), rel=0.05)


def test_a_further_size_is_named_where_slopes_disagree() -> None:
    bent = [Peak(1, 10 * GB), Peak(2, 10 * GB), Peak(8, 16 * GB)]
    straight = [Peak(1, 9 * GB), Peak(2, 10 * GB), Peak(8, 16 * GB)]
    assert next_size_to_measure(bent, 80 * GB, 64) in range(9, 64)
    assert next_size_to_measure(straight, 80 * GB, 64) is None


def test_the_first_size_off_the_floor_settles_nothing() -> None:
    """The floor's own slope, next to 0, and a line that begins there agree by chance where little is left to go."""
    allocator = Allocator(held=449_600_000, floor=462_800_000, workspace=0, sample=122_300, num_tensors=1)
    peaks, ran_out = learn(allocator, GB, 65536)
    assert ran_out or allocator.peak(largest_that_fits(peaks, GB, 65536, allocator.held)) <= GB


def test_a_line_that_is_still_open_is_not_believed() -> None:
    """Where measuring ended early, on the floor: its line, with 0 bytes per sample, would have anything fit."""
    on_the_floor = [Peak(1, 6 * GB), Peak(2, 6 * GB)]
    assert MemoryModel.fitted(on_the_floor, GB).largest(10 * GB, 64) == 64
    assert largest_that_fits(on_the_floor, 10 * GB, 64, GB) == 3  # 1 + 3 × 2.5 GB; 1 + 4 × 2.5 may be too much


def test_one_size_is_enough_with_what_is_held() -> None:
    """For compiled steps, where each further size would be compiled anew: the most that it can be."""
    model = MemoryModel.fitted([Peak(16, 16 * GB)], held_bytes=2 * GB)
    assert model.peak_bytes(32) == 30 * GB
    with pytest.raises(ValueError, match="two different micro-batches"):
        MemoryModel.fitted([Peak(16, 16 * GB)])


def test_what_was_measured_on_an_h200() -> None:
    """GPT-2 124M, 1024 tokens, bf16, eager: 59 GB at 64, with 2.0 GB of weights, gradients and moments."""
    allocator = Allocator(held=1_991_000_000, floor=0, workspace=250_000_000, sample=887_000_000)
    peaks, _ = learn(allocator, 126 * GB, 64)
    assert [peak.micro_batch for peak in peaks] == [1, 32]
    assert MemoryModel.fitted(peaks, allocator.held).peak_bytes(64) == pytest.approx(59 * GB, rel=0.01)

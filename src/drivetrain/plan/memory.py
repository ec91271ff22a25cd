"""How much memory a micro-batch needs, from a few small ones: a line, and never a guess below what was measured.

Weights, gradients and optimizer take what they take whatever the micro-batch is; activations and workspace grow with
it. Two or three small steps give the line. Allocators round and fragment, so what a forecast allows is a little less
than what there is.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from drivetrain.core.value import Value

FRAGMENTATION = 0.03  # of what is reserved, seen between the peak of what is allocated and of what is reserved


class Peak(NamedTuple):
    """The most memory that a step with this many samples held."""

    micro_batch: int
    num_bytes: int


class MemoryModel(Value):
    """Peak = fixed + per sample × micro-batch."""

    fixed_bytes: float
    sample_bytes: float

    @classmethod
    def fitted(cls, peaks: Sequence[Peak]) -> "MemoryModel":
        """Through two or more sizes: the line of least squares, lifted so that no measured peak is above it."""
        sizes = {peak.micro_batch for peak in peaks}
        if len(sizes) < 2:
            raise ValueError("a line needs peaks of two different micro-batches")
        mean_size = math.fsum(peak.micro_batch for peak in peaks) / len(peaks)
        mean_bytes = math.fsum(peak.num_bytes for peak in peaks) / len(peaks)
        spread = math.fsum((peak.micro_batch - mean_size) ** 2 for peak in peaks)
        slope = math.fsum((peak.micro_batch - mean_size) * (peak.num_bytes - mean_bytes) for peak in peaks) / spread
        slope = max(0.0, slope)
        fixed = max(peak.num_bytes - slope * peak.micro_batch for peak in peaks)
        return cls(fixed_bytes=fixed, sample_bytes=slope)

    def peak_bytes(self, micro_batch: int) -> int:
        return round(self.fixed_bytes + self.sample_bytes * micro_batch)

    def largest(self, limit_bytes: float, at_most: int) -> int:
        """The largest micro-batch that fits; 0 if none does."""
        room = limit_bytes * (1 - FRAGMENTATION) - self.fixed_bytes
        if room < self.sample_bytes:
            return 0
        return at_most if self.sample_bytes == 0 else min(at_most, int(room // self.sample_bytes))

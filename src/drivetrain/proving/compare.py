"""Measures how far a trainer is from the plain loop, tensor by tensor, in units of what rounding explains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.core.precision import as_real
from drivetrain.proving.reference import ReferenceOutcome

# What may differ without a cause but rounding: of the gradient of one step, and of the weights after some twenty.
_GRADIENT_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}
_WEIGHT_LIMITS = {torch.float64: 1e-5, torch.float32: 3e-3}
_FLOOR_FACTOR = 50.0
_DOUBLE_NOISE = 1e-10  # more than float64 itself comes to
_LEAST_SHARE = 1e-3  # tensors smaller than this share of the largest are measured by that
CANNOT_TELL = 0.3  # where rounding alone may do this much, a comparison says nothing


@dataclass(frozen=True)
class Difference:
    """The first tensor, in the model's order, that is further off than rounding explains."""

    name: str
    error: float  # largest entry, relative to the tensor's scale
    limit: float
    num_tensors: int  # how many are off
    num_compared: int
    worst: str = ""
    worst_error: float = 0.0

    def __str__(self) -> str:
        others = f", {self.num_tensors} of {self.num_compared} tensors" if self.num_tensors > 1 else ""
        return f"{self.name} is off by {self.error:.1e} (rounding: {self.limit:.0e}){others}"


@dataclass(frozen=True)
class Floor:
    """The effect of rounding on this job: the plain loop with every batch in reverse order and a scaled loss.

    A model in float64 may compute parts of itself in float32, as many norms do. The scale shows that, and then what
    float32 explains is allowed.
    """

    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    dtype: torch.dtype | None

    @classmethod
    def measured(
        cls, truth: ReferenceOutcome, again: ReferenceOutcome, dtype: torch.dtype | None, num_turns: int = 1
    ) -> "Floor":
        """Measure it by two runs of the plain loop; `num_turns` is the number of updates in the first step."""
        gradients: dict[str, float] = {}
        for left, right in zip(again.gradients[:num_turns], truth.gradients[:num_turns], strict=False):
            gradients |= errors(left, right)
        weights = errors(again.weights, truth.weights, truth.first_weights)
        return cls(gradients, weights, dtype)

    def gradient_limit(self, name: str) -> float:
        return max(_GRADIENT_LIMITS[self._type], _FLOOR_FACTOR * self.gradients.get(name, 0.0))

    def weight_limit(self, name: str) -> float:
        return max(_WEIGHT_LIMITS[self._type], _FLOOR_FACTOR * self.weights.get(name, 0.0))

    @property
    def least_gradient_limit(self) -> float:
        return _GRADIENT_LIMITS[self._type]

    @property
    def tells_weights(self) -> bool:
        """Whether the weights after all steps still say anything: chaos may have amplified rounding."""
        limits = sorted(self.weight_limit(name) for name in self.weights)
        return not limits or limits[len(limits) // 2] < CANNOT_TELL

    @property
    def _type(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 and not self.has_float32_parts else torch.float32

    @property
    def has_float32_parts(self) -> bool:
        return self.dtype == torch.float64 and max(self.gradients.values(), default=0.0) > _DOUBLE_NOISE


def errors(
    seen: Mapping[str, Tensor], truth: Mapping[str, Tensor], start: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest entry; with `start`, to its movement."""
    seen, truth = _as_real(seen), _as_real(truth)
    start = None if start is None else _as_real(start)
    sizes = {name: _size(value, None if start is None else start.get(name)) for name, value in truth.items()}
    floating = [size for name, size in sizes.items() if truth[name].is_floating_point()]
    least = max(floating, default=0.0) * _LEAST_SHARE or 1e-30
    found = {}
    for name, right in truth.items():
        scale = max(sizes[name], least) if right.is_floating_point() else 1.0
        left = seen.get(name)
        if left is None:
            found[name] = sizes[name] / scale
        elif left.shape != right.shape:
            found[name] = float("inf")
        else:
            found[name] = _largest(_apart(left.double(), right.double())) / scale
    for name in seen.keys() - truth.keys():
        found[name] = _largest(seen[name].double()) / least
    return found


def _as_real(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: as_real(tensor) for name, tensor in tensors.items()}


def largest_error(found: Mapping[str, float]) -> float:
    return max(found.values(), default=0.0)


def gradient_difference(
    seen: Mapping[str, Tensor], truth: Mapping[str, Tensor], floor: Floor, *, is_first: bool = True
) -> Difference | None:
    """Return the first tensor that is off; later steps than the first may differ by rounding in the weights."""

    def limit(name: str) -> float:
        own = floor.gradient_limit(name)
        return own if is_first else max(own, floor.weight_limit(name))

    return _first(errors(seen, truth), limit)


def weight_difference(seen: Mapping[str, Tensor], truth: ReferenceOutcome, floor: Floor) -> Difference | None:
    wanted = {name: value for name, value in truth.weights.items() if name in seen or not seen}
    return _first(errors(seen, wanted, truth.first_weights), floor.weight_limit)


def step_difference(seen: Mapping[str, Tensor], truth: ReferenceOutcome, step: int, floor: Floor) -> Difference | None:
    """Return the first parameter that is off before a step."""
    return _first(errors(seen, truth.step_weights[step], truth.first_weights), floor.weight_limit)


def _first(found: Mapping[str, float], limit_of: Callable[[str], float]) -> Difference | None:
    off = {name: error for name, error in found.items() if not error <= limit_of(name)}
    if not off:
        return None
    name = next(iter(off))
    worst = max(off, key=lambda key: off[key])
    return Difference(name, off[name], limit_of(name), len(off), len(found), worst, off[worst])


def _apart(left: Tensor, right: Tensor) -> Tensor:
    """Return the difference; 0 where both are the same infinity, as in masks."""
    return torch.where(left == right, 0.0, left - right)


def _size(value: Tensor, start: Tensor | None) -> float:
    moved = value.double() if start is None or start.shape != value.shape else value.double() - start.double()
    return _largest(_finite(moved) if start is None else torch.where(moved.isfinite(), moved, 0.0))


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _finite(value: Tensor) -> Tensor:
    return torch.where(value.isinf(), 0.0, value)

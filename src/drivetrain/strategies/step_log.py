"""The values that a loss logs in a step, averaged over its micro-batches and ranks without a host wait.

A value without a count is a mean over the samples of its micro-batch. Sums and counts of all values are one vector on
the device, reduced over ranks once per step, and they reach the host with the step's record.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.logged import LoggedValues, one_value
from drivetrain.core.records import RESERVED_NAMES, LoggedTotals
from drivetrain.core.widths import wide_dtype, widened
from drivetrain.core.world import World

# What a micro-batch adds: a vector of totals, a factor of these, and their counts, or the one that all have.
_Term = tuple[Tensor, float, Sequence[float] | Tensor | float]


class StepLog:
    """Sums up logged values. Their names are fixed by `settle`: after the trial, or with a driven loop's first step."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world or World()
        self._is_alone = self._world.group is None
        self.names: tuple[str, ...] = ()
        # A CPU's values are numbers at once, without a wait; to stack them would take longer than all else.
        self._num_on_host = 0  # the number of names, where the device is this CPU and there is no other rank
        self._means: list[tuple[dict[str, float], int]] = []  # micro-batches of means there, and their samples
        self.numbers: dict[str, float] = {}  # values that were numbers in Python: a captured step would repeat them
        self._is_settled = False
        self._seen: dict[str, None] = {}  # names, until they are settled
        self._early: list[tuple[LoggedValues, int]] = []  # micro-batches before that
        self._terms: list[_Term] = []  # micro-batches of the step so far

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs for them."""
        return 2 * len(self.names)

    def add(self, values: LoggedValues, num_samples: int) -> None:
        """Add what a micro-batch logged."""
        if len(values) == self._num_on_host:
            means: dict[str, float] = {}
            try:
                for name in self.names:
                    (value,) = values[name]
                    # `float` for truth values, which JSON writes otherwise; what is complex raises.
                    means[name] = float(value.item())  # type: ignore[union-attr]
            except (KeyError, ValueError, AttributeError, RuntimeError, TypeError):
                pass  # another name, several values of one, or something that is not one number: as elsewhere
            else:
                self._means.append((means, num_samples))
                return
        if not self._is_settled:
            for name, logged in values.items():
                one_value(name, logged)  # raises for what cannot be logged
                self._seen[name] = None
            self._early.append((values, num_samples))
            return
        new = [name for name in values if name not in self.names]
        if new:
            known = ", ".join(self.names) or "nothing"
            raise DrivetrainError(
                f"dt.log was called with the name {new[0]!r}, and the first batch logged {known}",
                remedy="log every name from the first batch on; dt.LossSum(0.0, 0) where a batch has nothing of it",
            )
        if values:
            self._terms.append(self._term(values, num_samples))

    def _term(self, values: LoggedValues, num_samples: int) -> _Term:
        means: list[Any] = [logged[0] for name in self.names if (logged := values.get(name)) and len(logged) == 1]
        if len(means) == len(self.names) and all(isinstance(mean, Tensor) and not mean.dim() for mean in means):
            # The usual case. As few operations as possible, since each costs microseconds.
            return self._stacked([mean.detach() for mean in means]), float(num_samples), float(num_samples)
        found = [one_value(name, values[name]) if name in values else (0.0, 0.0) for name in self.names]
        self.numbers |= {
            name: total for name, (total, _) in zip(self.names, found, strict=True) if type(total) is float
        }
        totals = [total * num_samples if count is None else total for total, count in found]
        counts: list[Any] = [float(num_samples) if count is None else count for _, count in found]
        on_device = any(isinstance(count, Tensor) for count in counts)
        return self._stacked(totals), 1.0, self._stacked(counts) if on_device else counts

    def _stacked(self, values: Sequence[Any]) -> Tensor:
        """Stack numbers and scalars to a vector. Numbers are filled in on the device: a copy would wait."""
        device, first = self._world.device, values[0]
        if isinstance(first, Tensor) and all(
            isinstance(value, Tensor) and value.dtype is first.dtype and value.device == device for value in values
        ):
            return torch.stack(list(values))
        return torch.stack([
            value.to(device, wide_dtype(device), non_blocking=True)
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=wide_dtype(device), device=device)
            for value in values
        ])  # fmt: skip

    def settle(self) -> None:
        """Fix the names by what was logged so far. All ranks call it together: one may lack a name."""
        self.names = tuple(dict.fromkeys(name for names in self._world.gather(list(self._seen)) for name in names))
        taken = [name for name in self.names if name in RESERVED_NAMES or name.startswith(("loss_", "num_items_"))]
        if taken:
            raise DrivetrainError(
                f"dt.log was called with the name {taken[0]!r}, under which the run's own records keep something",
                remedy="choose another name",
            )
        if self._is_alone and self._world.device.type == "cpu":
            self._num_on_host = len(self.names)
        self._is_settled = True
        early, self._early = self._early, []
        for values, num_samples in early:
            self.add(values, num_samples)

    def take(self) -> LoggedTotals | dict[str, float] | None:
        """End a step and return the sums and counts of its values over all ranks. All ranks call it together.

        Where all of them are numbers on the host already, it returns their means.
        """
        if not self._is_settled:
            self.settle()
        if not self.names:
            return None
        terms, means = self._terms, self._means
        if means and not terms:
            self._means = []
            return means[0][0] if len(means) == 1 else _averaged(means)
        self._terms, self._means = [], []
        for found, count in means:
            terms.append((torch.tensor(list(found.values()), dtype=torch.float64), float(count), float(count)))
        if self._is_alone and len(terms) == 1:
            values, factor, counts = terms[0]
            if not isinstance(counts, Tensor):
                return LoggedTotals(values, self.names, factor, counts)
        device = self._world.device
        sums = torch.zeros(2, len(self.names), dtype=wide_dtype(device), device=device)
        for values, factor, counts in terms:
            sums[0] += widened(values) * factor
            if isinstance(counts, (Tensor, float)):
                sums[1] += counts
            else:
                sums[1] += self._stacked(counts)
        return LoggedTotals(self._world.all_reduce(sums).flatten(), self.names)

    def forget(self) -> None:
        """Discard a step that was begun."""
        self._terms.clear()
        self._means.clear()
        self._early.clear()


def _averaged(means: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Return the means over all samples, given those of micro-batches and their numbers of samples."""
    total = sum(count for _, count in means)
    return {name: sum(found[name] * count for found, count in means) / total for name in means[0][0]}

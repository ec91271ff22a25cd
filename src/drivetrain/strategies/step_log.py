"""The values that a loss logs in a step, averaged over its micro-batches and ranks without a host wait.

A value without a count is a mean over the samples of its micro-batch. Sums and counts of all values are one vector on
the device, reduced over ranks once per step, and they reach the host with the step's record.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.logged import LoggedValue, LoggedValues, one_value
from drivetrain.core.records import RESERVED_NAMES, LoggedTotals
from drivetrain.core.world import World


class StepLog:
    """Sums up logged values. Their names are fixed by `settle`: after the trial, or with a driven loop's first step."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world or World()
        self.names: tuple[str, ...] = ()
        self.numbers: dict[str, float] = {}  # values that were numbers in Python: a captured step would repeat them
        self._is_settled = False
        self._seen: dict[str, None] = {}  # names, until they are settled
        self._early: list[tuple[LoggedValues, int]] = []  # micro-batches before that
        self._sums: Tensor | None = None  # of the step so far: totals, then counts

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs for them."""
        return 2 * len(self.names)

    def add(self, values: LoggedValues, num_samples: int) -> None:
        """Add what a micro-batch logged."""
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
        sums = self._vector(values, num_samples)
        self._sums = sums if self._sums is None else self._sums + sums

    def _vector(self, values: Mapping[str, list[LoggedValue]], num_samples: int) -> Tensor:
        totals, counts = [], []
        for name in self.names:
            total, count = one_value(name, values[name]) if name in values else (0.0, 0.0)
            if not isinstance(total, Tensor) and name in values:
                self.numbers[name] = total
            totals.append(total * num_samples if count is None else total)
            counts.append(float(num_samples) if count is None else count)
        return torch.cat((self._stacked(totals), self._stacked(counts)))

    def _stacked(self, values: list[Tensor | float]) -> Tensor:
        """Stack numbers and scalars to a vector of float64. Numbers are filled in on the device: a copy would wait."""
        device, first = self._world.device, values[0]
        if isinstance(first, float) and all(type(value) is float and value == first for value in values):
            return torch.full((len(values),), first, dtype=torch.float64, device=device)  # the usual counts
        return torch.stack([
            value.to(device, torch.float64, non_blocking=True)
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=torch.float64, device=device)
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
        self._is_settled = True
        early, self._early = self._early, []
        for values, num_samples in early:
            self.add(values, num_samples)

    def take(self) -> LoggedTotals | None:
        """End a step and return the sums and counts of its values over all ranks. All ranks call it together."""
        if not self._is_settled:
            self.settle()
        if not self.names:
            return None
        sums, self._sums = self._sums, None
        if sums is None:
            sums = torch.zeros(self.num_values, dtype=torch.float64, device=self._world.device)
        return LoggedTotals(self._world.all_reduce(sums), self.names)

    def forget(self) -> None:
        """Discard a step that was begun."""
        self._sums = None
        self._early.clear()

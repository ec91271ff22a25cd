"""What a loss gives beside its gradient: named parts with their weights, and values that it logs in a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice
from drivetrain.core.metrics import (
    CountFunction,
    LoggedTotals,
    LoggedValues,
    LossSum,
    LossWeight,
    NamedLosses,
    PartCounts,
    PartLoss,
    PartTotals,
    one_value,
    summed_by_count,
)
from drivetrain.core.precision import wide_dtype, widened
from drivetrain.core.run_folder import RESERVED_NAMES
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch
from drivetrain.data.resident import Rows

# ----------------------------------------------------------------------------------------------------------------------
# The values that a loss logs in a step, averaged over its micro-batches and ranks without a host wait.
#
# A value without a count is a mean over the samples of its micro-batch. Sums and counts of all values are one vector on
# the device, reduced over ranks once per step, and they reach the host with the step's record.

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


# ----------------------------------------------------------------------------------------------------------------------
# Named parts of a loss: their weights, what each is divided by, and their sums over a step.
#
# A part is divided by the samples of the step, or by its own count over the whole step: all micro-batches, all ranks.
# Its own count has to be known before the first backward, since each part has another one and gradients are added up.
# So where a step has several micro-batches, `Job.count` counts the items of all of them beforehand, and one small
# all-reduce gives every rank the sums. A step that is one micro-batch takes the counts as its forward finds them.
#
# Nothing here waits for the device: coefficients, sums and counts are tensors, and reach the host with the step's
# record.

# What people call the sum of the parts, in dictionaries for trainers that take it out and log the rest.
_TOTALS = ("loss", "total", "total_loss", "loss_total")


class LossParts:
    """The named parts of a job's loss. Their names are those of the weights, else those of the first loss it is given.

    Args:
        weights: of each part, by name: a number, or a function of the number of steps done. None: 1 for each.
        count: gives the number of items of a batch that each part is over, for parts with a count of their own.
        world: the ranks whose micro-batches make up a step.
        alone: divide each micro-batch by its own counts, for measurements that do not train.
    """

    def __init__(
        self,
        weights: Mapping[str, LossWeight] | None = None,
        count: CountFunction | None = None,
        world: World | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._given, self.count, self._world = weights, count, world or World()
        self.names: tuple[str, ...] = ()
        self.counted: tuple[str, ...] = ()  # those of them that have a count of their own
        self._totals: Tensor | None = None  # of the step so far, on this rank
        self._counts: Tensor | None = None  # of the step, on all ranks; none if every part is divided by samples
        self._shares: Tensor | None = None  # 1 / counts
        self._on_its_way: dist.Work | None = None
        self.step = 0  # that was begun last: how many were done before it
        self._weights: list[float] = []  # what the device has
        self._ahead_names: tuple[str, ...] = ()  # those that `count` counts
        self._of_micro_steps: Tensor | None = None  # a row of counts for each micro-step, where they are known
        self._num_forwards = 0
        self._ahead: dict[int, Tensor] = {}  # counts of steps that were fetched and not begun, by the step's number

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs for the parts."""
        return len(self.names) + len(self.counted)

    # ---- what they are

    def settle(self, parts: NamedLosses, counts: PartCounts) -> None:
        """Fix names, kinds and weights by the first loss. All ranks call it together: one may lack a part."""
        for name, part in parts.items():
            _check(name, part)
        sums = [name for name, part in parts.items() if isinstance(part, LossSum)]
        told = self._world.gather([list(parts), sums, list(counts)])
        found = list(dict.fromkeys(name for names, _, _ in told for name in names))
        given = None if self._given is None else list(self._given)
        unknown = [] if given is None else [name for name in found if name not in given]
        if unknown:
            raise DrivetrainError(
                f"the loss has the part {unknown[0]!r}, and Job.loss_weights names {', '.join(given or ())}",
                remedy="give every part a weight, or leave loss_weights out: then each counts once",
            )
        names = found if given is None else given
        if given is None:
            _check_sum(parts, names, tells=self._world.is_main and not self._alone)
        is_counted = {name for _, by_sum, by_count in told for name in (*by_sum, *by_count)}
        strange = [name for _, _, by_count in told for name in by_count if name not in names]
        if strange:
            raise DrivetrainError(
                f"Job.count counts {strange[0]!r}, and the loss has the parts {', '.join(names)}",
                remedy="count under the names of the loss's parts",
            )
        self.names, self.counted = tuple(names), tuple(name for name in names if name in is_counted)
        self._ahead_names = tuple(dict.fromkeys(name for _, _, by_count in told for name in by_count))
        self._device = device = self._world.device
        self._weights = self.weights_at(self.step)
        self._coefficients = torch.tensor(self._weights, dtype=wide_dtype(device), device=device)
        self._is_counted = torch.tensor([name in is_counted for name in names], device=device)
        self._places = torch.tensor([names.index(name) for name in self.counted], dtype=torch.int64, device=device)

    def weights_at(self, step: int) -> list[float]:
        """Return the weight of each part after so many steps."""
        given = self._given or {}
        found = [given.get(name, 1.0) for name in self.names]
        return [float(weight(step)) if callable(weight) else float(weight) for weight in found]

    def weights_now(self, names: Sequence[str]) -> list[float]:
        """Return the weights of some parts in the step that was begun last."""
        found = [(self._given or {}).get(name, 1.0) for name in names]
        return [float(weight(self.step)) if callable(weight) else float(weight) for weight in found]

    @property
    def has_schedule(self) -> bool:
        """Whether weights change with the steps."""
        return self._given is not None and any(map(callable, self._given.values()))

    def set_weights(self, step: int) -> None:
        """Set the weights of the step that begins. On the device the fill is enqueued after the earlier steps."""
        self.step, now = step, self.weights_at(step)
        for number, (before, weight) in enumerate(zip(self._weights, now, strict=True)):
            if weight != before:
                self._coefficients[number].fill_(weight)
        self._weights = now

    # ---- counting beforehand

    def check_division(self, num_micro_steps: int) -> None:
        """Refuse parts whose counts would be known too late."""
        late = [name for name in self.counted if name not in self._ahead_names]
        if late and num_micro_steps > 1:
            raise DrivetrainError(
                f"the part {late[0]!r} of the loss is a LossSum, and a step has {num_micro_steps} micro-batches: what "
                "it is divided by is not known before the last of them, and each part has a count of its own",
                remedy="a larger --batch-size, so that a step is one micro-batch; or, with dt.train, "
                f'Job(count=lambda batch: {{"{late[0]}": …}}), which counts its items beforehand',
            )

    @property
    def can_count_ahead(self) -> bool:
        """Whether `Job.count` counts every part that has its own count."""
        return bool(self.counted) and set(self.counted) <= set(self._ahead_names)

    def count_ahead(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the items of this rank's micro-batches of a step that was fetched."""
        rows = [self._counted_row(micro) for micro in micro_batches]
        self._ahead[step] = torch.stack(rows)

    def _counted_row(self, micro: MicroBatch) -> Tensor:
        if not micro.weight:
            return torch.zeros(len(self.counted), dtype=torch.float64)
        batch = micro.batch.gather() if isinstance(micro.batch, Rows) else micro.batch
        counts = self._checked_counts(batch)
        values = [counts.get(name, 0.0) for name in self.counted]
        device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
        return _stacked(values, device)

    def _checked_counts(self, batch: Any) -> PartCounts:
        counts = {} if self.count is None else self.count(batch)
        if not isinstance(counts, Mapping):
            raise DrivetrainError(
                f"Job.count returned {type(counts).__name__}, expected a dictionary",
                remedy='return a number for each part: {"name": count}',
            )
        new = [name for name in counts if self.names and name not in self._ahead_names]
        if new:
            raise DrivetrainError(
                f"Job.count counts {new[0]!r}, which it did not in the trial step",
                remedy="return the same names for every batch; 0 where there is nothing to count",
            )
        return counts

    def begin(self, step: int) -> None:
        """Begin a step whose items were counted: the all-reduce of the counts overlaps with the first forward."""
        rows = self._ahead.pop(step)
        if self._device.type == "cuda" and rows.device.type == "cpu":
            rows = rows.pin_memory()
        self._of_micro_steps = rows.to(self._device, non_blocking=True)
        self._counts, self._shares, self._num_forwards = self._of_micro_steps.sum(0), None, 0
        if self._world.group is not None:
            self._on_its_way = dist.all_reduce(self._counts, group=self._world.group, async_op=True)

    # ---- a step

    def objective(self, parts: NamedLosses, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        """Weight the parts of one micro-batch: the returned values add up to the step's loss over all micro-batches."""
        counts = self._counts_of(batch)
        if not self.names:
            self.settle(parts, counts)
        summed = summed_by_count(self._checked(parts), counts)
        values = self._values(summed)
        coefficients = self._coefficients * (weight * num_samples / step_samples)
        if self.counted:
            shares = self._settle_counts(summed, weight)
            coefficients = torch.where(self._is_counted, self._coefficients * (shares * weight), coefficients)
        if weight:
            self._add(widened(values.detach()), num_samples)
        self._num_forwards += 1
        return torch.dot(values, coefficients.to(values.dtype))

    def _counts_of(self, batch: Any) -> PartCounts:
        """Return the counts of a micro-batch: those that were counted beforehand, else counted now."""
        if self.count is None:
            return {}
        if self._of_micro_steps is None:
            return self._checked_counts(batch)
        row = self._of_micro_steps[self._num_forwards]
        return {name: row[number] for number, name in enumerate(self.counted)}

    def _settle_counts(self, summed: Mapping[str, Tensor | LossSum], weight: int) -> Tensor:
        """Return the divisor of each part in this step, as a factor; 0 for a part without an item."""
        if self._alone and self._of_micro_steps is None:
            self._counts = self._shares = None
        if self._shares is None:
            if self._counts is None:
                own = [part.count if isinstance(part, LossSum) else 0.0 for part in map(summed.get, self.counted)]
                self._counts = self._world.all_reduce(_stacked(own, self._device) * weight)
            elif self._on_its_way is not None:
                self._on_its_way.wait()  # of the stream, on a GPU
                self._on_its_way = None
            shares = torch.where(self._counts > 0, self._counts.reciprocal(), torch.zeros_like(self._counts))
            self._shares = torch.zeros_like(self._coefficients).index_copy(0, self._places, shares)
        elif self._of_micro_steps is None:
            self.check_division(2)
            raise DrivetrainError(
                "the parts of this step were not counted before its first micro-batch",
                remedy="train with dt.train, which counts them; or make a step one micro-batch",
            )
        return self._shares

    def _checked(self, parts: NamedLosses) -> NamedLosses:
        for name, part in parts.items():
            if name not in self.names:
                raise DrivetrainError(
                    f"the loss has the part {name!r}, which it had not in the trial step: {', '.join(self.names)}",
                    remedy="return every part from the first batch on, dt.LossSum(…, 0) where it has no items; or name "
                    "all of them in Job.loss_weights",
                )
            if isinstance(part, LossSum) and name not in self.counted:
                raise DrivetrainError(
                    f"the part {name!r} of the loss is a LossSum, and was a mean in the trial step",
                    remedy="return the same kind for every batch",
                )
            _check(name, part)
        return parts

    def _values(self, parts: Mapping[str, Tensor | LossSum]) -> Tensor:
        """Return the parts as one vector. A part that this micro-batch lacks contributes nothing."""
        found: list[Tensor | None] = []
        for name in self.names:
            part = parts.get(name)
            if isinstance(part, Tensor) and name in self.counted:
                raise DrivetrainError(
                    f"the part {name!r} of the loss is a mean, and was counted in the trial step",
                    remedy="return dt.LossSum(sum, count) for every batch, or its count from Job.count",
                )
            value = part.total if isinstance(part, LossSum) else part
            found.append(value)
        there = [value for value in found if value is not None]
        if not there:
            raise DrivetrainError(
                "the loss function returned no part at all for a batch",
                remedy=f"return at least one of {', '.join(self.names)}; dt.LossSum(sum, 0) for one without items",
            )
        dtype = torch.float64 if any(value.dtype is torch.float64 for value in there) else torch.float32
        zero = there[0].new_zeros((), dtype=dtype)
        return torch.stack([zero if value is None else value.to(dtype) for value in found])

    def _add(self, values: Tensor, num_samples: int) -> None:
        own = values * num_samples
        if self.counted:
            own = torch.where(self._is_counted, values, own)
        self._totals = own if self._totals is None else self._totals + own

    def take(self) -> PartTotals | None:
        """End a step and return the sums and counts of its parts over all ranks. All ranks call it together."""
        if not self.names:
            return None
        totals = torch.zeros_like(self._coefficients) if self._totals is None else self._totals
        found = self._world.all_reduce(totals)
        if self.counted:
            counts = (
                torch.zeros_like(self._places, dtype=wide_dtype(self._places.device))
                if self._counts is None
                else self._counts
            )
            found = torch.cat((found, counts))
        self.forget()
        return PartTotals(found, self)

    def forget(self) -> None:
        """Discard a step that was begun."""
        self._totals = self._counts = self._shares = self._on_its_way = self._of_micro_steps = None
        self._num_forwards = 0

    def read(self, values: Sequence[float], step: int, num_samples: float) -> tuple[float, dict[str, PartLoss]]:
        """Return the loss of a step from the result of `take`, and each part's. A part without an item is nan there."""
        counts = dict(zip(self.counted, values[len(self.names) :], strict=True))
        loss, parts = 0.0, dict[str, PartLoss]()
        for name, weight, total in zip(self.names, self.weights_at(step), values, strict=False):
            count = counts.get(name, num_samples)
            parts[name] = PartLoss(total / count if count else float("nan"), count)
            if count:
                loss += weight * parts[name].loss
        return loss, parts

    # ---- outside of steps

    def means(self, parts: NamedLosses, batch: Any) -> dict[str, Tensor | LossSum]:
        """Return the parts of a batch by itself, those with a count as a `LossSum`."""
        counts = {} if self.count is None else self.count(batch)
        return summed_by_count(parts, counts)

    def total(self, parts: NamedLosses, batch: Any, step: int = 0) -> Tensor:
        """Return the weighted sum of a batch's parts, each divided by its own count."""
        given = self._given or {}
        total: Tensor | None = None
        for name, part in self.means(parts, batch).items():
            if isinstance(part, Tensor):
                value = part
            else:
                count = torch.as_tensor(part.count, dtype=part.total.dtype, device=part.total.device)
                value = torch.where(count > 0, part.total / count.clamp(min=1e-30), torch.zeros_like(part.total))
            weight = given.get(name, 1.0)
            term: Tensor = value * float(weight(step) if callable(weight) else weight)
            total = term if total is None else total + term
        assert total is not None, "a loss has at least one part"
        return total


def _check(name: Any, part: Any) -> None:
    if not isinstance(name, str) or not name:
        raise DrivetrainError(
            f"a part of the loss is named {name!r}, expected a str", remedy='name it by a text: {"name": loss}'
        )
    value = part.total if isinstance(part, LossSum) else part
    if not isinstance(value, Tensor) or value.dim():
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise DrivetrainError(
            f"the part {name!r} of the loss is {shape}, not a scalar tensor",
            remedy="return its mean over the batch, or dt.LossSum(sum, count); a batch that lacks it may leave it out. "
            "Of what a model returned with its loss, return the loss alone: output.loss",
        )


def _check_sum(parts: NamedLosses, names: Sequence[str], *, tells: bool) -> None:
    """Refuse a total among the parts, and tell of a part that is not learned from: each value is added to the loss."""
    totals = [name for name in names if name.lower() in _TOTALS]
    if totals and len(names) > 1:
        others = ", ".join(name for name in names if name not in totals)
        raise DrivetrainError(
            f"the loss function returned {totals[0]!r} beside {others}: the values of a dictionary are parts that are "
            "added up, and a total among them would count twice",
            remedy=f'return the loss alone, and log the others with dt.log("name", value); if {totals[0]!r} is a part '
            "like the others, give every part a weight in Job.loss_weights",
        )
    values = {name: part.total if isinstance(part, LossSum) else part for name, part in parts.items()}
    learned = [name for name, value in values.items() if value.requires_grad]
    for name in [name for name in values if name not in learned] if learned and tells else ():
        notice(
            f"the part {name!r} of the loss depends on no weight that is trained, at least in the first batch: it is "
            f'added to the loss that is shown, and nothing is learned from it; dt.log("{name}", value) shows it alone'
        )


def _stacked(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Stack numbers and scalars to one vector of float64. A number is filled in on the device: a copy would wait."""
    return torch.stack([
        value.detach().to(device, wide_dtype(device), non_blocking=True)
        if isinstance(value, Tensor)
        else torch.full((), float(value), dtype=wide_dtype(device), device=device)
        for value in values
    ])  # fmt: skip

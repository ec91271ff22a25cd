"""What a run does now and then, as seldom as its cost asks: the gradient norm, and comparing what ranks hold."""

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import StepRecord
from drivetrain.core.precision import as_real
from drivetrain.core.world import World, synchronize
from drivetrain.moe.mixture import mixtures_in
from drivetrain.run.assemble import RunParts
from drivetrain.run.session import Session
from drivetrain.strategies import StrategyParts

# ----------------------------------------------------------------------------------------------------------------------
# Decides how often the gradient norm is recorded where nothing is clipped by it.
#
# It is recorded in every step where it costs at most 1 % of a step; else in every n-th, so that it costs that much. It
# is measured on the run itself: what a norm takes when it starts, and what a step takes over its first steps, which all
# have their norm. A captured step cannot leave its norm out now and then: it has its norm if the plan measured how long
# a step takes and the norm is short against that; else every n-th step is run without capture, for its norm.

MOST_OF_NORMS = 0.01  # of a step's time
FIRST, LAST = 3, 12  # steps of a run, from 0, between whose beginnings a step is timed
EVERY_CAPTURED = 1000  # a step without capture takes some ten times as long
ROUNDS, AT_ONCE = 3, 3  # of norms that are timed


class NormCadence:
    """Decides in which steps the norm is computed."""

    def __init__(
        self,
        parts: StrategyParts,
        world: World,
        first_step: int,
        tell: Callable[[str, dict[str, Any]], None],
        *,
        shares: bool,
    ) -> None:
        """Time the norm. `shares`: whether gradients are sharded over ranks, so that the norm takes a collective."""
        self._due, self._world, self._first_step, self._tell = parts.norms, world, first_step, tell
        self._norm_seconds = norm_seconds(parts, world, shares=shares)
        self._begins: list[float] = []
        self._is_settled = self._is_captured = False
        self.every = 1

    def settle_captured(self, step_seconds: float | None) -> None:
        """Decide before the first step, which may be captured, with its norm or without. None: no replay was timed."""
        if self._world.size > 1:  # the ranks agree, before the first step: a replay is without a norm on all or on none
            told = self._world.gather([self._norm_seconds, step_seconds])
            self._norm_seconds = max(norm for norm, _ in told)
            step_seconds = told[0][1]
        is_short = step_seconds is not None and self._norm_seconds <= MOST_OF_NORMS * step_seconds
        self._is_captured = True
        self._settle(1 if is_short else EVERY_CAPTURED, step_seconds)

    def begin(self, step: int) -> bool:
        """Prepare the step that begins, after so many. Returns whether there is nothing left to decide or to do."""
        number = step - self._first_step
        if not self._is_settled and number >= FIRST:
            self._begins.append(time.perf_counter())
            if number >= LAST:
                self._settle_by_clock()
        self._due.is_due = self.every == 1 or (step + 1) % self.every == 0
        self._due.is_apart = self._is_captured and self.every > 1 and self._due.is_due
        return self._is_settled and self.every == 1

    def _settle_by_clock(self) -> None:
        """Decide by the measured times, at the same step on all ranks.

        The host waits here once: the ranks agree on the slowest rank's norm.
        """
        took = [after - before for before, after in pairwise(self._begins)]
        # The norm's time is that of a quiet moment. A CPU's step has one, too; a GPU's is given to it ahead of time.
        seconds = min(took) if self._world.device.type == "cpu" else statistics.median(took)
        told = self._world.gather([self._norm_seconds, seconds])
        self._norm_seconds = max(norm for norm, _ in told)
        seconds = max(1e-9, statistics.median(step for _, step in told) - self._norm_seconds)
        self._settle(round_up(self._norm_seconds / (MOST_OF_NORMS * seconds)), seconds)

    def _settle(self, every: int, step_seconds: float | None) -> None:
        self.every, self._is_settled = every, True
        of_step = "" if step_seconds is None else f", {self._norm_seconds / step_seconds:.1%} of a step"
        words = f"every {every} steps: it takes {1e3 * self._norm_seconds:.3g} ms{of_step}" if every > 1 else ""
        facts = {"every": every, "norm_seconds": self._norm_seconds, "step_seconds": step_seconds}
        self._tell(words, facts)


def round_up(number: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50 and so on."""
    factor = 1
    while True:
        for step in (1, 2, 5):
            if step * factor >= number:
                return step * factor
        factor *= 10


def norm_seconds(parts: StrategyParts, world: World, *, shares: bool) -> float:
    """Time the norm of tensors like the gradients: the weights. All ranks call it together."""
    tensors = [parameter.detach() for parameter in parts.trained if parameter.numel()]

    def once() -> None:
        nn.utils.get_total_norm(tensors)
        if shares:
            world.all_reduce(torch.zeros((), dtype=torch.float64, device=world.device))

    times = []
    for _ in range(1 + ROUNDS):
        synchronize(world.device)
        began = time.perf_counter()
        for _ in range(AT_ONCE):
            once()
        synchronize(world.device)  # the host waits, before the first step
        times.append((time.perf_counter() - began) / AT_ONCE)
    return min(times[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Compares the weights and moments of ranks that must have the same ones, now and then: hardware may err in silence.
#
# A sum of the bits of every tensor, computed on its device, is compared; any single flipped bit changes it. It is done
# after the first step, and every 100 steps, or as much less often as keeps it below 0.5 % of the time.

COMPARE_EVERY, MOST_OF_COMPARING = 100, 0.005  # steps, and of the time
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def replica_check(
    run: Session, parts: RunParts, tell: Callable[..., None], *, trained_only: bool = False
) -> "ReplicaCheck":
    """Return the comparison of what all ranks of a run hold alike: nothing of a sharded model, no experts of a rank."""
    return ReplicaCheck(
        parts.model,
        parts.optimizer,
        run.world,
        tell,
        every=run.config.watch.compare_replicas if run.is_whole else 0,
        shares_experts=run.spec.shares_experts,
        trained_only=trained_only,
    )


class ReplicaCheck:
    """Compares replicas. Used by all ranks alike, with the records of the same steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        tell: Callable[..., None],
        *,
        every: int | None = None,
        shares_experts: bool = False,
        trained_only: bool = False,
    ) -> None:
        """Take what is compared.

        Args:
            model: The model, of which every rank has a whole one, but for experts that are shared out.
            optimizer: Its optimizer.
            world: The ranks.
            tell: Writes an event.
            every: Steps between two comparisons; None: by what it costs. 0: never.
            shares_experts: Whether every rank holds experts of its own, which have no replica.
            trained_only: Whether weights that the optimizer does not hold may differ, such as a teacher that a loop
                moves on the main process alone.
        """
        self._model, self._optimizer, self._world, self._tell = model, optimizer, world, tell
        self._pinned, self.every = every is not None, COMPARE_EVERY if every is None else every
        self._last_equal, self._is_warm, self._shares_experts = 0, False, shares_experts
        self._trained = {id(it) for group in optimizer.param_groups for it in group["params"]} if trained_only else None
        self._is_first = True  # what a forward changes in weights differs from the first step on

    def observe(self, record: StepRecord) -> None:
        """Compare, if it is due. Raises on all ranks if some differ; the host waits for the device and the others.

        Args:
            record: The step that was read back. Later ones may be in flight, equally many on all ranks.
        """
        is_due = self._is_first or (self.every and record.step % self.every == 0)
        if not self.every or not is_due or self._world.size == 1:
            return
        began = time.perf_counter()
        sums = bit_sums(self._tensors())
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()
        found = self._world.gather([digest, time.perf_counter() - began, record.seconds])
        if len({of_rank[0] for of_rank in found}) > 1:
            raise self._differ(record.step, sums, [of_rank[0] for of_rank in found])
        self._last_equal, self._is_first = record.step, False
        if not self._pinned and self._is_warm:
            seconds = max(of_rank[1] for of_rank in found)
            self._settle(seconds, max(1e-9, found[0][2]))
        self._is_warm = True  # the first one allocates, and loads kernels

    def _settle(self, seconds: float, step_seconds: float) -> None:
        every = max(COMPARE_EVERY, round_up(seconds / (MOST_OF_COMPARING * step_seconds)))
        if every != self.every:
            self.every = every
            self._tell("replicas compared", every=every, seconds=seconds, share=seconds / (every * step_seconds))

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        layers = mixtures_in(self._model).values() if self._shares_experts else ()
        own = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in own or not (self._trained is None or id(parameter) in self._trained):
                continue
            found[name] = parameter.detach()
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    found[f"{kind} of {name}"] = value
        return found

    def _differ(self, step: int, sums: Mapping[str, int], digests: list[str]) -> DrivetrainError:
        """Return the error that names the ranks that differ from most others, and what differs. Collective."""
        by_rank: list[dict[str, int]] = self._world.gather(dict(sums))
        names = [name for name in sums if len({of_rank[name] for of_rank in by_rank}) > 1]
        (most, count), *others = Counter(digests).most_common()
        odd = [rank for rank, digest in enumerate(digests) if digest != most]
        is_known = not others or count > others[0][1]
        who = f"rank {', '.join(map(str, odd))} differs from the other ranks" if is_known else "the ranks differ"
        what = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        self._tell("replicas differ", step=step, ranks=odd if is_known else [], names=names[:20])
        if self._is_first:
            return DrivetrainError(
                f"the processes hold different weights after step {step}, the first one here: {what} differ"
                f"{'' if len(names) > 1 else 's'}. A forward pass, the loss, a hook or the loop sets them from samples "
                "that are not those of the other processes, as a layer that is initialized by its first batch does",
                remedy="set them where the model is made, from the same samples on each process; or train on one "
                "process. Different kinds of GPUs round differently: --compare-replicas 0 then",
            )
        good = f"they were equal after step {self._last_equal}"
        return DrivetrainError(
            f"replicas are not equal after step {step}: {who} in {what}; {good}",
            remedy="test the memory and the GPU of that rank, and leave its machine out; then move checkpoints after "
            f"step {self._last_equal} away, and start the same command again. Different kinds of GPUs round "
            "differently: --compare-replicas 0 then",
        )


def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's bits, read as whole numbers; the host waits once.

    Args:
        tensors: The tensors, all on one device.
    """
    sums = [_bit_sum(tensor) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _bit_sum(tensor: Tensor) -> Any:
    flat = as_real(tensor).contiguous().view(-1)
    size = flat.element_size()
    if not flat.nbytes % 8 and not flat.storage_offset() * size % 8:
        size = 8  # several elements at once: a sum of these is ten times as fast on a CPU
    return flat.view(_WHOLE_NUMBERS[size]).sum(dtype=torch.int64)

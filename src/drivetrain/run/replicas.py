"""Compares the weights and moments of ranks that must have the same ones, now and then: hardware may err in silence.

A sum of the bits of every tensor, computed on its device, is compared; any single flipped bit changes it. It is done
every 100 steps, or as much less often as keeps it below 0.5 % of the time.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.precision import as_real
from drivetrain.core.records import StepRecord
from drivetrain.core.world import World
from drivetrain.moe.layer.mixture import mixtures_in
from drivetrain.run.grad_norm import round_up

EVERY, MOST_SHARE = 100, 0.005  # steps, and of the time
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    ) -> None:
        """Take what is compared.

        Args:
            model: The model, of which every rank has a whole one, but for experts that are shared out.
            optimizer: Its optimizer.
            world: The ranks.
            tell: Writes an event.
            every: Steps between two comparisons; None: by what it costs. 0: never.
            shares_experts: Whether every rank holds experts of its own, which have no replica.
        """
        self._model, self._optimizer, self._world, self._tell = model, optimizer, world, tell
        self._pinned, self.every = every is not None, EVERY if every is None else every
        self._last_equal, self._is_warm, self._shares_experts = 0, False, shares_experts

    def observe(self, record: StepRecord) -> None:
        """Compare, if it is due. Raises on all ranks if some differ; the host waits for the device and the others.

        Args:
            record: The step that was read back. Later ones may be in flight, equally many on all ranks.
        """
        if not self.every or record.step % self.every or self._world.size == 1:
            return
        began = time.perf_counter()
        sums = bit_sums(self._tensors())
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()
        found = self._world.gather([digest, time.perf_counter() - began, record.seconds])
        if len({of_rank[0] for of_rank in found}) > 1:
            raise self._differ(record.step, sums, [of_rank[0] for of_rank in found])
        self._last_equal = record.step
        if not self._pinned and self._is_warm:
            seconds = max(of_rank[1] for of_rank in found)
            self._settle(seconds, max(1e-9, found[0][2]))
        self._is_warm = True  # the first one allocates, and loads kernels

    def _settle(self, seconds: float, step_seconds: float) -> None:
        every = max(EVERY, round_up(seconds / (MOST_SHARE * step_seconds)))
        if every != self.every:
            self.every = every
            self._tell("replicas compared", every=every, seconds=seconds, share=seconds / (every * step_seconds))

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        layers = mixtures_in(self._model).values() if self._shares_experts else ()
        own = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in own:
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
        good = f"they were equal after step {self._last_equal}" if self._last_equal else "they were never compared"
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

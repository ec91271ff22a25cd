"""Counts the tokens of each expert during training, once each, and derives load figures."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from drivetrain.core.isolation import is_counted

SAMPLE = 256  # tokens of a micro-batch that are kept to decide by which experts come and go


class LoadTally:
    """A layer's counts since the last step, per device, and the auxiliary losses it has not handed over yet.

    It is no buffer: DDP would overwrite it with rank 0's. At a step's end it is empty, so it is not saved either. The
    copies that `replicate` makes of a layer share it; a deep copy gets a separate one.
    """

    def __init__(self, num_slots: int, sample_width: int = 0) -> None:
        self.num_slots, self.sample_width = num_slots, sample_width
        self.counts: dict[torch.device, Tensor] = {}
        self.losses: list[tuple[Tensor, int]] = []  # a sum over tokens, and how many
        # Where experts come and go: some tokens of the last forward that counted, and of how many they are, with how
        # many tokens to a sample of the batch.
        self.samples: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> Tensor:
        if device.type == "meta":  # of a model that is not made yet; nothing is counted there
            return torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        if device not in self.counts:
            self.counts[device] = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        return self.counts[device]

    def sample_on(self, device: torch.device) -> Tensor:
        return self._sample(device)[0]

    def sampled(self, device: torch.device) -> tuple[Tensor, int]:
        """Return the sample without repetitions, and the number of tokens per sample of the batch. The host waits."""
        tokens, sizes = self._sample(device)
        count, per_sample = sizes.tolist()
        return tokens[:count], per_sample

    def keep(self, tokens: Tensor, per_sample: int) -> None:
        """Keep a sample of tokens, in place and of fixed size (repeated if too few), so that it can be captured."""
        if tokens.shape[0] and tokens.device.type != "meta":
            keep(*self._sample(tokens.device), tokens.detach(), per_sample)

    def _sample(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self.samples:
            sizes = torch.tensor([0, 1], device=device)
            self.samples[device] = torch.zeros(SAMPLE, self.sample_width, device=device), sizes
        return self.samples[device]

    def move(self, device: torch.device) -> None:
        """Follow the layer to a device. Counts elsewhere are dropped: reading them would wait for the device.

        All tensors are allocated before the first forward: a compiled one would notice a new one.
        """
        self.counts.clear()
        self.samples.clear()
        if device.type != "meta":
            self.on(device)
            self._sample(device)

    def total(self, device: torch.device) -> Tensor:
        """Return the counts over all devices of this process."""
        here = self.on(device)
        return here + sum(there.to(device) for other, there in self.counts.items() if other != device)

    def forget(self) -> None:
        for counts in self.counts.values():
            counts.zero_()  # in place: compiled and captured code keeps adding to them
        self.losses.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self)(self.num_slots, self.sample_width)
        for device in self.counts:
            twin.move(device)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.num_slots, self.sample_width)


def is_recomputing() -> bool:
    """Return whether this forward runs inside a backward: activation checkpointing computes it again."""
    return torch._C._current_graph_task_id() != -1


def count(tally: Tensor, chosen: Tensor) -> None:
    """Add the chosen experts to the counts, in place. Skips samples at weight 0, and recomputed forwards."""
    if torch.compiler.is_compiling():
        torch.ops.drivetrain.count_tokens(tally, chosen)  # asks at run time, not once when it is traced
    else:
        _count(tally, chosen)


def _count(tally: Tensor, chosen: Tensor) -> None:
    if is_counted() and not is_recomputing():
        flat = chosen.reshape(-1)
        tally.scatter_add_(0, flat, torch.ones_like(flat))  # whole numbers: the same in whatever order they are added


def keep(sample: Tensor, sizes: Tensor, tokens: Tensor, per_sample: int) -> None:
    """Keep a sample of tokens; like `count`, it skips samples that do not count."""
    if torch.compiler.is_compiling():
        torch.ops.drivetrain.keep_tokens(sample, sizes, tokens, per_sample)
    else:
        _keep(sample, sizes, tokens, per_sample)


def _keep(sample: Tensor, sizes: Tensor, tokens: Tensor, per_sample: int) -> None:
    if is_counted() and not is_recomputing():
        count = tokens.shape[0]
        picked = tokens[:SAMPLE] if count >= SAMPLE else tokens[torch.arange(SAMPLE, device=tokens.device) % count]
        sample.copy_(picked)
        # Filled, not set: to set an element from a number makes the host wait for the device.
        sizes[0].fill_(min(count, SAMPLE))
        sizes[1].fill_(per_sample)


torch.library.custom_op("drivetrain::count_tokens", _count, mutates_args=("tally",))
torch.library.register_fake("drivetrain::count_tokens", lambda tally, chosen: None)
torch.library.custom_op("drivetrain::keep_tokens", _keep, mutates_args=("sample", "sizes"))
torch.library.register_fake("drivetrain::keep_tokens", lambda sample, sizes, tokens, per_sample: None)


@dataclass(frozen=True)
class LoadFigures:
    """Figures of how evenly a step's tokens were spread over the active experts."""

    max_violation: float  # the fullest expert's load over the mean, less 1: 0 is perfect
    dead_experts: int  # active, and without a token
    entropy: float  # of the loads, over that of equal ones: 1 is perfect
    straggler: float  # the fullest rank's load over the mean of ranks: how long the others wait

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def figures_of(load: Sequence[int], active: Sequence[bool], ranks: Sequence[int], num_ranks: int) -> LoadFigures:
    """Compute the figures of a load; `ranks` holds the rank of each slot's expert."""
    loads = [tokens for tokens, is_active in zip(load, active, strict=True) if is_active]
    total = sum(loads)
    if not total:
        return LoadFigures(0.0, len(loads), 1.0, 1.0)
    entropy = -sum(tokens / total * math.log(tokens / total) for tokens in loads if tokens)
    by_rank = [0] * num_ranks
    for tokens, rank in zip(load, ranks, strict=True):
        by_rank[rank] += tokens
    return LoadFigures(
        max_violation=max(loads) * len(loads) / total - 1,
        dead_experts=loads.count(0),
        entropy=entropy / math.log(len(loads)) if len(loads) > 1 else 1.0,
        straggler=max(by_rank) * num_ranks / total,
    )

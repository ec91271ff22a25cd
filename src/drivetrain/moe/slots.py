"""Adds and removes experts in slots that exist from the start.

An expert is a row of many tensors: its weights, the router's row, the optimizer's state of each, their moving averages.
All of them change here and nowhere else, in place: so DDP, compiled and captured steps continue unchanged. Every rank
calls these together, at a step's end, with the same arguments.

`Surgery` grows, merges and prunes the experts of one layer, for a run that is awake (`Lifecycle`) and one that is
asleep (`Sleep`). An expert takes its centroid and spread along, which tell what its inputs are like. Who asks decides
which experts, and checks the result; a change that is not kept leaves no trace.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.world import World
from drivetrain.moe.experts import free_slot
from drivetrain.moe.mixture import MixtureOfExperts, agreements

Companions = Callable[[Tensor], Mapping[str, Tensor]]
# Gets a function that undoes a change. It returns whether the change is kept; where not, it has undone it.
Check = Callable[[Callable[[], None]], bool]


def no_companions(parameter: Tensor) -> Mapping[str, Tensor]:
    return {}


class _Kept(NamedTuple):
    """A tensor with a row for each slot."""

    name: str
    tensor: Tensor
    kind: str  # `weight`, `average`, or the optimizer's name for it
    is_shared_out: bool  # of experts, which may live on other ranks


class _Read(NamedTuple):
    """The values that were read of two tensors, with their version counters at that time."""

    ids: Tensor
    mask: Tensor
    written: tuple[int, int]
    numbers: list[int]
    flags: list[int]

    def is_of(self, ids: Tensor, mask: Tensor) -> bool:
        return self.ids is ids and self.mask is mask and self.written == (ids._version, mask._version)


class Slots:
    """The slots of one layer, with all tensors that have a row for each.

    `companions` returns the tensors that belong to a parameter and have its shape, by name: the optimizer's state, and
    `average`.
    """

    def __init__(self, layer: MixtureOfExperts, companions: Companions = no_companions) -> None:
        self.layer, self._companions = layer, companions
        self._read: _Read | None = None
        if any(type(parameter.data) is not Tensor for parameter in layer.parameters()):
            raise DrivetrainError(
                "experts cannot come and go while fsdp holds parts of their weights",
                remedy="use --parallel-strategy ddp or expert_parallel",
            )

    # What there is

    @property
    def ids(self) -> dict[int, int]:
        """The slots that hold an expert, and its number, which is never reused. The host waits."""
        return {slot: number for slot, number in enumerate(self._now()[0]) if number >= 0}

    @property
    def active(self) -> list[int]:
        return [slot for slot, is_active in enumerate(self._now()[1]) if is_active]

    def _now(self) -> tuple[list[int], list[int]]:
        """Return expert numbers and active flags; read again only after either tensor was written to."""
        ids, mask = self.layer.expert_ids, self.layer.router.mask
        read = self._read
        if read is None or not read.is_of(ids, mask):
            numbers, flags = torch.stack([ids, (mask == 0).to(ids.dtype)]).tolist()
            read = self._read = _Read(ids, mask, (ids._version, mask._version), numbers, flags)
        return read.numbers, read.flags

    # What can be done

    @torch.no_grad()
    def grow(self, parent: int, *, noise: float = 0.01, seed: int = 0) -> int | None:
        """Copy the parent into a free slot of the rank with the least work; None if no slot is free.

        The copy takes no part until it is activated, so no result changes by a bit. Equal copies would stay equal: each
        weight gets noise, scaled by the RMS of its row. The optimizer's moments of past gradients start at 0, and of
        their squares as the parent's: with zeros in both, the first steps would be several times too long.
        """
        self._check_there(parent)
        layer = self.layer
        load, active = layer.load.tolist(), layer.router.active.tolist()
        taken = [number >= 0 for number in layer.expert_ids.tolist()]
        placement, capabilities = layer.dispatcher.placement(layer.num_slots)
        slot = free_slot(load, active, taken, placement, capabilities)
        if slot is None:
            return None
        number = int(layer.next_id)
        for kept in self._kept():
            row = self._fetch(kept, parent)
            if kept.kind in ("weight", "average"):
                self._store(kept, slot, row + noise * _noise(row, (seed, number, kept.name)))
            else:
                self._store(kept, slot, row if _is_of_squares(kept.kind) else torch.zeros_like(row))
        layer.router.bias[slot] = layer.router.bias[parent]
        self._forget(slot)
        layer.expert_ids[slot] = number
        layer.next_id += 1
        return slot

    @torch.no_grad()
    def activate(self, slot: int) -> None:
        self._check_there(slot)
        self.layer.router.mask[slot] = 0.0

    @torch.no_grad()
    def prune(self, slot: int) -> None:
        """Empty a slot, as if nothing had ever been in it. Its expert's number is not reused."""
        self._check_there(slot)
        layer = self.layer
        left = [other for other in self.active if other != slot]
        if len(left) < layer.k:
            raise DrivetrainError(
                f"the expert in slot {slot} cannot go: {len(left)} would be left, and every token goes to {layer.k}",
                remedy="grow others first, or use a smaller k",
            )
        for kept in self._kept():
            self._store(kept, slot, torch.zeros_like(self._fetch(kept, slot)))
        layer.router.mask[slot] = float("-inf")
        layer.router.bias[slot] = 0.0
        self._forget(slot)
        layer.expert_ids[slot] = -1

    @torch.no_grad()
    def merge(self, into: int, gone: int, share: float) -> None:
        """Merge two experts into one: the weighted mean of all their rows, `share` of it the first's.

        Hidden units of two experts correspond only where one was grown from the other; the caller of other merges
        checks the result. The optimizer's moments of past gradients start at 0.
        """
        self._check_there(into)
        self._check_there(gone)
        for kept in self._kept():
            mixed = share * self._fetch(kept, into) + (1 - share) * self._fetch(kept, gone)
            is_mixed = kept.kind in ("weight", "average") or _is_of_squares(kept.kind)
            self._store(kept, into, mixed if is_mixed else torch.zeros_like(mixed))
        for counts in (self.layer.load, self.layer.uses):
            counts[into] += counts[gone]
        self.prune(gone)

    @torch.no_grad()
    def exchange(self, one: int, other: int) -> None:
        """Swap the contents of two slots, which may be on different ranks. No result changes."""
        layer = self.layer
        for kept in self._kept():
            first, second = self._fetch(kept, one).clone(), self._fetch(kept, other).clone()
            self._store(kept, one, second)
            self._store(kept, other, first)
        buffers = [layer.router.mask, layer.router.bias, layer.load, layer.uses, layer.expert_ids]
        if layer.can_grow:
            buffers += [layer.centroids, layer.spreads, layer.together, layer.together.T]
        for buffer in buffers:
            buffer[[one, other]] = buffer[[other, one]]

    def saved(self, slots: list[int]) -> Callable[[], None]:
        """Return a function that restores these slots to their present state."""
        layer = self.layer
        rows = [(kept, slot, self._fetch(kept, slot).clone()) for kept in self._kept() for slot in slots]
        buffers = [layer.router.mask, layer.router.bias, layer.load, layer.uses, layer.expert_ids]
        buffers += [layer.together] if layer.can_grow else []
        values = [buffer.clone() for buffer in buffers]

        @torch.no_grad()
        def put_back() -> None:
            for kept, slot, row in rows:
                self._store(kept, slot, row)
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

        return put_back

    def _forget(self, slot: int) -> None:
        """Clear a slot's load and co-activations."""
        layer = self.layer
        layer.load[slot] = layer.uses[slot] = 0
        if layer.can_grow:
            layer.together[slot] = layer.together[:, slot] = 0.0

    # Rows

    def _kept(self) -> Iterator[_Kept]:
        for name, parameter in self.layer.named_parameters():
            is_shared_out = name.startswith("experts.")
            yield _Kept(name, parameter.data, "weight", is_shared_out)
            for kind, tensor in sorted(self._companions(parameter).items()):
                yield _Kept(name, tensor, kind, is_shared_out)

    def _fetch(self, kept: _Kept, slot: int) -> Tensor:
        return self.layer.dispatcher.fetch(kept.tensor, slot) if kept.is_shared_out else kept.tensor[slot]

    def _store(self, kept: _Kept, slot: int, row: Tensor) -> None:
        place = self.layer.dispatcher.row_of(slot) if kept.is_shared_out else slot
        if place is not None:
            kept.tensor[place] = row

    def _check_there(self, slot: int) -> None:
        if slot not in self.ids:
            raise DrivetrainError(f"slot {slot} holds no expert", remedy=f"one of {sorted(self.ids)}")


def _is_of_squares(kind: str) -> bool:
    """Return whether it holds squares: `exp_avg_sq`, `max_exp_avg_sq`, `square_avg`, Adagrad's `sum`."""
    return "sq" in kind or kind == "sum"


def _noise(row: Tensor, key: tuple[object, ...]) -> Tensor:
    """Draw noise scaled by the row's RMS, on the host so that every device gets the same; none where a weight is 0."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    drawn = torch.randn(row.shape, generator=generator, dtype=torch.float64).to(row)
    spread = row.square().mean().sqrt()
    return drawn * spread * (row != 0)


class Surgery:
    """Grows, merges and prunes experts of one layer, on all ranks together.

    Args:
        layer: the layer.
        companions: returns what belongs to a parameter, such as the optimizer's state.
        min_experts: how many are always left.
        max_experts: how many there may be; None for as many as there are slots.
    """

    def __init__(
        self, layer: MixtureOfExperts, companions: Companions, min_experts: int, max_experts: int | None
    ) -> None:
        self.slots = Slots(layer, companions)
        self._layer = layer
        self._least = max(min_experts, layer.k)
        self._most = min(max_experts or layer.num_slots, layer.num_slots)

    @property
    def has_room(self) -> bool:
        """Whether one more expert may come."""
        return len(self.slots.ids) < self._most

    @property
    def can_lose(self) -> bool:
        """Whether enough are left without one of them."""
        return len(self.slots.active) > self._least

    def grow(self, parent: int, *, noise: float = 0.01, seed: int = 0) -> int | None:
        """Copy an expert into a free slot, where it waits to be activated. Returns the slot; None if none is free."""
        return self.slots.grow(parent, noise=noise, seed=seed)

    def settle(self, slot: int, parent: int, centre: Tensor) -> None:
        """Give a grown expert the center of its inputs, and the spread of its parent's."""
        self._layer.centroids[slot] = centre.to(self._layer.centroids)
        self._layer.spreads[slot] = self._layer.spreads[parent]

    def agreement(
        self, pairs: Sequence[tuple[int, int]], tokens: Tensor, compared: Sequence[int], world: World
    ) -> list[float]:
        """Return for each pair of slots how far their outputs agree on these tokens, 1 being the same.

        `compared` are all slots that occur in them; their outputs are computed together.
        """
        table = agreements(self._layer, tokens, list(compared), world)
        places = {slot: place for place, slot in enumerate(compared)}
        return [table[places[one]][places[other]] for other, one in pairs]

    def merge(self, into: int, gone: int, check: Check, *, moves_centroid: bool = False) -> bool:
        """Merge two experts by their loads, and keep the result if the check does. Returns whether it is kept."""
        layer, load = self._layer, self._layer.load.tolist()
        share = (load[into] + 1) / (load[into] + load[gone] + 2)
        undo = self.slots.saved([into, gone])
        self.slots.merge(into, gone, share)
        if not check(undo):
            return False
        if moves_centroid and layer.can_grow:
            layer.centroids[into].lerp_(layer.centroids[gone], 1 - share)
        self._clear(gone)
        return True

    def prune(self, slot: int, check: Check | None = None) -> bool:
        """Remove an expert, and keep it removed if the check does. Returns whether it is removed."""
        undo = None if check is None else self.slots.saved([slot])
        self.slots.prune(slot)
        if check is not None and undo is not None and not check(undo):
            return False
        self._clear(slot)
        return True

    def _clear(self, slot: int) -> None:
        if self._layer.can_grow:
            self._layer.centroids[slot], self._layer.spreads[slot] = 0.0, 0.0

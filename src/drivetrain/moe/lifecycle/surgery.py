"""Changes the experts of one layer, for a run that is awake (`Lifecycle`) and one that is asleep (`Sleep`).

An expert that is grown, merged or pruned takes its centroid and spread along, which tell what its inputs are like. Who
asks decides which experts, and checks the result; a change that is not kept leaves no trace.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from drivetrain.core.world import World
from drivetrain.moe.knowledge.expert_outputs import agreements
from drivetrain.moe.layer.mixture import MixtureOfExperts
from drivetrain.moe.layer.slots import Companions, Slots

# Gets a function that undoes a change. It returns whether the change is kept; where not, it has undone it.
Check = Callable[[Callable[[], None]], bool]


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
        """Give a grown expert the centre of its inputs, and the spread of its parent's."""
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

"""A balanced sample of everything that was seen: equally many of each group, however rare or long ago.

Every sample has a pseudo-random rank that follows from the seed and its number. Of each group those with the lowest
ranks are kept. So the reservoir is a fair sample of the group's distinct samples, whatever their order and however
often each was seen; it is the same on every rank; and there is no generator whose state would have to be saved.
"""

import hashlib
from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

CHECKED = 4  # one in this many is held out for checks, and never replayed


class Reservoir:
    """The numbers of samples by group. At most `capacity` in all."""

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self._capacity, self._seed = capacity, seed
        self._groups: dict[str, list[int]] = {}  # each by rank
        self._group_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        return dict(sorted(self._groups.items()))

    def group_of(self, number: int) -> str:
        return self._group_of[number]

    def unknown(self, numbers: Iterable[int], most: int) -> list[int]:
        """Return the numbers that are not in it: those of the lowest ranks, which may be kept."""
        new = {number for number in numbers if number not in self._group_of}
        return sorted(new, key=self._rank)[:most]

    def add(self, number: int, group: str) -> None:
        if number in self._group_of:
            return
        is_new = group not in self._groups
        insort(self._groups.setdefault(group, []), number, key=self._rank)
        self._group_of[number] = group
        for name in list(self._groups) if is_new else [group]:  # a new group makes the others' shares smaller
            kept, share = self._groups[name], max(1, self._capacity // len(self._groups))
            for gone in kept[share:]:
                del self._group_of[gone]
            del kept[share:]

    @property
    def checked(self) -> list[int]:
        """The samples that are never replayed: selected by rank, so that they stay so."""
        return [number for kept in self.groups.values() for number in kept if self._is_checked(number)]

    def draw(self, count: int, *key: int, without: Collection[int] = ()) -> list[int]:
        """Draw from the samples that may be replayed: equally many of each group, at random.

        The key identifies the draw.
        """
        groups = [
            [number for number in kept if not self._is_checked(number) and number not in without]
            for kept in self.groups.values()
        ]
        # Where the count does not divide evenly, the groups that get one more are drawn, too.
        groups = sorted((kept for kept in groups if kept), key=lambda kept: self._rank(kept[0], *key))
        drawn = []
        for place, kept in enumerate(groups):
            share = count // len(groups) + (place < count % len(groups))
            drawn += sorted(kept, key=lambda number: self._rank(number, *key))[:share]
        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {"groups": {name: list(kept) for name, kept in self.groups.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._groups = {name: list(kept) for name, kept in state["groups"].items()}
        self._group_of = {number: name for name, kept in self._groups.items() for number in kept}

    def _rank(self, number: int, *key: int) -> int:
        packed = repr((self._seed, number, *key)).encode()
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big")

    def _is_checked(self, number: int) -> bool:
        # The last bits; which samples are kept is by the first ones.
        return self._rank(number) % CHECKED == 0

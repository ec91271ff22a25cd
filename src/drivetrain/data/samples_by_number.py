"""Samples of a run by their numbers, for hooks that want to see some of them again."""

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.core.isolation import generators_kept
from drivetrain.data.batch import to_device
from drivetrain.data.keyed_items import Collated, KeyedItems
from drivetrain.data.loader import Loader

_AGAIN = 2**48  # an epoch that no run reaches: what items draw at random when they are seen again is keyed by it


class SamplesAgain:
    """Reads samples of a run in its keyed order again, in this process, leaving its loader and generators untouched."""

    def __init__(self, loader: Loader, collate: Collated, device: torch.device, *, channels_last: bool = False) -> None:
        assert loader.items is not None, "data that is only iterated has no numbers"
        self._loader, self._collate, self._device, self._channels_last = loader, collate, device, channels_last
        self._items = KeyedItems(loader.items.dataset, loader.items.seed)  # not the loader's: its workers use that

    def of_step(self, step: int) -> Sequence[int]:
        return self._loader.samples_of(self._loader.division.place(step))

    def items(self, numbers: Sequence[int]) -> list[Any]:
        with generators_kept():
            return self._items.__getitems__([(_AGAIN, number) for number in numbers])

    def batch(self, numbers: Sequence[int]) -> Any:
        items = self.items(numbers)
        with generators_kept():
            batch = self._collate(items)
        return to_device(batch, self._device, channels_last=self._channels_last)

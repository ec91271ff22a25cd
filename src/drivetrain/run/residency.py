"""Decides which data sets of a run are held on its device: each is copied there once, and that is reported."""

from typing import Any

import torch

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.value import format_bytes
from drivetrain.data.keyed_items import Collate
from drivetrain.data.resident import Resident, num_bytes_in_memory
from drivetrain.data.resident_copy import NotResidentError, make_resident
from drivetrain.data.source import Source

COMFORTABLE = 0.25  # of the free memory: so much is taken without asking what else needs it
MOST = 0.9  # of the free memory, where it was asked for or measured


class Residency:
    """Decides for each data set of a run, makes its resident form, and collects the notes to report about it.

    By itself it takes only data that is made of tensors already, and fits comfortably: that costs no reading, and
    cannot lose. The rest is for the planner, which knows what reading costs and what a step takes.
    """

    def __init__(self, config: Config, device: torch.device, free_host_bytes: int, *, quiet: bool) -> None:
        self._wanted, self._num_workers = config.data.resident, config.data.num_workers
        self._device, self._free_host_bytes, self._quiet = device, free_host_bytes, quiet
        self._made: dict[int, tuple[Any, Resident]] = {}  # by id, with the data set itself: the id is then its alone
        self._notes: list[str] = []

    def of(
        self, source: Source, collate: Collate, *, channels_last: bool, num_workers: int, planned: bool | None
    ) -> Resident | None:
        """Return the resident form of a data set; None if its items are fetched batch by batch.

        `planned` is the planner's decision for `auto`: whether data that has to be read first is made resident as well.
        """
        key = id(source.dataset)
        if key in self._made:
            resident = self._made[key][1]
            resident.turn(channels_last)  # a plan may settle on the other format after the first look
            return resident
        limit = self._limit(source, channels_last, planned)
        if limit is None:
            return None
        try:
            resident = make_resident(
                source,
                collate,
                self._device,
                limit,
                channels_last=channels_last,
                num_workers=num_workers,
                say=self._say,
            )
        except NotResidentError as error:
            if self._wanted == "on" and not self._made:  # of a run it is the training set that was meant
                message = f"the data set cannot be resident: {error.message}"
                raise ConfigError([Problem("--resident", message, "on", remedy=error.remedy)]) from None
            self._notes.append(f"not resident on {self._device}: {error.message}")
            return None
        self._made[key] = source.dataset, resident
        return resident

    @property
    def num_bytes(self) -> int:
        """The bytes of the data sets that were made resident."""
        return sum(resident.num_bytes for _, resident in self._made.values())

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def free_bytes(self) -> int:
        """Return the bytes that are free on the device now."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return self._free_host_bytes

    def _limit(self, source: Source, channels_last: bool, planned: bool | None) -> float | None:
        """Return how much memory a data set may take; None if it is not to be resident."""
        if self._wanted == "off" or (self._wanted == "auto" and self._num_workers > 0):
            return None  # workers that were asked for are used
        if self._wanted == "on" or planned:
            return self.free_bytes() * MOST
        known = None if source.is_iterable else num_bytes_in_memory(source.dataset)
        if known is None or planned is False:
            return None
        if self._device.type == "cpu" and not channels_last:
            return float(known)  # it is there already, and stays where it is
        limit = self.free_bytes() * COMFORTABLE
        if known > limit:
            self._notes.append(
                f"not resident on {self._device}: its {format_bytes(known)} are more than a quarter of the "
                f"{format_bytes(self.free_bytes())} that are free"
            )
            return None
        return limit

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(f"  data       {text}", flush=True)

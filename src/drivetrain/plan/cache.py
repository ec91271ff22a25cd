"""Caches what was measured of a job on this machine, for its next start.

Measurements are kept, not the decision: a longer job, or a device with less free memory, decides again from the same
figures, and only what is missing is measured. A file belongs to a key of all that the figures depend on.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.run_folder import write_atomically
from drivetrain.core.value import Value
from drivetrain.plan.knobs import Way
from drivetrain.plan.repeat import Repeatability
from drivetrain.plan.tune import Tried


class Repeated(Value):
    """The result of testing whether a way repeats: the way that was followed then, and why."""

    chosen: Way
    followed: Way
    found: Repeatability


class _File(Value):
    format: int = 1
    tried: tuple[Tried, ...] = ()
    repeats: tuple[Repeated, ...] = ()


def key_of_facts(facts: Mapping[str, Any]) -> str:
    """Return a short name for everything that the figures depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


class PlanCache:
    """One cache file. A folder that cannot be written, or a file that cannot be read, is the same as an empty one."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / f"{key}.json"
        self.journal = folder / f"{key}.probes.jsonl"

    def read(self) -> tuple[Tried, ...]:
        return self._read().tried

    def repeated(self, chosen: Way) -> Repeated | None:
        """Return what was found about this way at an earlier start."""
        return next((each for each in self._read().repeats if each.chosen == chosen), None)

    def _read(self) -> _File:
        try:
            found = _File.from_json(self.path.read_bytes())
        except (OSError, ValueError):
            return _File()
        return found if found.format == 1 else _File()

    def write(self, tried: Iterable[Tried]) -> None:
        """Write the file whole or not at all. Ways that ran out of memory are kept, too: they are not tried again."""
        self._write(_File(tried=tuple(tried), repeats=self._read().repeats))

    def write_repeated(self, repeated: Repeated) -> None:
        before = self._read()
        others = tuple(each for each in before.repeats if each.chosen != repeated.chosen)
        self._write(before.model_copy(update={"repeats": (*others, repeated)}))

    def _write(self, file: _File) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, file.to_json(), f".{os.getpid()}")

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

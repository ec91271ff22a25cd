"""Decides when the doctor looks, and at what: the last half minute during a run, all of it at the end."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from drivetrain.monitor.doctor import Diagnosis, Observed, diagnose, is_enough
from drivetrain.monitor.phases import PHASES, Laps


@dataclass
class _Figures:
    """The figures of some steps: sums and counts, so that two of them add up to one."""

    seconds: Sequence[float]  # by phase
    steps: int = 0
    waited: float = 0.0
    mfu: float = 0.0  # the sum over steps
    mfu_steps: int = 0
    saves: int = 0
    save_seconds: float = 0.0
    save_waits: float = 0.0
    validations: int = 0
    samples: int = 0  # of the card
    busy: float = 0.0
    memory_busy: float = 0.0
    retries: int = 0

    def __add__(self, other: "_Figures") -> "_Figures":
        seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]
        names = [each.name for each in fields(self) if each.name != "seconds"]
        return _Figures(seconds, **{name: getattr(self, name) + getattr(other, name) for name in names})


class Checkups:
    """Gets the figures of the run as they are recorded. A look costs some 50 µs, and is due once a second."""

    EVERY_SECONDS = 1.0
    RECENT_SECONDS = 30.0

    def __init__(self, run: Observed) -> None:
        self._run = run  # what stays the same; the rest of it is not looked at
        self._next = _Figures([0.0] * len(PHASES))  # of what was seen since the last steps
        self._first: _Figures | None = None  # holds the warm-up, and stays apart
        self._others = _Figures([0.0] * len(PHASES))
        self._recent: deque[tuple[float, _Figures]] = deque()  # with when it ended
        self._looked = time.monotonic()
        self._tells_waits = False
        self._card: Mapping[str, Any] | None = None
        self._held: float | None = None
        self._retries = 0
        self._kind = self._kind_before = ""  # that was told last; that led at the last look

    def saw_save(self, seconds: float, waited: float) -> None:
        self._next.saves += 1
        self._next.save_seconds += seconds
        self._next.save_waits += waited

    def saw_validation(self) -> None:
        self._next.validations += 1

    def saw_card(self, row: Mapping[str, Any] | None) -> None:
        """Take the sampler's last row for this process's GPU. Its first row is from before the first step."""
        if not row or row is self._card:
            return
        is_first, self._card = self._card is None, row
        retries, before = int(row.get("allocation_retries", 0)), self._retries
        self._retries = retries
        if is_first:
            return
        self._next.retries += retries - before
        if "utilisation_percent" in row:
            self._next.samples += 1
            self._next.busy += row["utilisation_percent"] / 100
            self._next.memory_busy += row.get("memory_utilisation_percent", 0.0) / 100
        if row.get("memory_total_gib") and "memory_peak_reserved_gib" in row:
            self._held = max(self._held or 0.0, row["memory_peak_reserved_gib"] / row["memory_total_gib"])

    def saw_steps(self, laps: Laps, mfu: float | None) -> None:
        figures, self._next = self._next, _Figures([0.0] * len(PHASES))
        figures.steps, figures.seconds = laps.steps, laps.seconds
        if laps.waited is not None:
            self._tells_waits, figures.waited = True, laps.waited
        if mfu is not None:
            figures.mfu, figures.mfu_steps = mfu * laps.steps, laps.steps
        if self._first is None:
            self._first = figures
        else:
            self._others += figures
        self._recent.append((time.monotonic(), figures))

    def look(self) -> tuple[Diagnosis | None, bool]:
        """Return the diagnosis of the last half minute, if a look is due; and whether its leading kind is new."""
        now = time.monotonic()
        if now - self._looked < self.EVERY_SECONDS or not self._recent:
            return None, False
        self._looked = now
        while len(self._recent) > 1 and self._recent[0][0] < now - self.RECENT_SECONDS:
            self._recent.popleft()
        found = self._diagnosed(sum((figures for _, figures in self._recent), _Figures([0.0] * len(PHASES))))
        kind, before = found.leading.kind, self._kind_before
        self._kind_before = kind
        # Twice the same, so that a single odd second is no news.
        is_news = kind not in (self._kind, "too short") and kind == before
        if is_news:
            self._kind = kind
        return found, is_news

    def final(self) -> Diagnosis | None:
        """Return the diagnosis of the whole run, without its first figures if there are enough others.

        None: nothing was measured.
        """
        first, others = self._first, self._others
        if first is None or not first.steps + others.steps:
            return None
        return self._diagnosed(others if is_enough(others.steps, sum(others.seconds)) else first + others)

    def _diagnosed(self, figures: _Figures) -> Diagnosis:
        steps, samples = max(figures.steps, 1), figures.samples
        phases = zip(PHASES, figures.seconds, strict=True)
        return diagnose(
            replace(
                self._run,
                steps=figures.steps,
                phases={name: seconds / steps for name, seconds in phases if seconds},
                waited_seconds=figures.waited / steps if self._tells_waits else None,
                mfu=figures.mfu / figures.mfu_steps if figures.mfu_steps else None,
                busy=figures.busy / samples if samples else None,
                memory_busy=figures.memory_busy / samples if samples else None,
                memory_held=self._held,
                allocation_retries=figures.retries,
                num_saves=figures.saves,
                save_seconds=figures.save_seconds / max(figures.saves, 1),
                save_waits=figures.save_waits,
                num_validations=figures.validations,
            )
        )

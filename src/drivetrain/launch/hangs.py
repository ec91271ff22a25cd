"""Finds out that a job hangs, by the steps of its ranks, and which rank it hangs on, by their stacks.

Ranks of a job go in step: if one hangs, the others wait for it in a collective, and no rank makes progress. A hang is
reported and ended by the times that steps took so far; what is not a step (planning, compiling, validation, hooks) has
limits of its own. The odd one out is the rank that is stopped, that waits for nothing, or that waits elsewhere.
"""

import contextlib
import re
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.progress import END_FACTOR, END_LEAST_SECONDS, FACTOR, LEAST_SECONDS

OTHER_SECONDS, OTHER_END_SECONDS = 120.0, 600.0  # of phases that are not steps, where nothing is known of them
START_SECONDS = 600.0  # of planning and compiling: reported, never ended
_NEVER = float("inf")
_FRAME = re.compile(r'^\s+File "([^"]*)", line \d+ in (\S+)', re.MULTILINE)
# Frames of a rank that waits for the others, or for the device, which waits for them.
_WAITS = re.compile(
    r"torch/distributed/|torch/nn/parallel/|torch/autograd/graph\.py|drivetrain/strategies/"
    r"|drivetrain/loop/read_back\.py|torch/cuda/streams\.py|drivetrain/core/world\.py"
)
_OF_STEPS = re.compile(r"drivetrain/strategies/|drivetrain/loop/read_back\.py")


@dataclass
class _Rank:
    step: int = 0
    phase: str = "start"
    at: float = 0.0  # when it last made progress
    frozen_at: float | None = None  # since when its process is stopped


@dataclass(frozen=True)
class Stall:
    """A job in which nothing happens."""

    seconds: float
    step: int  # the newest that any rank has reported
    median: float  # seconds of a step
    is_over: bool  # it has lasted long enough to be ended
    frozen: frozenset[int] = frozenset()  # ranks whose process is stopped


@dataclass
class HangWatch:
    """Watches the progress of all ranks of one attempt, on the clock of the caller."""

    least_seconds: float = END_LEAST_SECONDS  # before anything is ended; 0: nothing is watched
    ranks: dict[int, _Rank] = field(default_factory=dict)
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _longest: dict[str, float] = field(default_factory=dict)  # seconds of a phase that is not a step

    def observe(self, rank: int, step: int, phase: str, frozen: bool, now: float) -> None:
        """Take what a rank reports.

        Args:
            rank: The rank.
            step: How many steps it has read back.
            phase: What it does.
            frozen: Whether its process is stopped.
            now: The time.
        """
        before = self.ranks.setdefault(rank, _Rank(at=now))
        if (step, phase) != (before.step, before.phase):
            if step > before.step > 0 and phase == before.phase == "step":
                self._rates.append((now - before.at) / (step - before.step))
            elif before.phase not in ("step", phase):
                self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), now - before.at)
            before.step, before.phase, before.at = step, phase, now
        before.frozen_at = (before.frozen_at or now) if frozen else None

    def stall(self, now: float) -> Stall | None:
        """Return how the job hangs, once that is to be reported; None while it may be at work.

        Args:
            now: The time.
        """
        if not self.least_seconds or not self.ranks:
            return None
        frozen = {rank: now - it.frozen_at for rank, it in self.ranks.items() if it.frozen_at is not None}
        seconds = now - max(it.at for it in self.ranks.values())
        limits = [self._limits(it.phase) for it in self.ranks.values()]
        report, end = max(limit[0] for limit in limits), max(limit[1] for limit in limits)
        if frozen:
            report, end = min(report, self._limits("step")[0]), min(end, self._limits("step")[1])
            seconds = min(seconds, max(frozen.values()))
        if seconds < report:
            return None
        step = max(it.step for it in self.ranks.values())
        return Stall(seconds, step, self.median, seconds >= end, frozenset(frozen))

    @property
    def median(self) -> float:
        return statistics.median(self._rates) if self._rates else 0.0

    def _limits(self, phase: str) -> tuple[float, float]:
        """Return after how many seconds without progress a phase is reported, and ended."""
        scale = self.least_seconds / END_LEAST_SECONDS
        if phase == "step":
            median = self.median
            return max(LEAST_SECONDS * scale, FACTOR * median), max(self.least_seconds, END_FACTOR * median)
        if phase == "end":
            return _NEVER, _NEVER  # the rest of a script is its own
        if phase in ("start", "compile"):
            return START_SECONDS, _NEVER
        longest = self._longest.get(phase)
        if longest is None:
            return OTHER_SECONDS, _NEVER
        end = max(OTHER_END_SECONDS, END_FACTOR * longest) if phase == "validation" else _NEVER
        return max(OTHER_SECONDS, FACTOR * longest), end


def main_stack(text: str) -> list[tuple[str, str]]:
    """Return the frames of the main thread, innermost first, from what `faulthandler` dumped of all threads.

    Args:
        text: The dump; of several, the last.
    """
    threads = [_FRAME.findall(part) for part in re.split(r"(?m)^(?:Current thread|Thread) 0x", text)]
    main = [frames for frames in threads if frames and frames[-1][1] == "<module>"]
    return (main or [frames for frames in threads if frames] or [[]])[-1]


def odd_ranks(stacks: Mapping[int, str], frozen: frozenset[int] = frozenset()) -> list[int]:
    """Return the ranks that the others wait for, as far as their stacks tell; none if they do not tell.

    Args:
        stacks: What each rank's `faulthandler` dumped; empty where it did not answer.
        frozen: Ranks whose process is stopped.
    """
    if frozen:
        return sorted(frozen)
    if len(stacks) == 1:
        return list(stacks)
    frames = {rank: main_stack(text) for rank, text in stacks.items()}
    silent = [rank for rank, found in frames.items() if not found]
    at_work = [rank for rank, found in frames.items() if found and not _waits(found)]
    if silent or at_work:
        return sorted(silent or at_work) if len(silent or at_work) < len(frames) else []
    elsewhere = [rank for rank, found in frames.items() if not any(_OF_STEPS.search(file) for file, _ in found)]
    if 0 < len(elsewhere) < len(frames):
        return sorted(elsewhere)
    places = Counter(tuple(found) for found in frames.values())
    (most, count), *others = places.most_common()
    if others and count > others[0][1]:
        return sorted(rank for rank, found in frames.items() if tuple(found) != most)
    return []


def _waits(frames: list[tuple[str, str]]) -> bool:
    """Return whether one of the innermost frames is one that waits for others."""
    return any(_WAITS.search(file) for file, _ in frames[:4])


def hang_in_words(stall: Stall, odd: Sequence[int], watch: HangWatch) -> str:
    """Return what is known of a hang, in a line.

    Args:
        stall: The hang.
        odd: The ranks that the others wait for.
        watch: What each rank does.
    """
    usual = f", and one takes {stall.median:.2g} s" if stall.median else ""
    words = f"no step has ended for {stall.seconds:.0f} s after step {stall.step}{usual}"
    if not odd:
        return f"{words}; all ranks wait, and their stacks do not tell for which"
    if stall.frozen:
        return f"{words}; its process is stopped (SIGSTOP, or a debugger)"
    phase = watch.ranks[odd[0]].phase
    what = "" if phase == "step" else f", in {phase}"
    if len(watch.ranks) == 1:
        return f"{words}{what}"
    others = f" (and rank {', '.join(map(str, odd[1:]))})" if len(odd) > 1 else ""
    return f"{words}; the other ranks wait for it{others}{what}"


def write_stacks(folder: Path, stall: Stall, stacks: Mapping[int, str]) -> Path:
    """Write the stacks of all ranks beside their logs, and return the file.

    Args:
        folder: The folder of the logs.
        stall: The hang.
        stacks: The stack of each rank; empty where it did not answer.
    """
    path = folder / f"hang-after-step-{stall.step}.txt"
    parts = [f"rank {rank}\n{text or '(no answer)'}\n" for rank, text in sorted(stacks.items())]
    with contextlib.suppress(OSError):
        path.write_text("\n".join(parts), encoding="utf-8")
    return path
